"""The layout of a checkpoint and of each safetensors file, and writing a slice of a tensor.

In:   names, dtypes and shapes of full tensors; later, the slices of each process.
Out:  the tensors on disk, the file of each (`model.safetensors`, or several files with an index) and its offset; files
      with the bytes of `safetensors.torch.save_file`:

    8 bytes: length of the header | header: JSON with dtype, shape and offsets of every tensor | tensors in order

Must hold: names, files and order are those of the uncut model's `save_pretrained`; all ranks find the same layout. Only
the header is kept in memory; a slice goes to its offsets in the file without a copy (from a GPU: with a copy); no two
slices write the same byte, so their order does not matter.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_helix.checkpoint.reader import persistent_tensors
from hf_helix.operators.param_shard import COPIED, Placement
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.stage import Stage

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
    """The layout of a file: its first bytes with the length of the JSON, the offset of each tensor by name, and its
    size."""

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


def write_slice(
    file: int, start: int, shape: Sequence[int], value: Tensor, placement: Placement, size: int, rank: int
) -> None:
    """Writes a rank's slice of a tensor, which begins at byte `start`, to its offsets in a file.

    A slice along the first dimension is contiguous in the file; a slice along another dimension has a contiguous piece
    for each index of the dimensions before.
    """
    value = value.detach().cpu()
    dim = placement.dim
    if dim is None or size == 1:
        _write(file, _bytes(value.reshape(1, -1))[0], start)
        return
    bounds = placement.bounds(size, rank)
    inner = math.prod(shape[dim + 1 :]) * value.itemsize
    for part, (first, _) in zip(value.split([last - first for first, last in bounds], dim), bounds, strict=True):
        if part.numel():
            for row, data in enumerate(_bytes(part.reshape(math.prod(shape[:dim]), -1))):
                _write(file, data, start + (row * shape[dim] + first) * inner)


def _bytes(rows: Tensor) -> np.ndarray:
    """Returns the bytes of each row, in the memory of the tensor."""
    array: np.ndarray = rows.view(torch.uint8).numpy()
    return array


def _write(file: int, data: np.ndarray, offset: int) -> None:
    """Writes all of the data: the system may write less at a time, at most 2 GiB."""
    left = data.data
    while left:
        count = os.pwrite(file, left, offset)
        left, offset = left[count:], offset + count


# -- layout --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointLayout:
    """The layout of a checkpoint.

    Attributes:
        tensors: the full tensors by their names on disk, on the meta device.
        file_of: the name of the file of each tensor.
        files: the layout of each file, by its name.
        index: the contents of `model.safetensors.index.json`; None for a single file.
    """

    tensors: dict[str, Tensor]
    file_of: dict[str, str]
    files: dict[str, FileLayout]
    index: dict[str, Any] | None

    @classmethod
    def of(cls, model: Any, stage: Stage, mesh: Mesh, max_shard_size: int | str) -> CheckpointLayout:
        """Returns the layout of the uncut model's `PreTrainedModel.save_pretrained`. Collective.

        Args:
            stage: the model's units on this rank.
            max_shard_size: the largest size of a file, in bytes or as text such as "5GB".
        """
        full = _meta_tensors(model, stage, mesh)
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


def tensors_on_disk(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of `save_pretrained` for a model's state, by the names on disk."""
    tensors = {name: value for name, value in state.items() if name not in (model._keys_to_ignore_on_save or ())}
    return revert_weight_conversion(model, remove_tied_weights_from_state_dict(tensors, model))


def _meta_tensors(model: Any, stage: Stage, mesh: Mesh) -> dict[str, Tensor]:
    """Returns all tensors in the uncut model's state, on the meta device. Collective over the pipeline."""
    placements, owners = stage.all_placements, stage.owners
    tensors = persistent_tensors(model)
    shapes: dict[str, tuple[int, ...]] = {
        name: placements.get(tensor, COPIED).full_shape(tensor.shape)
        for name, tensor in tensors.items()
        if owners.get(tensor, stage.rank) == stage.rank
    }
    if mesh.pipe.group is not None:
        shapes = {name: shape for part in all_gather_object(shapes, mesh.pipe.ranks) for name, shape in part.items()}
    return {name: torch.empty(shapes[name], dtype=tensors[name].dtype, device="meta") for name in tensors}
