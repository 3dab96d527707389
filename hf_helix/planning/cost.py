"""The cost function: from programs and measured times to the time they take.

In:   instructions in the order of issue (of several ranks: one rank after the other), seconds of every operator alone,
      and how much operators slow each other down.
Out:  a `Timeline`: start and end of every instruction.
Must hold: the same rules as the executor's. Every stream of a rank runs in the order of issue; communication starts
once everything issued before it on the compute stream is done, a computation once the values that it reads have
arrived; at a barrier the compute stream waits for the collectives; nothing is issued before sizes have arrived that the
host must know for what comes before it. What a rank sends to a neighbour goes over one link
in order, and has arrived when it is sent. Where operators of a rank run beside each other, each goes on at its own
slowed rate, until one of them ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hf_helix.planning.graph.operator import Kind, Operator, Part
from hf_helix.planning.instructions import Instruction
from hf_helix.planning.layout import Layout

Times = Mapping[tuple[str, str], float]
"""Seconds of each operator, by the name of its unit and its entry in a plan."""

Slowdown = Callable[[tuple[str, str], tuple[str, str]], float]
"""How many times longer the first operator takes while the second runs beside it; 1 where they do not interfere."""

STREAMS = (Kind.COMPUTE, Kind.INTRA_NODE, Kind.INTER_NODE, Kind.PIPELINE)
COMPUTE = STREAMS.index(Kind.COMPUTE)
_NONE = -1


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
        hosts: of each instruction, the one that brings sizes which the host must know to issue it, or -1; empty where
            it is -1 for all.
    """

    streams: list[int]
    seconds: list[float]
    needs: list[list[int]]
    entries: list[int]
    names: list[tuple[str, str]]
    ranks: list[int] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)
    hosts: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.streams)

    def rank(self, place: int) -> int:
        """The pipeline rank of an instruction."""
        return self.ranks[place] if self.ranks else 0

    def queues(self) -> list[int]:
        """Of each instruction, the number of its queue; instructions of one queue run one after the other."""
        ranks, lanes = self.ranks or [0] * len(self), self.lanes or [0] * len(self)
        numbers: dict[tuple[int, int, int], int] = {}
        return [numbers.setdefault(key, len(numbers)) for key in zip(ranks, self.streams, lanes, strict=True)]

    def paced(self, pace: float) -> Work:
        """The same, with computations that take so many times as long."""
        seconds = [each * pace if at == COMPUTE else each for each, at in zip(self.seconds, self.streams, strict=True)]
        return replace(self, seconds=seconds)

    def loads(self) -> dict[Kind, float]:
        """Seconds of work on each stream of the rank that has most."""
        totals: dict[tuple[int, int], float] = {}
        for place, key in enumerate(zip(self.ranks or [0] * len(self), self.streams, strict=True)):
            totals[key] = totals.get(key, 0.0) + self.seconds[place]
        return {
            kind: max((seconds for (_, stream), seconds in totals.items() if stream == number), default=0.0)
            for number, kind in enumerate(STREAMS)
        }


@dataclass(frozen=True)
class Timeline:
    """When each instruction runs, in seconds from the start."""

    work: Work
    starts: list[float]
    ends: list[float]

    @property
    def seconds(self) -> float:
        """Of the whole program."""
        return max(self.ends, default=0.0)

    def spans(self) -> list[tuple[str, str, int, float, float]]:
        """(stream, entry, instruction, start, end) of every operator, for pictures."""
        work = self.work
        return [
            (STREAMS[work.streams[i]].value, work.names[entry][1], i, self.starts[i], self.ends[i])
            for i, entry in enumerate(work.entries)
            if entry != _NONE
        ]


def entry_of(instruction: Instruction, layout: Layout) -> tuple[str, str]:
    """The unit's name and the entry in a plan of what an instruction runs."""
    op = instruction.operator
    assert op is not None
    return layout.units[instruction.unit], f"{'F' if op.part is Part.F else 'B'}.{op.name}"


