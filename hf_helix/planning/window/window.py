"""Windows as numbers: what one micro-batch runs is worked out once, and repeated for every micro-batch of a schedule.

In:   a schedule, and what the ranks hold.
Out:  a `Window`: of every instruction of the window, which one of a single micro-batch's it is, and of which
      micro-batch; and the `Work` of all of them.
Must hold: instructions, their order and their needs are those of `window_instructions` and `work_of`. No operator reads
what another micro-batch wrote, so what one micro-batch runs says everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from hf_helix.planning.graph.operator import Kind, Operator, Part
from hf_helix.planning.schedule.actions import Schedule, num_microbatches_of
from hf_helix.planning.window.instructions import PARTS_OF, Instruction, pass_instructions, slot_passes
from hf_helix.planning.window.layout import GATHERS, SUMS, Layout

Times = Mapping[tuple[str, str], float]
"""Seconds of each operator, by the name of its unit and its entry in a plan."""


STREAMS = (Kind.COMPUTE, Kind.INTRA_NODE, Kind.INTER_NODE, Kind.PIPELINE, Kind.GRADIENTS)


COMPUTE = STREAMS.index(Kind.COMPUTE)


@dataclass(frozen=True)
class Work:
    """Programs as plain numbers.

    Attributes:
        streams: of each instruction, an index into `STREAMS`.
        seconds: of each instruction alone.
        needs: the instructions that each waits for.
        entries: what each runs, an index into `names`; -1 for a barrier.
        names: (unit name, entry).
        ranks: of each instruction, the pipeline rank that runs it; empty where there is one.
        lanes: of each instruction, what it queues on, together with its rank and stream; empty where it is 0 for all.
        size_sources: of each instruction, the collective whose result the host reads before it issues the instruction,
            or -1 if there is none; empty where it is -1 for all.
    """

    streams: list[int]
    seconds: list[float]
    needs: list[list[int]]
    entries: list[int]
    names: list[tuple[str, str]]
    ranks: list[int] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)
    size_sources: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.streams)

    def rank(self, place: int) -> int:
        """The pipeline rank of an instruction."""
        return self.ranks[place] if self.ranks else 0

    def queues(self) -> list[int]:
        """Returns the number of each instruction's queue; instructions of one queue run one after the other."""
        ranks, lanes = self.ranks or [0] * len(self), self.lanes or [0] * len(self)
        numbers: dict[tuple[int, int, int], int] = {}
        return [numbers.setdefault(key, len(numbers)) for key in zip(ranks, self.streams, lanes, strict=True)]

    def followed_by(
        self,
        stream: int,
        names: Sequence[tuple[str, str]],
        times: Times,
        needs: Sequence[list[int]],
        ranks: Iterable[int],
    ) -> Work:
        """Returns these programs with instructions of the whole window behind them, each of another operator. Where in
        the order of issue they come is not decided yet.

        Args:
            stream: of all of them, an index into `STREAMS`.
            names: of their operators.
            times: seconds of every operator.
            needs: what each waits for.
            ranks: that run them.

        Raises:
            KeyError: `times` lacks one of them.
        """
        count = len(names)
        return replace(
            self,
            streams=[*self.streams, *[stream] * count],
            seconds=[*self.seconds, *(times[name] for name in names)],
            needs=[*self.needs, *needs],
            entries=[*self.entries, *range(len(self.names), len(self.names) + count)],
            names=[*self.names, *names],
            ranks=[*self.ranks, *ranks],
            lanes=[*self.lanes, *[0] * count],
            size_sources=[*self.size_sources, *[-1] * count],
        )

    def paced(self, pace: float) -> Work:
        """Returns these programs with computations that take `pace` times as long."""
        seconds = [each * pace if at == COMPUTE else each for each, at in zip(self.seconds, self.streams, strict=True)]
        return replace(self, seconds=seconds)

    def loads_of(self, rank: int) -> dict[Kind, float]:
        """Seconds of work on each stream of a pipeline rank."""
        totals = [0.0] * len(STREAMS)
        for place, stream in enumerate(self.streams):
            if self.rank(place) == rank:
                totals[stream] += self.seconds[place]
        return dict(zip(STREAMS, totals, strict=True))

    def loads(self) -> dict[Kind, float]:
        """Seconds of work on each stream of the rank that has most."""
        ranks = [self.loads_of(rank) for rank in sorted(set(self.ranks)) or [0]]
        return {kind: max(loads[kind] for loads in ranks) for kind in STREAMS}


