"""Units by hand: without operators, and run without a plan."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from hf_helix.operators.base import OperatorContext, Precision, explicit_gradients
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Part
from hf_helix.planning.parameters import Cut


def unit_of(placements: dict[nn.Parameter, Cut]) -> Unit:
    """Parameters without operators."""
    nothing = GraphPair.of(Graph("unit", (), (), ()))
    return Unit(label="unit", graphs=nothing, operators={}, placements=placements)


class Running:
    """One micro-batch in one unit, in the order of the graphs."""

    def __init__(self, unit: Unit, side: Mapping[str, Any], precision: Precision | None = None) -> None:
        self.unit = unit
        self._side = side
        self._precision = precision or Precision()
        self._shared: dict[object, Any] = {}
        self._contexts: dict[str, OperatorContext] = {}
        self._values: dict[str, Tensor] = {}

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What leaves the unit."""
        graph = self.unit.graphs.forward
        self._values = dict(inputs)
        self._run(graph)
        return {name: self._values[name] for name in graph.outputs}

    def backward(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of what enters the unit, from those of what leaves it."""
        self._values |= {f"d.{name}": gradient for name, gradient in gradients.items()}
        self._run(self.unit.graphs.backward)
        return {name: self._values[f"d.{name}"] for name in self.unit.graphs.forward.inputs}

    def _run(self, graph: Graph) -> None:
        values = self._values
        with explicit_gradients():
            for op in graph.operators:
                name = op.forward_name
                ctx = self._contexts.setdefault(
                    name, OperatorContext(self._side, 0, True, self._precision, shared=self._shared)
                )
                made = self.unit.operators[name].method_of(op.part)(ctx, *(values[value] for value in op.reads))
                if op.recomputed and op.part is Part.F:
                    ctx.saved = None
                for value, out, added in zip_longest(op.writes, made, op.accumulates):
                    values[value] = out if added is None else values[added] + out


def run_unit(
    unit: Unit,
    inputs: Mapping[str, Tensor],
    side: Mapping[str, Any],
    gradients: Mapping[str, Tensor],
    precision: Precision | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Forward and backward of one micro-batch: what leaves the unit, and the gradients of what enters it. `gradients`
    are those of what leaves it.
    """
    running = Running(unit, side, precision)
    outputs = running.forward(inputs)
    return outputs, running.backward(gradients)


def run_units(
    units: Sequence[Unit], inputs: Sequence[Tensor], side: Mapping[str, Any], gradients: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Forward of units one after the other, then backward: what leaves the last, and the gradients of what enters."""
    running = [Running(unit, side) for unit in units]
    values = list(inputs)
    for each in running:
        values = [*each.forward(dict(zip(each.unit.graphs.forward.inputs, values, strict=True))).values()]
    back = list(gradients)
    for each in reversed(running):
        back = [*each.backward(dict(zip(each.unit.graphs.forward.outputs, back, strict=True))).values()]
    return values, back


class StandInGroup:
    """A process group of `size` ranks, of which this is the first, without processes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0
