"""The files of a checkpoint under temporary names, until every rank has written its part.

In:   the layout of a checkpoint; later, slices of its tensors.
Out:  the files under their own names, complete.
Must hold: files of an earlier save stay usable until the new ones are complete; what an unfinished save has left goes
with the next one. After an error a rank writes nothing more, and says so at the end, so that the ranks stay in step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from hf_helix.checkpoint.layout import CheckpointLayout
from hf_helix.checkpoint.reader import INDEX_NAME
from hf_helix.checkpoint.safetensors_file import write_slice
from hf_helix.operators.unit import COPIED, Placement
from hf_helix.runtime.distributed.agreement import decide_on_rank_0
from hf_helix.runtime.distributed.groups import control_group
from hf_helix.runtime.distributed.mesh import rank, world_size

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor on disk that one rank writes: a slice, or all of it.

    Attributes:
        key: the name of the tensor.
        placement: how the tensor is cut.
        size: how many slices it has.
        rank: which of the slices this is.
    """

    key: str
    placement: Placement = COPIED
    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class CheckpointDraft:
    """The files of a checkpoint under temporary names, until they are complete.

    Attributes:
        folder: where the checkpoint will lie.
        token: a part of the temporary names, the same on every rank.
        layout: which tensor lies where.
    """

    folder: Path
    token: str
    layout: CheckpointLayout

    def path(self, name: str) -> Path:
        """The temporary path of the file that will have this name."""
        return self.folder / f".helix-{self.token}-{name}.tmp"

    def create(self) -> None:
        """Makes every file in its full size, and a probe for `writers`. Called on rank 0 alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, file in self.layout.files.items():
            file.create(self.path(name))
        self.path("probe").write_bytes(bytes(world_size()))

    def writers(self) -> set[int]:
        """The ranks whose writing arrives in rank 0's files. Collective."""
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
        """Deletes the temporary files of this draft."""
        with contextlib.suppress(OSError):
            for file in self.folder.glob(f".helix-{self.token}-*.tmp"):
                file.unlink()


class DraftFiles:
    """The files of a draft that this rank has open.

    An error is kept instead of raised, so that the ranks stay in step; nothing is written after it.

    Attributes:
        error: the first error.
    """

    def __init__(self, draft: CheckpointDraft) -> None:
        self.error: OSError | None = None
        self._draft = draft
        self._open: dict[str, int] = {}

    def write(self, part: TensorPart, value: Tensor) -> None:
        """Writes a part of a tensor to its places in its file."""
        if self.error is not None:
            return
        layout = self._draft.layout
        name = layout.file_of[part.key]
        with self._noted():
            if name not in self._open:
                self._open[name] = os.open(self._draft.path(name), os.O_WRONLY)
            start, whole = layout.files[name].starts[part.key], layout.tensors[part.key].shape
            write_slice(self._open[name], start, whole, value, part.placement, part.size, part.rank)

    def close(self) -> None:
        """Brings everything to the disk. Every rank does: rank 0 could only for what was written on its own host."""
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
