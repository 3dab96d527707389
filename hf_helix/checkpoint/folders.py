"""The files of a checkpoint under temporary names, and their publication.

In:   the layout of a checkpoint, and slices of its tensors; or a folder written by `save_pretrained` of Transformers or
      PEFT, and the expected tensors; or a staging folder with a complete checkpoint.
Out:  complete files under their own names, in place of the files of an earlier save.
Must hold: earlier files stay usable until the new files are complete, if the process is killed, too; the next save
deletes the remains of an unfinished save. After an error a rank writes nothing more and reports at the end, so the
ranks stay in step. Rank 0 alone publishes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import torch.distributed as dist
from torch import Tensor

from hf_helix.checkpoint.files import TYPES, CheckpointLayout, write_slice
from hf_helix.checkpoint.reader import INDEX_NAME, open_safetensors
from hf_helix.operators.param_shard import COPIED, Placement
from hf_helix.runtime.distributed.agreement import decide_on_rank_0
from hf_helix.runtime.distributed.groups import control_group
from hf_helix.runtime.distributed.mesh import rank, world_size

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor on disk that a rank writes: slice `rank` of `size`, or the full tensor."""

    key: str
    placement: Placement = COPIED
    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class PendingCheckpoint:
    """The files of a checkpoint under temporary names, with a part, `token`, that is equal on every rank."""

    folder: Path
    token: str
    layout: CheckpointLayout

    def path(self, name: str) -> Path:
        """Returns the temporary path of a file."""
        return self.folder / f".helix-{self.token}-{name}.tmp"

    def create(self) -> None:
        """Makes every file in its full size, and a probe for `writers`. Called on rank 0 alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, file in self.layout.files.items():
            file.create(self.path(name))
        self.path("probe").write_bytes(bytes(world_size()))

    def writers(self) -> set[int]:
        """Returns the ranks whose writes arrive in rank 0's files. Collective."""
        with contextlib.suppress(OSError), self.path("probe").open("r+b") as file:
            os.pwrite(file.fileno(), b"x", rank())
        if world_size() > 1:
            dist.barrier(control_group())
        marks = decide_on_rank_0(self.path("probe").read_bytes)
        return {number for number, mark in enumerate(marks) if mark}

    def publish(self) -> None:
        """Gives the files their names, and deletes files of earlier and of unfinished saves. Called on rank 0 alone."""
        for name in self.layout.files:
            self.path(name).replace(self.folder / name)
        for file in self.folder.iterdir():
            is_left_over = file.name.startswith(".helix-") and file.name.endswith(".tmp")
            if is_left_over or (WEIGHTS.fullmatch(file.name) and file.name not in self.layout.files):
                file.unlink()
        index = self.folder / INDEX_NAME
        if self.layout.index is None:
            index.unlink(missing_ok=True)
        else:
            index.write_text(json.dumps(self.layout.index, indent=2, sort_keys=True) + "\n")

    def remove(self) -> None:
        """Deletes the temporary files."""
        with contextlib.suppress(OSError):
            for file in self.folder.glob(f".helix-{self.token}-*.tmp"):
                file.unlink()


class PendingFiles:
    """The open files of a pending checkpoint on this rank. The first error is recorded instead of raised, so the ranks
    stay in step; nothing is written after an error."""

    def __init__(self, pending: PendingCheckpoint) -> None:
        self.error: OSError | None = None
        self._pending = pending
        self._open: dict[str, int] = {}

    def write(self, part: TensorPart, value: Tensor) -> None:
        """Writes a part of a tensor to its offsets in its file."""
        if self.error is not None:
            return
        layout = self._pending.layout
        name = layout.file_of[part.key]
        with self._noted():
            if name not in self._open:
                self._open[name] = os.open(self._pending.path(name), os.O_WRONLY)
            start, shape = layout.files[name].starts[part.key], layout.tensors[part.key].shape
            write_slice(self._open[name], start, shape, value, part.placement, part.size, part.rank)

    def close(self) -> None:
        """Flushes all writes to the disk, on every rank: rank 0 could only flush the writes of its own host."""
        for number in self._open.values():
            with self._noted():
                os.fsync(number)
            os.close(number)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error


# -- staged --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yields an empty folder whose files are moved into `folder` at the end. Called on rank 0 alone."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(mkdtemp(prefix=".helix-", dir=folder))
    try:
        if (folder / "README.md").is_file():  # PEFT adds to an existing card
            shutil.copy2(folder / "README.md", aside)
        yield aside
        written = [path for path in aside.rglob("*") if path.is_file()]
        kept = {path.name for path in written if WEIGHTS.fullmatch(path.name)}
        for path in folder.iterdir() if kept else ():  # adapters may lie beside the files of their model
            if WEIGHTS.fullmatch(path.name) and path.name not in kept:
                path.unlink()
        for path in written:
            target = folder / path.relative_to(aside)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_files(paths: Iterable[Path], expected: Mapping[str, Tensor]) -> None:
    """Reads files of tensors back. Raises ValueError, with the file or tensor, if a name, shape or dtype is not as
    expected."""
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


# -- atomic --------------------------------------------------------------------------------------------------------


PREFIX = "checkpoint"  # as the Trainer names them
STAGING = "_saving"  # pushes to the Hub leave out `_*`


def recover(folder: Path, is_complete: Callable[[Path], bool]) -> None:
    """Deletes the remains of an unfinished save; publishes a checkpoint that was complete and not yet moved."""
    staging = folder / STAGING
    if not staging.is_dir():
        return
    for left in staging.glob(f"{PREFIX}-*"):
        if is_complete(left) and not (folder / left.name).exists():
            left.rename(folder / left.name)
    shutil.rmtree(staging)


def publish(staged: Path, folder: Path, mark: Callable[[], None]) -> None:
    """Moves a checkpoint from the staging folder to its place, in a single step, over a checkpoint of the same name."""
    to_disk(staged)
    mark()
    to_disk(staged)
    final = folder / staged.name
    if final.exists():  # a process that ends here leaves the rest to `recover`
        final.rename(staged.parent / "replaced")
    staged.rename(final)
    _sync(folder)
    shutil.rmtree(staged.parent)


def to_disk(folder: Path) -> None:
    """Flushes a folder to the disk, so that the folder survives a crash of the machine."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot flush folders
            raise
    finally:
        os.close(number)