def entry_of(instruction: Instruction, layout: Layout) -> tuple[str, str]:
    """The unit's name and the entry in a plan of what an instruction runs; of what belongs to the window, its name."""
    op = instruction.operator
    assert op is not None
    unit = layout.units[instruction.unit]
    if instruction.is_of_window:
        unit = SUMS if instruction.gather < 0 else GATHERS
    return unit, f"{'F' if op.part is Part.F else 'B'}.{op.name}"


def work_of(program: Sequence[Instruction], layout: Layout, times: Times) -> Work:
    """The numbers of a program, or of several ranks' programs one after the other.

    Args:
        program: the instructions in the order of issue.
        layout: what the ranks hold.
        times: seconds of every operator alone.

    Raises:
        KeyError: `times` lacks an operator.
    """
    numbers: dict[tuple[str, str], int] = {}
    work = Work([], [], [], [], [])
    writers: dict[tuple[int, object], int] = {}
    forwards: dict[tuple[int, int, str], int] = {}
    pending: dict[int, list[int]] = {}
    sent = _senders(program)
    arriving: dict[int, list[int]] = {}  # gathers of weights that nothing has waited for yet, by unit
    for place, instruction in enumerate(program):
        op, rank = instruction.operator, layout.rank_of(instruction.unit)
        work.ranks.append(rank)
        if op is None:
            work.streams.append(COMPUTE)
            work.lanes.append(0)
            work.seconds.append(0.0)
            work.size_sources.append(NONE)
            work.needs.append(pending.pop(rank, []))
            work.entries.append(NONE)
            continue
        name = entry_of(instruction, layout)
        microbatch = instruction.microbatch
        needs = [writers[microbatch, key] for key in instruction.needs if (microbatch, key) in writers]
        if instruction.gather >= 0:
            for unit in layout.gathers[instruction.gather].units:
                arriving.setdefault(unit, []).append(place)
        elif op.kind is Kind.COMPUTE:
            needs += arriving.pop(instruction.unit, [])
        place_of_call = (microbatch, instruction.unit, op.forward_name)
        if op.part is Part.F:
            forwards[place_of_call] = place
        elif place_of_call in forwards and op.kind is not Kind.PIPELINE:
            needs.append(forwards[place_of_call])  # what forward kept for backward
        for key in instruction.writes:
            writers[microbatch, key] = place
        if op.kind in (Kind.INTRA_NODE, Kind.INTER_NODE) and not op.ahead:
            pending.setdefault(rank, []).append(place)
        if op.receives:
            needs += [sent[key] for key in [transfer_key(instruction)] if key in sent]
        work.streams.append(STREAMS.index(op.kind))
        work.lanes.append(_lane(instruction, op, layout))
        work.seconds.append(0.0 if op.receives else times[name])
        work.needs.append(list(dict.fromkeys(needs)))
        keys = [key for name, key in zip(op.reads, instruction.reads, strict=True) if name in op.host_read_sizes]
        brought = [writers[microbatch, key] for key in keys if (microbatch, key) in writers]
        work.size_sources.append(max((each for each in brought if work.streams[each] != COMPUTE), default=NONE))
        work.entries.append(numbers.setdefault(name, len(numbers)))
    work.names.extend(numbers)
    return work


def _senders(program: Sequence[Instruction]) -> dict[tuple[int, bool, int], int]:
    """What is sent between ranks -> the instruction that sends it."""
    return {
        transfer_key(instruction): place
        for place, instruction in enumerate(program)
        if instruction.operator is not None and instruction.operator.sends
    }


