"""ZeRO-3: every rank keeps a shard of the weights; operators gather full weights for their readers
(`shard_parameters`).

In:   the units of a whole model, and the replicas of each parameter.
Out:  units whose graphs have an all-gather for each flat parameter (in forward and, except in the last unit, again in
      backward), and whose operators read the gathered buffers.
Must hold: a unit computes the same. Units with equal graphs and equal trained parameters still have equal graphs. An
operator runs while its parameters are views of the buffers of its micro-batch. Saved tensors keep no gathered buffer
alive: of a saved view of a buffer, autograd keeps only shape, strides and offset, and reads the values from the buffer
of backward. Casts of weights to the type of matrix products live as long as the buffer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_helix.operators.base import Communication, Method, OperatorContext, TensorOperator, Tensors, TransferFn
from hf_helix.operators.communication.transport import ReplicaAxes
from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.parameters.host_shard import HostLink
from hf_helix.operators.units.unit import Unit
from hf_helix.operators.zero.grouping import ShardAxes, make_flat_parameters
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part
from hf_helix.planning.parameters import Cut

COST = 8.0  # of gathering a unit in the types of its parameters, in norms: a rough value until measured
LEAST_COST = 0.1

UNITS_AHEAD = 2
"""How many units before its own a gather is issued: the next unit of each of two strands, or two units of one. A larger
number keeps the full weights of more units at the same time; docs/data_parallelism.md gives the gain."""


class GatherWeights(Communication):
    """The all-gather of a flat parameter. Forward and recomputation are the same; backward does nothing."""

    def __init__(self, flat: FlatParameter) -> None:
        self.flat = flat

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        buffer, gather = self.flat.prepare_gather(*inputs)
        return (buffer,), gather


class CopyWeights(Communication):
    """The copy of a rank's shard from its host: of a single rank, all that a gather does."""

    def __init__(self, flat: FlatParameter) -> None:
        self.flat = flat

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        host = self.flat.host
        assert host is not None
        copy = torch.empty(host.crossing.shape, dtype=host.crossing.dtype, device=self.flat.device)
        return (copy,), lambda: host.up(copy)


def apply_zero3(
    units: Sequence[Unit],
    shard_axes: ShardAxes,
    autocast_dtype: torch.dtype | None,
    host_link: HostLink | None = None,
) -> list[Unit]:
    """Returns the units with operators to gather their weights; every parameter with several replicas is in a flat
    parameter.

    Args:
        units: of the whole model, in forward order.
        shard_axes: see `ShardAxes`.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.
        host_link: see `make_flat_parameters`. Where every use copies weights from the host, every parameter is in a
            flat parameter.
    """
    streamed = host_link is not None and host_link.streams_weights

    def axes(placement: Cut) -> ReplicaAxes | None:
        found = shard_axes(placement)
        return found if found is not None and (streamed or found.gather.size > 1) else None

    by_unit = make_flat_parameters(units, axes, autocast_dtype, FlatParameter, host_link)
    last = len(units) - 1
    return [_gathering(unit, by_unit[index], keeps=index == last) for index, unit in enumerate(units)]


def _gathering(unit: Unit, flats: Sequence[FlatParameter], keeps: bool) -> Unit:
    """Returns the unit with operators to gather its flat parameters. With `keeps`, backward reads the buffers of
    forward."""
    by_parameter: dict[Tensor, str] = {parameter: flat.name for flat in flats for parameter in flat.placements}
    read = [_reading(op, unit.operators[op.forward_name], by_parameter) for op in unit.graphs.forward.operators]
    again = {
        value for op in read for value in (*op.dgrad_weights, *op.wgrad_weights, *(op.weights if op.recomputed else ()))
    }
    total = sum(_bytes(flat, None) for flat in flats)
    operators: dict[Operator, TensorOperator] = {}
    for flat in (each for each in flats if any(each.name in op.weights for op in read)):
        gather = Operator(
            name=flat.name,
            kind=flat.gather_axis.kind,
            reads=(),
            writes=(flat.name,),
            non_differentiable=(flat.name,),
            recomputed=flat.name in again and not keeps,
            ahead=UNITS_AHEAD,
            relative_cost=max(LEAST_COST, round(COST * _bytes(flat, flat.cast_to) / total, 1)),
        )
        operators |= _bringing(flat, gather)
    if not operators:
        return unit
    forward: Graph = replace(unit.graphs.forward, operators=(*operators, *read))
    return replace(
        unit,
        graphs=GraphPair.of(forward),
        operators={**{op.name: operator for op, operator in operators.items()}, **unit.operators},
        flat_parameters={name: flat for flat in flats for name in (flat.name, f"r.{flat.name}")},
    )


