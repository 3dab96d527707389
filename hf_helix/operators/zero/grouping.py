"""Which parameters lie in one flat.

In:   the units of a whole model, which ranks hold copies of what, and the type of matrix products under autocast.
Out:  flats, not spread yet, for each unit.
Must hold: parameters of a flat are read by the same units, have one type, the same ranks with copies and readers of one
kind, and are all trained, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TypeVar

import torch
from torch import Tensor, nn

from hf_helix.operators.communication.transport import ReplicaAxes
from hf_helix.operators.param_shard import EXPERTS, Placement
from hf_helix.operators.unit import Unit
from hf_helix.operators.zero.flat_parameter import FlatParameter

ShardAxes = Callable[[Placement], ReplicaAxes | None]
"""Returns the ranks that a parameter which is placed like this is spread over; None where every rank keeps it."""

AnyFlatParameter = TypeVar("AnyFlatParameter", bound=FlatParameter)


def make_flat_parameters(
    units: Sequence[Unit],
    shard_axes: ShardAxes,
    autocast_dtype: torch.dtype | None,
    kind: type[AnyFlatParameter],
    frozen: bool = True,
) -> list[list[AnyFlatParameter]]:
    """Returns the flats of every unit. A parameter that several units read is in a flat of its own kind, which each of
    these units has.

    Args:
        units: of the whole model, in forward order.
        shard_axes: see `ShardAxes`.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.
        kind: the class of the flats.
        frozen: whether parameters that are not trained are in flats, too.
    """
    users: dict[nn.Parameter, list[int]] = {}
    placements: dict[nn.Parameter, Placement] = {}
    for place, unit in enumerate(units):
        for parameter, placement in unit.placements.items():
            users.setdefault(parameter, []).append(place)
            placements[parameter] = placement
    cast = set(_read_by_products_alone(units)) if autocast_dtype is not None else set()
    members: dict[tuple[tuple[int, ...], str, bool], list[nn.Parameter]] = {}
    for parameter, places in users.items():
        if shard_axes(placements[parameter]) is not None and (frozen or parameter.requires_grad):
            is_cast = parameter in cast and parameter.dtype is not autocast_dtype
            name = _name_of(parameter, placements[parameter], len(places) > 1, is_cast)
            members.setdefault((tuple(places), name, is_cast), []).append(parameter)
    found: list[list[AnyFlatParameter]] = [[] for _ in units]
    for (using, name, is_cast), alike in members.items():
        over = shard_axes(placements[alike[0]])
        assert over is not None
        # Matrices first, so that those that are multiplied at once lie side by side.
        ordered = sorted(alike, key=lambda parameter: -parameter.dim())
        held = {parameter: placements[parameter] for parameter in ordered}
        taken = {flat.name for place in using for flat in found[place]}
        if name in taken:  # by what these units share with others
            name = next(other for number in count(2) if (other := f"{name}.{number}") not in taken)
        flat = kind(name, held, over.gather, over.reduce, autocast_dtype if is_cast else None)
        for place in using:
            found[place].append(flat)
    return found


def _name_of(parameter: nn.Parameter, placement: Placement, shared: bool, is_cast: bool) -> str:
    """Returns the name of the flat that a parameter is in, and of the value that holds it once it is gathered.

    Args:
        parameter: itself.
        placement: how it is cut.
        shared: whether several units read it.
        is_cast: whether operators read it in the type of matrix products.
    """
    traits = {
        "shared": shared,
        "experts": placement.over == EXPERTS,
        "frozen": not parameter.requires_grad,
        "bf16": parameter.dtype is torch.bfloat16,
        "products": is_cast,
    }
    return ".".join(["weights", *(trait for trait, holds in traits.items() if holds)])


def _read_by_products_alone(units: Sequence[Unit]) -> Iterator[Tensor]:
    operators = [operator for unit in units for operator in unit.operators.values()]
    cast = {parameter for operator in operators for parameter in operator.cast_parameters}
    others = {p for operator in operators for p in operator.parameters if p not in set(operator.cast_parameters)}
    return (parameter for parameter in cast if parameter not in others)
