"""Where every byte of a checkpoint lies, before any is written.

In:   a cut model, of which only names, types and shapes are read.
Out:  the tensors on disk, the file of each (`model.safetensors`, or several files with an index), and where it begins
      in that file.
Must hold: names, files and order are those that `save_pretrained` of the whole model would give; all ranks find the
same layout.

How the bytes of a single file are laid out is in `safetensors_file`; which rank writes which of them is in `save`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_helix.checkpoint.reader import persistent_tensors
from hf_helix.checkpoint.safetensors_file import FileLayout
from hf_helix.operators.unit import COPIED
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.stage import Stage


@dataclass(frozen=True)
class CheckpointLayout:
    """Which tensor lies where in a checkpoint.

    Attributes:
        tensors: the whole tensors by their names on disk, on the meta device.
        file_of: the name of the file that each tensor lies in.
        files: the layout of each file, by its name.
        index: the contents of `model.safetensors.index.json`; None for a single file.
    """

    tensors: dict[str, Tensor]
    file_of: dict[str, str]
    files: dict[str, FileLayout]
    index: dict[str, Any] | None

    @classmethod
    def of(cls, model: Any, stage: Stage, mesh: Mesh, max_shard_size: int | str) -> CheckpointLayout:
        """The layout that `PreTrainedModel.save_pretrained` would give the whole model. Collective.

        Args:
            model: the cut model.
            stage: its units on this rank.
            mesh: the layout of the ranks.
            max_shard_size: the largest size of a file, in bytes or as text such as "5GB".
        """
        whole = _outlines(model, stage, mesh)
        weights = {id(model.get_parameter_or_buffer(name)): outline for name, outline in whole.items()}
        count = sum(weights[id(parameter)].numel() for parameter in model.parameters())
        tensors = tensors_on_disk(model, whole)
        split = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda outline: outline.untyped_storage().nbytes(),
            get_storage_id=lambda outline: outline.untyped_storage()._cdata,
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
    """Returns what `save_pretrained` writes of a model's state, by the names on disk."""
    tensors = {name: value for name, value in state.items() if name not in (model._keys_to_ignore_on_save or ())}
    return revert_weight_conversion(model, remove_tied_weights_from_state_dict(tensors, model))


def _outlines(model: Any, stage: Stage, mesh: Mesh) -> dict[str, Tensor]:
    """All tensors that the whole model has in its state, on the meta device. Collective over the pipeline."""
    placements, owners = stage.all_placements, stage.owners
    tensors = persistent_tensors(model)
    shapes: dict[str, tuple[int, ...]] = {
        name: placements.get(tensor, COPIED).whole_shape(tensor.shape)
        for name, tensor in tensors.items()
        if owners.get(tensor, stage.rank) == stage.rank
    }
    if mesh.pipe.group is not None:
        shapes = {name: shape for part in all_gather_object(shapes, mesh.pipe.ranks) for name, shape in part.items()}
    return {name: torch.empty(shapes[name], dtype=tensors[name].dtype, device="meta") for name in tensors}
