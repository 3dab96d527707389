"""The cost function: from a program and measured times to the time it takes.

In:   instructions in the order of issue, seconds of every operator alone, and how much operators slow each other down.
Out:  a `Timeline`: start and end of every instruction.
Must hold: the same rules as the executor's. Every stream runs in the order of issue; communication starts once
everything issued before it on the compute stream is done, a computation once the values that it reads have arrived; at
a barrier the compute stream waits for all communication. Where operators run beside each other, each goes on at its
own slowed rate, until one of them ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_helix.planning.graph import Kind, Part
from hf_helix.planning.window import Instruction, Layout

Times = Mapping[tuple[str, str], float]
"""Seconds of each operator, by the name of its unit and its entry in a plan."""

Slowdown = Callable[[tuple[str, str], tuple[str, str]], float]
"""How many times longer the first operator takes while the second runs beside it; 1 where they do not interfere."""

STREAMS = tuple(Kind)
COMPUTE = STREAMS.index(Kind.COMPUTE)
_NONE = -1


@dataclass(frozen=True)
class Work:
    """A program as plain numbers.

    Attributes:
        streams: of each instruction, an index into `STREAMS`.
        seconds: of each instruction alone.
        needs: the earlier instructions that each waits for.
        entries: what each runs, an index into `names`; -1 for a barrier.
        names: (unit name, entry).
    """

    streams: list[int]
    seconds: list[float]
    needs: list[list[int]]
    entries: list[int]
    names: list[tuple[str, str]]

    def __len__(self) -> int:
        return len(self.streams)

    def loads(self) -> dict[Kind, float]:
        """Seconds of work on each stream."""
        totals = dict.fromkeys(STREAMS, 0.0)
        for stream, seconds in zip(self.streams, self.seconds, strict=True):
            totals[STREAMS[stream]] += seconds
        return totals


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
    """The numbers of a program.

    Raises:
        KeyError: `times` lacks an operator.
    """
    numbers: dict[tuple[str, str], int] = {}
    work = Work([], [], [], [], [])
    writers: dict[tuple[int, object], int] = {}
    forwards: dict[tuple[int, int, str], int] = {}
    pending: list[int] = []
    for place, instruction in enumerate(program):
        op = instruction.operator
        if op is None:
            work.streams.append(COMPUTE)
            work.seconds.append(0.0)
            work.needs.append(pending)
            work.entries.append(_NONE)
            pending = []
            continue
        name = entry_of(instruction, layout)
        microbatch = instruction.microbatch
        needs = [writers[microbatch, key] for key in instruction.needs if (microbatch, key) in writers]
        place_of_call = (microbatch, instruction.unit, op.of)
        if op.part is Part.F:
            forwards[place_of_call] = place
        elif place_of_call in forwards:
            needs.append(forwards[place_of_call])  # what forward kept for backward
        for key in instruction.writes:
            writers[microbatch, key] = place
        if op.kind.communicates:
            pending.append(place)
        work.streams.append(STREAMS.index(op.kind))
        work.seconds.append(times[name])
        work.needs.append(list(dict.fromkeys(needs)))
        work.entries.append(numbers.setdefault(name, len(numbers)))
    work.names.extend(numbers)
    return work


def simulate(work: Work, slowdown: Slowdown | None = None, order: Sequence[int] | None = None) -> Timeline:
    """Run the work on paper.

    Args:
        slowdown: see `Slowdown`; None where nothing interferes.
        order: of issue, as indices; None for the work's own.

    Raises:
        ValueError: an instruction waits for one that is issued later on its own stream.
    """
    order = range(len(work)) if order is None else order
    queues = _queues(work, order)
    slow = _slow_table(work, slowdown)
    running = [_NONE] * len(queues)
    left, rate = [0.0] * len(queues), [1.0] * len(queues)
    position = [0] * len(queues)
    starts, ends = [0.0] * len(work), [0.0] * len(work)
    done = bytearray(len(work) + 1)
    done[_NONE] = 1
    now, finished, streams = 0.0, 0, [s for s, queue in enumerate(queues) if queue]
    while finished < len(order):
        for stream in streams:
            if running[stream] == _NONE and position[stream] < len(queues[stream]):
                place, behind = queues[stream][position[stream]]
                if done[behind] and all(done[need] for need in work.needs[place]):
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
                    if other != stream:
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


def _queues(work: Work, order: Sequence[int]) -> list[list[tuple[int, int]]]:
    """By stream: what it runs in order, each with the computation issued last before it (-1: none)."""
    queues: list[list[tuple[int, int]]] = [[] for _ in STREAMS]
    last = _NONE
    for place in order:
        stream = work.streams[place]
        queues[stream].append((place, _NONE if stream == COMPUTE else last))
        if stream == COMPUTE:
            last = place
    return queues


def _slow_table(work: Work, slowdown: Slowdown | None) -> list[list[float]] | None:
    """Slowdowns by entry; the last row and column, which -1 finds, are the barrier's."""
    if slowdown is None:
        return None
    table = [[slowdown(a, b) for b in work.names] + [1.0] for a in work.names]
    return [*table, [1.0] * (len(work.names) + 1)]
