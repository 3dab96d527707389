"""Cuts parameters into this rank's slices, and joins slices to full tensors.

In:   a model with full parameters on every rank, or on the meta device; later, the cut model.
Out:  parameters cut in place under their own names, empty for other pipeline ranks; full tensors, a few at a time.
Must hold: names and dtypes never change; all ranks start from rank 0's weights and buffers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import swap_tensors

from hf_helix.operators.parameters.parts import cut_tensor, paste, slices_of
from hf_helix.planning.parameters import VOCABULARY, Cut, Parameter, Part
from hf_helix.runtime.distributed.agreement import check_same_on_all_ranks
from hf_helix.runtime.distributed.groups import control_group, receive_on_host, send_on_host
from hf_helix.runtime.distributed.mesh import Mesh, world_size
from hf_helix.runtime.rank_units import RankUnits


def cut_parameters(rank_units: RankUnits, mesh: Mesh) -> None:
    """Keeps this rank's slice of every parameter, in place; others stay under their names, empty and not trained.
    Collective.

    Rank 0's values count, as with DDP: a rank with other weights (a model at random without a common seed) gets rank
    0's.
    """
    rows = rank_units.model_rows
    if world_size() > 1:
        # Ranks have slices of the vocabulary at different places among their units.
        ordered = sorted(rows, key=lambda parameter: rows[parameter].cut.mesh_axis != VOCABULARY)
        _align_with_rank_0([parameter.data for parameter in ordered], mesh.device)
    for parameter, row in rows.items():
        part = Part(row, mesh.place)
        if part.is_here:
            parameter.data = cut_tensor(parameter.data, row.cut, *part.ranks)
        else:
            parameter.data = parameter.data.new_empty(0)
            parameter.requires_grad_(False)


def align_buffers(model: nn.Module, device: torch.device) -> None:
    """Gives the buffers of all ranks rank 0's values, in place, as DDP does. Collective; `device` is the device of
    messages.

    Raises:
        ValueError: on every rank, if the ranks' buffers have other names, shapes or types.
    """
    buffers = dict(model.named_buffers())
    if world_size() == 1:
        return
    forms = [f"{name} {list(buffer.shape)} {buffer.dtype}" for name, buffer in buffers.items()]
    check_same_on_all_ranks("\n".join(forms), "buffers")
    if buffers:
        _align_with_rank_0([buffer.detach() for buffer in buffers.values()], device)


@torch.no_grad()
def materialize(model: Any, rank_units: RankUnits, mesh: Mesh) -> None:
    """Gives this rank's parameters and buffers memory on its device, in place of the meta device.

    Parameters are cut and uninitialised, and empty for other pipeline ranks; buffers have the model's values.
    Parameters that are sharded over data-parallel ranks are sharded from the start.

    Parameters and buffers off the meta device stay unchanged.

    Raises:
        ValueError: a buffer that neither a checkpoint nor the model provides.
    """
    for name, module in model.named_modules():
        _materialize_buffers(model, name, module, mesh.device)
    for parameter, row in rank_units.model_rows.items():
        if not parameter.is_meta:
            continue
        part = Part(row, mesh.place)
        shape = part.shape if part.is_here else (0,)
        held = (1,) * len(shape) if part.is_here and row.flat is not None else shape
        value = torch.empty(held, dtype=parameter.dtype, device=mesh.device).expand(shape)
        # torch refuses `parameter.data = value` across devices.
        swap_tensors(parameter, nn.Parameter(value, requires_grad=part.is_here and parameter.requires_grad))
    for flat in rank_units.flat_parameters:
        if not flat.is_sharded:
            flat.shard_in_place(mesh.device)


def _materialize_buffers(model: Any, name: str, module: nn.Module, device: torch.device) -> None:
    """Makes the buffers of a module as `from_pretrained` does: `_init_weights` fills buffers such as rope's."""
    absent = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    if not absent:
        return
    made = {key: torch.empty_like(buffer, device=device) for key, buffer in absent.items()}
    module._buffers.update(made)
    versions = {key: buffer._version for key, buffer in made.items()}
    model._init_weights(module)  # its parameters still are on the meta device, so nothing is drawn
    for key, buffer in made.items():
        if key in module._non_persistent_buffers_set and buffer._version == versions[key]:
            raise ValueError(
                f"{name}.{key} is in no checkpoint, and {type(model).__name__} does not make it in _init_weights, so "
                "the model cannot start on the meta device; make it with from_pretrained(folder)"
            )


