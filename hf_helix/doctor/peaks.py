"""Peak memory of a window: of a program, operator by operator, or of a schedule, unit by unit.

In:   the memory allocated by operators, and a rank's program or schedule.
Out:  `Peak`s.
Must hold: in a program, memory is freed after the last holder releases it (`hf_helix.doctor.amounts.lifetimes`);
collectives in flight are holders. Releases follow the rules of `hf_helix.runtime.streams`: on a GPU an event keeps the
buffers until the compute stream waits for the event, or until nothing refers to the event; on a CPU a thread releases
the buffers at the end of the collective. A value sent to another stage is freed when the next transfer begins. Without
a program, two strands take turns layer by layer: plans need at most one layer's activations more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from hf_helix.doctor.amounts.amounts import Adders, Amounts, Gradient
from hf_helix.doctor.amounts.lifetimes import outputs_of
from hf_helix.doctor.memory import GRADIENT, Peak
from hf_helix.planning.graph.backward import RECEIVE
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.schedule.actions import Schedule, Slot
from hf_helix.planning.timing.operator_clock import Timeline
from hf_helix.planning.timing.sizes import EXPERT_COPIES
from hf_helix.planning.window.instructions import PARTS_OF, Instruction, entry_of
from hf_helix.planning.window.layout import Key, Layout, Name

# -- of a program ------------------------------------------------------------------------------------------------------


def peak_of_program(amounts: Amounts, layout: Layout, program: Sequence[Instruction], held: Held | None = None) -> Peak:
    """Returns the peak memory of a rank's program, see `memory_of_program`."""
    return max(memory_of_program(amounts, layout, program, held), key=lambda peak: peak.total, default=Peak())


def memory_of_program(
    amounts: Amounts, layout: Layout, program: Sequence[Instruction], held: Held | None = None
) -> Iterator[Peak]:
    """Yields the most memory during each instruction of a rank, without batches; collectives keep their buffers as in
    `held`.

    Gradients are part of it with sharded weights only: other gradients also live between windows.
    """
    alive = _LiveMemory(amounts, layout)
    held = held or {}
    landing: dict[int, list[_Block]] = {}
    for place, instruction in enumerate(program):
        for block in landing.pop(place, ()):
            alive.let_go(block)
        alive.begin()
        until = held.get(place, 0)
        if instruction.operator and (blocks := alive.run(instruction, holds=until > place + 1)):
            landing.setdefault(until, []).extend(blocks)
        yield alive.peak


def peaks_of_window(
    amounts: Amounts, layout: Layout, programs: Sequence[Instruction], timeline: Timeline | None = None
) -> list[Peak]:
    """Returns the peak memory of each rank, operator by operator; with a timeline on CPUs, where collectives hold their
    buffers until their end, and without on GPUs, where they do until computation waits for them."""
    places: list[list[int]] = [[] for _ in range(layout.num_ranks)]
    for place, made in enumerate(programs):
        places[layout.rank_of(made.unit)].append(place)
    programs_of_ranks = ([programs[place] for place in mine] for mine in places)
    return [
        peak_of_program(amounts, layout, program, held_in(program, mine, timeline))
        for mine, program in zip(places, programs_of_ranks, strict=True)
    ]


def held_in(program: Sequence[Instruction], places: Sequence[int], timeline: Timeline | None) -> Held:
    """Returns the releases of a rank's program, which stands at these places of a timeline; without a timeline, on a
    GPU."""
    if timeline is None:
        return held_until_waited(program)
    starts, ends = ([times[place] for place in places] for times in (timeline.starts, timeline.ends))
    return held_until_over(program, starts, ends)


ACTIVATIONS, WEIGHTS, GRADIENTS = range(3)  # sorts of memory, in the order of `Peak`


@dataclass(eq=False, slots=True)
class _Block:
    """A live allocation of a sort (`ACTIVATIONS` or `WEIGHTS`), freed without holders."""

    bytes: int
    sort: int
    holders: int = 0


