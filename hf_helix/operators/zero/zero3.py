"""Spreading of units: their weights are gathered by operators, ahead of those that read them.

In:   the units of a whole model, and which ranks hold copies of what.
Out:  units whose graphs have an all-gather for each of their flats (forward and, but for the last unit, again in
      backward), and operators that read what it brings.
Must hold: what a unit computes stays the same. Units that had equal graphs have equal graphs where they train the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_helix.operators.base import Call, Communication, Method, TensorOperator, Tensors, Work
from hf_helix.operators.unit import Unit
from hf_helix.operators.zero.flat_parameter import Flat
from hf_helix.operators.zero.grouping import SpreadOver, make_flats
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Operator, Part

COST = 8.0  # of gathering a unit in the types of its parameters, by that of a norm: roughly, until it is measured
LEAST_COST = 0.1

UNITS_AHEAD = 2
"""How many units before its own a gather is issued: the next unit of each of two strands, or two of one. Each more
keeps the weights of another unit whole at the same time; docs/data_parallelism.md says what it gains."""


class GatherWeights(Communication):
    """The all-gather of a flat. Forward and recomputation are the same; there is no backward."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, Work]:
        whole, work = self.flat.prepare_gather()
        return (whole,), work


def spread_units(units: Sequence[Unit], spread_over: SpreadOver, autocast_dtype: torch.dtype | None) -> list[Unit]:
    """Returns the units with their weights gathered; each parameter gets a place in a flat.

    Args:
        units: of the whole model, in forward order.
        spread_over: see `SpreadOver`.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.
    """
    flats = make_flats(units, spread_over, autocast_dtype, Flat)
    last = len(units) - 1
    return [_gathering(unit, flats[place], keeps=place == last) for place, unit in enumerate(units)]


def _gathering(unit: Unit, flats: Sequence[Flat], keeps: bool) -> Unit:
    """The unit with operators that gather its flats.

    Args:
        keeps: whether backward reads what forward has gathered, since it follows at once.
    """
    by_parameter: dict[Tensor, str] = {parameter: flat.name for flat in flats for parameter in flat.placements}
    read = [_reading(op, unit.operators[op.forward_name], by_parameter) for op in unit.graphs.forward.operators]
    again = {value for op in read for value in _read_in_backward(op)}
    whole = sum(_bytes(flat, None) for flat in flats)
    gathers = [
        Operator(
            name=flat.name,
            kind=flat.axis.kind,
            reads=(),
            writes=(flat.name,),
            non_differentiable=(flat.name,),
            recomputed=flat.name in again and not keeps,
            ahead=UNITS_AHEAD,
            relative_cost=max(LEAST_COST, round(COST * _bytes(flat, flat.cast_to) / whole, 1)),
        )
        for flat in flats
        if any(flat.name in op.weights for op in read)
    ]
    if not gathers:
        return unit
    forward: Graph = replace(unit.graphs.forward, operators=(*gathers, *read))
    tensor_operators: Mapping[str, TensorOperator] = {flat.name: GatherWeights(flat) for flat in flats}
    return replace(
        unit,
        graphs=GraphPair.of(forward),
        operators={**tensor_operators, **unit.operators},
        flats={name: flat for flat in flats for name in (flat.name, f"r.{flat.name}")},
    )


def _reading(op: Operator, operator: TensorOperator, by_parameter: Mapping[Tensor, str]) -> Operator:
    """An operator of a forward graph that reads gathered weights."""

    def values(*parts: Part) -> tuple[str, ...]:
        read = (parameter for part in parts for parameter in operator.weights_read_by(part))
        return tuple(dict.fromkeys(name for name in (by_parameter.get(each) for each in read) if name))

    if not operator.parameters:
        return op
    in_parts = op.splits_dgrad_wgrad and op.wgrad_fraction > 0
    return replace(
        op,
        weights=values(Part.F),
        dgrad_weights=values(Part.I if in_parts else Part.B),
        wgrad_weights=values(Part.W) if in_parts else (),
    )


def _bytes(flat: Flat, dtype: torch.dtype | None) -> int:
    """The bytes of a flat before it is cut and spread, in a type; None for that of its parameters."""
    return sum(parameter.numel() * (dtype or parameter.dtype).itemsize for parameter in flat.placements)


def _read_in_backward(op: Operator) -> Iterator[str]:
    yield from (*op.dgrad_weights, *op.wgrad_weights, *(op.weights if op.recomputed else ()))


# -- lending -------------------------------------------------------------------------------------------------------
# Lending: an operator runs while the parameters it reads are views of what was gathered for its micro-batch.
#
# In:   a part of an operator, and the gathered pieces that it reads.
# Out:  what the operator returns.
# Must hold: nothing that an operator leaves for backward keeps a gathered piece alive: of what autograd saves of one,
# only the place is kept, which is looked up in the piece that is lent by then. Copies in the type of matrix products,
# and
# views of pieces that have this type, live as long as the piece.


Lent = Sequence[tuple[Flat, Tensor]]
"""Flats, each with the piece that its parameters are views of meanwhile."""


class _Place(NamedTuple):
    """What autograd has saved of a gathered piece."""

    flat: Flat
    size: Sequence[int]
    stride: Sequence[int]
    offset: Any


def lending(method: Method, lent: Lent) -> Method:
    """Returns a part of an operator that reads gathered weights, such that it runs with these."""
    return lambda call, *inputs: _run(method, call, inputs, lent)


def _run(method: Method, call: Call, inputs: Sequence[Tensor], lent: Lent) -> Tensors:
    for flat, whole in lent:
        flat.lend(whole)
    with call.precision.weights.within(_copies_of(lent[0][1])):
        if not call.training:
            return method(call, *inputs)
        flats = {whole.untyped_storage()._cdata: flat for flat, whole in lent}

        def keep(value: Tensor) -> Tensor | _Place:
            flat = flats.get(value.untyped_storage()._cdata)
            return value if flat is None else _Place(flat, value.shape, value.stride(), value.storage_offset())

        with torch.autograd.graph.saved_tensors_hooks(keep, _find):
            return method(call, *inputs)


def casts_of(flats: Iterable[Flat]) -> Callable[[Tensor], Tensor | None]:
    """Returns what finds a weight in the type of matrix products, where ranks gather it in this type.

    Args:
        flats: those that this rank's parameters are in.
    """
    casting: dict[Tensor, Flat] = {p: flat for flat in flats if flat.cast_to is not None for p in flat.placements}

    def find(weight: Any) -> Tensor | None:
        flat = casting.get(weight)
        return None if flat is None else flat.cast(weight)

    return find


def _find(saved: Tensor | _Place) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    assert saved.flat.lent is not None, f"backward reads {saved.flat.name}, which is not lent"
    return saved.flat.lent.as_strided(saved.size, saved.stride, saved.offset)


def _copies_of(whole: Tensor) -> dict[tuple[object, ...], Any]:
    """What was made of a gathered piece; it goes with the piece."""
    copies: dict[tuple[object, ...], Any] = vars(whole).setdefault("copies", {})
    return copies
