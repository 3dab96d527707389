"""The window of a step: when the ranks of a pipeline compute.

In:   what its virtual stages cost, and the name of a schedule.
Out:  a `WindowTime`.
Must hold: a long window repeats itself: it takes what a short one takes, and for each further micro-batch what one
more adds there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from hf_helix.config import AUTO
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.schedule.auto import listed_schedules
from hf_helix.planning.schedule.clock import USUAL_GAIN, Costs, Simulated, simulate_schedule
from hf_helix.planning.schedule.named import FOLDED
from hf_helix.planning.schedule.scheduler import ON_ONE_RANK, Scheduler

SHORT, LONG = 4, 6
"""Micro-batches, for each rank of the pipeline, of the two windows whose difference tells what one more adds."""


@dataclass(frozen=True)
class WindowTime:
    """The forward and backward of all micro-batches of a step.

    Attributes:
        name: of the schedule.
        seconds: of the window.
        busiest: the pipeline rank that works most.
        bubble: part of the window in which ranks wait, on average.
    """

    name: str
    seconds: float
    busiest: int
    bubble: float


@functools.lru_cache(maxsize=64)
def schedule_of(name: str, num_ranks: int, microbatches: int) -> Schedule:
    """Returns the schedule of a window, made once: many layouts have the same.

    Args:
        name: of the schedule.
        num_ranks: of the pipeline.
        microbatches: of the window.
    """
    return Scheduler(name, num_ranks)(microbatches)


def possible_names(name: str, num_ranks: int) -> Sequence[str]:
    """Returns the names of the schedules that a name stands for: "auto" for those on the fold, without a search."""
    if name != AUTO:
        return [name]
    return FOLDED if num_ranks > 1 else [ON_ONE_RANK]


def usual_schedules(name: str, num_ranks: int, microbatches: int, two_strands: bool) -> list[Schedule]:
    """Returns the schedules that memory is counted for, of a window as long as memory depends on.

    Args:
        name: of the schedule; "auto" may take any on the fold, and one that puts off weight gradients.
        num_ranks: of the pipeline.
        microbatches: of the window.
        two_strands: whether forward and backward run beside each other.
    """
    count = min(microbatches, SHORT * num_ranks)
    named = [schedule_of(each, num_ranks, count) for each in possible_names(name, num_ranks)]
    return [*named, *_listed(num_ranks, count, two_strands)] if name == AUTO and num_ranks > 1 else named


@functools.lru_cache(maxsize=64)
def _listed(num_ranks: int, microbatches: int, two_strands: bool) -> Sequence[Schedule]:
    costs = Costs.of_layers([1] * (2 * num_ranks), gain=USUAL_GAIN if two_strands else 1.0)
    return listed_schedules(num_ranks, microbatches, costs)


def window_of(name: str, ranks: Sequence[int], microbatches: int, costs: Costs) -> WindowTime:
    """Returns the window of a schedule.

    Args:
        name: of the schedule; "auto" for the faster of those on the fold, without a search.
        ranks: of each virtual stage.
        microbatches: of the window.
        costs: of the virtual stages.
    """
    num_ranks = max(ranks) + 1
    windows = [_window(each, ranks, microbatches, costs) for each in possible_names(name, num_ranks)]
    return min(windows, key=lambda window: window.seconds)


def _window(name: str, ranks: Sequence[int], microbatches: int, costs: Costs) -> WindowTime:
    num_ranks = max(ranks) + 1

    def simulated(count: int) -> Simulated:
        return simulate_schedule(schedule_of(name, num_ranks, count), ranks, costs)

    long = simulated(min(microbatches, LONG * num_ranks))
    seconds, busy = long.seconds, list(long.busy)
    if microbatches > LONG * num_ranks:
        short = simulated(SHORT * num_ranks)
        further = (microbatches - LONG * num_ranks) / ((LONG - SHORT) * num_ranks)
        seconds += further * (long.seconds - short.seconds)
        busy = [more + further * (more - less) for more, less in zip(long.busy, short.busy, strict=True)]
    busiest = max(range(num_ranks), key=lambda rank: busy[rank])
    return WindowTime(name, seconds, busiest, max(0.0, 1 - sum(busy) / num_ranks / seconds))