class _LiveMemory:
    """Live memory of a rank during a program, and its peak since `begin`."""

    def __init__(self, amounts: Amounts, layout: Layout) -> None:
        self.peak = Peak()
        self._amounts, self._layout = amounts, layout
        self._now = [0, 0, 0]
        self._values: dict[tuple[int, Key], list[_Block]] = {}  # by micro-batch; freed with the value
        self._kept: dict[tuple[int, Key], list[_Block]] = {}  # by micro-batch; freed after an entry of a unit
        self._sent: list[_Block] = []
        self._adding: dict[tuple[int, str], list[tuple[object, Gradient]]] = {}
        for rank in range(layout.num_ranks):
            for made, adders in _sharded_gradients(amounts, layout, rank):
                for adder in adders:
                    self._adding.setdefault(adder, []).append(((adders, id(made)), made))
        self._begun: set[object] = set()

    def begin(self) -> None:
        """Begins a peak anew, with what is live."""
        self.peak = Peak(*self._now)

    def run(self, instruction: Instruction, holds: bool = False) -> list[_Block]:
        """Counts the allocations of an instruction, and the releases after it. Returns the blocks held by the
        instruction, if it holds its inputs and its workspace beyond its issue."""
        held: list[_Block] = []
        op, microbatch, unit = instruction.operator, instruction.microbatch, instruction.unit
        assert op is not None
        if op.kind is Kind.GRADIENTS:  # copied into one bucket
            if self._amounts.spread:
                whole = self._layout.reductions[instruction.reduction].bytes
                self._see(whole, GRADIENTS)
                if holds:  # the bucket, in addition to this rank's shard of the sum
                    self._now[GRADIENTS] += whole // min(self._amounts.spread.values())
                    self._see(0, GRADIENTS)
            return held
        if op.kind is Kind.PIPELINE:
            while self._sent:
                self._release(self._sent.pop())
            if op.receives:
                self._keep(instruction, self._amounts.handed_on, [name for _, name in instruction.writes])
                self._see(0, ACTIVATIONS)
        else:
            name = entry_of(instruction, self._layout)
            for key, made in self._adding.pop((unit, op.name), ()):  # gradients begin with their first addition
                if key not in self._begun:
                    self._begun.add(key)
                    self._now[GRADIENTS] += GRADIENT * made.elements
            self._see(self._amounts.operators[name].peak, WEIGHTS if op.ahead else ACTIVATIONS)
            for storage in self._amounts.lifetimes.left.get(name, ()):
                sort = WEIGHTS if storage.is_weight else ACTIVATIONS
                self._keep(instruction, storage.bytes, storage.values, storage.last, sort)
            held = self._held(instruction, name, WEIGHTS if op.ahead else ACTIVATIONS) if holds else held
            for block in self._kept.pop((microbatch, (unit, name[1])), ()):
                self.let_go(block)
        for key in instruction.frees:
            for block in self._values.pop((microbatch, key), ()):
                self.let_go(block, sends=op.sends)
        if instruction.ends:
            for block in self._kept.pop((microbatch, (-1, "")), ()):
                self.let_go(block)
        return held

    def _held(self, instruction: Instruction, name: Name, sort: int) -> list[_Block]:
        """Returns the blocks held by a collective in flight: its inputs, and its workspace, now counted as live."""
        left = sum(storage.bytes for storage in self._amounts.lifetimes.left.get(name, ()))
        works = _Block(max(0, self._amounts.operators[name].peak - left), sort)
        self._now[works.sort] += works.bytes
        reads = (self._values.get((instruction.microbatch, key), ()) for key in instruction.reads)
        blocks = [works, *dict.fromkeys(block for blocks in reads for block in blocks)]
        for block in blocks:
            block.holders += 1
        return blocks

    def _see(self, above: int, sort: int) -> None:
        """Raises the peak if the live bytes plus `above` temporary bytes of a sort exceed it."""
        if sum(self._now) + above > self.peak.total:
            then = list(self._now)
            then[sort] += above
            self.peak = Peak(*then)

    def _keep(
        self, instruction: Instruction, count: int, values: Sequence[str], last: str = "", sort: int = ACTIVATIONS
    ) -> None:
        """Adds a block of `count` bytes, held by its values, or by the entries after which it is freed."""
        microbatch, unit, layout = instruction.microbatch, instruction.unit, self._layout
        block = _Block(count, sort)
        entries = [(unit, last)] if last else []
        for forward, position in outputs_of(layout, unit, values):
            following = layout.neighbours(unit, forward)[1]
            if following is not None:
                entry = self._amounts.lifetimes.entering.get((layout.units[following], forward, position))
                entries += [(following, entry)] if entry else []
        holders = [(self._values, (unit, value)) for value in values]
        holders += [(self._kept, key) for key in entries or ([] if values else [(-1, "")])]
        for held, key in holders:
            held.setdefault((microbatch, key), []).append(block)
        block.holders = len(holders)
        self._now[sort] += count

    def let_go(self, block: _Block, sends: bool = False) -> None:
        """Removes one holder; frees a block without holders, at the next transfer if the block is sent."""
        block.holders -= 1
        if not block.holders:
            if sends:
                self._sent.append(block)
            else:
                self._release(block)

    def _release(self, block: _Block) -> None:
        self._now[block.sort] -= block.bytes


