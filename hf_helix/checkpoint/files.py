"""The files of a checkpoint: their layout, a part of a tensor in them, and publication.

In:   names, dtypes and shapes of full tensors; later, the parts of each process.
Out:  the tensors on disk, the file of each (`model.safetensors`, or several files with an index) and its offset; files
      with the bytes of `safetensors.torch.save_file`:

    8 bytes: length of the header | header: JSON with dtype, shape and offsets of every tensor | tensors in order

Must hold: names, files and order equal the uncut model's `save_pretrained`; all ranks find the same layout. Only
the header is kept in memory; a part goes to its offsets in the file without a copy (from a GPU: with a copy); no two
parts write the same byte, so their order does not matter. Earlier files stay usable until the new files are complete,
also if the process is killed; the next save deletes the remains of an unfinished save, which carry a mark (`claims`),
and nothing else. After an error a rank writes nothing more and reports at the end, so the ranks stay in step. Rank 0
alone publishes.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import math
import operator
import os
import re
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_helix.checkpoint.background import Copies
from hf_helix.checkpoint.claims import MARK, delete_unfinished, find_unfinished, make_unfinished
from hf_helix.checkpoint.direct import DirectFile
from hf_helix.checkpoint.reader import INDEX_NAME, SINGLE_NAME, open_safetensors, persistent_tensors
from hf_helix.runtime.distributed.agreement import decide_on_rank_0
from hf_helix.runtime.distributed.groups import control_group
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.rank_units import RankUnits

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class FileLayout:
    """The layout of a file: its first bytes up to the end of the JSON, the offset of each tensor, and its size."""

    header: bytes
    starts: dict[str, int]
    size: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> FileLayout:
        """Returns the layout of a file with these tensors, on any device."""
        about: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        # Dtypes with larger elements come first, so every offset is a multiple of the tensor's element size.
        for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
            tensor, start = tensors[name], end
            end += tensor.nbytes
            about[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
            starts[name] = start
        text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        return cls(header, {name: len(header) + start for name, start in starts.items()}, len(header) + end)

    def create(self, path: Path) -> None:
        """Makes a file of the full size with the header."""
        with path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.size)


def write_box(file: DirectFile, start: int, shape: Sequence[int], offset: Sequence[int], box: Tensor) -> None:
    """Writes a part of a tensor, which begins at byte `start`, to its offsets in a file, a piece for each run of bytes.

    Args:
        file: the file of all tensors.
        start: the first byte of the tensor.
        shape: of the full tensor.
        offset: of the part in the full tensor, an index for each dimension.
        box: the part.
    """
    if not box.numel():
        return
    value = box.detach().cpu()
    dim = max((dim for dim, length in enumerate(shape) if value.shape[dim] != length), default=0)
    inner = [math.prod(shape[after + 1 :]) * value.itemsize for after in range(len(shape))]  # bytes between indices
    indices = itertools.product(
        *(range(at, at + length) for at, length in zip(offset[:dim], value.shape, strict=False))
    )
    for index, data in zip(indices, _bytes(value.reshape(math.prod(value.shape[:dim]), -1)), strict=True):
        place = sum(map(operator.mul, (*index, *offset[dim:]), inner))
        file.write_at(data, start + place)


def _bytes(rows: Tensor) -> np.ndarray:
    """Returns the bytes of each row, in the memory of the tensor."""
    array: np.ndarray = rows.view(torch.uint8).numpy()
    return array


# -- layout --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointLayout:
    """The layout of a checkpoint."""

    tensors: dict[str, Tensor]  # the full tensors by their names on disk, on the meta device
    file_of: dict[str, str]  # the name of the file of each tensor
    files: dict[str, FileLayout]  # the layout of each file, by its name
    index: dict[str, Any] | None  # the contents of `model.safetensors.index.json`; None for a single file

    @classmethod
    def of(cls, model: Any, rank_units: RankUnits, mesh: Mesh, max_shard_size: int | str) -> CheckpointLayout:
        """Returns the layout of the uncut model's `PreTrainedModel.save_pretrained`, with files of at most a number of
        bytes, or a text such as "5GB". Collective."""
        full = _meta_tensors(model, rank_units)
        weights = {id(model.get_parameter_or_buffer(name)): tensor for name, tensor in full.items()}
        count = sum(weights[id(parameter)].numel() for parameter in model.parameters())
        tensors = tensors_on_disk(model, full)
        split = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
            get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        files = {
            file: FileLayout.of({name: tensors[name] for name in names})
            for file, names in split.filename_to_tensors.items()
        }
        about = {"metadata": {"total_parameters": count, **split.metadata}, "weight_map": split.tensor_to_filename}
        return cls(tensors, split.tensor_to_filename, files, about if split.is_sharded else None)

    def create(self, folder: Path) -> None:
        """Makes every file in its full size, and the index. Called only on rank 0."""
        for name, file in self.files.items():
            file.create(folder / name)
        if self.index is not None:
            (folder / INDEX_NAME).write_text(json.dumps(self.index, indent=2, sort_keys=True) + "\n")


def tensors_on_disk(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of `save_pretrained` for a model's state, by the names on disk."""
    tensors = {name: value for name, value in state.items() if name not in (model._keys_to_ignore_on_save or ())}
    return revert_weight_conversion(model, remove_tied_weights_from_state_dict(tensors, model))


def _meta_tensors(model: Any, rank_units: RankUnits) -> dict[str, Tensor]:
    """Returns all tensors in the uncut model's state, on the meta device."""
    tensors, rows = persistent_tensors(model), rank_units.rows
    shapes = {name: rows[each].shape if each in rows else each.shape for name, each in tensors.items()}
    return {name: torch.empty(shapes[name], dtype=tensors[name].dtype, device="meta") for name in tensors}


