"""Local search: anneals a schedule with small random changes, most of them on its critical path.

A list schedule takes no choice back, and the best choice for a slot can be a bad one for those after it; this takes
choices back.

In:   a schedule that can run, its slot clock, and how many activations a rank may hold.
Out:  a schedule that is no slower.
Must hold: the result can run, every stage takes the micro-batches in order, and no rank holds more than it may. Equal
inputs give equal schedules on every machine, so nothing depends on a clock, a hash or a transcendental function.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_helix.planning.annealing import anneal, threshold
from hf_helix.planning.pipeline.actions import Action, Schedule, Slot
from hf_helix.planning.pipeline.clock import ClockRun, Row, SlotClock, TimedSlot

TRIALS = 10_000
EFFORT = 3_000_000  # slots that are run in all; about a second
HEAT = 0.2  # of the time of an average F: how much worse a change may make a schedule at first
MEAN = 0.01  # weight of the ranks' mean end beside the last one's, so that many small steps can make one that counts
ON_PATH = 0.8  # the part of the changes that are on the critical path
STEPS = (-4, -3, -2, -1, 1, 2, 3, 4)
LATER = 8  # places by which a W may move away from its I


@dataclass
class _Candidate:
    """A schedule that can run."""

    rows: list[Row]
    run: ClockRun

    @cached_property
    def value(self) -> float:
        """Returns what becomes small: the time, and a little of the mean time of the ranks."""
        return max(self.run.ends) + MEAN * sum(self.run.ends) / len(self.run.ends)

    @cached_property
    def path(self) -> list[tuple[int, int]]:
        """Returns the critical path."""
        return self.run.critical_path()


def improve_schedule(schedule: Schedule, clock: SlotClock, max_live: int, seed: int = 0) -> Schedule:
    """Returns the fastest schedule of a walk of small changes; at first the walk may go uphill a little.

    Args:
        schedule: where the walk starts.
        clock: of its stages and micro-batches.
        max_live: activations, each of one stage and micro-batch, that may live at once on a rank.
        seed: of the random changes.
    """
    rows = [[clock.timed(slot) for slot in slots] for slots in schedule]
    run = clock.run(rows)
    assert run is not None, "only schedules that can run are improved"

    def propose(current: _Candidate, rng: random.Random) -> _Candidate | None:
        rank, place = rng.choice(current.path) if rng.random() < ON_PATH else _anywhere(current.rows, rng)
        row = list(current.rows[rank])
        rng.choice(CHANGES)(row, place, rng, clock.timed)
        if row == current.rows[rank] or not _is_valid(row, len(clock.ranks), max_live):
            return None
        changed = [*current.rows[:rank], row, *current.rows[rank + 1 :]]
        run = clock.run(changed)
        return None if run is None else _Candidate(changed, run)

    heat = HEAT * sum(clock.costs.forward) / len(clock.costs.forward)
    best = anneal(
        _Candidate(rows, run),
        propose,
        steps=min(TRIALS, EFFORT // sum(map(len, rows))),
        rng=random.Random(seed),
        temperature=lambda _: heat,
        accept=threshold,
        merit=lambda candidate: (max(candidate.run.ends), candidate.value),
    )
    return [[timed.slot for timed in row] for row in best.rows]


def _anywhere(rows: Sequence[Row], rng: random.Random) -> tuple[int, int]:
    rank = rng.randrange(len(rows))
    return rank, rng.randrange(len(rows[rank]))


def _is_valid(row: Row, num_stages: int, max_live: int) -> bool:
    """Returns whether a rank takes the micro-batches in order and holds no more than it may.

    That a W comes behind its I is left to the clock, on which it would wait for ever otherwise.
    """
    following = [0] * (3 * num_stages)  # by part: the micro-batch that comes next
    live = 0
    for slot, _, _, _, parts in row:
        for part, microbatch in parts:
            if following[part] != microbatch:
                return False
            following[part] = microbatch + 1
        live += slot.forward is not None
        if live > max_live:
            return False
        live -= slot.backward is not None and slot.backward.computation_type != "I"
    return True


# -- changes ---------------------------------------------------------------------------------------------------------
#
# Each function changes a row in place, at a place; where the change does not apply, it leaves the row as it is.

Make = Callable[[Slot], TimedSlot]


def _shift(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Moves a slot by a few places."""
    item = row.pop(place)
    row.insert(max(0, place + rng.choice(STEPS)), item)


def _fuse(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Runs a forward and a backward slot near it side by side."""
    other = place + rng.choice(STEPS)
    if 0 <= other < len(row):
        slots = row[place].slot, row[other].slot
        forward = [slot.forward for slot in slots if slot.forward]
        backward = [slot.backward for slot in slots if slot.backward]
        if len(forward) == len(backward) == 1 and not slots[0].fused and not slots[1].fused:
            row[place] = make(Slot(forward[0], backward[0]))
            del row[other]


def _unfuse(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Runs the two actions of a fused slot one after the other."""
    alone = [make(Slot.alone(action)) for action in row[place].slot.actions]
    row[place : place + 1] = alone if rng.random() < 0.5 else alone[::-1]


def _split(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Splits a B into I and W, and runs the W later."""
    forward, backward = row[place].slot.forward, row[place].slot.backward
    if backward and backward.computation_type == "B":
        stage, microbatch = backward.stage, backward.microbatch
        row[place] = make(Slot(forward, Action(stage, "I", microbatch)))
        row.insert(place + 1 + rng.randrange(LATER), make(Slot.alone(Action(stage, "W", microbatch))))


def _join(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Joins a W with its I to a B."""
    forward, backward = row[place].slot.forward, row[place].slot.backward
    if backward and backward.computation_type == "W":
        stage, microbatch = backward.stage, backward.microbatch
        apart = Action(stage, "I", microbatch)
        first = next(number for number, item in enumerate(row) if item.slot.backward == apart)
        row[first] = make(Slot(row[first].slot.forward, Action(stage, "B", microbatch)))
        row[place : place + 1] = [make(Slot(forward))] if forward else []


CHANGES = (_shift, _shift, _fuse, _unfuse, _split, _join)
