"""Single operators and pairs of them, run again and again with the values that they have in a step.

In:   a runner and a micro-batch.
Out:  seconds of an operator that runs several times in a row; seconds of each of two operators that run beside each
      other.
Must hold: operators are timed through the executor's own issue code, on the rank's own streams; two that start together
do so on every rank that shares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_helix.measure.overlap import forget_gradients, transports
from hf_helix.measure.timing import ISSUING_SLOWEST, hold, meet, traced
from hf_helix.operators.base import Call, explicit_gradients
from hf_helix.operators.communication.transport import Recorder
from hf_helix.planning.graph.operator import Kind, Operator, Part
from hf_helix.planning.instructions import BARRIER_INSTRUCTION, Instruction, unit_instructions
from hf_helix.planning.layout import Key
from hf_helix.planning.profile import Name, named_operators
from hf_helix.runtime.bound_instruction import BoundInstruction
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.trace import Span


@dataclass(frozen=True)
class TimedOperator:
    """An operator that is timed.

    Attributes:
        name: its name in a profile.
        unit: the number of the first unit of this rank that has it.
        op: the operator.
    """

    name: Name
    unit: int
    op: Operator


class Bench:
    """Runs one or two operators again and again, with the values that they have in a step.

    Args:
        runner: whose operators and streams are used.
        batch: the micro-batch whose values are used.
        length: how often an operator runs in a row; the first run warms up.
    """

    def __init__(self, runner: Runner, batch: MicroBatch, length: int) -> None:
        self.length = length
        self.runner = runner
        self.batch = batch
        self.values = _capture(runner, batch)
        first = _first_units(runner)
        every = [
            TimedOperator(name, first[name[0]], op) for name, op in named_operators(runner.layout) if name[0] in first
        ]
        self.computing = [timed for timed in every if timed.op.kind is Kind.COMPUTE]
        self.moving = [timed for timed in every if timed.op.kind in (Kind.INTRA_NODE, Kind.INTER_NODE)]

    def repeats(self, timed: TimedOperator) -> bool:
        """Whether it belongs to a decoder layer."""
        return self.runner.layout.graphs[timed.name[0]].forward.repeats

    def alike(self) -> dict[Name, Name]:
        """Returns, for collectives that move tensors of the same shapes and types as an earlier one, its name."""
        first: dict[object, Name] = {}
        others = {}
        for timed in sorted(self.moving, key=lambda timed: not self.repeats(timed)):
            step = self._step(self._instruction(0, timed))
            inputs = [self.values[source] for source in step.reads]
            outputs, _ = step.prepare(self._call(timed), timed.op.part, *inputs)
            moves = (timed.op.kind, *((tuple(value.shape), value.dtype) for value in (*outputs, *inputs)))
            other = first.setdefault(moves, timed.name)
            if other != timed.name:
                others[timed.name] = other
        return others

    def time_repeats(self, timed: TimedOperator) -> list[float]:
        """Returns the seconds of an operator that runs `length` times in a row, without the first. Collective."""
        program: list[Instruction] = []
        for repeat in range(self.length):
            program += [*self._before(repeat, timed), BARRIER_INSTRUCTION, self._instruction(repeat, timed, ends=True)]
        label = self._label(timed)
        return [span.seconds for span in self._run(program) if span.label == label][1:]

    def bytes_sent(self, timed: TimedOperator) -> int:
        """Returns the bytes that this rank sends in an operator. Collective."""
        axes = self.runner.mesh.axes
        recorders = [Recorder(axis.transport) for axis in axes]
        with transports(axes, recorders):
            self._work(timed)()
        return sum(recorder.bytes_sent for recorder in recorders)

    def together(
        self, first: TimedOperator, second: TimedOperator, counts: tuple[int, int]
    ) -> list[tuple[float, float]]:
        """Returns the seconds of two operators that start together on every rank, for each repeat. Collective.

        Args:
            first: an operator.
            second: another, or the same.
            counts: how often each of them runs in a row.
        """
        if first.op.kind is second.op.kind:
            # Two that draw random numbers at once would leave each other's state behind.
            device = self.runner.mesh.device
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                return self._on_two_streams(first, second)
        # Each works on micro-batches of its own, or one that reads what the other makes would wait for it.
        trains = [
            (timed, place * self.length + repeat)
            for place, (timed, count) in enumerate(zip((first, second), counts, strict=True))
            for repeat in range(count)
        ]
        # Communication is issued first: a computation issued before it would hold it up.
        trains.sort(key=lambda each: each[0].op.kind is Kind.COMPUTE)
        program = [before for timed, repeat in trains for before in self._before(repeat, timed)]
        issued = [self._instruction(repeat, timed) for timed, repeat in trains]
        program += [BARRIER_INSTRUCTION, *issued, BARRIER_INSTRUCTION]
        labels = [self._label(first), self._label(second)]
        rows = []
        for _ in range(self.length):
            spans = self._run(program)
            ran = [[span.seconds for span in spans if span.label == label] for label in labels]
            rows.append((sum(ran[0][-counts[0] :]), sum(ran[1][-counts[1] :])))
        return rows[1:]

    def _on_two_streams(self, first: TimedOperator, second: TimedOperator) -> list[tuple[float, float]]:
        """Times two operators of one kind; the second runs on the stream of another kind."""
        streams = self.runner.executor.streams
        rows = []
        for _ in range(self.length):
            with explicit_gradients():
                works = [self._work(timed) for timed in (first, second)]
            meet(self.runner)
            hold(streams, 2 * ISSUING_SLOWEST)
            with streams.tracing() as trace:
                side = Kind.INTRA_NODE if first.op.kind is Kind.COMPUTE else Kind.INTER_NODE
                event = streams.issue(side, works[1], (), "second")
                if first.op.kind is Kind.COMPUTE:
                    streams.compute(works[0], "first")
                else:
                    streams.wait(streams.issue(first.op.kind, works[0], (), "first"))
                streams.wait(event)
            by_label = {span.label: span.seconds for span in trace.spans}
            rows.append((by_label["first"], by_label["second"]))
        return rows[1:]

    def _work(self, timed: TimedOperator) -> Callable[[], object]:
        step = self._step(self._instruction(0, timed))
        inputs = [self.values[key] for key in step.reads]
        call = self._call(timed)
        if step.communicates:
            return step.prepare(call, timed.op.part, *inputs)[1]
        for setup in map(self._step, self._before(0, timed)):
            setup.method(self.values)(call, *(self.values[key] for key in setup.reads))
        call.training = step.keeps
        run = step.method(self.values)

        def compute() -> None:
            with explicit_gradients():  # holds for one thread, and the work may run in that of a stream
                run(call, *inputs)

        return compute

    def _step(self, instruction: Instruction) -> BoundInstruction:
        return BoundInstruction(instruction, self.runner.executor.units)

    def _call(self, timed: TimedOperator) -> Call:
        unit = self.runner.executor.units[timed.unit]
        return self.runner.executor.strand(self.batch, {}, training=True).call(timed.unit, timed.op.forward_name, unit)

    def _before(self, repeat: int, timed: TimedOperator) -> list[Instruction]:
        """The forward operators that a backward operator needs, those of recompute where there are any."""
        if timed.op.part in (Part.F, Part.R) or timed.op.kind.communicates:
            return []
        made = unit_instructions(self.runner.layout, (repeat, timed.unit), forward=not timed.op.recomputed)
        before = [
            i
            for i in made
            if i.operator and i.operator.forward_name == timed.op.forward_name and not i.operator.kind.communicates
        ]
        return [i for i in before if i.operator and i.operator.part in (Part.F, Part.R)]

    def _instruction(self, repeat: int, timed: TimedOperator, ends: bool = False) -> Instruction:
        made = unit_instructions(self.runner.layout, (repeat, timed.unit), forward=timed.op.part is Part.F)
        instruction = next(i for i in made if i.operator is not None and i.operator.name == timed.op.name)
        return replace(instruction, ends=ends)

    def _run(self, program: Sequence[Instruction]) -> list[Span]:
        meet(self.runner)
        return traced(self.runner, program, [self.batch] * 2 * self.length, self.values)

    def _label(self, timed: TimedOperator) -> str:
        return self.runner.executor.label(self.batch.key[1], timed.unit, timed.op)


def _first_units(runner: Runner) -> dict[str, int]:
    """The first unit of each name on this rank, without the units that send or receive."""
    first: dict[str, int] = {}
    for index, unit in runner.stage.units.items():
        if not runner.layout.transfers(index):
            first.setdefault(unit.name, index)
    return first


def _capture(runner: Runner, batch: MicroBatch) -> dict[Key, Tensor]:
    """The values of a micro-batch in the first unit of each name, forward and backward. Collective."""
    layout = runner.layout
    keep: set[Key] = set()
    for unit in _first_units(runner).values():
        for forward in (True, False):
            for instruction in unit_instructions(layout, (0, unit), forward):
                keep.update(instruction.needs + instruction.writes)
    program = runner.build_program(runner.scheduler(1), keep)
    values = runner.executor.run(program, [batch], runner.sources(), training=True)[0]
    forget_gradients(runner)
    return {key: value for key, value in values.items() if key in keep}
