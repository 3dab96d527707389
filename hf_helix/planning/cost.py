"""The cost function: from programs and measured times to the time they take.

In:   instructions in the order of issue (of several ranks: one rank after the other), seconds of every operator alone,
      and how much operators slow each other down.
Out:  a `Timeline`: start and end of every instruction.
Must hold: the same rules as the executor's. Every stream of a rank runs in the order of issue; communication starts
once everything issued before it on the compute stream is done, a computation once the values that it reads have
arrived; at a barrier the compute stream waits for the collectives but those issued ahead; the first computation of a
unit waits for its weights. The host issues in order, and blocks at an instruction whose row counts have not arrived
yet. What a rank sends to a neighbour goes over one link in order, and has arrived when it is sent. Where operators of a
rank run beside each other, each goes on at its own slowed rate, until one of them ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from hf_helix.planning.graph.operator import Kind, Operator, Part
from hf_helix.planning.instructions import Instruction
from hf_helix.planning.layout import GATHERS, SUMS, Layout
from hf_helix.planning.rank_clock import NONE, Queue, RankClock, Slowdowns

Times = Mapping[tuple[str, str], float]
"""Seconds of each operator, by the name of its unit and its entry in a plan."""

Slowdown = Callable[[tuple[str, str], tuple[str, str]], float]
"""How many times longer the first operator takes while the second runs beside it; 1 where they do not interfere."""

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


def busiest_link(loads: Iterable[tuple[str, float]]) -> float:
    """Seconds that communication takes at least: what goes over one link adds up, and links carry side by side.

    Args:
        loads: the name of a link, and seconds of communication over it; a link may come several times.
    """
    totals: dict[str, float] = {}
    for link, seconds in loads:
        totals[link] = totals.get(link, 0.0) + seconds
    return max(totals.values(), default=0.0)


@dataclass(frozen=True)
class Timeline:
    """When each instruction runs, in seconds from the start."""

    work: Work
    starts: list[float]
    ends: list[float]

    @property
    def seconds(self) -> float:
        """The seconds that the whole program takes."""
        return max(self.ends, default=0.0)

    def spans(self) -> list[tuple[str, str, int, float, float]]:
        """(stream, entry, instruction, start, end) of every operator, for pictures."""
        work = self.work
        return [
            (STREAMS[work.streams[i]].value, work.names[entry][1], i, self.starts[i], self.ends[i])
            for i, entry in enumerate(work.entries)
            if entry != NONE
        ]


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


def simulate(work: Work, slowdown: Slowdown | None = None, order: Sequence[int] | None = None) -> Timeline:
    """Runs the work on paper.

    Args:
        slowdown: see `Slowdown`; None where nothing interferes.
        order: of issue, as indices; None for the work's own.

    Raises:
        ValueError: an instruction waits for one that is issued later on its own stream.
    """
    order = range(len(work)) if order is None else order
    timeline = Timeline(work, [0.0] * len(work), [0.0] * len(work))
    done = bytearray(len(work) + 1)
    done[NONE] = 1
    slow = None if slowdown is None else Slowdowns(work, slowdown)
    ranks = [RankClock(timeline, queues, done, slow) for queues in _queues(work, order)]
    waiting = _waiting_ranks(work, len(ranks))
    events: list[tuple[float, int, int]] = []  # when something ends on a rank, the rank, and the state it was found in
    for number, rank in enumerate(ranks):
        if rank.start():
            heappush(events, (rank.now + rank.step, number, rank.state))
    left = len(order)
    while events:
        _, number, state = heappop(events)
        rank = ranks[number]
        if state != rank.state:
            continue
        ended = rank.finish()
        left -= len(ended)
        changed = [number]
        for place in ended if waiting else ():
            if place in waiting:
                changed = sorted({*changed, *waiting[place]})
        for other in changed:
            clock = ranks[other]
            if other != number:
                clock.go_on(rank.now)
            if clock.start():
                heappush(events, (clock.now + clock.step, other, clock.state))
    if left:
        raise ValueError(f"the order cannot run: {left} instructions wait for later ones")
    return timeline


def _waiting_ranks(work: Work, num_ranks: int) -> dict[int, list[int]]:
    """The ranks that wait for an instruction of another."""
    waiting: dict[int, list[int]] = {}
    for rank, needs in zip(work.ranks, work.needs, strict=True) if num_ranks > 1 else ():
        for need in needs:
            if work.ranks[need] != rank:
                waiting.setdefault(need, []).append(rank)
    return waiting


def _queues(work: Work, order: Sequence[int]) -> list[list[Queue]]:
    """The queues of every rank."""
    numbers = work.queues()
    queues: list[Queue] = [[] for _ in range(max(numbers, default=-1) + 1)]
    ranks = [0] * len(queues)
    last: dict[int, int] = {}
    known: dict[int, int] = {}
    for place in order:
        rank, computes = work.rank(place), work.streams[place] == COMPUTE
        ranks[numbers[place]] = rank
        if work.size_sources and work.size_sources[place] != NONE:
            known[rank] = work.size_sources[place]
        behind = NONE if computes else last.get(rank, NONE)
        queues[numbers[place]].append((place, behind, known.get(rank, NONE)))
        if computes:
            last[rank] = place
    return [
        [queue for queue, home in zip(queues, ranks, strict=True) if home == rank]
        for rank in range(max(ranks, default=-1) + 1)
    ]
