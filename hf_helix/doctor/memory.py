"""The memory of a rank, by part: weights, gradients, states, and the peak of a window.

In:   a rank's weights, a case, whose options say how replicas shard them; the memory allocated by operators, and a
      rank's program or schedule.
Out:  `Memory`, in bytes; `Peak`s of a program, operator by operator, or of a schedule.
Must hold: trained weights, gradients and states are in fp32, frozen weights in the type of the loaded model. In a
program, memory is freed after the last holder releases it (`hf_helix.doctor.amounts.lifetimes`);
collectives in flight are holders. Releases follow `hf_helix.runtime.streams.streams`: on a GPU an event keeps the
buffers until the compute stream waits for the event, or until nothing refers to the event; on a CPU a thread releases
the buffers at the end of the collective. A value sent to another stage is freed when the next transfer begins.
`hf_helix.planning.choice.memory` counts schedules.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from hf_helix.doctor.amounts.records import GRADIENT, PARAMETER, Amounts, Storage, Weights, outputs_of
from hf_helix.doctor.case import ELEMENT, Case
from hf_helix.planning.choice.memory import Passes, Peak
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.parameters import Adder
from hf_helix.planning.schedule.actions import Schedule, Slot
from hf_helix.planning.timing.operator_clock import Timeline
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES
from hf_helix.planning.traffic import BUCKET_BYTES, BucketMember
from hf_helix.planning.window.instructions import Instruction, entry_of
from hf_helix.planning.window.layout import Key, Layout
from hf_helix.planning.window.passes import MAX_COPIES

Drawing = tuple[Sequence[Instruction], Timeline]
"""The programs of all ranks, and their timeline."""


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


def needs_text(needed: float, budget: float, least: str = "with all that saves memory", exact: bool = True) -> str:
    """Returns why bytes do not fit.

    Args:
        needed: the bytes.
        budget: the bytes of a device.
        least: what they are for, or what saves memory.
        exact: whether more are not needed.
    """
    more = f", {bytes_text(needed - budget)} too much" if bytes_text(needed) == bytes_text(budget) else ""
    needed_text = bytes_text(needed) if exact else f"at least {bytes_text(needed)}"
    return f"needs {needed_text} of a device that has {bytes_text(budget)}{more}, {least}"


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
        case: the case, whose options place weights and states.
    """
    held, on_host = held_weights(amounts, layout, rank), bool(case.config.offload)
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
    for row in amounts.parameters:
        if row.flat is not None and row.flat.is_kept and row.flat.itemsize == PARAMETER:
            ranks = case.place.sharers(row.cut.mesh_axis).shards.size
            held = names.count(amounts.layout.units[row.units[0]]) * PARAMETER * row.most_elements(case.place)
            total += held * (1 if case.config.offload else 1 - 1 / ranks)
    return total


# -- of a program ------------------------------------------------------------------------------------------------------

ACTIVATIONS, WEIGHTS, GRADIENTS = range(3)  # sorts of memory, in the order of `Peak`

Span = tuple[int, int, int, int]
"""Allocated memory: its begin, its end, its sort, its bytes. Times of a program are counted in half steps: 2 p is the
time of the instruction at place p, 2 p + 1 the time between the instruction and the next."""

NEVER = sys.maxsize  # the end of memory that outlives a program


def memory_of_program(
    amounts: Amounts, layout: Layout, program: Sequence[Instruction], held: Held | None = None
) -> Iterator[Peak]:
    """Yields the most memory during each instruction of a rank, without batches; collectives keep their buffers as in
    `held`.

    Gradients are part of it with sharded weights only: other gradients also live between windows.
    """
    changes = [[0, 0, 0] for _ in range(2 * len(program))]
    for spans in (
        _spans_of_values(amounts, layout, program, held or {}),
        _spans_of_gradients(amounts, layout, program),
    ):
        for begin, end, sort, count in spans:
            changes[begin][sort] += count
            if end < len(changes):
                changes[end][sort] -= count
    activations = weights = gradients = 0
    for time, change in enumerate(changes):
        activations, weights, gradients = activations + change[0], weights + change[1], gradients + change[2]
        if time % 2 == 0:
            yield Peak(activations, weights, gradients)


def memory_of_window(
    amounts: Amounts, layout: Layout, drawn: Drawing, host_runs_ahead: bool
) -> Iterator[tuple[Sequence[int], Iterator[Peak]]]:
    """Yields, for each rank, the places of its instructions in the programs, and `memory_of_program`; where the host
    runs ahead (`host_runs_ahead`, on GPUs) collectives hold their buffers until computation waits for them, else until
    their end."""
    programs, timeline = drawn
    places: list[list[int]] = [[] for _ in range(layout.num_ranks)]
    for place, made in enumerate(programs):
        places[layout.rank_of(made.unit)].append(place)
    for mine in places:
        program = [programs[place] for place in mine]
        starts, ends = ([times[place] for place in mine] for times in (timeline.starts, timeline.ends))
        held = held_until_waited(program) if host_runs_ahead else held_until_over(program, starts, ends)
        yield mine, memory_of_program(amounts, layout, program, held)


