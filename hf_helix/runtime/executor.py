"""The executor: runs a program, one instruction after the other.

In:   instructions, the units they name, and micro-batches.
Out:  the values that the program keeps; gradients in `parameter.grad`.
Must hold: one executor for every plan. The executor issues in the program's order, makes the compute stream wait only
for the values that an operator reads, frees a value after its last reader, and never synchronises with the device. No
rank waits until another rank has received a tensor; a sent tensor stays alive until then.

    for step in program:  (each bound once, see `bind`)
        barrier         wait for the collectives of all micro-batches
        traffic         issue the reduction of a bucket, the gather of ZeRO-1 weights, or a copy of either
        communication   wait for sizes; allocate; issue on its stream; note the event by its outputs
        computation     wait for the events of its inputs; run
        then            reshard and free values without a further reader

`hf_helix.runtime.streams.streams` gives the stream of each operator.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from hf_helix.operators.base import Communication, Method, Precision, Tensors, TransferFn, explicit_gradients
from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.parameters.host_shard import HostShard
from hf_helix.operators.units.unit import Unit
from hf_helix.operators.zero.zero1 import Zero1FlatParameter, zero1_flat_parameters
from hf_helix.operators.zero.zero3 import with_unsharded
from hf_helix.planning.graph.operator import Kind, Operator, Part
from hf_helix.planning.plan.program import Program
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Key, Layout
from hf_helix.runtime.gradients.reduce import GradientReducer
from hf_helix.runtime.microbatch import MicroBatch, MicroBatchState
from hf_helix.runtime.streams.streams import Event, Streams

Sources = Callable[[MicroBatch], Mapping[Key, Tensor | None]]
"""Returns the first values of a micro-batch, such as the gradient of its loss; None for a gradient that may be given
before its reader runs, see `MicroBatchState.given`."""


def no_sources(batch: MicroBatch) -> Mapping[Key, Tensor | None]:
    """Returns nothing: no operator reads a value that none has written."""
    return {}


class BoundOperator:
    """An instruction bound to its operator: everything that is the same in every window, and nothing of one
    micro-batch. `Instruction` explains the attributes that are not listed.

    Attributes:
        op: the operator of the graph.
        adds_to: the traffic, by unit, whose gradients of every micro-batch the operator adds to.
        unit: the unit of the operator.
        operator_key: index of the unit, and name of the declared operator.
        returns: the gathered weights without a later reader, as flat parameters and keys.
    """

    def __init__(self, made: Instruction, units: Mapping[int, Unit], adds_to: Sequence[int]) -> None:
        assert made.operator is not None
        self.op = op = made.operator
        self.microbatch = made.microbatch
        self.adds_to = adds_to
        self.unit = units[made.unit]
        self.operator_key = made.unit, op.forward_name
        self.reads = made.reads
        self.writes = made.writes
        self.frees = made.frees
        self.ends = made.ends
        self.returns = _flat_parameters_of(self.frees, units)


class BoundComputation(BoundOperator):
    """An operator for the compute stream.

    Attributes:
        run: the method.
        awaited: the ZeRO-1 flat parameters of the unit.
        saves_for_backward: whether forward may save state; False if backward runs forward again.
        weights: the gathered weights that the operator reads, as flat parameters and keys.
    """

    def __init__(self, made: Instruction, units: Mapping[int, Unit], adds_to: Sequence[int]) -> None:
        super().__init__(made, units, adds_to)
        op = self.op
        self.needs = made.needs
        self.adds = made.accumulates if any(made.accumulates) else ()
        self.run: Method = self.unit.operators[op.forward_name].method_of(op.part)
        self.awaited = tuple(zero1_flat_parameters(self.unit.flat_parameters.values()))
        self.saves_for_backward = not (op.recomputed and op.part is Part.F)
        flats = (self.unit.flat_parameters[name] for name in op.weights)
        self.weights = list(zip(flats, made.weights, strict=True))

    def method(self, values: Mapping[Key, Tensor]) -> Method:
        """Returns the method for the compute stream, with its gathered weights."""
        return (
            with_unsharded(self.run, [(flat, values[key]) for flat, key in self.weights]) if self.weights else self.run
        )


class BoundTransfer(BoundOperator):
    """An operator for a communication stream.

    Attributes:
        prepare, lane: the method that issues, and its queue.
        sends: whether its inputs stay alive until others have them.
        sizes: the keys of the values with the sizes of a transfer; the host reads them.
    """

    def __init__(self, made: Instruction, units: Mapping[int, Unit], adds_to: Sequence[int]) -> None:
        super().__init__(made, units, adds_to)
        op, operator = self.op, self.unit.operators[self.op.forward_name]
        assert isinstance(operator, Communication), f"{op.name} is issued, and computes"
        self.prepare: Callable[..., tuple[Tensors, TransferFn]] = operator.prepare
        self.lane = operator.lane(op.part)
        self.sends = op.sends or op.kind is Kind.DOWN
        self.sizes = [key for name, key in zip(op.reads, made.reads, strict=True) if name in op.host_read_sizes]


class BoundTraffic(NamedTuple):
    """An operator that moves gradients or weights.

    Attributes:
        flat: the weights; None for gradients.
        reader: the label of the first unit that reads the weights.
    """

    microbatch: int
    unit: int
    op: Operator
    flat: Zero1FlatParameter | None = None
    reader: str = ""


BoundInstruction = BoundComputation | BoundTransfer | BoundTraffic | Instruction
"""An instruction as the executor reads it; barriers stay as they are."""


def bind(instruction: Instruction, units: Mapping[int, Unit], layout: Layout) -> BoundInstruction:
    """Returns an instruction of a rank, bound to its operator.

    Args:
        instruction: of the rank.
        units: of the rank, by index in the layout.
        layout: with the traffic.
    """
    op = instruction.operator
    if op is None:
        return instruction
    if op.is_traffic:
        return _bound_traffic(instruction, op, units, layout)
    adds_to = () if op.part is Part.F else layout.often_adding.get((instruction.unit, op.name), ())
    bound = BoundTransfer if op.kind.communicates else BoundComputation
    return bound(instruction, units, adds_to)


def _bound_traffic(instruction: Instruction, op: Operator, units: Mapping[int, Unit], layout: Layout) -> BoundTraffic:
    readers = layout.traffic_at(instruction.unit).readers
    if not readers:
        return BoundTraffic(instruction.microbatch, instruction.unit, op)
    reader = units[readers[0]]
    flat = reader.flat_parameters[op.forward_name]
    assert isinstance(flat, Zero1FlatParameter)
    return BoundTraffic(instruction.microbatch, instruction.unit, op, flat, reader.label)


def _flat_parameters_of(keys: Sequence[Key], units: Mapping[int, Unit]) -> list[tuple[FlatParameter, Key]]:
    """Returns the gathered weights among several values, with their flat parameters."""
    named = ((units[unit].flat_parameters.get(name), (unit, name)) for unit, name in keys if unit in units)
    return [(flat, key) for flat, key in named if flat is not None]


def issue_gather(streams: Streams, flat: Zero1FlatParameter, label: str) -> Event:
    """Issues the gather of ZeRO-1 weights; returns the event of its end. Collective."""
    after = [flat.host.copied] if flat.host is not None and flat.host.copied is not None else []
    return streams.issue(flat.reduce_axis.kind, flat.prepare_gather_in_place(), after, label)


def issue_copy(streams: Streams, host: HostShard, label: str) -> None:
    """Issues the copy of a shard on the host to the device, unless the device has it or every use copies it."""
    if host.copy is not None and not host.is_copied:
        host.copied = streams.issue(Kind.UP, host.prepare_copy(), (), label)


# -- executor ------------------------------------------------------------------------------------------------------

KeptValues = Mapping[int, Mapping[Key, Tensor]]
"""By micro-batch, the values that a program never frees."""

Bound = list[tuple[list[BoundInstruction], int]]
"""The steps of the parts of a program; each part with the number of micro-batches to add to the numbers in its
steps."""

MAX_PROGRAMS = 16
"""How many programs stay bound to their operators, the last that ran. There is one for each number of micro-batches in
a window."""


class WindowEnded(Exception):
    """A window has ended before its last micro-batch, with all communication of those that had begun."""


class Executor:
    """Runs programs on a rank's streams.

    Args:
        units: of the rank, by index in the layout.
        streams: the streams that instructions go to.
        seed: the seed of the run on this rank; the randomness of every operator derives from it.
        precision: the types of every forward pass.
        layout: of the units, with their traffic.
    """

    def __init__(
        self, units: Mapping[int, Unit], streams: Streams, seed: int, precision: Precision, layout: Layout
    ) -> None:
        self._layout = layout
        self.units = units
        self.streams = streams
        self.seed = seed
        self._precision = precision
        self._sent: deque[tuple[Event, Tensor]] = deque()
        self._gathered: dict[Zero1FlatParameter, Event] = {}  # gathers that nothing has waited for yet
        self._bound: dict[int, tuple[Sequence[Instruction], Bound]] = {}
        self._at: tuple[BoundInstruction, int] | None = None  # the instruction issued last

    @property
    def place(self) -> str:
        """The operator issued last, such as `B2.layers.3.mlp.down.W`; empty before the first. For other threads."""
        step, microbatch = self._at or (None, 0)
        if step is None or isinstance(step, Instruction):
            return ""
        if isinstance(step, BoundTraffic):
            return step.op.name
        return self.label(microbatch, step.operator_key[0], step.op)

    def run(
        self,
        program: Sequence[Instruction],
        microbatches: Sequence[MicroBatch],
        sources: Sources,
        saves_for_backward: bool,
        reduction: GradientReducer | None = None,
        at_barrier: Callable[[], object] | None = None,
        states: dict[int, MicroBatchState] | None = None,
        may_begin: Callable[[int], bool] | None = None,
    ) -> KeptValues:
        """Issues every instruction of a program.

            for every step of the program:
                skip it if its micro-batch is at or after one that may not begin
                barrier:   wait for the collectives of all micro-batches
                traffic:   gather weights, or reduce the gradients of a bucket; there is no micro-batch state
                operator:  if it is the first of its micro-batch, make the state
                           add gradients from outside to the values that it reads
                           switch the buckets that it adds to over to its micro-batch
                           communicate or compute
                           reshard weights and free values without a further reader
                           if it is the last of its micro-batch, wait for its collectives and end the state
            wait for tensors that other ranks still receive, and for gathers without a reader here

        Args:
            program: the instructions; the list must not change after its first run.
            microbatches: the micro-batches that the instructions number.
            sources: see `Sources`.
            saves_for_backward: whether operators save state, for a later backward pass.
            reduction: of the gradients of the window; None for no reductions.
            at_barrier: called at every barrier, after a wait for everything issued before, even ahead of its time.
            states: the states that an earlier program has begun, by micro-batch; afterwards those that this program
                has not ended. None if a program ends every state.
            may_begin: asked before the first operator of a micro-batch. After False no later one begins, and those that
                have begun run to their end.

        Returns:
            By micro-batch, the values that were never freed.

        Raises:
            WindowEnded: `may_begin` has been False.
        """
        kept: dict[int, Mapping[Key, Tensor]] = {}
        states = {} if states is None else states
        limit = math.inf
        with self._window():
            for step, later in ((step, later) for steps, later in self._bind(program) for step in steps):
                microbatch = step.microbatch + later
                if microbatch >= limit:
                    continue
                self._at = step, microbatch
                if isinstance(step, Instruction):
                    self._barrier(states, include_ahead=at_barrier is not None)
                    if at_barrier is not None:
                        at_barrier()
                    continue
                if isinstance(step, BoundTraffic):
                    if step.flat is not None:
                        self._gather(step, step.flat, microbatches)
                    elif reduction is not None:
                        reduction.issue(step.unit, step.op.kind, microbatch)
                    continue
                state = states.get(microbatch)
                if state is None and may_begin is not None and not may_begin(microbatch):
                    limit = microbatch
                    if reduction is not None:
                        reduction.last = None
                    continue
                if state is None:
                    state = states[microbatch] = self.begin(microbatches[microbatch], sources, saves_for_backward)
                if state.given:
                    self._add_given(step, state)
                if step.adds_to and reduction is not None:
                    for unit in step.adds_to:
                        reduction.switch_to(unit, microbatch)
                if isinstance(step, BoundTransfer):
                    self._communicate(step, state)
                else:
                    self._compute(step, state)
                for flat, key in step.returns:
                    flat.reshard(state.values[key])
                for key in step.frees:
                    del state.values[key]
                    if state.events:
                        state.events.pop(key, None)
                if step.ends:
                    self._drain(state)
                    kept[microbatch] = states.pop(microbatch).values
            while self._sent:
                self._wait(self._sent.popleft()[0])
            while self._gathered:
                self._wait(self._gathered.popitem()[1])
        if limit < math.inf:
            raise WindowEnded
        return kept

    @contextlib.contextmanager
    def _window(self) -> Iterator[None]:
        """Returns the context in which a program runs. Sharded parameters are prepared for it, and resharded after it,
        also after an error."""
        flats = dict.fromkeys(flat for unit in self.units.values() for flat in unit.flat_parameters.values())
        for flat in flats:
            flat.begin_window()
            if flat.host is not None and flat.host.copied is not None and not isinstance(flat, Zero1FlatParameter):
                self._wait(flat.host.copied)
        try:
            with self._precision.in_window(), explicit_gradients(), self.streams.window():
                yield
        finally:
            self._sent.clear()  # of a program that has failed
            self._gathered.clear()
            for flat in flats:
                flat.reshard()

    def _bind(self, program: Sequence[Instruction]) -> Bound:
        """Returns the steps of a program, the same in every window; a repeated period has its steps once."""
        entry = self._bound.pop(id(program), None)
        if entry is None:
            if len(self._bound) == MAX_PROGRAMS:
                del self._bound[next(iter(self._bound))]  # the least recently run
            once = program.once if isinstance(program, Program) else program
            parts = program.parts() if isinstance(program, Program) else [(0, len(once), 0)]
            steps = [bind(each, self.units, self._layout) for each in once]
            slices: dict[tuple[int, int], list[BoundInstruction]] = {}
            bound = [(slices.setdefault((begin, end), steps[begin:end]), later) for begin, end, later in parts]
            entry = program, bound
        # The entry keeps the program alive, so that no other program gets its id.
        self._bound[id(program)] = entry
        return entry[1]

    def begin(self, batch: MicroBatch, sources: Sources, saves_for_backward: bool) -> MicroBatchState:
        """Returns the state of a micro-batch before its first operator.

        Args:
            batch: the micro-batch.
            sources: the values before the first operator.
            saves_for_backward: see `run`.
        """
        return MicroBatchState(
            batch.key, batch.prepare(), saves_for_backward, self.seed, self._precision, {**sources(batch)}
        )

    def peek(self, state: MicroBatchState, key: Key) -> Tensor:
        """Returns a value that no program frees, once the compute stream may read it."""
        if key in state.events:
            self._wait(state.events.pop(key))
        return state.values[key]

    def take(self, state: MicroBatchState, key: Key) -> Tensor:
        """Returns a value as `peek` does, and forgets it."""
        value = self.peek(state, key)
        del state.values[key]
        return value

    def label(self, microbatch: int, unit: int, op: Operator) -> str:
        """Returns the label of an operator in a trace, such as `B2.layers.3.mlp.down.W`.

        Args:
            microbatch: its number in the window.
            unit: the index of the unit in the layout.
            op: of the unit's graphs.
        """
        return f"{'F' if op.part is Part.F else 'B'}{microbatch}.{self.units[unit].label}.{op.name}"

    def _gather(self, step: BoundTraffic, flat: Zero1FlatParameter, microbatches: Sequence[MicroBatch]) -> None:
        """Issues the gather of ZeRO-1 weights, or their copy from the host, unless the buffer has them from an earlier
        window."""
        if flat.is_current:
            return
        label = f"F{microbatches[step.microbatch].key[1]}.{step.reader}.{flat.name}"
        if step.op.kind.copies:
            assert flat.host is not None
            issue_copy(self.streams, flat.host, f"{label}.up")
            return
        if self.streams.trace is not None:
            self.streams.trace.note("issue", label)
        self._gathered[flat] = issue_gather(self.streams, flat, label)

    def _add_given(self, step: BoundOperator, state: MicroBatchState) -> None:
        """Adds gradients from outside to those that an operator is the first to read."""
        for key in step.reads:
            given = state.given.pop(key, None)
            if given is not None:
                if key in state.events:
                    self._wait(state.events.pop(key))
                known = state.values.get(key)
                state.values[key] = given if known is None else known + given

    def _compute(self, step: BoundComputation, state: MicroBatchState) -> None:
        values, events, trace = state.values, state.events, self.streams.trace
        if self._gathered:
            for flat in step.awaited:
                if flat in self._gathered:
                    self._wait(self._gathered.pop(flat))
        if events:
            for key in step.needs:
                if key in events:
                    self._wait(events.pop(key))
        ctx = state.contexts.get(step.operator_key) or state.context_of(*step.operator_key, step.unit)
        # An operator that is recomputed in backward saves nothing in forward.
        ctx.saves_for_backward = state.saves_for_backward and step.saves_for_backward
        run = step.method(values) if step.weights else step.run
        if step.adds:
            ctx.partials = tuple([None if key is None else values[key] for key in step.adds])
        if trace is None:
            outputs = run(ctx, *map(values.__getitem__, step.reads))
        else:
            label = self.label(state.key[1], step.operator_key[0], step.op)
            trace.note("run", label)
            inputs = [values[key] for key in step.reads]
            outputs = self.streams.compute(lambda: run(ctx, *inputs), label)
        if ctx.partials:
            for key, partial, output in zip(step.writes, ctx.partials, outputs, strict=False):
                values[key] = output if partial is None else partial + output
            ctx.partials = ()
        elif step.writes:
            values.update(zip(step.writes, outputs, strict=False))

    def _communicate(self, step: BoundTransfer, state: MicroBatchState) -> None:
        op, values, events, trace = step.op, state.values, state.events, self.streams.trace
        for key in step.sizes:
            if key in events:
                self._wait(events.pop(key))
        if self._sent and op.kind is Kind.PIPELINE:  # at the begin or the end of a slot
            self._release()
        inputs = list(map(values.__getitem__, step.reads))
        # The event is not popped: a later computation that reads the same value must wait for it as well.
        after = [events[key] for key in step.reads if key in events] if events else ()
        label = op.name
        if trace is not None:
            label = self.label(state.key[1], step.operator_key[0], op)
            trace.note("issue", label)
        ctx = state.contexts.get(step.operator_key) or state.context_of(*step.operator_key, step.unit)
        outputs, work = step.prepare(ctx, op.part, *inputs)
        event = self.streams.issue(op.kind, work, after, label, step.lane)
        for key, output in zip(step.writes, outputs, strict=True):
            values[key] = output
            events[key] = event
        if op.ahead:
            state.ahead.update(step.writes)
        if step.sends:
            self._sent += [(event, value) for value in inputs]
            if op.kind is Kind.DOWN:  # once a layer
                self._release()

    def _wait(self, event: Event) -> None:
        if self.streams.trace is not None:
            self.streams.trace.note("wait", event.label)
        self.streams.wait(event)

    def _release(self) -> None:
        """Frees the tensors received by other ranks or by the host. A late one does not keep alive those for others."""
        for _ in range(len(self._sent)):
            event, value = self._sent.popleft()
            if self.streams.is_over(event):
                self._wait(event)
            else:
                self._sent.append((event, value))

    def _drain(self, state: MicroBatchState, but: Collection[Key] = ()) -> None:
        """Makes the compute stream wait for a micro-batch's collectives."""
        for key, event in list(state.events.items()):
            if event.kind.is_awaited and key not in but:
                self._wait(event)
                del state.events[key]

    def _barrier(self, states: Mapping[int, MicroBatchState], include_ahead: bool) -> None:
        """Makes the compute stream wait for collectives; for collectives issued ahead only with `include_ahead`."""
        for state in states.values():
            self._drain(state, but=() if include_ahead else state.ahead)
