"""Refinement: small random changes of a schedule where it is tight, of which those that help are kept.

In:   a schedule, the rank of every virtual stage, costs, and room for activations.
Out:  a schedule that is no slower.
Must hold: what comes out can run, with every stage in the order of micro-batches, and keeps to the room; the same input
gives the same schedule on every machine, so nothing here depends on a clock, a hash or a transcendental function.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hf_helix.planning.annealing import anneal, threshold
from hf_helix.planning.pipeline.actions import PARTS, Action, Schedule, Slot
from hf_helix.planning.pipeline.simulate import Costs

TRIALS = 10_000
EFFORT = 3_000_000  # slots that are run in all; about a second
HEAT = 0.2  # of the time of an average F: how much worse a change may make it at first
MEAN = 0.01  # weight of the ranks' mean end beside the last one's, so that many small steps can make one that counts
TIGHT = 0.8  # of the changes, how many are on the critical path
STEPS = (-4, -3, -2, -1, 1, 2, 3, 4)
LATER = 8  # places by which a W may move away from its I


class _Item(NamedTuple):
    """A slot as the clock sees it; results are numbered, F's and then I's by stage and micro-batch."""

    slot: Slot
    seconds: float
    needs: tuple[tuple[int, float], ...]
    gives: tuple[int, ...]


Row = list[_Item]


class _Run(NamedTuple):
    """What a run on the clock found.

    Attributes:
        ends: of each rank, when it is done.
        waits: of each rank and slot, the number of the result that it waited for; -1 for the slot before it.
        makers: of each result, its rank and slot.
    """

    ends: list[float]
    waits: list[list[int]]
    makers: dict[int, tuple[int, int]]

    @property
    def value(self) -> float:
        """What is made smaller."""
        return max(self.ends) + MEAN * sum(self.ends) / len(self.ends)

    def tight(self) -> list[tuple[int, int]]:
        """The critical path, from the end: rank and slot."""
        rank = max(range(len(self.ends)), key=lambda rank: self.ends[rank])
        place = len(self.waits[rank]) - 1
        path = []
        while place >= 0:
            path.append((rank, place))
            waited = self.waits[rank][place]
            rank, place = (rank, place - 1) if waited < 0 else self.makers[waited]
        return path


def refine_schedule(schedule: Schedule, ranks: Sequence[int], costs: Costs, most_live: int, seed: int = 0) -> Schedule:
    """The best of a walk of small changes that starts at a schedule; at first it may go uphill a little."""
    clock = _Clock(ranks, costs, 1 + max(action.microbatch for slot in schedule[0] for action in slot.actions))
    rows = [[clock.item(slot) for slot in slots] for slots in schedule]
    run = clock.run(rows)
    assert run is not None, "only schedules that can run are refined"

    def propose(current: _Candidate, rng: random.Random) -> _Candidate | None:
        rank, place = rng.choice(current.path) if rng.random() < TIGHT else _anywhere(current.rows, rng)
        row = list(current.rows[rank])
        rng.choice(CHANGES)(row, place, rng, clock.item)
        if row == current.rows[rank] or not _fits(row, most_live):
            return None
        changed = [*current.rows[:rank], row, *current.rows[rank + 1 :]]
        run = clock.run(changed)
        return None if run is None else _Candidate(changed, run)

    heat = HEAT * sum(costs.forward) / len(costs.forward)
    best = anneal(
        _Candidate(rows, run),
        propose,
        steps=min(TRIALS, EFFORT // sum(map(len, rows))),
        rng=random.Random(seed),
        temperature=lambda _: heat,
        accept=threshold,
        merit=lambda candidate: (max(candidate.run.ends), candidate.value),
    )
    return [[item.slot for item in row] for row in best.rows]


@dataclass
class _Candidate:
    """A schedule that can run."""

    rows: list[Row]
    run: _Run

    @cached_property
    def value(self) -> float:
        """What becomes small: the time, and a little of the mean time of the ranks."""
        return self.run.value

    @cached_property
    def path(self) -> list[tuple[int, int]]:
        """The critical path."""
        return self.run.tight()


def _anywhere(rows: Sequence[Row], rng: random.Random) -> tuple[int, int]:
    rank = rng.randrange(len(rows))
    return rank, rng.randrange(len(rows[rank]))


def _fits(row: Row, most_live: int) -> bool:
    """Whether a rank takes micro-batches in order, each W after its I, and has room for what it holds."""
    following: dict[tuple[int, str], int] = {}
    live = 0
    for slot, *_ in row:
        for action in slot.actions:
            for part in PARTS[action.direction]:
                key = action.stage, part
                if following.get(key, 0) != action.microbatch:
                    return False
                following[key] = action.microbatch + 1
            if action.direction == "W" and following.get((action.stage, "I"), 0) <= action.microbatch:
                return False
        live += slot.forward is not None
        if live > most_live:
            return False
        live -= slot.backward is not None and slot.backward.direction != "I"
    return True


class _Clock:
    """A simulation for many similar schedules; `hf_helix.planning.pipeline.simulate` says the same at more length."""

    def __init__(self, ranks: Sequence[int], costs: Costs, num_microbatches: int) -> None:
        self.ranks = ranks
        self.costs = costs
        self.num_microbatches = num_microbatches
        self.inputs = len(ranks) * num_microbatches  # the number of the first I
        self.items: dict[Slot, _Item] = {}

    def item(self, slot: Slot) -> _Item:
        """A slot with what it needs and gives."""
        if slot not in self.items:
            needs: list[tuple[int, float]] = []
            gives = []
            for action in slot.actions:
                number = action.stage * self.num_microbatches + action.microbatch
                if action.direction == "F":
                    needs += self._need(action.stage, -1, number)
                    gives.append(number)
                elif action.direction in "BI":
                    needs += [(number, 0.0), *self._need(action.stage, 1, self.inputs + number)]
                    gives.append(self.inputs + number)
            self.items[slot] = _Item(slot, self.costs.slot_seconds(slot), tuple(needs), tuple(gives))
        return self.items[slot]

    def _need(self, stage: int, step: int, number: int) -> list[tuple[int, float]]:
        """The result of a neighbouring stage and how long it travels, where there is such a stage."""
        if not 0 <= stage + step < len(self.ranks):
            return []
        hop = self.costs.transfer if self.ranks[stage] != self.ranks[stage + step] else 0.0
        return [(number + step * self.num_microbatches, hop)]

    def run(self, rows: Sequence[Row]) -> _Run | None:
        """Run every slot as soon as it can; None if that never ends."""
        results: list[float | None] = [None] * (2 * self.inputs)
        ends = [0.0] * len(rows)
        waits: list[list[int]] = [[] for _ in rows]
        makers: dict[int, tuple[int, int]] = {}
        total = sum(map(len, rows))
        progress = True
        while progress:
            progress = False
            for rank, row in enumerate(rows):
                done, free = waits[rank], ends[rank]
                for place in range(len(done), len(row)):
                    _, seconds, needs, gives = row[place]
                    start, waited = free, -1
                    for number, hop in needs:
                        result = results[number]
                        if result is None:
                            break
                        if result + hop > start:
                            start, waited = result + hop, number
                    else:
                        free = start + seconds
                        for number in gives:
                            results[number] = free
                            makers[number] = rank, place
                        done.append(waited)
                        progress = True
                        continue
                    break
                ends[rank] = free
        return _Run(ends, waits, makers) if sum(map(len, waits)) == total else None


# -- changes ---------------------------------------------------------------------------------------------------------
#
# Each changes a row in place, at a place; or not at all where it does not apply.

Make = Callable[[Slot], _Item]


def _shift(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Move a slot by a few places."""
    item = row.pop(place)
    row.insert(max(0, place + rng.choice(STEPS)), item)