def peaks_of_window(amounts: Amounts, layout: Layout, drawn: Drawing, host_runs_ahead: bool) -> list[Peak]:
    """Returns the peak memory of each rank, see `memory_of_window`."""
    by_rank = (memory for _, memory in memory_of_window(amounts, layout, drawn, host_runs_ahead))
    return [_largest(memory) for memory in by_rank]


def peaks_of_programs(amounts: Amounts, layout: Layout, programs: Sequence[Sequence[Instruction]]) -> list[Peak]:
    """Returns the peak memory of each rank on devices whose host runs ahead, for which the times of instructions do not
    matter; `programs` are the instructions of each rank."""
    return [_largest(memory_of_program(amounts, layout, mine, held_until_waited(mine))) for mine in programs]


def _largest(memory: Iterator[Peak]) -> Peak:
    return max(memory, key=lambda peak: peak.total, default=Peak())


def _spans_of_values(amounts: Amounts, layout: Layout, program: Sequence[Instruction], held: Held) -> Iterator[Span]:
    """Yields the spans of operators' results, and of their workspaces; from the end of a program on, if the ends
    of values are known."""
    ends: dict[tuple[int, object], int] = {}  # of values and entries by micro-batch, and of micro-batches
    known: dict[tuple[int, str], list[tuple[Storage, list[object]]]] = {}  # memory left, by operator, with its holders
    transfer = NEVER  # the next transfer, at which a sent value is freed
    for place in range(len(program) - 1, -1, -1):
        instruction, now, after = program[place], 2 * place, 2 * place + 1
        op, microbatch, unit = instruction.operator, instruction.microbatch, instruction.unit
        if op is None or op.is_traffic:
            continue
        for key in instruction.frees:
            ends[microbatch, key] = transfer if op.sends else after
        if instruction.ends:
            ends[microbatch, None] = after
        name, sort = entry_of(instruction, layout), WEIGHTS if op.ahead else ACTIVATIONS
        if (unit, name[1]) not in known:
            received = Storage(amounts.handed_on, tuple(value for _, value in instruction.writes), "", False)
            made = [received] if op.receives else amounts.lifetimes.left.get(name, ())
            known[unit, name[1]] = [(storage, _holders(amounts, layout, unit, storage)) for storage in made]
        left = known[unit, name[1]]
        if op.kind is Kind.PIPELINE:
            transfer, work = now, sum(storage.bytes for storage, _ in left)
        else:
            ends[microbatch, (unit, name)] = after
            work, until = amounts.operators[name].peak, held.get(place, 0)
            if until > place + 1:  # holds its inputs and its workspace beyond its issue
                for read in ((microbatch, key) for key in instruction.reads):
                    ends[read] = max(ends.get(read, NEVER), 2 * until)
                yield after, 2 * until, sort, max(0, work - sum(storage.bytes for storage, _ in left))
        yield now, after, sort, work
        for storage, holders in left:
            end = max([ends.get((microbatch, holder), NEVER) for holder in holders])
            yield after, end, WEIGHTS if storage.is_weight else ACTIVATIONS, storage.bytes


def _holders(amounts: Amounts, layout: Layout, unit: int, storage: Storage) -> list[object]:
    """Returns the values of a unit that hold memory, and the operators, as (unit, name), after which it is freed; None
    for memory without either, freed with its micro-batch."""
    holders: list[object] = [(unit, value) for value in storage.values]
    holders += [(unit, (layout.units[unit], storage.last))] if storage.last else []
    for forward, position in outputs_of(layout, unit, storage.values):
        following = layout.neighbours(unit, forward)[1]
        if following is not None:
            name = layout.units[following]
            entry = amounts.lifetimes.entering.get((name, forward, position))
            holders += [(following, (name, entry))] if entry else []
    return holders or [None]


