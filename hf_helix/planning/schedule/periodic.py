"""Periodic schedules: every micro-batch goes the same way, a period after the one before.

In:   the costs and the ranks of the virtual stages, several on every rank.
Out:  schedules, the most promising first.
Must hold: an action begins after its inputs have arrived, and in a period the actions of a rank do not overlap; so a
schedule can run, and keeps as many micro-batches under way as a micro-batch takes periods. Equal inputs give equal
schedules on every machine.

No period is shorter than the time of the heaviest rank for a micro-batch. Actions are placed in the order of a
micro-batch, at the first time at which their rank is free in every period, if possible without gaps that are too small
for others; weight gradients go into what is left (software pipelining: Lam, 1988; arXiv 2411.05288 repeats such a block
for slices of the vocabulary, too).
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

from hf_helix.planning.schedule.actions import Action, Schedule, Slot
from hf_helix.planning.schedule.slot_clock import Costs, SlotClock, simulate_schedule

STRETCHES, GAPS = (1.02, 1.05, 1.1, 1.2), (0.1, 0.2, 0.3, 0.5)
"""The periods to try, in parts of the shortest possible one, each with the smallest gaps, in parts of the period."""

SURE = 24.0
"""A period in which every action finds a place, since it is longer than any number of gaps that are too small."""


def periodic_schedules(ranks: tuple[int, ...], costs: Costs, num_microbatches: int, count: int) -> list[Schedule]:
    """Returns at most `count` schedules, the fastest of a short window first; `ranks` are those of the stages."""
    clock = SlotClock(ranks, costs, min(num_microbatches, 3 * (max(ranks) + 1)))
    tried = [_placed(clock, *each) for each in product(STRETCHES, GAPS)]
    if not any(tried):
        tried = [_placed(clock, SURE, 0.0)]
    blocks = [each for each in tried if each is not None]
    made = [(simulate_schedule(_repeated(clock, *block), ranks, costs).seconds, block) for block in blocks]
    whole = SlotClock(ranks, costs, num_microbatches)
    return [_repeated(whole, *block) for _, block in sorted(made, key=lambda each: each[0])[:count]]


def _placed(clock: SlotClock, stretch: float, least: float) -> tuple[Mapping[Action, float], float] | None:
    """Returns when the actions of the first micro-batch begin, and the period; None where an action finds no place."""
    costs, stages = clock.costs, range(len(clock.ranks))
    loads = [0.0] * (max(clock.ranks) + 1)
    for stage in stages:
        loads[clock.ranks[stage]] += costs.seconds(Action(stage, "F", 0)) + costs.seconds(Action(stage, "B", 0))
    period = stretch * max(loads)
    slack = 1e-9 * period  # of rounding
    taken: list[list[tuple[float, float]]] = [[] for _ in loads]
    starts: dict[Action, float] = {}

    def place(action: Action, ready: float) -> bool:
        seconds, mine = costs.seconds(action), taken[clock.ranks[action.stage]]
        ends = [(begin + length - ready) % period for begin, length in mine]
        begins = [(begin - seconds - ready) % period for begin, _ in mine]
        fitting: list[tuple[bool, float]] = []
        for start in (ready + wait for wait in sorted({0.0, *ends, *begins})):
            since = [(start - begin + slack) % period - slack - length for begin, length in mine]
            until = [(begin - start + slack) % period - slack - seconds for begin, _ in mine]
            rests = min(since, default=period), min(until, default=period)
            if min(rests) >= -2 * slack:
                fitting.append((any(2 * slack < rest < least * period for rest in rests), start))
        if fitting:
            starts[action] = min(fitting)[1]
            mine += [(starts[action], seconds)] if seconds else []
        return bool(fitting)

    ready = 0.0
    route = [(stage, "F") for stage in stages] + [(stage, "I") for stage in stages[::-1]]
    for (stage, part), (following, _) in zip(route, [*route[1:], route[-1]], strict=True):
        action = Action(stage, part, 0)
        if not place(action, ready):
            return None
        ready = starts[action] + costs.seconds(action) + clock.hop(stage, following)
    for stage in stages[::-1]:
        action = Action(stage, "I", 0)
        if not place(Action(stage, "W", 0), starts[action] + costs.seconds(action)):
            return None
    return starts, period


def _repeated(clock: SlotClock, starts: Mapping[Action, float], period: float) -> Schedule:
    """Returns the actions of all micro-batches in the order of their times; a W directly behind its I joins it."""
    rows: Schedule = [[] for _ in range(max(clock.ranks) + 1)]
    # Actions without a time of their own begin at the same time as others: they keep the order of a micro-batch.
    times = [
        (start + number * period, place, number, action)
        for place, (action, start) in enumerate(starts.items())
        for number in range(clock.num_microbatches)
    ]
    for _, _, number, action in sorted(times):
        row, action = rows[clock.ranks[action.stage]], replace(action, microbatch=number)
        joined = replace(action, computation_type="I")
        if action.computation_type == "W" and row and row[-1].backward == joined:
            row[-1] = Slot(backward=replace(action, computation_type="B"))
        else:
            row.append(Slot.alone(action))
    return rows
