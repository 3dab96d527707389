"""The slot clock: when the slots of a schedule start and end. Schedules are simulated, made and improved with it.

In:   the rank of every virtual stage, what the stages cost, and the number of micro-batches.
Out:  what each slot needs, gives and takes; the start of every slot of a schedule.
Must hold: a rank runs its slots in order, each as soon as all that it needs has arrived, as the runner does. F needs F
of the stage before; I needs F of its own stage and I of the stage after; W needs I. A result arrives on another rank
`transfer` seconds after its slot ends. The validator has a dry run of its own, on purpose: it shares nothing with this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hf_helix.planning.pipeline.actions import PARTS, Slot
from hf_helix.planning.pipeline.costs import Costs


class TimedSlot(NamedTuple):
    """A slot as the clock sees it.

    Attributes:
        slot: the slot.
        seconds: that it takes.
        needs: the results that must have arrived, each with the seconds of its transfer.
        gives: the results that exist when it ends.
        parts: the parts of its actions: each one's number among all stages' parts, and its micro-batch.
    """

    slot: Slot
    seconds: float
    needs: tuple[tuple[int, float], ...]
    gives: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]


Row = list[TimedSlot]
"""The slots of a rank, in order."""


class SlotClock:
    """Tells when slots run.

    Results have numbers: the F's by stage and micro-batch, then the I's in the same order. `results` lists hold when
    each result exists, in seconds from the start of the window; infinity as long as that is not known.

    Args:
        ranks: the rank of every virtual stage.
        costs: of every virtual stage.
        num_microbatches: of the window.

    Attributes:
        needs: of every result, the results that it needs, each with the seconds of its transfer.
    """

    def __init__(self, ranks: Sequence[int], costs: Costs, num_microbatches: int) -> None:
        self.ranks = tuple(ranks)
        self.costs = costs
        self.num_microbatches = num_microbatches
        self.needs = [
            tuple(self._needs(part, stage, microbatch))
            for part in "FI"
            for stage in range(len(ranks))
            for microbatch in range(num_microbatches)
        ]
        self._timed: dict[Slot, TimedSlot] = {}

    def number(self, part: str, stage: int, microbatch: int) -> int:
        """Returns the number of the result of an F or an I.

        Args:
            part: "F" or "I".
            stage: a virtual stage.
            microbatch: of the window.
        """
        return ((part == "I") * len(self.ranks) + stage) * self.num_microbatches + microbatch

    def hop(self, stage: int, other: int) -> float:
        """Returns the seconds of a transfer from one stage to another."""
        return self.costs.transfer if self.ranks[stage] != self.ranks[other] else 0.0

    def _needs(self, part: str, stage: int, microbatch: int) -> list[tuple[int, float]]:
        own = [(self.number("F", stage, microbatch), 0.0)] if part == "I" else []
        other = stage - 1 if part == "F" else stage + 1
        if not 0 <= other < len(self.ranks):
            return own
        return [*own, (self.number(part, other, microbatch), self.hop(other, stage))]

    def timed(self, slot: Slot) -> TimedSlot:
        """Returns a slot with what it needs, gives, runs and takes."""
        timed = self._timed.get(slot)
        if timed is None:
            needs: list[tuple[int, float]] = []
            gives: list[int] = []
            parts: list[tuple[int, int]] = []
            for action in slot.actions:
                for part in PARTS[action.computation_type]:
                    parts.append((3 * action.stage + "FIW".index(part), action.microbatch))
                    number = self.number("F" if part == "F" else "I", action.stage, action.microbatch)
                    if part != "W":
                        needs += self.needs[number]
                        gives.append(number)
                    elif number not in gives:
                        needs.append((number, 0.0))
            timed = TimedSlot(slot, self.costs.slot_seconds(slot), tuple(needs), tuple(gives), tuple(parts))
            self._timed[slot] = timed
        return timed

    def no_results(self) -> list[float]:
        """Returns the list of results before anything has run."""
        return [math.inf] * len(self.needs)

    def arrival(self, number: int, results: Sequence[float]) -> float:
        """Returns when everything that a result needs has arrived; infinity as long as that is not known."""
        latest = 0.0
        for need, hop in self.needs[number]:
            if results[need] + hop > latest:
                latest = results[need] + hop
        return latest

    def run(self, rows: Sequence[Row]) -> ClockRun | None:
        """Runs every slot as soon as it can; None if that never ends."""
        results = self.no_results()
        starts: list[list[float]] = [[] for _ in rows]
        free = [0.0] * len(rows)
        left = sum(map(len, rows))
        progress = True
        while progress and left:
            progress = False
            for rank, row in enumerate(rows):
                done, now = starts[rank], free[rank]
                for place in range(len(done), len(row)):
                    _, seconds, needs, gives, _ = row[place]
                    start = now
                    for number, hop in needs:
                        arrival = results[number] + hop
                        if arrival > start:
                            start = arrival
                    if start == math.inf:
                        break
                    now = start + seconds
                    for number in gives:
                        results[number] = now
                    done.append(start)
                    left -= 1
                    progress = True
                free[rank] = now
        return None if left else ClockRun(rows, starts, free, results)


class ClockRun(NamedTuple):
    """A schedule that has run on the clock.

    Attributes:
        rows: of each rank, its slots.
        starts: of each rank and slot, when it starts.
        ends: of each rank, when it is done.
        results: when each result exists.
    """

    rows: Sequence[Row]
    starts: list[list[float]]
    ends: list[float]
    results: list[float]

    def critical_path(self) -> list[tuple[int, int]]:
        """Returns the slots, as rank and place, that the last end waits for, from the end to the start."""
        makers = {
            number: (rank, place)
            for rank, row in enumerate(self.rows)
            for place, timed in enumerate(row)
            for number in timed.gives
        }
        rank = max(range(len(self.ends)), key=lambda rank: self.ends[rank])
        place = len(self.rows[rank]) - 1
        path = []
        while place >= 0:
            path.append((rank, place))
            waited = self._waited_for(rank, place)
            rank, place = (rank, place - 1) if waited is None else makers[waited]
        return path

    def _waited_for(self, rank: int, place: int) -> int | None:
        """Returns the number of the result that a slot waited for; None where it waited for the slot before it."""
        start = self.starts[rank][place - 1] + self.rows[rank][place - 1].seconds if place else 0.0
        waited = None
        for number, hop in self.rows[rank][place].needs:
            if self.results[number] + hop > start:
                start, waited = self.results[number] + hop, number
        return waited
