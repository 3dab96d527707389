"""Gives the parameters and buffers that this rank holds memory on its device, where the model is on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import swap_tensors

from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.stage import Stage


@torch.no_grad()
def materialize(model: Any, stage: Stage, mesh: Mesh) -> None:
    """Memory for what this rank holds of a model on the meta device; what is real already stays as it is.

    Parameters are cut and not filled yet, those of other pipeline ranks empty; buffers are as the model makes them.

    Raises:
        ValueError: a buffer that no checkpoint has and that the model does not make.
    """
    for name, module in model.named_modules():
        _materialize_buffers(model, name, module, mesh.device)
    owners = stage.owners
    for parameter, placement in stage.all_placements.items():
        if not parameter.is_meta:
            continue
        mine, axis = owners[parameter] == stage.rank, mesh.axis_of(placement)
        shape = placement.shape(parameter.shape, axis.size, axis.rank) if mine else (0,)
        value = torch.empty(shape, dtype=parameter.dtype, device=mesh.device)
        # `parameter.data = value` is refused from one device to another.
        swap_tensors(parameter, nn.Parameter(value, requires_grad=mine and parameter.requires_grad))


def _materialize_buffers(model: Any, name: str, module: nn.Module, device: torch.device) -> None:
    """As `from_pretrained`: make room for them and let `_init_weights` fill it, such as with the rope's frequencies."""
    absent = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    if not absent:
        return
    made = {key: torch.empty_like(buffer, device=device) for key, buffer in absent.items()}
    module._buffers.update(made)
    versions = {key: buffer._version for key, buffer in made.items()}
    model._init_weights(module)  # its parameters are on the meta device still, so nothing is drawn
    for key, buffer in made.items():
        if key in module._non_persistent_buffers_set and buffer._version == versions[key]:
            raise ValueError(
                f"{name}.{key} is in no checkpoint, and {type(model).__name__} does not make it in _init_weights, so "
                "the model cannot start on the meta device; make it with from_pretrained(folder)"
            )