def _spans_of_gradients(amounts: Amounts, layout: Layout, program: Sequence[Instruction]) -> Iterator[Span]:
    """Yields the spans of full gradients of shards: from the first addition until a reduction has copied them into its
    bucket, and few further buckets are in flight. The copy is made while they exist."""
    if not amounts.spread:
        return
    gradients = [each for rank in range(layout.num_ranks) for each in _sharded_gradients(amounts, layout, rank)]
    sizes = [each.bytes for each in gradients]
    added: dict[Adder, list[int]] = {}  # gradients by adder
    for number, gradient in enumerate(gradients):
        for adder in gradient.adders:
            added.setdefault(adder, []).append(number)
    adding = {each.unit: set(each.adders) for each in layout.reductions}
    reduced = {
        unit: [number for number, each in enumerate(gradients) if adders.issuperset(each.adders)]
        for unit, adders in adding.items()
    }
    copying = [2 * place for place, made in enumerate(program) if _reduces(made)]
    ends = iter([*copying[MAX_COPIES + 1 :], *[NEVER] * (MAX_COPIES + 1)])
    begun: dict[int, int] = {}  # the begins of live gradients
    for place, made in enumerate(program):
        now, op = 2 * place, made.operator
        if _reduces(made):
            mine, end = {number: begun.pop(number) for number in reduced[made.unit] if number in begun}, next(ends)
            yield now, now + 1, GRADIENTS, sum(sizes[number] for number in mine)
            yield from ((begin, end, GRADIENTS, sizes[number]) for number, begin in mine.items())
        elif op is not None and op.part in (Part.B, Part.W):
            for number in added.get((made.unit, op.name), ()):
                begun.setdefault(number, now)
    yield from ((begin, NEVER, GRADIENTS, sizes[number]) for number, begin in begun.items())


def _reduces(instruction: Instruction) -> bool:
    """Returns whether an instruction reduces gradients, and does not copy them to the host."""
    op = instruction.operator
    return op is not None and op.is_traffic and op.part is Part.B and not op.kind.copies


def _sharded_gradients(amounts: Amounts, layout: Layout, rank: int) -> list[BucketMember]:
    """Returns the gradients that replicas shard, in the order of completion."""
    gradients = amounts.completed_gradients(layout, rank, amounts.counted_place) if amounts.spread else ()
    return [member for _, member in gradients if member.is_sharded]


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
    """Returns the bytes of full gradients of a rank that shards them: all, but if every micro-batch is reduced
    (`often`, or a window of a single one) only those in flight, and in backward or in two copies. Weights of several
    units are reduced once in a window."""
    buckets: dict[tuple[object, bool], int] = {}
    for each in _sharded_gradients(amounts, layout, rank):
        key = each.flat, is_single or (often and len({unit for unit, _ in each.adders}) == 1)
        buckets[key] = buckets.pop(key, 0) + each.bytes
    kept = sum(size for (_, goes), size in buckets.items() if not goes)
    sizes = [size for (_, goes), size in buckets.items() if goes]
    ends = range(len(sizes))
    flights = (sum(sizes[max(0, end - MAX_COPIES) : end + 1]) + max(sizes[end : end + 2]) for end in ends)
    return kept + max(flights, default=0)


# -- collectives in flight ---------------------------------------------------------------------------------------------


COLLECTIVE = (Kind.INTRA_NODE, Kind.INTER_NODE)

Held = Mapping[int, int]  # index of a collective -> index of the instruction before which its buffers are released


def held_until_waited(program: Sequence[Instruction]) -> Held:
    """Returns the releases of a program on a GPU: when the compute stream waits for a value of the collective; without
    a wait when nothing refers to its event any more, neither a value nor a collective that has read a value."""
    until: dict[int, int] = {}
    ends: dict[tuple[int, Key], tuple[int, bool]] = {}  # the end of the event of a value, and whether by a wait
    readers: dict[tuple[int, Key], list[int]] = {}  # collectives that read a value before its end
    of_batch: dict[int, tuple[int, bool]] = {}  # the wait for all collectives of a micro-batch
    barrier = NEVER, False  # the wait for all but prefetches
    for place in range(len(program) - 1, -1, -1):
        instruction, waited = program[place], (place, True)
        op, microbatch = instruction.operator, instruction.microbatch
        if op is None:
            barrier = waited
            continue
        if instruction.ends:
            of_batch[microbatch] = place + 1, True
        gone = {(microbatch, key): (place + 1, False) for key in instruction.frees}
        if op.kind is Kind.COMPUTE:
            gone |= {(microbatch, key): waited for key in instruction.needs}
        elif op.kind in COLLECTIVE:  # the host waits for sizes that it reads
            sizes = (key for name, key in zip(op.reads, instruction.reads, strict=True) if name in op.host_read_sizes)
            gone |= {(microbatch, key): waited for key in sizes}
        ends |= gone
        for value in gone:
            readers.pop(value, None)
        if op.kind in COLLECTIVE:
            values = [(microbatch, key) for key in instruction.writes]
            usual = min(of_batch.get(microbatch, (NEVER, False)), (NEVER, False) if op.ahead else barrier)
            found = [min(ends.get(value, usual), usual) for value in values]
            later = [until[reader] for value in values for reader in readers.get(value, ())]
            waits = [first for first, waits in found if waits]
            until[place] = min(waits) if waits else max([*(first for first, _ in found), *later], default=NEVER)
            for key in instruction.reads:
                readers.setdefault((microbatch, key), []).append(place)
    return {place: first for place, first in until.items() if first < NEVER}


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