def _fuse(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Run a forward and a backward slot near it side by side."""
    other = place + rng.choice(STEPS)
    if 0 <= other < len(row):
        slots = row[place].slot, row[other].slot
        forward = [slot.forward for slot in slots if slot.forward]
        backward = [slot.backward for slot in slots if slot.backward]
        if len(forward) == len(backward) == 1 and not slots[0].fused and not slots[1].fused:
            row[place] = make(Slot(forward[0], backward[0]))
            del row[other]


def _unfuse(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Run the two of a fused slot one after the other."""
    alone = [make(Slot.alone(action)) for action in row[place].slot.actions]
    row[place : place + 1] = alone if rng.random() < 0.5 else alone[::-1]


def _split(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Take a backward apart, and run its W later."""
    forward, backward = row[place].slot.forward, row[place].slot.backward
    if backward and backward.direction == "B":
        stage, microbatch = backward.stage, backward.microbatch
        row[place] = make(Slot(forward, Action(stage, "I", microbatch)))
        row.insert(place + 1 + rng.randrange(LATER), make(Slot.alone(Action(stage, "W", microbatch))))


def _join(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Run a W with its I."""
    forward, backward = row[place].slot.forward, row[place].slot.backward
    if backward and backward.direction == "W":
        stage, microbatch = backward.stage, backward.microbatch
        apart = Action(stage, "I", microbatch)
        first = next(number for number, item in enumerate(row) if item.slot.backward == apart)
        row[first] = make(Slot(row[first].slot.forward, Action(stage, "B", microbatch)))
        row[place : place + 1] = [make(Slot(forward))] if forward else []


CHANGES = (_shift, _shift, _fuse, _unfuse, _split, _join)
