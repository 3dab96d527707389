"""What is alive in a window when most is: of a program, operator by operator, or of a schedule, unit by unit.

In:   the memory that operators allocate, and a rank's program or its schedule.
Out:  `Peak`s.
Must hold: of a program, each piece of memory is freed once nothing holds it any more
(`hf_helix.doctor.amounts.lifetimes`), a collective on its way included (`hf_helix.doctor.held`). Before there
are programs, two strands take turns layer by layer, which is what plans promise to need no more than (one layer's
activations apart). What is sent to another stage of the pipeline is freed when the next transfer begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from hf_helix.doctor.amounts.amounts import Adders, Amounts, Gradient
from hf_helix.doctor.amounts.lifetimes import outputs_of
from hf_helix.doctor.held import Held, held_until_over, held_until_waited
from hf_helix.doctor.memory import GRADIENT, Peak
from hf_helix.planning.graph.backward import RECEIVE
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.schedule.actions import Action, Schedule, Slot
from hf_helix.planning.timing.clock import Timeline
from hf_helix.planning.timing.sizes import EXPERT_COPIES
from hf_helix.planning.window.instructions import PARTS_OF, Instruction, entry_of
from hf_helix.planning.window.layout import Key, Layout, Name

# -- of a program ------------------------------------------------------------------------------------------------------


def peak_of_program(amounts: Amounts, layout: Layout, program: Sequence[Instruction], held: Held | None = None) -> Peak:
    """Returns what is alive while a rank runs a program, when most is.

    The batches are left out, and so are gradients unless weights are spread: else they are there between windows, too.

    Args:
        held: until when collectives hold what they read and work with; None where each ends as it is issued.
    """
    alive = _Alive(amounts, layout)
    held = held or {}
    landing: dict[int, list[_Block]] = {}
    for place, instruction in enumerate(program):
        for block in landing.pop(place, ()):
            alive.let_go(block)
        if instruction.operator is None:
            continue
        until = held.get(place, 0)
        if blocks := alive.run(instruction, holds=until > place + 1):
            landing.setdefault(until, []).extend(blocks)
    return alive.peak


def peaks_of_window(
    amounts: Amounts, layout: Layout, programs: Sequence[Instruction], timeline: Timeline | None = None
) -> list[Peak]:
    """Returns what is alive on each rank when most is, operator by operator.

    Args:
        timeline: on CPUs, when each of them runs: collectives hold memory until they are over. None on GPUs, where they
            hold it until they are waited for.
    """
    places: list[list[int]] = [[] for _ in range(layout.num_ranks)]
    for place, made in enumerate(programs):
        places[layout.rank_of(made.unit)].append(place)
    peaks = []
    for mine in places:
        program = [programs[place] for place in mine]
        if timeline is None:
            held = held_until_waited(program)
        else:
            starts, ends = ([times[place] for place in mine] for times in (timeline.starts, timeline.ends))
            held = held_until_over(program, starts, ends)
        peaks.append(peak_of_program(amounts, layout, program, held))
    return peaks


ACTIVATIONS, WEIGHTS, GRADIENTS = range(3)
"""What memory is for, in the order of `Peak`."""


@dataclass(eq=False, slots=True)
class _Block:
    """Memory that is alive.

    Attributes:
        bytes: how much.
        sort: what for, `ACTIVATIONS` or `WEIGHTS`.
        holders: how many must let go of it.
    """

    bytes: int
    sort: int
    holders: int = 0


class _Alive:
    """What is alive on a rank while it runs a program.

    Attributes:
        peak: when most was, so far.
    """

    def __init__(self, amounts: Amounts, layout: Layout) -> None:
        self.peak = Peak()
        self._amounts, self._layout = amounts, layout
        self._now = [0, 0, 0]
        self._values: dict[tuple[int, Key], list[_Block]] = {}  # by micro-batch; freed with the value
        self._kept: dict[tuple[int, Key], list[_Block]] = {}  # likewise, freed behind an entry of a unit
        self._sent: list[_Block] = []
        self._adding: dict[tuple[int, str], list[tuple[object, Gradient]]] = {}
        for rank in range(layout.num_ranks):
            for made, adders in _spread_gradients(amounts, layout, rank):
                for adder in adders:
                    self._adding.setdefault(adder, []).append(((adders, id(made)), made))
        self._begun: set[object] = set()

    def run(self, instruction: Instruction, holds: bool = False) -> list[_Block]:
        """Counts what an instruction allocates, and what is freed behind it.

        Args:
            holds: whether it holds what it reads and works with until it is let go.

        Returns:
            What it holds.
        """
        held: list[_Block] = []
        op, microbatch, unit = instruction.operator, instruction.microbatch, instruction.unit
        assert op is not None
        if op.kind is Kind.GRADIENTS:  # they are put in one piece
            if self._amounts.spread:
                whole = self._layout.reductions[instruction.reduction].bytes
                self._see(whole, GRADIENTS)
                if holds:  # the piece, beside what this rank keeps of its sum
                    self._now[GRADIENTS] += whole // min(self._amounts.spread.values())
                    self._see(0, GRADIENTS)
            return held
        if op.kind is Kind.PIPELINE:
            for block in self._sent:
                self._release(block)
            self._sent = []
            if op.receives:
                self._keep(instruction, self._amounts.handed_on, [name for _, name in instruction.writes])
                self._see(0, ACTIVATIONS)
        else:
            name = entry_of(instruction, self._layout)
            self._add_gradients(unit, op.name)
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
        """Returns what a collective holds on its way: what it reads, and what it works with, which stays alive."""
        left = sum(storage.bytes for storage in self._amounts.lifetimes.left.get(name, ()))
        works = _Block(max(0, self._amounts.operators[name].peak - left), sort)
        self._now[works.sort] += works.bytes
        reads = (self._values.get((instruction.microbatch, key), ()) for key in instruction.reads)
        blocks = [works, *dict.fromkeys(block for blocks in reads for block in blocks)]
        for block in blocks:
            block.holders += 1
        return blocks

    def _see(self, above: int, sort: int) -> None:
        """Notes that so many bytes of a sort are alive for a while above what is alive now."""
        if sum(self._now) + above > self.peak.total:
            then = list(self._now)
            then[sort] += above
            self.peak = Peak(*then)

    def _keep(
        self, instruction: Instruction, count: int, values: Sequence[str], last: str = "", sort: int = ACTIVATIONS
    ) -> None:
        """Counts memory until nothing holds it any more.

        Args:
            count: bytes.
        """
        microbatch, unit, layout = instruction.microbatch, instruction.unit, self._layout
        block = _Block(count, sort)
        entries = [(unit, last)] if last else []
        for forward, position in outputs_of(layout, unit, values):
            following = layout.neighbours(unit, forward)[1]
            if following is not None:
                entry = self._amounts.lifetimes.entering.get((layout.units[following], forward, position))
                entries += [(following, entry)] if entry else []
        for value in values:
            self._hold(self._values, (microbatch, (unit, value)), block)
        for key in entries or ([] if values else [(-1, "")]):
            self._hold(self._kept, (microbatch, key), block)
        self._now[sort] += count

    def _hold(self, held: dict[tuple[int, Key], list[_Block]], key: tuple[int, Key], block: _Block) -> None:
        held.setdefault(key, []).append(block)
        block.holders += 1

    def let_go(self, block: _Block, sends: bool = False) -> None:
        """Frees memory once the last that holds it lets go; what is sent to another stage later."""
        block.holders -= 1
        if not block.holders:
            if sends:
                self._sent.append(block)
            else:
                self._release(block)

    def _release(self, block: _Block) -> None:
        self._now[block.sort] -= block.bytes

    def _add_gradients(self, unit: int, name: str) -> None:
        """Counts the gradients that an operator is the first to add to."""
        for key, made in self._adding.pop((unit, name), ()):
            if key not in self._begun:
                self._begun.add(key)
                self._now[GRADIENTS] += GRADIENT * made.elements


def _spread_gradients(amounts: Amounts, layout: Layout, rank: int) -> Iterator[tuple[Gradient, Adders]]:
    """Yields the gradients of a rank, each with what adds to it, that become parts of several ranks."""
    for made, adders in amounts.completed_gradients(layout, rank) if amounts.spread else ():
        if not made.is_experts or EXPERT_COPIES in amounts.spread:
            yield made, adders


# -- of a schedule -----------------------------------------------------------------------------------------------------


def peaks_of_schedules(
    amounts: Amounts, layout: Layout, schedules: Sequence[Schedule], two_strands: bool
) -> list[Peak]:
    """Returns the same for every rank, of whichever schedule needs most of it, before there are programs: strands take
    turns, layer by layer.

    Args:
        two_strands: whether the plan may keep one layer more.
    """
    passes = _Passes(amounts, layout)
    more = passes.largest_layer() if two_strands else 0
    peaks = []
    for rank in range(layout.num_ranks):
        peak = max((_peak_of_slots(each[rank], passes) for each in schedules), key=lambda each: each.total)
        gradients = sum(GRADIENT * made.elements for made, _ in _spread_gradients(amounts, layout, rank))
        peaks.append(Peak(peak.activations + more, peak.weights, gradients))
    return peaks


@dataclass(frozen=True)
class _Pass:
    """What a micro-batch changes of live memory on its way through a unit.

    Attributes:
        delta: bytes, those of `gathered` that it frees again included.
        peak: bytes alive at most, above those before.
        weights: those of `delta` that are gathered weights, or copies of these.
        weights_then: likewise above those before, when most is alive.
        gathered: bytes of weights that are gathered for it, before it begins.
        is_transfer: whether the unit moves what it is given to another stage, or takes it from there; what goes is
            freed by the next of them.
    """

    delta: int = 0
    peak: int = 0
    weights: int = 0
    weights_then: int = 0
    gathered: int = 0
    is_transfer: bool = False

    def then(self, other: _Pass) -> _Pass:
        """Returns what both change, one after the other, if all that they gather is there before them."""
        peak, weights_then = self.peak, self.weights_then
        if self.delta + other.peak > peak:
            peak, weights_then = self.delta + other.peak, self.weights + other.weights_then
        delta, weights = self.delta + other.delta, self.weights + other.weights
        return _Pass(delta, peak, weights, weights_then, self.gathered + other.gathered, self.is_transfer)


class _Passes:
    """What passes through the units of a layout change."""

    def __init__(self, amounts: Amounts, layout: Layout) -> None:
        self._amounts, self._layout = amounts, layout
        self._turns = {name: turn for turn, name in enumerate(amounts.operators)}
        self._known: dict[tuple[str, str], _Pass] = {}
        self._of_slots: dict[tuple[object, ...], list[_Pass]] = {}
        entries = (op for pair in layout.graphs.values() for _, op in pair.entries())
        self.ahead = max((op.ahead for op in entries), default=0)  # units

    def through(self, unit: int, computation_type: str) -> _Pass:
        """Returns what a pass through a unit changes; units of one name change the same."""
        key = self._layout.units[unit], computation_type
        if key not in self._known:
            self._known[key] = self._counted(unit, computation_type)
        return self._known[key]

    def of_slot(self, slot: Slot) -> list[_Pass]:
        """Returns the passes of a slot; all micro-batches change the same."""
        forward, backward = slot.forward, slot.backward
        key = forward and forward.stage, backward and (backward.stage, backward.computation_type)
        if key not in self._of_slots:
            self._of_slots[key] = _merged(self.through(*turn) for turn in _turns(self._layout, slot))
        return self._of_slots[key]

    def largest_layer(self) -> int:
        """Returns the most that a pass through a layer works with."""
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
    """Returns passes that change the same, as few of them as there can be: those between which nothing else is freed or
    gathered are one."""
    found: list[_Pass] = []
    for change in passes:
        if found and not (found[-1].is_transfer or change.is_transfer or change.gathered):
            found[-1] = found[-1].then(change)
        else:
            found.append(change)
    return found


def _turns(layout: Layout, slot: Slot) -> Iterator[tuple[int, str]]:
    """Yields the units that a rank comes to, each with the computation type: strands take turns."""
    entering = _units(layout, slot.forward) if slot.forward else []
    leaving = _units(layout, slot.backward)[::-1] if slot.backward else []
    yield from (each for pair in zip_longest(entering, leaving) for each in pair if each)


def _units(layout: Layout, action: Action) -> list[tuple[int, str]]:
    return [(unit, action.computation_type) for unit in layout.chunks[action.stage]]
