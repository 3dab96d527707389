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

    def start(self) -> bool:
        """Start whatever can start now, and find when something ends; whether anything runs."""
        done, needs, running, active = self._done, self._work.needs, self._running, self._active
        for number, queue in enumerate(self._queues):
            if running[number] == NONE and queue:
                place, behind, known = queue[-1]
                if done[behind] and done[known]:
                    for need in needs[place]:
                        if not done[need]:
                            break
                    else:
                        queue.pop()
                        running[number], self._left[number] = place, self._work.seconds[place]
                        self._starts[place] = self.now
                        active.append(number)
        self.state += 1
        if not active:
            return False
        left = self._left
        if len(active) == 1:
            self._rate[active[0]] = 1.0
            self.step = left[active[0]]
        elif self._slow is None:
            self.step = min([left[number] for number in active])
        else:
            active.sort()
            self._find_rates(self._slow)
            self.step = min([left[number] * self._rate[number] for number in active])
        return True

    def _find_rates(self, slow: Slowdowns) -> None:
        """Find how many times longer everything takes that runs."""
        entries, running = self._work.entries, self._running
        for number in self._active:
            entry, rate = entries[running[number]], 1.0
            for other in self._active:
                if other != number:
                    rate *= slow(entry, entries[running[other]])
            self._rate[number] = rate

    def go_on(self, now: float) -> None:
        """Run until a time at which nothing of its own ends."""
        step = now - self.now
        for number in self._active:
            self._left[number] = max(0.0, self._left[number] - step / self._rate[number])
        self.now = now

    def finish(self) -> list[int]:
        """Run until something ends; what that is."""
        ended, active = [], []
        self.now += self.step
        for number in self._active:
            left = self._left[number] = self._left[number] - self.step / self._rate[number]
            if left <= 1e-12:
                place = self._running[number]
                self._ends[place] = self.now
                self._done[place] = 1
                self._running[number] = NONE
                ended.append(place)
            else:
                active.append(number)
        self._active = active
        return ended


class Slowdowns:
    """Slowdowns by the numbers of operators, each asked for once; the last row and column, which -1 finds, are the
    barrier's."""

    def __init__(self, work: Work, slowdown: Slowdown) -> None:
        self._slowdown, self._names = slowdown, work.names
        count = len(work.names)
        self._rows: list[list[float | None]] = [[None] * count + [1.0] for _ in range(count)] + [[1.0] * (count + 1)]

    def __call__(self, entry: int, other: int) -> float:
        row = self._rows[entry]
        found = row[other]
        if found is None:
            found = row[other] = self._slowdown(self._names[entry], self._names[other])
        return found