def _sharded_gradients(amounts: Amounts, layout: Layout, rank: int) -> Iterator[tuple[Gradient, Adders]]:
    """Yields the gradients that are sharded over replicas, each with its adders."""
    for made, adders in amounts.completed_gradients(layout, rank) if amounts.spread else ():
        if not made.is_experts or EXPERT_COPIES in amounts.spread:
            yield made, adders


# -- of a schedule -----------------------------------------------------------------------------------------------------


def peaks_of_schedules(
    amounts: Amounts, layout: Layout, schedules: Sequence[Schedule], two_strands: bool
) -> list[Peak]:
    """Returns the peak memory of each rank under its most demanding schedule; strands take turns, layer by layer, and
    two strands hold one layer more."""
    passes = _Passes(amounts, layout)
    more = passes.largest_layer() if two_strands else 0
    peaks = []
    for rank in range(layout.num_ranks):
        peak = max((_peak_of_slots(each[rank], passes) for each in schedules), key=lambda each: each.total)
        gradients = sum(GRADIENT * made.elements for made, _ in _sharded_gradients(amounts, layout, rank))
        peaks.append(Peak(peak.activations + more, peak.weights, gradients))
    return peaks


@dataclass(frozen=True)
class _Pass:
    """The change of live memory by one pass of a micro-batch through a unit."""

    delta: int = 0  # change of live bytes, including the release of `gathered`
    peak: int = 0  # largest increase of live bytes during the pass
    weights: int = 0  # the part of `delta` in gathered weights or copies of gathered weights
    weights_then: int = 0  # the increase of the bytes of gathered weights at the peak
    gathered: int = 0  # bytes of weights gathered before the pass begins
    # whether the unit sends to or receives from another stage; the next transfer frees sent values
    is_transfer: bool = False

    def then(self, other: _Pass) -> _Pass:
        """Returns the sequential composition of two passes, with the weights of both gathered first."""
        peak, weights_then = self.peak, self.weights_then
        if self.delta + other.peak > peak:
            peak, weights_then = self.delta + other.peak, self.weights + other.weights_then
        delta, weights = self.delta + other.delta, self.weights + other.weights
        return _Pass(delta, peak, weights, weights_then, self.gathered + other.gathered, self.is_transfer)