def full_parameter(value: Tensor | None, row: Parameter, mesh: Mesh) -> Tensor | None:
    """Joins the slices of a parameter on the host of the first rank of a replica; None on the others. Collective.

    The tensor travels through the hosts' memory: between devices, every pair of ranks would need an NCCL communicator,
    which takes half a gigabyte of the device and is never freed.
    """
    pipe, cut, owner = mesh.pipe, row.cut, row.owner
    full = join_slices(value.detach(), cut, mesh) if pipe.rank == owner and value is not None else None
    if owner == 0 or mesh.axis_of(cut).rank > 0:
        return full if pipe.rank == 0 else None
    if pipe.rank == owner:
        assert full is not None
        dist.send_object_list([tuple(full.shape), full.dtype], pipe.ranks[0], group=control_group())
        send_on_host(full, pipe.ranks[0])
    if pipe.rank > 0:
        return None
    about: list[Any] = [None, None]
    dist.recv_object_list(about, pipe.ranks[owner], group=control_group())
    shape, dtype = about
    arrived = torch.empty(shape, dtype=dtype)
    receive_on_host(arrived, pipe.ranks[owner])
    return arrived


def join_slices(value: Tensor, cut: Cut, mesh: Mesh) -> Tensor | None:
    """Joins the slices of a tensor on the host of the first rank of the axis; None on the others. Collective. The full
    tensor is allocated once, and a slice if slices are not contiguous in the full tensor."""
    axis = mesh.axis_of(cut)
    if axis.group is None or cut.dim is None:
        return value.cpu() if axis.rank == 0 else None
    ranks = dist.get_process_group_ranks(axis.group)
    if axis.rank > 0:
        send_on_host(value, ranks[0])
        return None
    full = torch.empty(cut.full_shape(value.shape), dtype=value.dtype)
    paste(full, value.cpu(), cut, axis.size, 0)
    for number, source in enumerate(ranks[1:], 1):
        targets = slices_of(full, cut, axis.size, number)
        if len(targets) == 1 and targets[0].is_contiguous():
            receive_on_host(targets[0], source)
            continue
        arrived = full.new_empty(cut.shape(full.shape, axis.size, number))
        receive_on_host(arrived, source)
        paste(full, arrived, cut, axis.size, number)
    return full


def is_cut(rank_units: RankUnits, mesh: Mesh) -> bool:
    """Returns whether a rank holds only a part of the model. Equal on every rank."""
    return bool(rank_units.flat_parameters) or has_slices(rank_units, mesh)


def has_slices(rank_units: RankUnits, mesh: Mesh) -> bool:
    """Returns whether a rank holds only a part of the model after unsharding. Equal on every rank."""
    return mesh.pipe.size > 1 or any(Part(row, mesh.place).is_cut for row in rank_units.model_rows.values())


def _align_with_rank_0(tensors: list[Tensor], device: torch.device) -> None:
    """Broadcasts the tensors if any rank's differ from rank 0's."""
    mine = torch.stack([_fingerprint(tensor).to(device) for tensor in tensors])
    theirs = mine.clone()
    dist.broadcast(theirs, src=0)
    differs = (mine != theirs).any().float()
    dist.all_reduce(differs)
    if differs.item():
        for tensor in filter(Tensor.numel, tensors):
            value = tensor.to(device).contiguous()
            dist.broadcast(value.view(-1).view(torch.uint8), src=0)  # of any type
            if value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value)


def _fingerprint(tensor: Tensor) -> Tensor:
    """Returns two numbers that identify values: their sum, and their sum weighted by position."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1).double()
    weights = torch.linspace(0.5, 1.5, flat.numel(), dtype=flat.dtype, device=flat.device)
    return torch.stack((flat.sum(), flat @ weights))
