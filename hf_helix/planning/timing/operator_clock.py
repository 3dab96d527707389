"""The operator clock: simulates a window, for given times and slowdowns.

In:   a window as numbers, an order of issue, and how much operators slow each other down.
Out:  a `Timeline`: start and end of every instruction.
Must hold: the clock and the executor have the same rules.

    - The instructions of a queue (a stream of a rank; of transfers, a link to a neighbour) run in the order of issue.
    - Communication starts after all computations that the rank issued before it.
    - A computation starts after the writers of its inputs; a barrier after the collectives before it, unless
      prefetched; the first computation of a unit after the weight gathers of the unit.
    - The host issues in order and blocks at an instruction whose row counts have not arrived.
    - Of concurrent operators of a rank, each runs at its own slowed rate until one of them ends.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush

from hf_helix.planning.window.layout import Name
from hf_helix.planning.window.window import COMPUTE, NONE, WindowArrays

Slowdown = Callable[[Name, Name], float]
"""How many times longer the first operator takes while the second runs; 1 without interference."""

Rates = Callable[[tuple[int, ...]], list[float]]

Queue = list[tuple[int, int, int]]
"""Instructions that run one after the other, each with the last computation issued before it and the collective that
the host last waited for (`NONE` if there is none)."""


@dataclass(frozen=True)
class Timeline:
    """When each instruction runs, in seconds from the start."""

    arrays: WindowArrays
    starts: list[float]
    ends: list[float]

    @property
    def seconds(self) -> float:
        """The seconds of the whole window."""
        return max(self.ends, default=0.0)


def simulate(arrays: WindowArrays, slowdown: Slowdown | None = None, order: Sequence[int] | None = None) -> Timeline:
    """Returns when each instruction runs.

    Args:
        arrays: the instructions of all ranks.
        slowdown: see `Slowdown`; None without interference.
        order: of issue, as places; None for the order of the arrays.

    Raises:
        ValueError: an instruction waits for a later one of its own queue.
    """
    order = range(len(arrays)) if order is None else order
    timeline = Timeline(arrays, [0.0] * len(arrays), [0.0] * len(arrays))
    done = bytearray(len(arrays) + 1)
    done[NONE] = 1
    rates = None if slowdown is None else _rates(arrays, slowdown)
    ranks = [_RankClock(timeline, queues, done, rates) for queues in _queues(arrays, order)]
    waiting = _waiting_ranks(arrays, len(ranks))
    events: list[tuple[float, int, int]] = []  # the time of a rank's next end, the rank, and its state at that time
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
                clock.advance(rank.now)
            if clock.start():
                heappush(events, (clock.now + clock.step, other, clock.state))
    if left:
        raise ValueError(f"the order cannot run: {left} instructions wait for later ones")
    return timeline


def _waiting_ranks(arrays: WindowArrays, num_ranks: int) -> dict[int, list[int]]:
    """The ranks that wait for an instruction of another rank."""
    waiting: dict[int, list[int]] = {}
    for rank, needs in zip(arrays.ranks, arrays.needs, strict=True) if num_ranks > 1 else ():
        for need in needs:
            if arrays.ranks[need] != rank:
                waiting.setdefault(need, []).append(rank)
    return waiting


def _queues(arrays: WindowArrays, order: Sequence[int]) -> list[list[Queue]]:
    """The queues of every rank."""
    numbers = arrays.queues()
    queues: list[Queue] = [[] for _ in range(max(numbers, default=-1) + 1)]
    ranks = [0] * len(queues)
    last: dict[int, int] = {}
    known: dict[int, int] = {}
    for place in order:
        rank, computes = arrays.ranks[place], arrays.streams[place] == COMPUTE
        ranks[numbers[place]] = rank
        if arrays.size_sources[place] != NONE:
            known[rank] = arrays.size_sources[place]
        after = NONE if computes else last.get(rank, NONE)
        queues[numbers[place]].append((place, after, known.get(rank, NONE)))
        if computes:
            last[rank] = place
    return [
        [queue for queue, home in zip(queues, ranks, strict=True) if home == rank]
        for rank in range(max(ranks, default=-1) + 1)
    ]


class _RankClock:
    """The streams of one rank.

    Attributes:
        now: the time of the last event.
        step: seconds until the next end.
        state: a number that changes with the set of running instructions.
    """

    def __init__(self, timeline: Timeline, queues: list[Queue], done: bytearray, rates: Rates | None) -> None:
        self.now = self.step = 0.0
        self.state = 0
        self._arrays, self._starts, self._ends = timeline.arrays, timeline.starts, timeline.ends
        self._queues = [queue[::-1] for queue in queues]
        self._done, self._rates = done, rates
        self._running = [NONE] * len(queues)
        self._left, self._rate = [0.0] * len(queues), [1.0] * len(queues)
        self._active: list[int] = []
        self._idle = [number for number, queue in enumerate(queues) if queue]
        self._blocked_by = [NONE] * len(queues)  # an instruction that the next one of an idle queue waits for

    def start(self) -> bool:
        """Starts all instructions that can start now, and finds the next end; returns whether anything runs."""
        done, needs, active, blocked_by = self._done, self._arrays.needs, self._active, self._blocked_by
        started = False
        for number in self._idle:
            if not done[blocked_by[number]]:
                continue
            place, after, known = self._queues[number][-1]
            if not done[after]:
                blocked_by[number] = after
            elif not done[known]:
                blocked_by[number] = known
            else:
                for need in needs[place]:
                    if not done[need]:
                        blocked_by[number] = need
                        break
                else:
                    self._queues[number].pop()
                    self._running[number], self._left[number] = place, self._arrays.seconds[place]
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
        elif self._rates is None:
            self.step = min([left[number] for number in active])
        else:
            active.sort()
            entries, rates = self._arrays.entries, self._rate
            found = self._rates(tuple([entries[running[number]] for number in active]))
            for number, rate in zip(active, found, strict=True):
                rates[number] = rate
            self.step = min([left[number] * rates[number] for number in active])
        return True

    def advance(self, now: float) -> None:
        """Runs until a time before the next end."""
        step = now - self.now
        for number in self._active:
            self._left[number] = max(0.0, self._left[number] - step / self._rate[number])
        self.now = now

    def finish(self) -> list[int]:
        """Runs until the next end, and returns the ended instructions."""
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


def _rates(arrays: WindowArrays, slowdown: Slowdown) -> Rates:
    """How many times longer concurrent operators take, by their numbers; barriers neither slow down nor are slowed."""

    @cache
    def of(entry: int, other: int) -> float:
        return 1.0 if NONE in (entry, other) else slowdown(arrays.names[entry], arrays.names[other])

    @cache
    def rates(entries: tuple[int, ...]) -> list[float]:
        return [
            math.prod(of(entry, other) for number, other in enumerate(entries) if number != place)
            for place, entry in enumerate(entries)
        ]

    return rates
