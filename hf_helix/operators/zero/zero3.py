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

from hf_helix.operators.base import Call, Communication, Method, TensorOperator, Tensors, TransferFn
from hf_helix.operators.unit import Unit
from hf_helix.operators.zero.flat_parameter import FlatParameter
from hf_helix.operators.zero.grouping import ShardAxes, make_flat_parameters
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Operator, Part

COST = 8.0  # of gathering a unit in the types of its parameters, by that of a norm: roughly, until it is measured
LEAST_COST = 0.1

UNITS_AHEAD = 2
"""How many units before its own a gather is issued: the next unit of each of two strands, or two of one. Each more
keeps the weights of another unit whole at the same time; docs/data_parallelism.md says what it gains."""


class GatherWeights(Communication):
    """The all-gather of a flat. Forward and recomputation are the same; there is no backward."""

    def __init__(self, flat: FlatParameter) -> None:
        self.flat = flat

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        whole, work = self.flat.prepare_gather()
        return (whole,), work


def apply_zero3(units: Sequence[Unit], shard_axes: ShardAxes, autocast_dtype: torch.dtype | None) -> list[Unit]:
    """Returns the units with their weights gathered; each parameter gets a place in a flat.

    Args:
        units: of the whole model, in forward order.
        shard_axes: see `ShardAxes`.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.
    """
    flats = make_flat_parameters(units, shard_axes, autocast_dtype, FlatParameter)
    last = len(units) - 1
    return [_gathering(unit, flats[place], keeps=place == last) for place, unit in enumerate(units)]


def _gathering(unit: Unit, flats: Sequence[FlatParameter], keeps: bool) -> Unit:
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
            kind=flat.gather_axis.kind,
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
        flat_parameters={name: flat for flat in flats for name in (flat.name, f"r.{flat.name}")},
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


def _bytes(flat: FlatParameter, dtype: torch.dtype | None) -> int:
    """The bytes of a flat before it is cut and spread, in a type; None for that of its parameters."""
    return sum(parameter.numel() * (dtype or parameter.dtype).itemsize for parameter in flat.placements)


def _read_in_backward(op: Operator) -> Iterator[str]:
    yield from (*op.dgrad_weights, *op.wgrad_weights, *(op.weights if op.recomputed else ()))


# -- with_unsharded -------------------------------------------------------------------------------------------------------
# Lending: an operator runs while the parameters it reads are views of what was gathered for its micro-batch.
#
# In:   a part of an operator, and the gathered pieces that it reads.
# Out:  what the operator returns.
# Must hold: nothing that an operator leaves for backward keeps a gathered piece alive: of what autograd saves of one,
# only the place is kept, which is looked up in the piece that is unsharded by then. Copies in the type of matrix products,
# and
# views of pieces that have this type, live as long as the piece.


Unsharded = Sequence[tuple[FlatParameter, Tensor]]
"""Flats, each with the piece that its parameters are views of meanwhile."""


class _Place(NamedTuple):
    """What autograd has saved of a gathered piece."""

    flat: FlatParameter
    size: Sequence[int]
    stride: Sequence[int]
    offset: Any


def with_unsharded(method: Method, unsharded: Unsharded) -> Method:
    """Returns a part of an operator that reads gathered weights, such that it runs with these."""
    return lambda call, *inputs: _run(method, call, inputs, unsharded)


def _run(method: Method, call: Call, inputs: Sequence[Tensor], unsharded: Unsharded) -> Tensors:
    for flat, whole in unsharded:
        flat.unshard(whole)
    with call.precision.weights.within(_copies_of(unsharded[0][1])):
        if not call.training:
            return method(call, *inputs)
        flats = {whole.untyped_storage()._cdata: flat for flat, whole in unsharded}

        def keep(value: Tensor) -> Tensor | _Place:
            flat = flats.get(value.untyped_storage()._cdata)
            return value if flat is None else _Place(flat, value.shape, value.stride(), value.storage_offset())

        with torch.autograd.graph.saved_tensors_hooks(keep, _find):
            return method(call, *inputs)


def casts_of(flats: Iterable[FlatParameter]) -> Callable[[Tensor], Tensor | None]:
    """Returns what finds a weight in the type of matrix products, where ranks gather it in this type.

    Args:
        flats: those that this rank's parameters are in.
    """
    casting: dict[Tensor, FlatParameter] = {
        p: flat for flat in flats if flat.cast_to is not None for p in flat.placements
    }

    def find(weight: Any) -> Tensor | None:
        flat = casting.get(weight)
        return None if flat is None else flat.cast(weight)

    return find


def _find(saved: Tensor | _Place) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    assert saved.flat.unsharded is not None, f"backward reads {saved.flat.name}, which is not unsharded"
    return saved.flat.unsharded.as_strided(saved.size, saved.stride, saved.offset)


def _copies_of(whole: Tensor) -> dict[tuple[object, ...], Any]:
    """What was made of a gathered piece; it goes with the piece."""
    copies: dict[tuple[object, ...], Any] = vars(whole).setdefault("copies", {})
    return copies
