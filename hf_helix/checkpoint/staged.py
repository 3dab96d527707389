"""Files that others write, such as `save_pretrained` of Transformers and PEFT: checked before they get their places.

In:   a folder, and the tensors that its files must hold.
Out:  the files in the folder, in place of those of an earlier save.
Must hold: until the new files have been read back and found complete, the earlier ones stay as they are.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp

from torch import Tensor

from hf_helix.checkpoint.draft import WEIGHTS
from hf_helix.checkpoint.reader import open_safetensors
from hf_helix.checkpoint.safetensors_file import TYPES


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yields a folder to write to, whose files get their places in another one at the end. Called on rank 0 alone."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(mkdtemp(prefix=".helix-", dir=folder))
    try:
        if (folder / "README.md").is_file():  # PEFT adds to a card that is there
            shutil.copy2(folder / "README.md", aside)
        yield aside
        written = [path for path in aside.rglob("*") if path.is_file()]
        kept = {path.name for path in written if WEIGHTS.fullmatch(path.name)}
        for path in folder.iterdir() if kept else ():  # adapters may lie beside the files of their model
            if WEIGHTS.fullmatch(path.name) and path.name not in kept:
                path.unlink()
        for path in written:
            place = folder / path.relative_to(aside)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_files(paths: Iterable[Path], expected: Mapping[str, Tensor]) -> None:
    """Reads files of tensors back, and compares names, shapes and types with what should be there.

    Args:
        paths: the files.
        expected: tensors of the same shapes and types, by name; on any device.

    Raises:
        ValueError: names the file or tensor that differs.
    """
    found: dict[str, tuple[list[int], str]] = {}
    for path in paths:
        with open_safetensors(path) as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            found |= {key: (about.get_shape(), about.get_dtype()) for key, about in slices.items()}
    wanted = {key: (list(value.shape), TYPES[value.dtype]) for key, value in expected.items()}
    if found != wanted or not found:
        odd = next((key for key in sorted(found.keys() | wanted.keys()) if found.get(key) != wanted.get(key)), "")
        raise ValueError(
            f"what was written is not the model: {odd or 'no tensor'} is {found.get(odd, 'missing')}, and should be "
            f"{wanted.get(odd, 'missing')}; the earlier files are as they were: save again, or report this"
        )
