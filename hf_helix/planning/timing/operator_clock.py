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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush

from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.window.layout import Name
from hf_helix.planning.window.window import COMPUTE, NONE, STREAMS, WindowArrays

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

    def seconds_without(self, *kinds: Kind) -> float:
        """Returns the seconds until everything but some kinds of operators has ended."""
        streams = [STREAMS.index(kind) for kind in kinds]
        ends = zip(self.ends, self.arrays.streams, strict=True)
        return max((end for end, stream in ends if stream not in streams), default=0.0)


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
    if slowdown is None and _follow(timeline, order):
        return timeline
    done = bytearray(len(arrays) + 1)
    done[NONE] = 1
    rates = None if slowdown is None else _rates(arrays, slowdown)
    ranks = [_RankClock(timeline, queues, done, rates) for queues in _queues(arrays, order)]
    waiting = _waiting_ranks(arrays, len(ranks))
    events: list[tuple[float, int, int]] = []  # the time of a rank's next event, the rank, and its state at that time
    looking = list(range(len(ranks)))  # ranks for which something may have changed

    def run(number: int, until: float, ends: bool) -> None:
        rank = ranks[number]
        found = rank.run(until, waiting, ends)
        if rank.next < math.inf:
            heappush(events, (rank.next, number, rank.state))
        looking.extend({each for place in found for each in waiting[place]} - {number})

    while looking or events:
        if looking:
            run(looking.pop(), -1.0, ends=False)
            continue
        _, number, state = heappop(events)
        if state == ranks[number].state:
            run(number, events[0][0] if events else math.inf, ends=True)
    left = len(order) + 1 - done.count(1)
    if left:
        raise ValueError(f"the order cannot run: {left} instructions wait for later ones")
    return timeline


