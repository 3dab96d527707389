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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from hf_helix.planning.window.window import COMPUTE, NONE, STREAMS, Work

Slowdown = Callable[[tuple[str, str], tuple[str, str]], float]
"""How many times longer the first operator takes while the second runs beside it; 1 where they do not interfere."""


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


Queue = list[tuple[int, int, int]]
"""Instructions that run one after the other, each with the computation issued last before it and what the host last
waited for (-1: none)."""


class RankClock:
    """A rank while work is simulated.

    Attributes:
        now: the time of its last event.
        step: seconds until something ends.
        state: a number that changes with what runs.
    """

    def __init__(self, timeline: Timeline, queues: list[Queue], done: bytearray, slow: Slowdowns | None) -> None:
        self.now = self.step = 0.0
        self.state = 0
        self._work, self._starts, self._ends = timeline.work, timeline.starts, timeline.ends
        self._queues = [queue[::-1] for queue in queues]
        self._done, self._slow = done, slow
        self._running = [NONE] * len(queues)
        self._left, self._rate = [0.0] * len(queues), [1.0] * len(queues)
        self._active: list[int] = []
        self._idle = [number for number, queue in enumerate(queues) if queue]  # of these nothing runs
        self._blocked_by = [NONE] * len(queues)  # of each of them, something that its next instruction waits for

    def start(self) -> bool:
        """Starts whatever can start now, and finds when something ends; returns whether anything runs."""
        done, needs, active, blocked_by = self._done, self._work.needs, self._active, self._blocked_by
        started = False
        for number in self._idle:
            if not done[blocked_by[number]]:
                continue
            place, behind, known = self._queues[number][-1]
            if not done[behind]:
                blocked_by[number] = behind
            elif not done[known]:
                blocked_by[number] = known
            else:
                for need in needs[place]:
                    if not done[need]:
                        blocked_by[number] = need
                        break
                else:
                    self._queues[number].pop()
                    self._running[number], self._left[number] = place, self._work.seconds[place]
                    self._starts[place] = self.now
                    active.append(number)
                    started = True
        self.state += 1
        if not active:
            return False
        running, left = self._running, self._left
        if started:
            self._idle = [number for number in self._idle if running[number] == NONE]
        if len(active) == 1:
            self._rate[active[0]] = 1.0
            self.step = left[active[0]]
        elif self._slow is None:
            self.step = min([left[number] for number in active])
        else:
            active.sort()
            entries, rates = self._work.entries, self._rate
            slow = self._slow(tuple([entries[running[number]] for number in active]))
            for number, rate in zip(active, slow, strict=True):
                rates[number] = rate
            self.step = min([left[number] * rates[number] for number in active])
        return True

    def go_on(self, now: float) -> None:
        """Runs until a time at which nothing of its own ends."""
        step = now - self.now
        for number in self._active:
            self._left[number] = max(0.0, self._left[number] - step / self._rate[number])
        self.now = now

    def finish(self) -> list[int]:
        """Runs until something ends, and returns what that is."""
        step, lefts, rates, running = self.step, self._left, self._rate, self._running
        now = self.now = self.now + step
        ended, active = [], []
        for number in self._active:
            left = lefts[number] = lefts[number] - step / rates[number]
            if left <= 1e-12:
                place = running[number]
                self._ends[place] = now
                self._done[place] = 1
                running[number] = NONE
                ended.append(place)
                if self._queues[number]:
                    self._idle.append(number)
            else:
                active.append(number)
        self._active = active
        return ended


class Slowdowns:
    """How many times longer operators take that run beside each other, by their numbers; each set is worked out once.
    Nothing slows a barrier down, or is slowed down by one."""

    def __init__(self, work: Work, slowdown: Slowdown) -> None:
        self._slowdown, self._names = slowdown, work.names
        self._pairs: dict[tuple[int, int], float] = {}
        self._known: dict[tuple[int, ...], list[float]] = {}

    def __call__(self, entries: tuple[int, ...]) -> list[float]:
        rates = self._known.get(entries)
        if rates is None:
            rates = self._known[entries] = [self._rate(place, entries) for place in range(len(entries))]
        return rates

    def _rate(self, place: int, entries: tuple[int, ...]) -> float:
        rate = 1.0
        for other, entry in enumerate(entries):
            if other != place:
                rate *= self._of(entries[place], entry)
        return rate

    def _of(self, entry: int, other: int) -> float:
        if NONE in (entry, other):
            return 1.0
        if (entry, other) not in self._pairs:
            self._pairs[entry, other] = self._slowdown(self._names[entry], self._names[other])
        return self._pairs[entry, other]
