"""Gathers the samples of metrics from all data-parallel ranks."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hf_helix.runtime.distributed.mesh import Mesh, world_size


def gather_samples(data: Any, mesh: Mesh, state: Any) -> Any:
    """Gathers values of samples over the data-parallel ranks, each sample once. Collective over these ranks.

    Args:
        data: tensors, or lists, tuples and mappings of tensors, with samples along the first dimension.
        state: Accelerate's gradient state, with the end of the data loader and the size of the last batch.
    """
    if isinstance(data, (tuple, list)):
        return type(data)(gather_samples(item, mesh, state) for item in data)
    if isinstance(data, Mapping):
        return type(data)({name: gather_samples(item, mesh, state) for name, item in data.items()})  # type: ignore[call-arg]
    if mesh.dp_group is not None:
        data = data.contiguous()
        blocks = [torch.empty_like(data) for _ in range(mesh.dp_size)]
        dist.all_gather(blocks, data, group=mesh.dp_group)
        data = torch.cat([block[None] if block.dim() == 0 else block for block in blocks])
    # The last batch is padded with samples from the start of the data set.
    count = _remainder(state) if state.end_of_dataloader else 0
    return data[:count] if count > 0 else data


def _remainder(state: Any) -> int:
    """Returns the number of samples in the last batch of all ranks. Accelerate 1.15 counts the batch of rank 0 once for
    every rank that shares the batch.
    """
    is_copied = getattr(state.active_dataloader, "submesh_tp", None) is not None
    return state.remainder // world_size() if is_copied else state.remainder
