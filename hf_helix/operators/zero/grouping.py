"""The parameters of each flat parameter.

In:   the units of a whole model, the replicas of each parameter, and the type of matrix products under autocast.
Out:  flat parameters, not sharded yet, for each unit.
Must hold: the parameters of a flat parameter have the same reading units, type, replicas and kind of reader (products,
or others), and are all trained, or none.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TypeVar

import torch
from torch import Tensor, nn

from hf_helix.operators.communication.transport import ReplicaAxes
from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.parameters.host_shard import HostLink
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.parameters import EXPERTS, Cut

ShardAxes = Callable[[Cut], ReplicaAxes | None]
"""From the placement of a parameter to the axes over its replicas, which shard it; None if replicated."""

AnyFlatParameter = TypeVar("AnyFlatParameter", bound=FlatParameter)


def make_flat_parameters(
    units: Sequence[Unit],
    shard_axes: ShardAxes,
    autocast_dtype: torch.dtype | None,
    kind: type[AnyFlatParameter],
    host_link: HostLink | None = None,
    frozen: bool = True,
) -> list[list[AnyFlatParameter]]:
    """Returns the flat parameters of every unit. Parameters with several reading units have a flat parameter of their
    own, shared by these units. Parameters above the decoder, those that no code reads, and those in a flat parameter
    already, get none.

    Args:
        units: of the whole model, in forward order.
        shard_axes: see `ShardAxes`.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.
        kind: the class of the flat parameters.
        host_link: the link to shards of trained parameters on the host, and of frozen ones if devices keep no copies;
            None if these lie on the device.
        frozen: whether flat parameters also hold frozen parameters.
    """
    users: dict[nn.Parameter, list[int]] = {}
    placements: dict[nn.Parameter, Cut] = {}
    for index, unit in enumerate(units):
        for parameter, placement in unit.placements.items():
            users.setdefault(parameter, []).append(index)
            placements[parameter] = placement
    known = {parameter for unit in units for flat in unit.flat_parameters.values() for parameter in flat.placements}
    unread = {parameter for unit in units for parameter in unit.unread}
    for parameter in {*units[-1].above, *unread, *known}:
        del users[parameter]
    cast = set(_read_only_by_products(units)) if autocast_dtype is not None else set()
    members: dict[tuple[tuple[int, ...], str, bool], list[nn.Parameter]] = {}
    for parameter, indices in users.items():
        if shard_axes(placements[parameter]) is not None and (frozen or parameter.requires_grad):
            is_cast = parameter in cast and parameter.dtype is not autocast_dtype
            name = _name_of(parameter, placements[parameter], len(indices) > 1, is_cast)
            members.setdefault((tuple(indices), name, is_cast), []).append(parameter)
    by_unit: list[list[AnyFlatParameter]] = [[] for _ in units]
    for (users_of_group, name, is_cast), group in members.items():
        axes = shard_axes(placements[group[0]])
        assert axes is not None
        # Matrices first: matrices of one product then lie side by side.
        ordered = sorted(group, key=lambda parameter: -parameter.dim())
        held = {parameter: placements[parameter] for parameter in ordered}
        taken = {flat.name for index in users_of_group for flat in by_unit[index]}
        if name in taken:  # by a flat parameter that these units share with others
            name = next(other for number in count(2) if (other := f"{name}.{number}") not in taken)
        is_on_host = host_link is not None and (group[0].requires_grad or host_link.streams_weights)
        host = host_link if is_on_host else None
        flat = kind(name, held, axes.gather, axes.reduce, autocast_dtype if is_cast else None, axes.copies, host)
        for index in users_of_group:
            by_unit[index].append(flat)
    return by_unit


def _name_of(parameter: nn.Parameter, placement: Cut, shared: bool, is_cast: bool) -> str:
    """Returns the name of a parameter's flat parameter, also the name of the gathered value."""
    traits = {
        "shared": shared,
        "experts": placement.mesh_axis == EXPERTS,
        "frozen": not parameter.requires_grad,
        "bf16": parameter.dtype is torch.bfloat16,
        "packed": parameter.dtype is torch.uint8,
        "products": is_cast,
    }
    return ".".join(["weights", *(trait for trait, holds in traits.items() if holds)])


def _read_only_by_products(units: Sequence[Unit]) -> Iterator[Tensor]:
    operators = [operator for unit in units for operator in unit.operators.values()]
    cast = {parameter for operator in operators for parameter in operator.cast_parameters}
    others = {p for operator in operators for p in operator.parameters if p not in set(operator.cast_parameters)}
    return (parameter for parameter in cast if parameter not in others)
