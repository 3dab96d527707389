"""Units by hand: without operators, and run without a plan."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from hf_helix.operators.base import Call, Precision, explicit_gradients
from hf_helix.operators.unit import Placement, Unit
from hf_helix.planning.graph.operator import Graph, Part
from hf_helix.planning.graph.pair import GraphPair


def unit_of(placements: dict[nn.Parameter, Placement]) -> Unit:
    """Parameters without operators."""
    nothing = GraphPair.of(Graph("unit", (), (), ()))
    return Unit(label="unit", graphs=nothing, operators={}, placements=placements)


def run_unit(
    unit: Unit,
    inputs: Mapping[str, Tensor],
    side: Mapping[str, Any],
    gradients: Mapping[str, Tensor],
    precision: Precision | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Forward and backward of one micro-batch in the order of the graphs: what leaves the unit, and the gradients of
    what enters it. `gradients` are those of what leaves it.
    """
    shared: dict[object, Any] = {}
    calls: dict[str, Call] = {}
    values = {**inputs, **{f"d.{name}": gradient for name, gradient in gradients.items()}}
    with explicit_gradients():
        for op in (*unit.graphs.forward.operators, *unit.graphs.backward.operators):
            name = op.forward_name
            call = calls.setdefault(name, Call(side, 0, True, precision or Precision(), shared=shared))
            made = unit.operators[name].method_of(op.part)(call, *(values[value] for value in op.reads))
            if op.recomputed and op.part is Part.F:
                call.saved = None
            for value, out, added in zip_longest(op.writes, made, op.accumulates):
                values[value] = out if added is None else values[added] + out
    leaving, entering = unit.graphs.forward.outputs, unit.graphs.forward.inputs
    return {name: values[name] for name in leaving}, {name: values[f"d.{name}"] for name in entering}