def transfer_key(instruction: Instruction) -> tuple[int, bool, int]:
    """Returns what tells one message between ranks from the others, at both of its ends.

    These are its micro-batch, whether it is of forward, and the unit that forward sends from.
    """
    op = instruction.operator
    assert op is not None
    forward = op.part is Part.F
    return instruction.microbatch, forward, instruction.unit - (op.receives if forward else op.sends)


def _lane(instruction: Instruction, op: Operator, layout: Layout) -> int:
    """0, or of pipeline communication: one lane to each neighbour, and one for everything that may arrive by itself."""
    if op.kind is not Kind.PIPELINE:
        return 0
    forward = op.part is Part.F
    if op.sends:
        return 1 + layout.rank_of(instruction.unit + (1 if forward else -1))
    return -1 - 2 * instruction.unit - forward


NONE = -1


Value = TypeVar("Value")

ABSENT = -1


class Pattern:
    """What one micro-batch runs in all units of a layout, forward and backward.

    Attributes:
        calls: the instructions of micro-batch 0: the units forward, then backward.
        spans: of each unit and direction (whether forward), its part of `calls`.
        names: of each call, the name of its unit and its entry in a plan.
        work: the calls as numbers, each taking a second; those that receive take none.
        after: of each call, the calls that plans have come first although it reads nothing of them: those of its unit
            that say so, and for what is issued ahead those that write what enters the unit that it comes with.
        ahead: of each call that is issued ahead, those that read what it brings.
    """

    def __init__(self, layout: Layout) -> None:
        self.calls: list[Instruction] = []
        self.spans: dict[tuple[int, bool], range] = {}
        units = sorted(unit for chunk in layout.chunks.values() for unit in chunk)
        for forward in (True, False):
            for unit in units if forward else reversed(units):
                made = pass_instructions(layout, (0, unit), forward)
                self.spans[unit, forward] = range(len(self.calls), len(self.calls) + len(made))
                self.calls += made
        self.names = [entry_of(call, layout) for call in self.calls]
        self.work = work_of(self.calls, layout, dict.fromkeys(self.names, 1.0))
        self._writers = {key: place for place, call in enumerate(self.calls) for key in call.writes}
        self.after = [after for pass_, span in self.spans.items() for after in self._after(*pass_, span, layout)]
        self.ahead = self._ahead()

    def _after(self, unit: int, forward: bool, span: range, layout: Layout) -> list[list[int]]:
        """Returns `after` of the calls of a unit in one direction."""
        operators = [self.calls[place].operator for place in span]
        places = {op.name: place for op, place in zip(operators, span, strict=True) if op}
        entering = [layout.key(unit, name, forward) for name in layout.graph(unit, forward).inputs]
        entered = [self._writers[key] for key in entering if key in self._writers]
        found = []
        for op, place in zip(operators, span, strict=True):
            if op:
                before = (*op.ordered_after, *([f"{op.forward_name}.I"] if op.part is Part.W else []))
                is_of_unit = self.calls[place].unit == unit
                found.append([places[name] for name in before] if is_of_unit else entered)
        return found

    def _ahead(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {
            place: [] for place, call in enumerate(self.calls) if call.operator and call.operator.ahead
        }
        for place, call in enumerate(self.calls) if found else ():
            for key in call.weights:
                found[self._writers[key]].append(place)
        return found

    def of(self, unit: int, computation_type: str) -> Sequence[int]:
        """The calls of a pass through a unit: those of the whole direction, or of a half of backward."""
        span = self.spans[unit, computation_type == "F"]
        if computation_type in "FB":
            return span
        parts = PARTS_OF[computation_type]
        return [place for place in span if (op := self.calls[place].operator) and op.part in parts]


class NumberedPass(NamedTuple):
    """A micro-batch going through a unit, as a part of an action.

    Attributes:
        microbatch, unit: which.
        computation_type: of the action.
        start: the place of its first instruction in the window; the others follow.
        calls: what it runs.
    """

    microbatch: int
    unit: int
    computation_type: str
    start: int
    calls: Sequence[int]


class Window:
    """The instructions of a window, rank by rank and slot by slot, as numbers.

    Args:
        schedule: of the window; ranks whose instructions do not matter may have no slots.
        layout: what the ranks hold.

    Attributes:
        pattern: what each micro-batch runs.
        passes: through units, in order.
        calls: of each instruction, the call of the pattern.
        microbatches: of each instruction, its micro-batch.
        at: of each micro-batch and call, the place of the instruction; `ABSENT` where the window does not have it.
        slots: of each rank and slot, the place of its first instruction; one more for the end of the rank.
    """

    def __init__(self, schedule: Schedule, layout: Layout) -> None:
        self.layout = layout
        self.pattern = pattern = pattern_of(layout)
        self.passes: list[NumberedPass] = []
        self.calls: list[int] = []
        self.microbatches: list[int] = []
        self.at = [[ABSENT] * len(pattern.calls) for _ in range(num_microbatches_of(schedule))]
        self.slots: list[list[int]] = []
        parts: dict[tuple[int, str], Sequence[int]] = {}
        for slots in schedule:
            self.slots.append([])
            for slot in slots:
                self.slots[-1].append(len(self.calls))
                for (microbatch, unit), action in slot_passes(slot, layout):
                    key = unit, action.computation_type
                    calls = parts[key] if key in parts else parts.setdefault(key, pattern.of(*key))
                    self._add(NumberedPass(microbatch, *key, len(self.calls), calls))
            self.slots[-1].append(len(self.calls))

    def __len__(self) -> int:
        return len(self.calls)

    def _add(self, made: NumberedPass) -> None:
        places = self.at[made.microbatch]
        for place, call in enumerate(made.calls, made.start):
            places[call] = place
        self.passes.append(made)
        self.calls += made.calls
        self.microbatches += [made.microbatch] * len(made.calls)

    def instruction(self, place: int) -> Instruction:
        """The instruction at a place."""
        return self.pattern.calls[self.calls[place]].of(self.microbatches[place])

    def of_calls(self, values: Sequence[Value]) -> list[Value]:
        """What is the same for every micro-batch, given for each call of the pattern, for each instruction."""
        return [values[call] for call in self.calls]

    def work(self, times: Times) -> Work:
        """The window as numbers.

        Raises:
            KeyError: `times` lacks an operator.
        """
        pattern, one, at = self.pattern, self.pattern.work, self.at
        numbers = self._numbers()
        seconds = [times[name] if takes else 0.0 for name, takes in zip(pattern.names, one.seconds, strict=True)]
        needs = [
            [at[k][need] for need in one.needs[call]] for call, k in zip(self.calls, self.microbatches, strict=True)
        ]
        if len(self) < len(self.at) * len(pattern.calls):
            needs = [[need for need in row if need != ABSENT] for row in needs]
        size_sources = [
            ABSENT if one.size_sources[call] == ABSENT else at[k][one.size_sources[call]]
            for call, k in zip(self.calls, self.microbatches, strict=True)
        ]
        return Work(
            self.of_calls(one.streams),
            self.of_calls(seconds),
            needs,
            [numbers[pattern.names[call]] for call in self.calls],
            list(numbers),
            self.of_calls(one.ranks),
            self.of_calls(one.lanes),
            size_sources,
        )

    def _numbers(self) -> dict[tuple[str, str], int]:
        """Numbers the operators as they come."""
        numbers: dict[tuple[str, str], int] = {}
        seen: set[tuple[int, str]] = set()  # layers may differ in what they issue ahead
        for made in self.passes:
            kind = made.unit, made.computation_type
            if kind not in seen:
                seen.add(kind)
                for call in made.calls:
                    numbers.setdefault(self.pattern.names[call], len(numbers))
        return numbers


def pattern_of(layout: Layout) -> Pattern:
    """The pattern of a layout, which is made once."""
    pattern = layout.derived.get("pattern")
    if not isinstance(pattern, Pattern):
        pattern = layout.derived["pattern"] = Pattern(layout)
    return pattern