# -- in a folder aside -------------------------------------------------------------------------------------------------


_ASIDE = ".helix-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ROOM = "make room on that disk, or save less: TrainingArguments(save_total_limit=1), save_only_model=True"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor on disk that a rank writes: its offset in the full tensor, and its shape."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yields an empty folder whose files rank 0 moves into `folder` at the end; after an error nothing is moved.
    Collective."""

    def make() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for left in find_unfinished(folder, _ASIDE):
            delete_unfinished(left)
        return make_unfinished(folder, _ASIDE)

    with disk_errors(folder):
        aside = decide_on_rank_0(make)
        try:
            yield aside
            decide_on_rank_0(lambda: _move(aside, folder))
        finally:
            if rank() == 0:
                delete_unfinished(aside)


def _move(aside: Path, folder: Path) -> None:
    """Moves files into a folder; weights take the place of all files of earlier weights, adapters are added to them."""
    written = [path.relative_to(aside) for path in aside.rglob("*") if path.is_file() and path != aside / MARK]
    names = {path.name for path in written}
    earlier = _files_of_weights(folder) if any(map(WEIGHTS.fullmatch, names)) else set()
    for path in written:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (aside / path).replace(folder / path)
    for name in earlier - names:
        (folder / name).unlink(missing_ok=True)


def _files_of_weights(folder: Path) -> set[str]:
    """Returns the files of a save of weights: the single file, the index, and the files that the index names."""
    try:
        named = set(map(str, json.loads((folder / INDEX_NAME).read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        named = set()
    return {SINGLE_NAME, INDEX_NAME} | set(filter(WEIGHTS.fullmatch, named))


def find_writers(aside: Path) -> set[int]:
    """Returns the ranks whose writes arrive in a folder that rank 0 has made. Collective."""
    probe = aside / "probe"
    decide_on_rank_0(lambda: probe.write_bytes(bytes(world_size())))
    with contextlib.suppress(OSError), probe.open("r+b") as file:
        os.pwrite(file.fileno(), b"x", rank())
    if world_size() > 1:
        dist.barrier(control_group())
    marks = decide_on_rank_0(probe.read_bytes)
    if rank() == 0:
        probe.unlink()
    return {number for number, mark in enumerate(marks) if mark}


class PendingFiles:
    """The files of a checkpoint, opened on this rank. The first error is recorded until the end, so the ranks stay in
    step; nothing is written after an error.

    Args:
        folder: of the files.
        layout: of the files.
        copies: makes `write` only copy, and `close` write; None to write at once.
    """

    def __init__(self, folder: Path, layout: CheckpointLayout, copies: Copies | None) -> None:
        self._error: OSError | None = None
        self._folder, self._layout = folder, layout
        self._copies, self._copied = copies, deque[tuple[TensorPart, Tensor]]()
        self._open: dict[str, DirectFile] = {}

    def write(self, part: TensorPart, value: Tensor, is_held: bool = False) -> None:
        """Writes a part of a tensor to its offsets in its file, or copies it, see `Copies.of`."""
        if self._copies is None:
            self._write(part, value)
        else:
            self._copied.append((part, self._copies.of(value, is_held)))

    def _write(self, part: TensorPart, value: Tensor) -> None:
        if self._error is not None:
            return
        layout, name = self._layout, self._layout.file_of[part.key]
        with self._noted(name):
            if name not in self._open:
                self._open[name] = DirectFile(self._folder / name)
            start, shape = layout.files[name].starts[part.key], layout.tensors[part.key].shape
            write_box(self._open[name], start, shape, part.offset, value)

    def close(self) -> None:
        """Writes the copies, and flushes all writes to the disk, on every rank: rank 0 could only flush the writes of
        its own host. Raises the first error."""
        while self._copied:
            self._write(*self._copied.popleft())
        for name, file in self._open.items():
            with self._noted(name), file:
                file.sync()
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        try:
            with disk_errors(self._folder / name):
                yield
        except OSError as error:
            self._error = self._error or error


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Adds the path and the remedy to errors of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or ROOM in str(error):
            raise
        raise OSError(error.errno, f"{error.strerror}: {error.filename or path}; {ROOM}") from error


def save_torch(value: Any, path: Path) -> None:
    """Writes a small file by `torch.save`, whose own errors of a full disk do not say so."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with disk_errors(path):
        path.write_bytes(buffer.getvalue())


def check_files(paths: Iterable[Path], expected: Mapping[str, Tensor]) -> None:
    """Reads files of tensors back. Raises ValueError for a name, shape or dtype that is not as expected."""
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
STAGING = "_saving-"  # begins the names of unfinished folders; pushes to the Hub leave out `_*`


def recover(folder: Path, is_complete: Callable[[Path], bool]) -> None:
    """Deletes the remains of an unfinished save; publishes a checkpoint that was complete and not yet moved."""
    for staging in find_unfinished(folder, STAGING):
        abandon(staging, folder, is_complete)


def abandon(staging: Path, folder: Path, is_complete: Callable[[Path], bool]) -> None:
    """Deletes an unfinished save, or publishes its checkpoint if that is complete."""
    for left in staging.glob(f"{PREFIX}-*"):
        if not left.is_symlink() and is_complete(left) and not (folder / left.name).exists():
            left.rename(folder / left.name)
    delete_unfinished(staging)


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
    delete_unfinished(staged.parent)


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
