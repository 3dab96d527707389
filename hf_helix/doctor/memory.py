"""The memory of a rank, by part: weights, gradients, states, and the peak of a window.

In:   a rank's weights, a case, whose options say how replicas shard them; the memory allocated by operators, and a
      rank's program or schedule.
Out:  `Memory`, in bytes; `Peak`s of a program, operator by operator, or of a schedule.
Must hold: trained weights, gradients and states are in fp32, frozen weights in the type of the loaded model. In a
program, memory is freed after the last holder releases it (`hf_helix.doctor.amounts.lifetimes`);
collectives in flight are holders. Releases follow the rules of `hf_helix.runtime.streams`: on a GPU an event keeps the
buffers until the compute stream waits for the event, or until nothing refers to the event; on a CPU a thread releases
the buffers at the end of the collective. A value sent to another stage is freed when the next transfer begins.
`hf_helix.planning.schedule.memory` counts schedules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from hf_helix.doctor.amounts.amounts import Adders, Amounts, Gradient, Weights
from hf_helix.doctor.amounts.lifetimes import outputs_of
from hf_helix.doctor.case import ELEMENT, GRADIENT, PARAMETER, Case
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.schedule.actions import Schedule, Slot
from hf_helix.planning.schedule.memory import Passes, Peak
from hf_helix.planning.timing.operator_clock import Timeline
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES
from hf_helix.planning.window.instructions import Instruction, entry_of
from hf_helix.planning.window.layout import Key, Layout, Name
from hf_helix.planning.window.passes import BUCKET_BYTES, MAX_COPIES


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank."""

    weights: float  # parameters, or the rank's shard of parameters
    gradients: float
    states: float
    copies: float  # copies of weights during a window: cast to the type of matrix products, or gathered
    activations: float  # peak of activations and workspace
    buffers: float  # buffers of gradient reduction

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Returns the bytes by part."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def bytes_text(count: float) -> str:
    """Returns bytes as text in a readable unit, like "43.7 GB"."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def needs_text(needed: float, budget: float) -> str:
    """Returns why bytes do not fit."""
    more = f", {bytes_text(needed - budget)} too much" if bytes_text(needed) == bytes_text(budget) else ""
    return f"needs {bytes_text(needed)} of a device that has {bytes_text(budget)}{more}, with all that saves memory"


def held_weights(amounts: Amounts, layout: Layout, rank: int) -> Weights:
    """Returns the full parameters of a pipeline rank."""
    names = [layout.units[unit] for unit in layout.units_of(rank)]
    weights = [amounts.weights[name] for name in names if name in amounts.weights]
    return Weights(
        trained=sum(each.trained for each in weights),
        experts=sum(each.experts for each in weights),
        frozen=sum(each.frozen for each in weights),
        frozen_experts=sum(each.frozen_experts for each in weights),
        frozen_itemsize=max((each.frozen_itemsize for each in weights), default=PARAMETER),
    )


def frozen_bytes(held: Weights, case: Case) -> float:
    """Returns the bytes of frozen weights of a rank, given its unsharded weights."""
    if case.streams_weights:
        return 0.0
    ranks = case.spread_weights
    elements = held.frozen / ranks.get(COPIES, 1) + held.frozen_experts / ranks.get(EXPERT_COPIES, 1)
    return held.frozen_itemsize * elements


def memory_of(amounts: Amounts, layout: Layout, rank: int, peak: Peak, case: Case) -> Memory:
    """Returns the memory of a pipeline rank.

    Args:
        amounts: the amounts of a rank.
        layout: the units of all ranks.
        rank: the pipeline rank.
        peak: the peak of its window.
        case: the case, whose options say where weights and states lie.
    """
    held, on_host = held_weights(amounts, layout, rank), bool(case.offload)
    trained, mine = held.all_trained, case.stepped(held.trained, held.experts)
    names = [layout.units[unit] for unit in layout.units_of(rank)]
    copies: float = sum(amounts.copies.get(name, 0) for name in names) + peak.weights
    gradients: float = GRADIENT * trained
    buffers: float = 0
    if case.spread_weights:
        gradients, copies = GRADIENT * mine + peak.gradients, copies + case.keeps_copies * ELEMENT[case.dtype] * mine
    elif case.spread_gradients or on_host:  # a gradient reduction holds the gradients of a unit in a second buffer
        gradients += 0 if on_host else GRADIENT * mine
        copies += _unsharded_bytes(amounts, names, case)
        units = [amounts.weights[name] for name in names if name in amounts.weights]
        buffers = GRADIENT * max((each.all_trained for each in units), default=0)
    elif case.sizes.copies > 1:
        buffers = min(BUCKET_BYTES, GRADIENT * trained)
    return Memory(
        weights=(0 if on_host else PARAMETER * mine) + frozen_bytes(held, case),
        gradients=gradients,
        states=0 if on_host else case.state_bytes * mine,
        copies=copies,
        activations=peak.activations,
        buffers=buffers,
    )


def _unsharded_bytes(amounts: Amounts, names: Sequence[str], case: Case) -> float:
    """Returns the bytes of full fp32 weights outside this rank's shard on the device; other types count as copies
    already."""
    total = 0.0
    for kept in amounts.kept:
        if kept.element_bytes == PARAMETER:
            ranks = case.spread_gradients.get(kept.axis, 1)
            total += names.count(kept.units[0]) * kept.bytes * (1 if case.offload else 1 - 1 / ranks)
    return total


# -- of a program ------------------------------------------------------------------------------------------------------


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


def memory_of_window(
    amounts: Amounts, layout: Layout, programs: Sequence[Instruction], timeline: Timeline | None = None
) -> Iterator[tuple[Sequence[int], Iterator[Peak]]]:
    """Yields, for each rank, the places of its instructions in the programs, and `memory_of_program`; with a timeline
    on CPUs, where collectives hold their buffers until their end, and without on GPUs, where they do until computation
    waits for them."""
    places: list[list[int]] = [[] for _ in range(layout.num_ranks)]
    for place, made in enumerate(programs):
        places[layout.rank_of(made.unit)].append(place)
    for mine in places:
        program = [programs[place] for place in mine]
        yield mine, memory_of_program(amounts, layout, program, held_in(program, mine, timeline))


def peaks_of_window(
    amounts: Amounts, layout: Layout, programs: Sequence[Instruction], timeline: Timeline | None = None
) -> list[Peak]:
    """Returns the peak memory of each rank, see `memory_of_window`."""
    by_rank = (memory for _, memory in memory_of_window(amounts, layout, programs, timeline))
    return [max(memory, key=lambda peak: peak.total, default=Peak()) for memory in by_rank]


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
        self._reduces: list[list[object]] = [[] for _ in layout.reductions]  # the gradients of each reduction
        adding = [set(each.adders) for each in layout.reductions]
        for rank in range(layout.num_ranks):
            for made, adders in _sharded_gradients(amounts, layout, rank):
                for adder in adders:
                    self._adding.setdefault(adder, []).append(((adders, id(made)), made))
                for number in (number for number, of_all in enumerate(adding) if of_all.issuperset(adders)):
                    self._reduces[number].append((adders, id(made)))
        self._begun: dict[object, int] = {}  # bytes of live gradients
        self._reduced: deque[int] = deque()  # bytes of the buckets in flight

    def begin(self) -> None:
        """Begins a peak anew, with what is live."""
        self.peak = Peak(*self._now)

    def run(self, instruction: Instruction, holds: bool = False) -> list[_Block]:
        """Counts the allocations of an instruction, and the releases after it. Returns the blocks held by the
        instruction, if it holds its inputs and its workspace beyond its issue."""
        held: list[_Block] = []
        op, microbatch, unit = instruction.operator, instruction.microbatch, instruction.unit
        assert op is not None
        if instruction.is_per_step:  # copied into one bucket, while few are in flight
            if self._amounts.spread and not op.kind.copies:
                while len(self._reduced) > MAX_COPIES:
                    self._now[GRADIENTS] -= self._reduced.popleft()
                mine = self._reduces[instruction.reduction]
                self._reduced.append(sum(self._begun.pop(key, 0) for key in mine))
                self._see(self._reduced[-1], GRADIENTS)
            return held
        if op.kind is Kind.PIPELINE:
            while self._sent:
                self._release(self._sent.pop())
            if op.receives:
                self._keep(instruction, self._amounts.handed_on, [name for _, name in instruction.writes])
                self._see(0, ACTIVATIONS)
        else:
            name = entry_of(instruction, self._layout)
            adding = self._adding.get((unit, op.name), ()) if op.part in (Part.B, Part.W) else ()
            for key, made in adding:  # gradients begin with their first addition
                if key not in self._begun:
                    self._begun[key] = GRADIENT * made.elements
                    self._now[GRADIENTS] += self._begun[key]
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
    amounts: Amounts, layout: Layout, schedules: Sequence[Schedule], two_strands: bool, often: bool = False
) -> list[Peak]:
    """Returns the peak memory of each rank under its most demanding schedule; `often`: whether gradients of shards are
    reduced in every micro-batch."""
    passes = Passes(amounts.operators, layout, amounts.handed_on, two_strands)
    peaks = []
    for rank in range(layout.num_ranks):
        peak = max((passes.peak(each[rank]) for each in schedules), key=lambda each: each.total)
        is_single = all(len(_microbatches(each[rank])) == 1 for each in schedules)
        peaks.append(replace(peak, gradients=full_gradients(amounts, layout, rank, is_single, often)))
    return peaks


def _microbatches(slots: Sequence[Slot]) -> set[int]:
    return {action.microbatch for slot in slots for action in slot.actions}


def full_gradients(amounts: Amounts, layout: Layout, rank: int, is_single: bool, often: bool) -> int:
    """Returns the bytes of full gradients of a rank that shards them: all, but where every micro-batch is reduced
    (`often`, or a window of a single one) only those in flight, and in backward or in two copies. Weights of several
    units are reduced once in a window."""
    buckets: dict[tuple[int, str, bool], int] = {}
    for made, adders in _sharded_gradients(amounts, layout, rank):
        units = {unit for unit, _ in adders}
        key = min(units), made.flat, is_single or (often and len(units) == 1)
        buckets[key] = buckets.pop(key, 0) + GRADIENT * made.elements
    kept = sum(size for (*_, goes), size in buckets.items() if not goes)
    sizes = [size for (*_, goes), size in buckets.items() if goes]
    ends = range(len(sizes))
    flights = (sum(sizes[max(0, end - MAX_COPIES) : end + 1]) + max(sizes[end : end + 2]) for end in ends)
    return kept + max(flights, default=0)


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
