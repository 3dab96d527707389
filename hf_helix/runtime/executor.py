"""The executor: runs one block by a plan's order.

In:   the steps of a block, compiled from an order, and the unit runs of the two strands.
Out:  their values and gradients.
Must hold: one executor for every plan. It issues in the plan's order, waits only where a value is read, frees a value
after its last reader, and never synchronises with the device.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_helix.planning.graph import Graph, Operator, Part
from hf_helix.planning.plan import GraphPair, Order, entries
from hf_helix.runtime.strand import UnitRun
from hf_helix.runtime.streams import Streams


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of an order, with what the executor needs to know in advance. A barrier has no operator."""

    is_forward: bool
    operator: Operator | None
    frees: tuple[str, ...]


def compile_order(
    order: Order, forward: GraphPair | None, backward: GraphPair | None, keep: Collection[str]
) -> list[Step]:
    """The steps of an order: which values each operator is the last to read, except for outputs and `keep`."""
    graphs = {"F": forward.forward if forward else None, "B": backward.backward if backward else None}
    operators = entries(graphs["F"], graphs["B"])
    frees: dict[str, list[str]] = {entry: [] for entry in order}
    for letter, graph in graphs.items():
        if graph is not None:
            for value, entry in _last_uses(order, letter, graph, operators).items():
                if value not in graph.outputs and value not in keep:
                    frees[entry].append(value)
    return [Step(entry[0] == "F", operators.get(entry), tuple(frees[entry])) for entry in order]


def _last_uses(order: Order, letter: str, graph: Graph, operators: dict[str, Operator]) -> dict[str, str]:
    last: dict[str, str] = {}
    for entry in order:
        if entry in operators and entry[0] == letter:
            for value in (*operators[entry].writes, *operators[entry].depends_on):
                last[value] = entry
    return last


class Executor:
    """Runs blocks on a rank's streams."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def run(self, steps: list[Step], forward: UnitRun | None, backward: UnitRun | None) -> None:
        """Issue every step of a block. `forward` runs its unit's F graph, `backward` its unit's B graph."""
        for step in steps:
            if step.operator is None:
                self._barrier(forward, backward)
                continue
            run = forward if step.is_forward else backward
            assert run is not None
            if step.operator.kind.communicates:
                self._communicate(step.operator, run)
            else:
                self._compute(step.operator, run)
            for name in step.frees:
                del run.values[name]
                run.events.pop(name, None)

    def drain(self, run: UnitRun) -> None:
        """Let the compute stream wait for all communication of a unit run."""
        for event in run.events.values():
            self._wait(event)
        run.events.clear()

    def _barrier(self, *runs: UnitRun | None) -> None:
        for run in runs:
            if run is not None:
                self.drain(run)

    def _compute(self, op: Operator, run: UnitRun) -> None:
        values = run.values
        if run.events:
            for name in op.depends_on:
                event = run.events.pop(name, None)
                if event is not None:
                    self._wait(event)
        inputs = [values[name] for name in op.reads]
        trace = self.streams.trace
        if trace is None:
            outputs = _apply(op, run, inputs)
        else:
            label = self._label(op, run)
            trace.note("run", label)
            outputs = self.streams.compute(lambda: _apply(op, run, inputs), label)
        for place, partial in enumerate(op.adds):
            value = outputs[place]
            values[op.writes[place]] = value if partial is None else values[partial] + value
        if not op.adds:
            values.update(zip(op.writes, outputs, strict=True))

    def _communicate(self, op: Operator, run: UnitRun) -> None:
        (name,), (result,) = op.reads, op.writes
        # What fills the input stays listed: a computation that reads it, too, waits for itself.
        earlier = run.events.get(name)
        trace = self.streams.trace
        label = op.name if trace is None else self._label(op, run)
        if trace is not None:
            trace.note("issue", label)
        output, work = run.unit.operators[op.of].prepare(op.part, run.values[name])  # type: ignore[union-attr]
        run.values[result] = output
        run.events[result] = self.streams.issue(op.kind, work, () if earlier is None else (earlier,), label)

    def _wait(self, event: Any) -> None:
        if self.streams.trace is not None:
            self.streams.trace.note("wait", event.label)
        self.streams.wait(event)

    def _label(self, op: Operator, run: UnitRun) -> str:
        letter = "F" if op.part is Part.F else "B"
        return f"{letter}{run.microbatch.key[1]}.{run.unit.label}.{op.name}"


def _apply(op: Operator, run: UnitRun, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Run a computation. A split or whole operator only gets the parts that its graph declares."""
    operator: Any = run.unit.operators[op.of]
    call = run.call(op.of)
    if op.part is Part.F:
        return operator.forward(call, *inputs)
    if op.part is Part.B:
        return operator.backward(call, *inputs)
    if op.part is Part.I:
        return operator.input_gradient(call, *inputs)
    operator.weight_gradient(call, *inputs)
    return ()
