"""How the bytes of one safetensors file are laid out, and how processes write it together.

In:   names, types and shapes of whole tensors; later, the slices that each process holds.
Out:  a file with the bytes that `safetensors.torch.save_file` would write: eight bytes with the length of the header,
      the header (JSON with type, shape and position of every tensor), then the tensors one after the other.
Must hold: nothing is kept in memory but the header; a slice goes from the tensor that holds it to its places in the
file without a copy (from a GPU: with one); no two slices write the same byte, so their order does not matter.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hf_helix.operators.unit import Placement

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
    """Which tensor lies where in a file.

    Attributes:
        header: the first bytes of the file, the length of the JSON included.
        starts: the byte in the file at which each tensor begins, by name.
        size: of the file, in bytes.
    """

    header: bytes
    starts: dict[str, int]
    size: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> FileLayout:
        """The layout of a file with these tensors, which may be on the meta device."""
        about: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        # Types with larger elements come first, so that every tensor lies at a multiple of the size of its elements.
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
        """Makes a file of the full size that holds the header only."""
        with path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.size)


def write_slice(
    file: int, start: int, whole: Sequence[int], value: Tensor, placement: Placement, size: int, rank: int
) -> None:
    """Writes a rank's slice of a tensor to its places in a file.

    A slice along the first dimension is one piece of the file; along another one it is a piece for each index of the
    dimensions before.

    Args:
        file: a descriptor that is open for writing.
        start: the byte in the file at which the tensor begins.
        whole: the shape of the whole tensor.
        value: the slice.
        placement: how the tensor is cut.
        size: how many slices it has.
        rank: which of them this is.
    """
    value = value.detach().cpu()
    dim = placement.dim
    if dim is None or size == 1:
        _write(file, _bytes(value.reshape(1, -1))[0], start)
        return
    bounds = placement.bounds(size, rank)
    inner = math.prod(whole[dim + 1 :]) * value.itemsize
    for part, (first, _) in zip(value.split([last - first for first, last in bounds], dim), bounds, strict=True):
        if part.numel():
            for row, data in enumerate(_bytes(part.reshape(math.prod(whole[:dim]), -1))):
                _write(file, data, start + (row * whole[dim] + first) * inner)


def _bytes(rows: Tensor) -> np.ndarray:
    """The bytes of each row, in the memory of the tensor."""
    array: np.ndarray = rows.view(torch.uint8).numpy()
    return array


def _write(file: int, data: np.ndarray, place: int) -> None:
    """Writes all of the data: the system may write less at a time, at most 2 GiB."""
    left = data.data
    while left:
        count = os.pwrite(file, left, place)
        left, place = left[count:], place + count
