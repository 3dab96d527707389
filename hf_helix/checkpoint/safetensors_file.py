"""A safetensors file that several processes write together, each the parts of tensors that it has.

In:   names, types and shapes of whole tensors; later, slices of them.
Out:  the bytes that `safetensors.torch.save_file` would write, and where each tensor begins in the file.
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
    """What lies where in a file.

    Attributes:
        header: its first bytes.
        starts: where each tensor begins, by name.
        size: of the file.
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
        """Make a file of this size with the header, and nothing else in it yet."""
        with path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.size)


def write_slice(
    file: int, start: int, whole: Sequence[int], value: Tensor, placement: Placement, size: int, rank: int
) -> None:
    """Write what a rank holds of a tensor to its places in a file.

    A slice along the first dimension is one piece of the file; along another one it is a piece for each index of the
    dimensions before.

    Args:
        file: a descriptor that is open for writing.
        start: where the tensor begins in the file.
        whole: its shape.
        value: the slice.
        placement, size, rank: how the tensor is cut, over how many, and which slice this is.
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
    found: np.ndarray = rows.view(torch.uint8).numpy()
    return found


def _write(file: int, data: np.ndarray, place: int) -> None:
    """All of it: the system may write less at a time, at most 2 GiB."""
    left = data.data
    while left:
        count = os.pwrite(file, left, place)
        left, place = left[count:], place + count
