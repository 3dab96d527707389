"""The clock of a rank: what runs beside what while work is simulated, and until when.

In:   the queues of a rank, what has ended anywhere, and how much operators slow each other down.
Out:  the start and the end of everything that the rank runs.
Must hold: an instruction starts once its queue is free and all that it waits for has ended. Where several run, each
goes on at its own slowed rate, until one of them ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_helix.planning.cost import Slowdown, Timeline, Work

NONE = -1

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