class _Passes:
    """The passes through the units of a layout."""

    def __init__(self, amounts: Amounts, layout: Layout) -> None:
        self._amounts, self._layout = amounts, layout
        self._turns = {name: turn for turn, name in enumerate(amounts.operators)}
        self._known: dict[tuple[str, str], _Pass] = {}
        self._of_slots: dict[tuple[object, ...], list[_Pass]] = {}
        entries = (op for pair in layout.graphs.values() for _, op in pair.entries())
        self.ahead = max((op.ahead for op in entries), default=0)  # units

    def through(self, unit: int, computation_type: str) -> _Pass:
        """Returns the pass through a unit, shared by all units of its name."""
        key = self._layout.units[unit], computation_type
        if key not in self._known:
            self._known[key] = self._counted(unit, computation_type)
        return self._known[key]

    def of_slot(self, slot: Slot) -> list[_Pass]:
        """Returns the passes of a slot, equal for all micro-batches."""
        forward, backward = slot.forward, slot.backward
        key = forward and forward.stage, backward and (backward.stage, backward.computation_type)
        if key not in self._of_slots:
            self._of_slots[key] = _merged(self.through(*turn) for turn in _turns(self._layout, slot))
        return self._of_slots[key]

    def largest_layer(self) -> int:
        """Returns the largest peak of a pass through a layer."""
        layers = [unit for unit, name in enumerate(self._layout.units) if self._layout.graphs[name].forward.repeats]
        return max((self.through(unit, part).peak for unit in layers for part in PARTS_OF), default=0)

    def _counted(self, unit: int, computation_type: str) -> _Pass:
        layout, forward = self._layout, computation_type == "F"
        if layout.transfers(unit):
            if computation_type == "W":
                return _Pass()
            passed = self._amounts.handed_on
            taken = forward == (layout.units[unit] == RECEIVE)
            return _Pass(passed, passed, is_transfer=True) if taken else _Pass(-passed, is_transfer=True)
        parts, name = PARTS_OF[computation_type], layout.units[unit]
        ops = {(name, entry): op for entry, op in layout.graphs[name].entries() if op.part in parts}
        whole = _Pass()
        for each in sorted(ops, key=self._turns.__getitem__):
            usage = self._amounts.operators[each]
            if ops[each].ahead:
                whole = whole.then(_Pass(gathered=usage.delta))
            else:
                whole = whole.then(_Pass(usage.delta, usage.peak, usage.weights))
        return whole


def _peak_of_slots(slots: Sequence[Slot], passes: _Passes) -> Peak:
    turns = [change for slot in slots for change in passes.of_slot(slot)]
    coming = deque(change.gathered for change in turns if change.gathered)
    alive = weights = sum(coming.popleft() for _ in range(min(passes.ahead, len(coming))))
    sent = most = then = 0
    for change in turns:
        if change.gathered and coming:
            gathered = coming.popleft()
            alive, weights = alive + gathered, weights + gathered
        delta = change.delta
        if change.is_transfer:
            alive -= sent
            sent, delta = max(0, -delta), max(0, delta)
        if alive + change.peak > most:
            most, then = alive + change.peak, weights + change.weights_then
        alive += delta
        weights += change.weights
    return Peak(most - then, then)


def _merged(passes: Iterable[_Pass]) -> list[_Pass]:
    """Returns the fewest equivalent passes: adjacent passes are composed unless a transfer or a gather separates."""
    found: list[_Pass] = []
    for change in passes:
        if found and not (found[-1].is_transfer or change.is_transfer or change.gathered):
            found[-1] = found[-1].then(change)
        else:
            found.append(change)
    return found


def _turns(layout: Layout, slot: Slot) -> Iterator[tuple[int, str]]:
    """Yields the units visited by a rank in a slot, as (unit, computation type); strands take turns."""
    entering, leaving = (
        [(unit, action.computation_type) for unit in layout.chunks[action.stage]] if action else []
        for action in (slot.forward, slot.backward)
    )
    yield from (each for pair in zip_longest(entering, leaving[::-1]) for each in pair if each)


# -- collectives in flight ---------------------------------------------------------------------------------------------


COLLECTIVE = (Kind.INTRA_NODE, Kind.INTER_NODE)

