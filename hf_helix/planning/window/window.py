"""One window as numbers: all instructions of all micro-batches, before a plan orders them.

In:   a schedule and a layout.
Out:  a `Window`; its `WindowArrays` for given times; the instructions of an order of issue.
Must hold: every instruction once, rank by rank and slot by slot. An operator never reads a value of another
micro-batch, so the instructions of one micro-batch (the `Pattern`) describe the whole window:

    pattern          F.norm  F.gather  F.up  ...  B.up.I  B.up.W  ...        worked out once
    place            0       1         2          40      41                 numbers the window's instructions
    indices[place]   0       1         2          0       1                  index into the pattern
    microbatches     0       0         0          1       1

Places from `len(window)` on belong to `Window.traffic`: gradients and weights that travel. In an order of issue a
negative number, of `barrier_of`, stands for a barrier. The passes of `planning.window.passes` change orders of places;
places become instructions once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from hf_helix.planning.graph.operator import Kind, Operator, Part
from hf_helix.planning.schedule.actions import Schedule, num_microbatches_of
from hf_helix.planning.traffic import Traffic
from hf_helix.planning.window.instructions import (
    PARTS_OF,
    Instruction,
    entry_of,
    pass_instructions,
    slot_passes,
    transfer_key,
)
from hf_helix.planning.window.layout import Layout, Name

Value = TypeVar("Value")

Times = Mapping[Name, float]
"""Seconds of each operator."""

STREAMS = tuple(Kind)
COMPUTE = STREAMS.index(Kind.COMPUTE)
NONE = -1


@dataclass
class WindowArrays:
    """Instructions as lists of numbers, an entry for each place; `append_barrier` adds to the lists.

    Attributes:
        streams: an index into `STREAMS`.
        seconds: the time of the operator by itself.
        needs: the places to end first.
        entries: the operator, as an index into `names`; `NONE` for a barrier.
        names: the operators.
        ranks: the pipeline rank.
        lanes: instructions of one rank, stream and lane run one after the other.
        size_sources: the collective whose result the host reads before it issues the instruction, or `NONE`.
    """

    streams: list[int]
    seconds: list[float]
    needs: list[list[int]]
    entries: list[int]
    names: list[Name]
    ranks: list[int]
    lanes: list[int]
    size_sources: list[int]

    def __len__(self) -> int:
        return len(self.streams)

    def queues(self) -> list[int]:
        """Returns the queue of each place; instructions of a queue run one after the other."""
        numbers: dict[tuple[int, int, int], int] = {}
        keys = zip(self.ranks, self.streams, self.lanes, strict=True)
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    def append_barrier(self, needs: list[int], rank: int) -> int:
        """Adds a barrier of a rank after the places of `needs`, and returns its place."""
        rows = (self.streams, COMPUTE), (self.entries, NONE), (self.ranks, rank), (self.lanes, 0)
        for row, number in (*rows, (self.size_sources, NONE)):
            row.append(number)
        self.seconds.append(0.0)
        self.needs.append(needs)
        return len(self) - 1

    def permuted(self, order: Sequence[int]) -> WindowArrays:
        """A copy of the instructions at some places, in this order."""
        places = {place: number for number, place in enumerate(order)}
        return WindowArrays(
            [self.streams[place] for place in order],
            [self.seconds[place] for place in order],
            [[places[need] for need in self.needs[place] if need in places] for place in order],
            [self.entries[place] for place in order],
            [*self.names],
            [self.ranks[place] for place in order],
            [self.lanes[place] for place in order],
            [places.get(self.size_sources[place], NONE) for place in order],
        )

    def with_compute_scaled(self, factor: float) -> WindowArrays:
        """Returns a copy with times of computations multiplied by `factor`."""
        made = self.permuted(range(len(self)))
        pairs = zip(self.seconds, self.streams, strict=True)
        made.seconds = [each * factor if stream == COMPUTE else each for each, stream in pairs]
        return made

    def loads_of(self, rank: int) -> dict[Kind, float]:
        """Busy seconds of each stream of a pipeline rank."""
        totals = [0.0] * len(STREAMS)
        for home, stream, seconds in zip(self.ranks, self.streams, self.seconds, strict=True):
            if home == rank:
                totals[stream] += seconds
        return dict(zip(STREAMS, totals, strict=True))

    def loads(self) -> dict[Kind, float]:
        """Busy seconds of each stream, on the rank with most."""
        ranks = [self.loads_of(rank) for rank in sorted(set(self.ranks)) or [0]]
        return {kind: max(loads[kind] for loads in ranks) for kind in STREAMS}


class Pattern:
    """The instructions of one micro-batch in all units of a layout: the units forward, then backward.

    Attributes:
        instructions: of micro-batch 0.
        spans: the part of `instructions` of each unit and direction (whether forward).
        names, streams, ranks, lanes, needs, size_sources: of each instruction, see `WindowArrays`.
        ordered_after: of each instruction, predecessors only by order: the operator's `ordered_after`, the I of a W,
            and for a prefetched operator the writers of the inputs of the unit listed with it.
        prefetch_readers: of each prefetched instruction, the readers of its values, or of the weights gathered from
            these.
        is_awaited: whether a barrier waits for the instruction, see `Kind.is_awaited`; not if prefetched.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.instructions: list[Instruction] = []
        self.spans: dict[tuple[int, bool], range] = {}
        units = sorted(unit for chunk in layout.chunks.values() for unit in chunk)
        for forward in (True, False):
            for unit in units if forward else reversed(units):
                made = pass_instructions(layout, (0, unit, forward))
                self.spans[unit, forward] = range(len(self.instructions), len(self.instructions) + len(made))
                self.instructions += made
        self._writers = {key: index for index, each in enumerate(self.instructions) for key in each.writes}
        self.operators = [each.operator for each in self.instructions if each.operator]
        self.names = [entry_of(each, layout) for each in self.instructions]
        self.streams = [STREAMS.index(op.kind) for op in self.operators]
        self.ranks = [layout.rank_of(each.unit) for each in self.instructions]
        self.lanes = [_lane(*each, layout) for each in zip(self.instructions, self.operators, strict=True)]
        self.needs = self._needs()
        self.size_sources = [self._size_source(*each) for each in zip(self.instructions, self.operators, strict=True)]
        self.ordered_after = [after for key, span in self.spans.items() for after in self._ordered_after(*key, span)]
        self.prefetch_readers = self._prefetch_readers()
        self.is_awaited = [op.kind.is_awaited and not op.ahead for op in self.operators]

    def _needs(self) -> list[list[int]]:
        forwards: dict[tuple[int, str], int] = {}
        senders: dict[tuple[int, bool, int], int] = {}
        for index, (each, op) in enumerate(zip(self.instructions, self.operators, strict=True)):
            if op.part is Part.F:
                forwards[each.unit, op.forward_name] = index
            if op.sends:
                senders[transfer_key(each)] = index
        found = []
        for each, op in zip(self.instructions, self.operators, strict=True):
            needs = [self._writers[key] for key in each.needs if key in self._writers]
            if op.part is not Part.F and op.kind is not Kind.PIPELINE:  # state saved by forward for backward
                needs += [forwards[key] for key in [(each.unit, op.forward_name)] if key in forwards]
            if op.receives:
                needs += [senders[key] for key in [transfer_key(each)] if key in senders]
            found.append(list(dict.fromkeys(needs)))
        return found

    def _size_source(self, instruction: Instruction, op: Operator) -> int:
        keys = [key for name, key in zip(op.reads, instruction.reads, strict=True) if name in op.host_read_sizes]
        writers = [self._writers[key] for key in keys if key in self._writers]
        return max((index for index in writers if self.streams[index] != COMPUTE), default=NONE)

    def _ordered_after(self, unit: int, forward: bool, span: range) -> list[list[int]]:
        indices = {self.operators[index].name: index for index in span}
        entering = [self._layout.key(unit, name, forward) for name in self._layout.graph(unit, forward).inputs]
        entered = [self._writers[key] for key in entering if key in self._writers]
        found = []
        for index in span:
            op = self.operators[index]
            before = (*op.ordered_after, *([f"{op.forward_name}.I"] if op.part is Part.W else []))
            is_of_unit = self.instructions[index].unit == unit
            found.append([indices[name] for name in before] if is_of_unit else entered)
        return found

    def _prefetch_readers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {index: [] for index, op in enumerate(self.operators) if op.ahead}
        for index, each in enumerate(self.instructions) if found else ():
            for key in (*each.weights, *each.reads):
                if index not in found and self._writers.get(key) in found:
                    found[self._writers[key]].append(index)
        for index in found:  # those that gather what others have copied
            read = (self._writers[key] for key in self.instructions[index].reads)
            found |= {each: found[index] for each in read if each in found}
        return found

    @cached_property
    def completes(self) -> dict[int, list[Traffic]]:
        """The gradient reductions that each instruction adds to."""
        found: dict[int, list[Traffic]] = {}
        for traffic in self._layout.reductions:
            for index in self.adders_of(traffic):
                found.setdefault(index, []).append(traffic)
        return found

    def adders_of(self, traffic: Traffic) -> list[int]:
        """Returns the instructions that add to a gradient reduction."""
        return [self._backward[adder] for adder in traffic.adders]

    @cached_property
    def _backward(self) -> dict[tuple[int, str], int]:
        units = {unit for each in self._layout.reductions for unit, _ in each.adders}
        return {(unit, self.operators[index].name): index for unit in units for index in self.spans[unit, False]}

    def of(self, unit: int, computation_type: str) -> Sequence[int]:
        """The instructions of a pass through a unit, as indices: a whole direction, or a half of backward."""
        span = self.spans[unit, computation_type == "F"]
        if computation_type in "FB":
            return span
        return [index for index in span if self.operators[index].part in PARTS_OF[computation_type]]


