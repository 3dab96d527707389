"""Files that others write, such as `save_pretrained` of Transformers and PEFT: checked before they get their places.

In:   a folder, and the tensors that its files must hold.
Out:  the files in the folder, in place of those of an earlier save.
Must hold: until the new files have been read back and found complete, the earlier ones stay as they are.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp

from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors")
"""The names of the files with tensors that `save_pretrained` writes."""

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "BOOL": "bool"}


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
        if any(WEIGHTS.fullmatch(path.name) for path in written):
            kept = {path.name for path in written}
            for path in folder.iterdir():
                if WEIGHTS.fullmatch(path.name) and path.name.startswith("model") and path.name not in kept:
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
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118
                    about = file.get_slice(key)
                    found[key] = about.get_shape(), _DTYPES.get(about.get_dtype(), about.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path.name} cannot be read back after saving ({error}); save again") from error
    wanted = {key: (list(value.shape), str(value.dtype).removeprefix("torch.")) for key, value in expected.items()}
    if found != wanted or not found:
        odd = next((key for key in sorted(found.keys() | wanted.keys()) if found.get(key) != wanted.get(key)), "")
        raise ValueError(
            f"what was written is not the model: {odd or 'no tensor'} is {found.get(odd, 'missing')}, and should be "
            f"{wanted.get(odd, 'missing')}; the earlier files are as they were: save again, or report this"
        )
