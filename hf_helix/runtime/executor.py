"""The executor: runs a program.

In:   instructions, the units they name, and micro-batches.
Out:  the values that the program keeps; gradients in `parameter.grad`.
Must hold: one executor for every plan. It issues in the program's order, waits only where a value is read, frees a
value after its last reader, and never synchronises with the device. It never waits for another rank to take what it
sends; what is sent stays alive until it has gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_helix.operators.base import Precision
from hf_helix.operators.unit import Unit
from hf_helix.planning.graph import Kind, Operator, Part
from hf_helix.planning.window import Instruction, Key
from hf_helix.runtime.strand import MicroBatch, Strand
from hf_helix.runtime.streams import Event, Streams

Kept = Mapping[int, Mapping[Key, Tensor]]


class Executor:
    """Runs programs on a rank's streams.

    Args:
        units: what the rank holds, by index in the layout.
        seed: of the run.
        precision: of every forward pass.
    """

    def __init__(self, units: Mapping[int, Unit], streams: Streams, seed: int, precision: Precision) -> None:
        self.units = units
        self.streams = streams
        self._seed = seed
        self._precision = precision
        self._sent: deque[tuple[Event, Tensor]] = deque()

    def run(
        self,
        program: Sequence[Instruction],
        microbatches: Sequence[MicroBatch],
        sources: Mapping[Key, Tensor],
        training: bool,
        completed: Callable[[int], object] | None = None,
        at_barrier: Callable[[], object] | None = None,
    ) -> Kept:
        """Issue every instruction; returns by micro-batch the values that were never freed.

        Args:
            sources: values that every micro-batch starts with, such as the gradient of its loss.
            completed: told the index of a unit once all its gradients have been issued.
            at_barrier: called at every barrier, between what comes before and after it.
        """
        with self._precision.weights.kept():
            return self._run(program, microbatches, sources, training, completed, at_barrier)

    def _run(
        self,
        program: Sequence[Instruction],
        microbatches: Sequence[MicroBatch],
        sources: Mapping[Key, Tensor],
        training: bool,
        completed: Callable[[int], object] | None,
        at_barrier: Callable[[], object] | None,
    ) -> Kept:
        strands: dict[int, Strand] = {}
        kept: dict[int, Mapping[Key, Tensor]] = {}
        for instruction in program:
            op = instruction.operator
            if op is None:
                self._barrier(strands)
                if at_barrier is not None:
                    at_barrier()
                continue
            strand = strands.get(instruction.microbatch)
            if strand is None:
                strand = self.strand(microbatches[instruction.microbatch], sources, training)
                strands[instruction.microbatch] = strand
            if op.kind.communicates:
                self._communicate(instruction, op, strand)
            else:
                self._compute(instruction, op, strand)
            for key in instruction.frees:
                del strand.values[key]
                strand.events.pop(key, None)
            if instruction.ends:
                self._drain(strand)
                kept[instruction.microbatch] = strands.pop(instruction.microbatch).values
            if completed is not None:
                for unit in instruction.completes:
                    completed(unit)
        while self._sent:
            self._wait(self._sent.popleft()[0])
        return kept

    def strand(self, batch: MicroBatch, sources: Mapping[Key, Tensor], training: bool) -> Strand:
        """A micro-batch before its first operator."""
        return Strand(batch.key, batch.prepare(), training, self._seed, self._precision, dict(sources))

    def label(self, microbatch: int, unit: int, op: Operator) -> str:
        """What an operator is called in a trace, such as `B2.layers.3.mlp.down.W`."""
        return f"{'F' if op.part is Part.F else 'B'}{microbatch}.{self.units[unit].label}.{op.name}"

    def _compute(self, instruction: Instruction, op: Operator, strand: Strand) -> None:
        values, adds = strand.values, instruction.adds
        if strand.events:
            for key in instruction.needs:
                event = strand.events.pop(key, None)
                if event is not None:
                    self._wait(event)
        inputs = [values[key] for key in instruction.reads]
        trace = self.streams.trace
        if trace is None:
            outputs = self._apply(instruction, op, strand, inputs)
        else:
            label = self.label(strand.key[1], instruction.unit, op)
            trace.note("run", label)
            outputs = self.streams.compute(lambda: self._apply(instruction, op, strand, inputs), label)
        for place, key in enumerate(instruction.writes):
            partial = adds[place] if adds else None
            values[key] = outputs[place] if partial is None else values[partial] + outputs[place]

    def _communicate(self, instruction: Instruction, op: Operator, strand: Strand) -> None:
        if op.sizes:
            for name, key in zip(op.reads, instruction.reads, strict=True):
                if name in op.sizes and key in strand.events:
                    self._wait(strand.events.pop(key))
        if self._sent and op.kind is Kind.PIPELINE:  # where a slot begins or ends
            self._release()
        inputs = [strand.values[key] for key in instruction.reads]
        # What fills the input stays listed: a computation that reads it, too, waits for itself.
        after = [strand.events[key] for key in instruction.reads if key in strand.events]
        trace = self.streams.trace
        label = op.name if trace is None else self.label(strand.key[1], instruction.unit, op)
        if trace is not None:
            trace.note("issue", label)
        unit = self.units[instruction.unit]
        operator: Any = unit.operators[op.of]
        outputs, work = operator.prepare(strand.call(instruction.unit, unit, op.of), op.part, *inputs)
        lane = operator.lane(op.part) if op.kind is Kind.PIPELINE else ""
        event = self.streams.issue(op.kind, work, after, label, lane)
        for key, output in zip(instruction.writes, outputs, strict=True):
            strand.values[key] = output
            strand.events[key] = event
        if op.sends:
            self._sent += [(event, value) for value in inputs]

    def _apply(self, instruction: Instruction, op: Operator, strand: Strand, inputs: list[Tensor]) -> Sequence[Tensor]:
        unit = self.units[instruction.unit]
        operator: Any = unit.operators[op.of]
        call = strand.call(instruction.unit, unit, op.of)
        # What backward runs again keeps nothing the first time.
        call.training = strand.training and not (op.again and op.part is Part.F)
        if op.part is Part.F:
            return operator.forward(call, *inputs)
        if op.part is Part.B:
            return operator.backward(call, *inputs)
        if op.part is Part.I:
            return operator.input_gradient(call, *inputs)
        if op.part is Part.R:
            return operator.again(call, *inputs)
        operator.weight_gradient(call, *inputs)
        return ()

    def _wait(self, event: Event) -> None:
        if self.streams.trace is not None:
            self.streams.trace.note("wait", event.label)
        self.streams.wait(event)

    def _release(self) -> None:
        """Give up what has gone to another rank; one that is slow to take does not hold up what others have."""
        for _ in range(len(self._sent)):
            event, value = self._sent.popleft()
            if self.streams.is_over(event):
                self._wait(event)
            else:
                self._sent.append((event, value))

    def _drain(self, strand: Strand) -> None:
        """Let the compute stream wait for the collectives of a micro-batch, but not for another rank."""
        for key, event in list(strand.events.items()):
            if event.kind is not Kind.PIPELINE:
                self._wait(event)
                del strand.events[key]

    def _barrier(self, strands: Mapping[int, Strand]) -> None:
        for strand in strands.values():
            self._drain(strand)
