"""Cuts parameters into this rank's slices, and makes single tensors whole again.

In:   a model that is whole on every rank, or on the meta device; later, the cut one.
Out:  parameters cut in place under their own names, those of other pipeline ranks emptied; single tensors whole again.
Must hold: names and types never change; ranks start from the same weights, rank 0's.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import swap_tensors

from hf_helix.operators.param_shard import Placement
from hf_helix.operators.zero.flat_parameter import FlatParameter
from hf_helix.runtime.distributed.groups import control_group, receive_on_host, send_on_host
from hf_helix.runtime.distributed.mesh import Mesh, world_size
from hf_helix.runtime.stage import Stage


def cut_parameters(stage: Stage, mesh: Mesh) -> None:
    """Keeps this rank's slice of every parameter that it holds, in place, and nothing of the others. Collective.

    Rank 0's values count, as with DDP: a rank that starts from other weights (a model initialised at random without a
    common seed) gets rank 0's. Parameters of other pipeline ranks stay in the model under their names, empty and not
    trained.
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


@torch.no_grad()
def materialize(model: Any, stage: Stage, mesh: Mesh) -> None:
    """Gives the parameters and buffers that this rank holds memory on its device, where they are on the meta device.

    Parameters are cut and not filled yet, those of other pipeline ranks empty; buffers are as the model makes them.
    What is spread over data-parallel ranks is spread from the start, and no rank ever has all of it.

    Args:
        model: is changed in place; parameters and buffers that are real already stay as they are.
        stage: its units on this rank.
        mesh: the layout of the ranks.

    Raises:
        ValueError: a buffer that no checkpoint has and that the model does not make.
    """
    for name, module in model.named_modules():
        _materialize_buffers(model, name, module, mesh.device)
    owners = stage.owners
    spread = {parameter for flat in stage.flat_parameters for parameter in flat.placements}
    for parameter, placement in stage.all_placements.items():
        if not parameter.is_meta:
            continue
        mine, axis = owners[parameter] == stage.rank, mesh.axis_of(placement)
        shape = placement.shape(parameter.shape, axis.size, axis.rank) if mine else (0,)
        held = (1,) * len(shape) if parameter in spread else shape
        value = torch.empty(held, dtype=parameter.dtype, device=mesh.device).expand(shape)
        # `parameter.data = value` is refused from one device to another.
        swap_tensors(parameter, nn.Parameter(value, requires_grad=mine and parameter.requires_grad))
    for flat in stage.flat_parameters:
        if not flat.is_sharded:
            flat.shard_in_place(mesh.device)


def _materialize_buffers(model: Any, name: str, module: nn.Module, device: torch.device) -> None:
    """Makes the buffers of a module as `from_pretrained` does: `_init_weights` fills them, such as rope's."""
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


def full_parameter(value: Tensor | None, placement: Placement, mesh: Mesh, owner: int = 0) -> Tensor | None:
    """Joins the slices of a parameter. Collective over the ranks that hold a copy of it together.

    The tensor is sent through the memory of the hosts, and lies there: between devices, every pair of ranks would need
    a communicator of NCCL, which takes half a gigabyte of the device and is never freed.

    Args:
        value: this rank's slice of a parameter, or of its gradient; not read on ranks that do not hold it.
        placement: how the parameter is cut.
        mesh: the layout of the ranks.
        owner: the pipeline rank that holds it.

    Returns:
        The whole tensor on the first of these ranks, None on the others.
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
    """Joins the slices of a tensor on the host, see `full_parameter`. Collective over the axis that it is cut over.

    The first rank allocates the whole tensor once, and one slice where slices do not lie in one piece.

    Args:
        value: this rank's slice.
        placement: how the tensor is cut.
        mesh: the layout of the ranks.

    Returns:
        The whole tensor on the first rank of the axis, None on the others.
    """
    axis = mesh.axis_of(placement)
    if axis.group is None or placement.dim is None:
        return value.cpu() if axis.rank == 0 else None
    ranks = dist.get_process_group_ranks(axis.group)
    if axis.rank > 0:
        send_on_host(value, ranks[0])
        return None
    whole = torch.empty(placement.full_shape(value.shape), dtype=value.dtype)
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
    """Whether a rank holds only a part of the model. The same on every rank."""
    return bool(stage.flat_parameters) or has_slices(stage, mesh)


def has_slices(stage: Stage, mesh: Mesh) -> bool:
    """Whether a rank holds only a part of the model once all that is spread is gathered. The same on every rank."""
    cut = (placement for placement in stage.all_placements.values() if placement.dim is not None)
    return mesh.pipe.size > 1 or any(mesh.axis_of(placement).size > 1 for placement in cut)


def _align_with_rank_0(parameters: list[nn.Parameter], device: torch.device) -> None:
    """Broadcasts the parameters if any rank's differ from rank 0's."""
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
    """Two numbers that tell values apart: their sum, and their sum weighted by position."""
    flat = parameter.detach().reshape(-1).double()
    weights = torch.linspace(0.5, 1.5, flat.numel(), dtype=flat.dtype, device=flat.device)
    return torch.stack((flat.sum(), flat @ weights))


# -- whole slices --------------------------------------------------------------------------------------------------
# Slices that are whole again for a while, where parameters are spread over the data-parallel ranks.
#
# In:   a stage, and the tensors of its model one after the other.
# Out:  each of them as this rank held it before it was spread: a slice over tp or over experts, or all of it.
# Must hold: a few flats are gathered at a time, so memory stays small, and none is left whole, whatever happens. All
# ranks that share a flat ask for its tensors in the same order. What was written to a slice is kept by the ranks that
# own
# it.


MOST = 4
"""How many flats are whole at a time; more where a unit has more, since its tensors come in any order."""


class UnshardedParameters:
    """Lends gathered pieces to parameters, within its context.

    Args:
        stage: whose parameters may be spread; of others, nothing happens.
        written: whether tensors are written to meanwhile.
    """

    def __init__(self, stage: Stage, written: bool = False) -> None:
        self._flats = {
            parameter: flat for flat in stage.flat_parameters if flat.is_sharded for parameter in flat.placements
        }
        self._written = written
        self._max_unsharded = max([MOST, *(len(set(unit.flat_parameters.values())) for unit in stage.units.values())])
        self._unsharded: dict[FlatParameter, None] = {}  # the one that was used last comes last

    @property
    def is_needed(self) -> bool:
        """Whether any parameter is spread."""
        return bool(self._flats)

    def __enter__(self) -> UnshardedParameters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for flat in list(self._unsharded):
            self._return(flat)

    def unshard(self, tensor: Any) -> None:
        """Makes a tensor whole, until some others have been. Collective over the ranks that it is spread over.

        Raises:
            RuntimeError: somebody else has made it whole.
        """
        flat = self._flats.get(tensor)
        if flat is None:
            return
        if flat in self._unsharded:
            del self._unsharded[flat]
        else:
            if len(self._unsharded) == self._max_unsharded:
                self._return(next(iter(self._unsharded)))
            flat.check_resharded()
            flat.unshard(flat.gather())
        self._unsharded[flat] = None

    def _return(self, flat: FlatParameter) -> None:
        if self._written and flat.unsharded is not None:
            flat.load_full(flat.unsharded)
        flat.reshard()
        del self._unsharded[flat]
