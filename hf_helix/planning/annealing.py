"""Simulated annealing: a random walk of small changes that may go uphill, with falling probability.

In:   a state to start from, a function that proposes a changed state, and the number of changes to try.
Out:  the best state of the walk.
Must hold: every random number comes from the given generator, so equal inputs give equal results.
"""

import math
import random
from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class State(Protocol):
    """A point of the walk; its `value` is minimised."""

    @property
    def value(self) -> float: ...


S = TypeVar("S", bound=State)

Accept = Callable[[float, float, float, random.Random], bool]
"""Whether the walk moves, by the current value, the proposed value, the temperature and a random generator."""


def metropolis(current: float, proposed: float, temperature: float, rng: random.Random) -> bool:
    """Accepts a worse value with the probability exp(-difference / temperature)."""
    return proposed <= current or rng.random() < math.exp((current - proposed) / (temperature + 1e-12))


def threshold(current: float, proposed: float, temperature: float, rng: random.Random) -> bool:
    """Returns whether a value is worse by at most a random part of the temperature.

    Uses no transcendental function, so the walk is equal on every machine.
    """
    return proposed <= current + temperature * rng.random()


def anneal(
    start: S,
    propose: Callable[[S, random.Random], S | None],
    *,
    steps: int,
    rng: random.Random,
    temperature: Callable[[float], float],
    accept: Accept = metropolis,
    merit: Callable[[S], Any] = lambda state: state.value,
    target: float = -math.inf,
    progress: Callable[[float], object] | None = None,
) -> S:
    """Returns the state of the walk with the smallest merit.

    Args:
        propose: makes a changed state; None if the change does not apply. Either counts as a step.
        steps: the number of changes to try.
        temperature: at the first step, given the value of the best state so far; from there it falls linearly to 0.
        accept: `metropolis` or `threshold`.
        merit: the measure of the best state.
        target: the walk ends when the best state's value is no more than this.
        progress: called now and then with the finished part of the steps, from 0 to 1.
    """
    current = best = start
    for step in range(steps):
        if progress is not None and step % 50 == 0:
            progress(step / steps)
        if best.value <= target:
            break
        proposed = propose(current, rng)
        if proposed is None:
            continue
        if accept(current.value, proposed.value, temperature(best.value) * (1 - step / steps), rng):
            current = proposed
            if merit(current) < merit(best):
                best = current
    return best