def _lane(instruction: Instruction, op: Operator, layout: Layout) -> int:
    """Returns 0; of transfers, a lane for each receiving neighbour, and a lane for each receiving unit."""
    if op.kind is not Kind.PIPELINE:
        return 0
    forward = op.part is Part.F
    if op.sends:
        return 1 + layout.rank_of(instruction.unit + (1 if forward else -1))
    return -1 - 2 * instruction.unit - forward


class TrafficPlace(NamedTuple):
    """An operator of traffic in a window."""

    traffic: Traffic
    name: Name
    op: Operator
    microbatch: int  # the last with gradients in it; of weights, any


class NumberedPass(NamedTuple):
    """A micro-batch in a unit, as a part of an action."""

    microbatch: int
    unit: int
    computation_type: str
    start: int  # the place of the first instruction; the others follow
    indices: Sequence[int]  # the instructions, as indices into the pattern


def barrier_of(unit: int) -> int:
    """Returns the number of the barrier of a unit's rank in an order of issue; the number of a number is the unit."""
    return ~unit


class Window:
    """The instructions of a window, rank by rank and slot by slot, as numbers.

    Args:
        schedule: of the window; ranks without interest may have no slots.

    Attributes:
        passes: through units, in order.
        indices: of each place, its index into the pattern.
        microbatches: of each place, its micro-batch.
        at: of each micro-batch and index, the place; `NONE` for an instruction outside the window.
        slots: of each rank and slot, the place of the first instruction; then the end of the rank.
    """

    def __init__(self, schedule: Schedule, layout: Layout) -> None:
        self.layout = layout
        self.pattern = pattern = pattern_of(layout)
        self.passes: list[NumberedPass] = []
        self.indices: list[int] = []
        self.microbatches: list[int] = []
        self.at = [[NONE] * len(pattern.instructions) for _ in range(num_microbatches_of(schedule))]
        self.slots: list[list[int]] = []
        parts: dict[tuple[int, str], Sequence[int]] = {}
        for slots in schedule:
            self.slots.append([])
            for slot in slots:
                self.slots[-1].append(len(self.indices))
                for (microbatch, unit, _), action in slot_passes(slot, layout):
                    key = unit, action.computation_type
                    indices = parts[key] if key in parts else parts.setdefault(key, pattern.of(*key))
                    self._add(NumberedPass(microbatch, *key, len(self.indices), indices))
            self.slots[-1].append(len(self.indices))

    def __len__(self) -> int:
        return len(self.indices)

    def _add(self, made: NumberedPass) -> None:
        places = self.at[made.microbatch]
        for place, index in enumerate(made.indices, made.start):
            places[index] = place
        self.passes.append(made)
        self.indices += made.indices
        self.microbatches += [made.microbatch] * len(made.indices)

    @cached_property
    def traffic(self) -> list[TrafficPlace]:
        """The traffic at the places from `len(self)` on."""
        last = len(self.at) - 1
        every = [(each, last) for each in self.layout.traffic]
        every += [(each, earlier) for earlier in range(last) for each in self.layout.traffic if each.every_microbatch]
        return [
            TrafficPlace(each, name, op, microbatch)
            for each, microbatch in every
            for name, op in each.named_operators
            if microbatch == last or op is each.operators[0]
        ]

    @cached_property
    def _traffic_at(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for place, each in enumerate(self.traffic, len(self)):
            found.setdefault((each.traffic.unit, each.microbatch), []).append(place)
        return found

    def places_of(self, traffic: Traffic, microbatch: int) -> list[int]:
        """Returns the places of the traffic with a micro-batch's gradients, or with weights, in order."""
        if traffic.every_microbatch:
            return self._traffic_at[traffic.unit, microbatch]
        return self._traffic_at[traffic.unit, len(self.at) - 1]

    def is_reduced_often(self, place: int) -> bool:
        """Whether a place is a gradient reduction of every micro-batch."""
        if place < len(self):
            return False
        traffic, _, op, _ = self.traffic[place - len(self)]
        return traffic.every_microbatch and not op.kind.copies

    def per_place(self, values: Sequence[Value]) -> list[Value]:
        """Values of the pattern's instructions, repeated for every place."""
        return [values[index] for index in self.indices]

    def instructions(self, order: Iterable[int]) -> list[Instruction]:
        """Returns the instructions of an order of issue: here places become instructions.

        A gradient reduction has the micro-batch of the last instruction before it.
        """
        instructions, indices, microbatches = self.pattern.instructions, self.indices, self.microbatches
        made: list[Instruction] = []
        for place in order:
            if place < 0:
                made.append(Instruction(-1, barrier_of(place), None))
            elif place < len(indices):
                made.append(instructions[indices[place]].of(microbatches[place]))
            else:
                traffic, _, op, _ = self.traffic[place - len(indices)]
                microbatch = min(microbatches, default=0) if traffic.readers else made[-1].microbatch
                made.append(Instruction(microbatch, traffic.unit, op))
        return made

    def arrays(self, times: Times, traffic: bool = False) -> WindowArrays:
        """The window for given times, with or without its traffic. Raises KeyError for an operator without a time."""
        pattern, at = self.pattern, self.at
        numbers = self._numbers()
        needs: list[list[int]] = []
        for made in self.passes:
            places = at[made.microbatch]
            needs += [[places[need] for need in pattern.needs[index]] for index in made.indices]
        if len(self) < len(self.at) * len(pattern.instructions):
            needs = [[need for need in row if need != NONE] for row in needs]
        moving = self.traffic if traffic else []
        if moving:
            self._add_traffic_needs(needs)
        entries = [numbers[pattern.names[index]] for index in self.indices]
        entries += [numbers.setdefault(step.name, len(numbers)) for step in moving]
        return WindowArrays(
            self.per_place(pattern.streams) + [STREAMS.index(step.op.kind) for step in moving],
            self.seconds(times) + [times[step.name] for step in moving],
            needs,
            entries,
            list(numbers),
            self.per_place(pattern.ranks) + [self.layout.rank_of(step.traffic.unit) for step in moving],
            self.per_place(pattern.lanes) + [0] * len(moving),
            self._size_sources() + [NONE] * len(moving),
        )

    def seconds(self, times: Times) -> list[float]:
        """The time of each place, without traffic. Raises KeyError for an operator without a time."""
        operators = zip(self.pattern.names, self.pattern.operators, strict=True)
        return self.per_place([0.0 if op.receives else times[name] for name, op in operators])

    def _size_sources(self) -> list[int]:
        """The size source of each place."""
        at, sources = self.at, self.pattern.size_sources
        if all(source == NONE for source in sources):
            return [NONE] * len(self)
        places = zip(self.indices, self.microbatches, strict=True)
        return [NONE if sources[index] == NONE else at[k][sources[index]] for index, k in places]

    def _add_traffic_needs(self, needs: list[list[int]]) -> None:
        """Adds rows for the places of the traffic, and these places to other rows: a reduction needs the adders to its
        gradients, the first computation of a unit all gathers of the unit, other traffic the operator before it."""
        needs += [[] for _ in self.traffic]
        for (_, microbatch), (first, *others) in self._traffic_at.items():
            traffic, before = self.traffic[first - len(self)].traffic, first
            adders = (self.at[microbatch][index] for index in self.pattern.adders_of(traffic))
            needs[first] += [each for each in adders if each != NONE]
            for place in others:
                needs[place].append(before)
                before = place
            for reader in traffic.readers:
                self._await(reader, before, needs)

    def _await(self, unit: int, place: int, needs: list[list[int]]) -> None:
        """Adds a place to the needs of the first computation of a unit, in every micro-batch."""
        span = self.pattern.spans[unit, True]
        reader = next((index for index in span if self.pattern.streams[index] == COMPUTE), NONE)
        for places in self.at if reader != NONE else ():
            if places[reader] != NONE:
                needs[places[reader]].append(place)

    def _numbers(self) -> dict[Name, int]:
        """The operators, numbered by their first appearance."""
        numbers: dict[Name, int] = {}
        seen: set[tuple[int, str]] = set()  # equal layers may be listed with different prefetched operators
        for made in self.passes:
            kind = made.unit, made.computation_type
            if kind not in seen:
                seen.add(kind)
                for index in made.indices:
                    numbers.setdefault(self.pattern.names[index], len(numbers))
        return numbers


def pattern_of(layout: Layout) -> Pattern:
    """The pattern of a layout; made once."""
    pattern = layout.derived.get("pattern")
    if not isinstance(pattern, Pattern):
        pattern = layout.derived["pattern"] = Pattern(layout)
    return pattern