def _follow(timeline: Timeline, order: Sequence[int]) -> bool:
    """Fills a timeline without interference: an instruction begins at the latest end of all that it waits for. Returns
    whether every instruction waits for instructions that its rank issued before, or for other ranks only."""
    arrays, ends, starts = timeline.arrays, [-1.0] * len(timeline.arrays), timeline.starts
    streams, needs, seconds, sources = arrays.streams, arrays.needs, arrays.seconds, arrays.size_sources
    queues = arrays.queues()
    free = [0.0] * (max(queues, default=-1) + 1)
    places: list[list[int]] = [[] for _ in range(max(arrays.ranks, default=-1) + 1)]
    for place in reversed(order):
        places[arrays.ranks[place]].append(place)
    computed, known = [0.0] * len(places), [0.0] * len(places)
    waiting: dict[int, list[int]] = {}  # ranks by the instruction that they wait for
    ready, left = list(range(len(places))), len(order)
    while ready:
        rank = ready.pop()
        mine, last, of_sizes = places[rank], computed[rank], known[rank]
        while mine:
            place = mine[-1]
            queue, computes = queues[place], streams[place] == COMPUTE
            begin = max(free[queue], of_sizes) if computes else max(free[queue], of_sizes, last)
            for need in needs[place] if sources[place] == NONE else (*needs[place], sources[place]):
                end = ends[need]
                if end < 0.0:
                    waiting.setdefault(need, []).append(rank)
                    break
                if end > begin:
                    begin = end
            else:
                mine.pop()
                left -= 1
                if sources[place] != NONE:
                    of_sizes = max(of_sizes, ends[sources[place]])
                end = begin + seconds[place]
                starts[place], ends[place], free[queue] = begin, end, end
                if computes:
                    last = end
                if place in waiting:
                    ready += waiting.pop(place)
                continue
            break
        computed[rank], known[rank] = last, of_sizes
    if not left:
        timeline.ends[:] = [max(0.0, end) for end in ends]
    return not left


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
    """The streams of one rank. A rank runs ahead of others until one of its queues waits for an instruction of another
    rank that has not ended.

    Attributes:
        next: the time of the next event: an end, or an end on another rank that a queue waits for; infinity if nothing
            runs.
        state: a number that changes with the set of running instructions.
    """

    def __init__(self, timeline: Timeline, queues: list[Queue], done: bytearray, rates: Rates | None) -> None:
        self.state, self.next = 0, math.inf
        self._now = self._step = 0.0
        self._arrays, self._starts, self._ends = timeline.arrays, timeline.starts, timeline.ends
        self._queues = [queue[::-1] for queue in queues]
        self._done, self._rates = done, rates
        self._running = [NONE] * len(queues)
        self._left, self._rate = [0.0] * len(queues), [1.0] * len(queues)
        self._active: list[int] = []
        self._idle = [number for number, queue in enumerate(queues) if queue]
        self._blocked_by = [NONE] * len(queues)  # an instruction that the next one of an idle queue waits for

    def run(self, until: float, waiting: Mapping[int, object], ends: bool) -> list[int]:
        """Runs until nothing can start or end, or while a queue waits for an instruction of another rank, until the
        next event is later than `until` or an instruction has ended that others wait for. In every round, what can
        start starts, and the next event is found.

        One long function without calls: it runs for every instruction of every window.

        Args:
            until: in seconds; nothing of another rank ends before.
            waiting: by the instructions that other ranks wait for.
            ends: whether the first round begins with the next event.

        Returns:
            The ended instructions that other ranks wait for.
        """
        done, needs, seconds, entries = self._done, self._arrays.needs, self._arrays.seconds, self._arrays.entries
        queues, running, left, rate, blocked_by = self._queues, self._running, self._left, self._rate, self._blocked_by
        first, last, idle, active, now, step = self._starts, self._ends, self._idle, self._active, self._now, self._step
        found: list[int] = []
        wake = self.next
        while True:
            if ends and wake < now + step:
                for number in active:
                    left[number] = max(0.0, left[number] - (wake - now) / rate[number])
                now = wake
            elif ends:
                now += step
                still = []
                for number in active:
                    rest = left[number] - step / rate[number]
                    if rest > 1e-12:
                        left[number] = rest
                        still.append(number)
                        continue
                    place = running[number]
                    last[place] = now
                    done[place] = 1
                    running[number] = NONE
                    if queues[number]:
                        idle.append(number)
                    if place in waiting:
                        found.append(place)
                active = still
            ends, started, is_open, wake = True, False, False, math.inf
            for number in idle:
                if not done[blocked_by[number]]:
                    is_open = is_open or blocked_by[number] in waiting
                    continue
                place, after, known = queues[number][-1]
                if not done[after]:
                    blocked_by[number] = after
                elif not done[known]:
                    blocked_by[number] = known
                else:
                    for need in needs[place]:
                        if not done[need]:
                            blocked_by[number] = need
                            is_open = is_open or need in waiting
                            break
                        if last[need] > now:  # another rank is ahead
                            blocked_by[number] = NONE
                            wake = min(wake, last[need])
                            break
                    else:
                        queues[number].pop()
                        running[number], left[number] = place, seconds[place]
                        first[place] = now
                        active.append(number)
                        started = True
            if started:
                idle = [number for number in idle if running[number] == NONE]
            if len(active) == 1:
                rate[active[0]] = 1.0
                step = left[active[0]]
            elif not active:
                step = math.inf
            elif self._rates is None:
                step = min([left[number] for number in active])
            else:
                active.sort()
                slowed = self._rates(tuple([entries[running[number]] for number in active]))
                step = math.inf
                for number, slow in zip(active, slowed, strict=True):
                    rate[number] = slow
                    step = min(step, left[number] * slow)
            if len(active) == 1 and not is_open:  # goes on alone, until an instruction that another queue waits for
                number = active[0]
                queue, place, awaited = queues[number], running[number], {blocked_by[other] for other in idle}
                while queue and place not in awaited and now + step < wake:
                    following, after, known = queue[-1]
                    done[place] = 1
                    late = [need for need in needs[following] if not done[need] or last[need] > now + step]
                    if late or not (done[after] and done[known]):
                        done[place] = 0
                        break
                    if place in waiting:
                        found.append(place)
                    queue.pop()
                    now += step
                    last[place] = first[following] = now
                    place, step = following, seconds[following]
                running[number], left[number] = place, step
            wake = min(wake, now + step)
            if wake == math.inf or (is_open and (found or wake > until)):
                break
        self._idle, self._active, self._now, self._step, self.next = idle, active, now, step, wake
        self.state += 1
        return found


def _rates(arrays: WindowArrays, slowdown: Slowdown) -> Rates:
    """How many times longer concurrent operators take, by their numbers; barriers neither slow down nor are slowed."""

    @cache
    def of(entry: int, other: int) -> float:
        return 1.0 if NONE in (entry, other) else slowdown(arrays.names[entry], arrays.names[other])

    @cache
    def rates(entries: tuple[int, ...]) -> list[float]:
        return [
            math.prod([of(entry, other) for number, other in enumerate(entries) if number != place])
            for place, entry in enumerate(entries)
        ]

    return rates