def work_of(program: Sequence[Instruction], layout: Layout, times: Times) -> Work:
    """The numbers of a program, or of several ranks' programs one after the other.

    Raises:
        KeyError: `times` lacks an operator.
    """
    numbers: dict[tuple[str, str], int] = {}
    work = Work([], [], [], [], [])
    writers: dict[tuple[int, object], int] = {}
    forwards: dict[tuple[int, int, str], int] = {}
    pending: dict[int, list[int]] = {}
    sent = _senders(program)
    for place, instruction in enumerate(program):
        op, rank = instruction.operator, layout.rank_of(instruction.unit)
        work.ranks.append(rank)
        if op is None:
            work.streams.append(COMPUTE)
            work.lanes.append(0)
            work.seconds.append(0.0)
            work.hosts.append(_NONE)
            work.needs.append(pending.pop(rank, []))
            work.entries.append(_NONE)
            continue
        name = entry_of(instruction, layout)
        microbatch = instruction.microbatch
        needs = [writers[microbatch, key] for key in instruction.needs if (microbatch, key) in writers]
        place_of_call = (microbatch, instruction.unit, op.forward_name)
        if op.part is Part.F:
            forwards[place_of_call] = place
        elif place_of_call in forwards and op.kind is not Kind.PIPELINE:
            needs.append(forwards[place_of_call])  # what forward kept for backward
        for key in instruction.writes:
            writers[microbatch, key] = place
        if op.kind.communicates and op.kind is not Kind.PIPELINE:
            pending.setdefault(rank, []).append(place)
        if op.receives:
            needs += [sent[key] for key in [_passage(instruction)] if key in sent]
        work.streams.append(STREAMS.index(op.kind))
        work.lanes.append(_lane(instruction, op, layout))
        work.seconds.append(0.0 if op.receives else times[name])
        work.needs.append(list(dict.fromkeys(needs)))
        keys = [key for name, key in zip(op.reads, instruction.reads, strict=True) if name in op.host_read_sizes]
        brought = [writers[microbatch, key] for key in keys if (microbatch, key) in writers]
        work.hosts.append(max((each for each in brought if work.streams[each] != COMPUTE), default=_NONE))
        work.entries.append(numbers.setdefault(name, len(numbers)))
    work.names.extend(numbers)
    return work


def _senders(program: Sequence[Instruction]) -> dict[tuple[int, bool, int], int]:
    """What is sent between ranks -> the instruction that sends it."""
    return {
        _passage(instruction): place
        for place, instruction in enumerate(program)
        if instruction.operator is not None and instruction.operator.sends
    }


def _passage(instruction: Instruction) -> tuple[int, bool, int]:
    """Micro-batch, whether forward, and the unit that forward sends from; the same at both ends."""
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
    """Run the work on paper.

    Args:
        slowdown: see `Slowdown`; None where nothing interferes.
        order: of issue, as indices; None for the work's own.

    Raises:
        ValueError: an instruction waits for one that is issued later on its own stream.
    """
    order = range(len(work)) if order is None else order
    queues, ranks = _queues(work, order)
    slow = _slow_table(work, slowdown)
    running = [_NONE] * len(queues)
    left, rate = [0.0] * len(queues), [1.0] * len(queues)
    position = [0] * len(queues)
    starts, ends = [0.0] * len(work), [0.0] * len(work)
    done = bytearray(len(work) + 1)
    done[_NONE] = 1
    now, finished, streams = 0.0, 0, list(range(len(queues)))
    while finished < len(order):
        for stream in streams:
            if running[stream] == _NONE and position[stream] < len(queues[stream]):
                place, behind, known = queues[stream][position[stream]]
                if done[behind] and done[known] and all(done[need] for need in work.needs[place]):
                    running[stream], left[stream] = place, work.seconds[place]
                    starts[place] = now
                    position[stream] += 1
        active = [stream for stream in streams if running[stream] != _NONE]
        if not active:
            raise ValueError(f"the order cannot run: {len(order) - finished} instructions wait for later ones")
        if slow is not None and len(active) > 1:
            for stream in active:
                rate[stream] = 1.0
                for other in active:
                    if other != stream and ranks[other] == ranks[stream]:
                        rate[stream] *= slow[work.entries[running[stream]]][work.entries[running[other]]]
            step = min(left[stream] * rate[stream] for stream in active)
            for stream in active:
                left[stream] -= step / rate[stream]
        else:
            step = min(left[stream] for stream in active)
            for stream in active:
                left[stream] -= step
        now += step
        for stream in active:
            if left[stream] <= 1e-12:
                ends[running[stream]] = now
                done[running[stream]] = 1
                running[stream] = _NONE
                finished += 1
    return Timeline(work, starts, ends)


def _queues(work: Work, order: Sequence[int]) -> tuple[list[list[tuple[int, int, int]]], list[int]]:
    """Of every queue: what it runs, each with the computation issued last before it and what the host last waited for
    (-1: none); and its rank."""
    numbers = work.queues()
    queues: list[list[tuple[int, int, int]]] = [[] for _ in range(max(numbers, default=-1) + 1)]
    ranks = [0] * len(queues)
    last: dict[int, int] = {}
    known: dict[int, int] = {}
    for place in order:
        rank, computes = work.rank(place), work.streams[place] == COMPUTE
        ranks[numbers[place]] = rank
        if work.hosts and work.hosts[place] != _NONE:
            known[rank] = work.hosts[place]
        behind = _NONE if computes else last.get(rank, _NONE)
        queues[numbers[place]].append((place, behind, known.get(rank, _NONE)))
        if computes:
            last[rank] = place
    return queues, ranks


def _slow_table(work: Work, slowdown: Slowdown | None) -> list[list[float]] | None:
    """Slowdowns by entry; the last row and column, which -1 finds, are the barrier's."""
    if slowdown is None:
        return None
    table = [[slowdown(a, b) for b in work.names] + [1.0] for a in work.names]
    return [*table, [1.0] * (len(work.names) + 1)]
