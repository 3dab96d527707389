"""Whole parameters <-> slices.

In:   a whole model on every rank; later, the cut one.
Out:  parameters cut in place under their own names, those of other pipeline ranks emptied; single tensors whole again.
Must hold: names and types never change; ranks start from the same weights, rank 0's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_helix.operators.unit import Placement
from hf_helix.runtime.distributed.groups import control_group, receive_on_host, send_on_host
from hf_helix.runtime.distributed.mesh import Mesh, world_size
from hf_helix.runtime.stage import Stage


def cut_parameters(stage: Stage, mesh: Mesh) -> None:
    """Keep this rank's slice of every parameter that it holds, in place, and nothing of the others.

    Rank 0's values count, as with DDP: where another rank starts from other weights (a model initialised at random
    without a common seed), it gets rank 0's. Parameters of other pipeline ranks stay in the model under their names,
    empty and not trained.
    """
    placements = stage.all_placements
    if world_size() > 1:
        _align_with_rank_0(list(placements), mesh.device)
    owners = stage.owners
    for parameter, placement in placements.items():
        if owners[parameter] != stage.rank:
            parameter.data = parameter.data.new_empty(0)
            parameter.requires_grad_(False)
        else:
            axis = mesh.axis_of(placement)
            parameter.data = placement.cut(parameter.data, axis.size, axis.rank)


def whole_parameter(value: Tensor | None, placement: Placement, mesh: Mesh, owner: int = 0) -> Tensor | None:
    """The uncut tensor on the first of the ranks that hold a copy together, None on the others. Collective over these.

    It lies in the host's memory, and goes over it: between devices, every pair of ranks would need a communicator of
    NCCL, half a gigabyte of the device that is never freed.

    Args:
        value: this rank's slice of a parameter, or of its gradient; on ranks that do not hold it, anything.
        owner: the pipeline rank that holds it.
    """
    pipe = mesh.pipe
    whole = join_slices(value.detach(), placement, mesh) if pipe.rank == owner and value is not None else None
    if owner == 0 or mesh.axis_of(placement).rank > 0:
        return whole if pipe.rank == 0 else None
    if pipe.rank == owner:
        assert whole is not None
        dist.send_object_list([tuple(whole.shape), whole.dtype], pipe.ranks[0], group=control_group())
        send_on_host(whole, pipe.ranks[0])
    if pipe.rank > 0:
        return None
    about: list[Any] = [None, None]
    dist.recv_object_list(about, pipe.ranks[owner], group=control_group())
    shape, dtype = about
    arrived = torch.empty(shape, dtype=dtype)
    receive_on_host(arrived, pipe.ranks[owner])
    return arrived


def join_slices(value: Tensor, placement: Placement, mesh: Mesh) -> Tensor | None:
    """The uncut tensor on the first rank of the axis it is cut over, None on the others. Collective over it.

    It lies in the host's memory, and goes over it, see `whole_parameter`. The first rank allocates the whole once, and
    one slice where slices do not lie in one piece.
    """
    axis = mesh.axis_of(placement)
    if axis.group is None or placement.dim is None:
        return value.cpu() if axis.rank == 0 else None
    ranks = dist.get_process_group_ranks(axis.group)
    if axis.rank > 0:
        send_on_host(value, ranks[0])
        return None
    whole = torch.empty(placement.whole_shape(value.shape), dtype=value.dtype)
    placement.paste(whole, value.cpu(), axis.size, 0)
    for number, source in enumerate(ranks[1:], 1):
        places = placement.slices(whole, axis.size, number)
        if len(places) == 1 and places[0].is_contiguous():
            receive_on_host(places[0], source)
            continue
        arrived = whole.new_empty(placement.shape(whole.shape, axis.size, number))
        receive_on_host(arrived, source)
        placement.paste(whole, arrived, axis.size, number)
    return whole


def is_cut(stage: Stage, mesh: Mesh) -> bool:
    """Whether this rank holds a part of the model only. The same on every rank."""
    return mesh.pipe.size > 1 or any(
        placement.dim is not None and mesh.axis_of(placement).size > 1 for placement in stage.all_placements.values()
    )


def _align_with_rank_0(parameters: list[nn.Parameter], device: torch.device) -> None:
    """Broadcast the parameters if any rank's differ from rank 0's."""
    mine = torch.stack([_fingerprint(parameter) for parameter in parameters]).to(device)
    theirs = mine.clone()
    dist.broadcast(theirs, src=0)
    differs = (mine != theirs).any().float()
    dist.all_reduce(differs)
    if differs.item():
        for parameter in parameters:
            value = parameter.data.to(device)
            dist.broadcast(value, src=0)
            parameter.data.copy_(value)


def _fingerprint(parameter: nn.Parameter) -> Tensor:
    """Two numbers that other values would hardly share: the sum, and a sum weighted by place."""
    flat = parameter.detach().reshape(-1).double()
    weights = torch.linspace(0.5, 1.5, flat.numel(), dtype=flat.dtype, device=flat.device)
    return torch.stack((flat.sum(), flat @ weights))