Held = Mapping[int, int]  # index of a collective -> index of the instruction before which its buffers are released


def held_until_waited(program: Sequence[Instruction]) -> Held:
    """Returns the releases of a program on a GPU."""
    events = _Events()
    for place, instruction in enumerate(program):
        op = instruction.operator
        if op is None:
            events.wait_for_all(place)
        elif op.kind in COLLECTIVE:
            events.issue(place, instruction)
        elif instruction.reduction >= 0:
            events.until[place] = len(program)  # gradient reductions are waited for at the end of the window
        elif op.kind is Kind.COMPUTE:
            for key in instruction.needs:
                events.wait(instruction.microbatch, key, place)
        for key in instruction.frees:
            events.forget(instruction.microbatch, key, place + 1)
        if instruction.ends:
            events.wait_for_microbatch(instruction.microbatch, place + 1)
    return events.until


def held_until_over(program: Sequence[Instruction], starts: Sequence[float], ends: Sequence[float]) -> Held:
    """Returns the releases of a program on a CPU, whose host thread computes while issuing; times are in seconds."""
    kinds = [made.operator.kind if made.operator is not None else None for made in program]
    computing = [place for place, kind in enumerate(kinds) if kind is Kind.COMPUTE]
    times = [starts[place] for place in computing]
    until = {}
    for place, kind in enumerate(kinds):
        if kind in COLLECTIVE:
            following = max(bisect_left(times, ends[place]), bisect_left(computing, place))
            until[place] = computing[following] if following < len(computing) else len(program)
    return until


class _Events:
    """Events of collectives, before the compute stream has waited for them; `until` are the releases so far."""

    def __init__(self) -> None:
        self.until: dict[int, int] = {}
        self._of: dict[tuple[int, Key], int] = {}  # (micro-batch, value) -> the collective that writes the value
        self._ahead: set[int] = set()
        self._after: dict[int, list[int]] = {}  # collective -> its predecessors, whose events it refers to

    def issue(self, place: int, instruction: Instruction) -> None:
        """Notes a collective after the writers of its inputs; the host waits for sizes read on the host."""
        op, microbatch = instruction.operator, instruction.microbatch
        assert op is not None
        for name, key in zip(op.reads, instruction.reads, strict=True):
            if name in op.host_read_sizes:
                self.wait(microbatch, key, place)
        self._after[place] = [self._of[microbatch, key] for key in instruction.reads if (microbatch, key) in self._of]
        for key in instruction.writes:
            self._of[microbatch, key] = place
        if op.ahead:
            self._ahead.add(place)

    def wait(self, microbatch: int, key: Key, place: int) -> None:
        """Lets the compute stream wait for the writer of a value."""
        if (microbatch, key) in self._of:
            self._let_go(self._of.pop((microbatch, key)), place)

    def forget(self, microbatch: int, key: Key, place: int) -> None:
        """Forgets a value; its event goes unless another value or a later collective refers to the event."""
        collective = self._of.pop((microbatch, key), None)
        if collective is not None and not self._is_known(collective):
            self._let_go(collective, place)

    def wait_for_microbatch(self, microbatch: int, place: int) -> None:
        """Lets the compute stream wait for all collectives of a micro-batch."""
        for number, key in list(self._of):
            if number == microbatch:
                self.wait(number, key, place)

    def wait_for_all(self, place: int) -> None:
        """Lets the compute stream wait for all collectives except prefetches."""
        for (microbatch, key), collective in list(self._of.items()):
            if collective not in self._ahead:
                self.wait(microbatch, key, place)

    def _is_known(self, collective: int) -> bool:
        return collective in self._of.values() or any(collective in before for before in self._after.values())

    def _let_go(self, collective: int, place: int) -> None:
        self.until.setdefault(collective, place)
        for earlier in self._after.pop(collective, ()):
            if earlier not in self.until and not self._is_known(earlier):
                self._let_go(earlier, place)
