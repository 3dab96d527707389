"""Annealing: finds the bottom of a bumpy valley, the same way every time, and stops where it is told to."""

import random
from typing import NamedTuple

import pytest

from hf_helix.planning.annealing import Accept, anneal, metropolis, threshold

both = pytest.mark.parametrize("accept", [metropolis, threshold])


class Point(NamedTuple):
    place: int

    @property
    def value(self) -> float:
        """A valley with a bump after every second step, so that a walk that only goes down stays where it is."""
        return abs(self.place) + 1.5 * (self.place % 2)


def step(point: Point, rng: random.Random) -> Point:
    return Point(point.place + rng.choice((-1, 1)))


@both
@pytest.mark.parametrize("seed", range(5))
def test_the_walk_crosses_bumps_and_is_the_same_every_time(accept: Accept, seed: int):
    def walk(temperature: float) -> Point:
        rng = random.Random(seed)
        return anneal(Point(20), step, steps=4000, rng=rng, temperature=lambda _: temperature, accept=accept)

    assert walk(4.0) == walk(4.0) == Point(0)
    assert walk(0.0) == Point(20), "without a temperature nothing goes uphill"


@both
def test_how_much_worse_a_state_may_become(accept: Accept):
    rng = random.Random(0)
    assert all(accept(1.0, value, 0.0, rng) for value in (0.5, 1.0))
    assert not accept(1.0, 1.1, 0.0, rng)
    often, seldom = (sum(accept(1.0, 1.3, temperature, rng) for _ in range(500)) for temperature in (2.0, 0.4))
    assert 0 < seldom < often < 500


def test_it_ends_at_the_target_and_counts_changes_that_do_not_apply():
    told: list[float] = []
    options = {"rng": random.Random(0), "temperature": lambda best: 0.1 * best, "progress": told.append}
    assert anneal(Point(20), lambda point, _: Point(point.place - 2), target=10, steps=1000, **options) == Point(10)
    assert told == [0]
    told.clear()
    assert anneal(Point(3), lambda point, rng: None, steps=200, **options) == Point(3)
    assert told == [0, 0.25, 0.5, 0.75]


def test_the_best_is_chosen_by_merit():
    """The walk goes by the value, and what is kept by something else."""
    options = {"steps": 50, "rng": random.Random(0), "temperature": lambda _: 100.0}
    best = anneal(Point(0), step, merit=lambda point: -point.place, **options)
    assert best.place > 0