def _bringing(flat: FlatParameter, gather: Operator) -> dict[Operator, TensorOperator]:
    """Returns the operators of a graph that bring weights from other ranks, from the host, or from both."""
    if flat.host_link is None or not flat.host_link.streams_weights:
        return {gather: GatherWeights(flat)}
    if flat.gather_axis.size == 1:
        return {replace(gather, kind=Kind.UP): CopyWeights(flat)}
    name, own = f"{flat.name}.up", (f"{flat.name}.up",)
    copy = replace(gather, name=name, forward_name=name, kind=Kind.UP, writes=own, non_differentiable=own)
    # A unit earlier than the gather: other collectives would queue after a gather that waits.
    return {replace(copy, ahead=gather.ahead + 1): CopyWeights(flat), replace(gather, reads=own): GatherWeights(flat)}


def _reading(op: Operator, operator: TensorOperator, by_parameter: Mapping[Tensor, str]) -> Operator:
    """Returns an operator of a forward graph with the names of its gathered weights."""

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
    """The bytes of a flat parameter before sharding, in a type; None for the type of its parameters."""
    return sum(parameter.numel() * (dtype or parameter.dtype).itemsize for parameter in flat.placements)


# -- operators on unsharded parameters --------------------------------------------------------------------------------

Unsharded = Sequence[tuple[FlatParameter, Tensor]]
"""Flat parameters, each with the buffer that its parameters are views of."""


class _SavedView(NamedTuple):
    """A view of a gathered buffer, saved by autograd without its values."""

    flat: FlatParameter
    size: Sequence[int]
    stride: Sequence[int]
    offset: Any


def with_unsharded(method: Method, unsharded: Unsharded) -> Method:
    """Returns a part of an operator, changed to unshard flat parameters before it runs."""
    return lambda ctx, *inputs: _run(method, ctx, inputs, unsharded)


def _run(method: Method, ctx: OperatorContext, inputs: Sequence[Tensor], unsharded: Unsharded) -> Tensors:
    for flat, buffer in unsharded:
        flat.unshard(buffer)
    casts = vars(unsharded[0][1]).setdefault("copies", {})  # freed with the buffer
    with ctx.precision.weights.within(casts):
        if not ctx.saves_for_backward:
            return method(ctx, *inputs)
        flats = {buffer.untyped_storage()._cdata: flat for flat, buffer in unsharded}

        def pack(value: Tensor) -> Tensor | _SavedView:
            flat = flats.get(value.untyped_storage()._cdata)
            return value if flat is None else _SavedView(flat, value.shape, value.stride(), value.storage_offset())

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return method(ctx, *inputs)


def casts_of(flats: Iterable[FlatParameter]) -> Callable[[Tensor], Tensor | None]:
    """Returns a function from a weight to its cast in the gathered buffer; None for a weight without a cast."""
    casting: dict[Tensor, FlatParameter] = {
        p: flat for flat in flats if flat.cast_to is not None for p in flat.placements
    }

    def find(weight: Any) -> Tensor | None:
        flat = casting.get(weight)
        return None if flat is None else flat.cast(weight)

    return find


def _unpack(saved: Tensor | _SavedView) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    assert saved.flat.unsharded is not None, f"backward reads {saved.flat.name}, which is not unsharded"
    return saved.flat.unsharded.as_strided(saved.size, saved.stride, saved.offset)
