"""Search: priorities of operators that make a window short.

In:   what the ranks hold, a schedule, and a profile.
Out:  `Priorities`, with the predicted time of a window and the bound that no order can beat.
Must hold: within the memory that `extra_live_layers` allows; on the window that it is made for never longer, by the
cost function, than `greedy` on the same profile by more than `CLOSE`.

The search anneals over the priorities, on one rank: first on a chain of layers, the forward of one micro-batch beside
the backward of another, where only the steady state counts; then, from the best so far, on a short window with warm-up,
cool-down and the boundaries between its units. It keeps whichever of these results and of `greedy` is best on the whole
window on all ranks, of a long window on `JUDGED` periods. The cost function judges candidates, contention included.
Measured times drift. An order that delays collectives looks free while compute is the bottleneck, and is expensive once
it is not; so candidates are also judged with compute 20 % faster.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from hf_helix.planning.annealing import anneal
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.plan.bounds import bound
from hf_helix.planning.plan.list_scheduler import EXTRA_LIVE_LAYERS, SLACK, ListScheduler, Priorities, Priority
from hf_helix.planning.schedule.actions import Action, Schedule, Slot, num_microbatches_of, without_microbatches
from hf_helix.planning.schedule.named import build_schedule
from hf_helix.planning.timing.clock import Timeline, simulate
from hf_helix.planning.timing.profile import Name, Profile, named_operators
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.passes import add_sums, order_with_sums, prefetched
from hf_helix.planning.window.repetition import Periodic
from hf_helix.planning.window.window import COMPUTE

EFFORT = 1_800_000  # of one annealing: instructions ordered and simulated, see `_Cost.effort`
MAX_STEPS = 6000
HEAT = 0.001  # by which part a change may make a window longer at first
CHAIN_LAYERS, CHAIN_STARTS = 10, 2
SHORT_LAYERS, SHORT_MICROBATCHES = 3, 5  # of a chunk, and of the window; more of the same need no search of their own
USUAL_MICROBATCHES = 8
JUDGED = 16  # periods of the schedule of the window on which results are compared
COMPUTE_TIME_FACTORS = (1.0, 0.8)  # seconds of computations over their measured seconds; the first is as measured
CLOSE = 1.005  # windows whose measured-time predictions differ by less are judged by all factors

Progress = Callable[[float], object]
"""Told how much of a search is done, from 0 to 1."""


def usual_extra_live_layers(layout: Layout) -> int:
    """How many layers' activations may be alive beyond what the schedule's strands keep in turns.

    One; none on several ranks, whose fused slots keep one layer more than a single strand would (paper, section 6.5).
    """
    return EXTRA_LIVE_LAYERS if layout.num_ranks == 1 else 0


def greedy(profile: Profile, extra_live_layers: int | None = None) -> Priorities:
    """Priorities without a search: what can start soonest, then the shortest; weight gradients last.

    Args:
        profile: the times of the operators.
        extra_live_layers: see `Priorities`; None for `usual_extra_live_layers`.
    """
    times = {name: profile.times[name] for name, _ in named_operators(profile.layout)}
    longest = max(times.values())
    priority = {
        name: 1e-3 * (times[name] + (longest if op.part is Part.W else 0.0))
        for name, op in named_operators(profile.layout)
    }
    usual = usual_extra_live_layers(profile.layout)
    return Priorities(times, priority, usual if extra_live_layers is None else extra_live_layers)


def search(
    profile: Profile,
    schedule: Schedule | None = None,
    extra_live_layers: int | None = None,
    progress: Progress | None = None,
    effort: float = 1.0,
) -> Priorities:
    """The best priorities found.

    Args:
        profile: the times of the operators, alone and beside each other.
        schedule: of the window that the plan is made for; by default `usual_schedule`.
        extra_live_layers: as for `greedy`.
        progress: told how much of the search is done.
        effort: the length of the search, in parts of the usual one.
    """
    num_ranks = profile.layout.num_ranks
    periodic = Periodic(schedule or usual_schedule(profile.layout))
    usual = periodic.keep(min(JUDGED, periodic.periods)) if periodic.periods else periodic.schedule

    first = hold_weights(greedy(profile, extra_live_layers), profile, usual)
    cost = _Cost(first, profile, profile.layout, usual)
    candidates = [(first, cost.by_factor(first.priority, first.held_units))]

    def best() -> Priorities:
        shortest = min(as_measured for _, (as_measured, *_) in candidates)
        close = [(each, costs) for each, costs in candidates if costs[0] <= CLOSE * shortest]
        return min(close, key=lambda each: sum(each[1]))[0]

    views = [(*view, seed) for view in chains(profile.layout) for seed in range(CHAIN_STARTS)]
    if num_ranks == 1:
        short = without_microbatches(usual, SHORT_MICROBATCHES)
    else:
        short = build_schedule("folded_1f1b", 1, min(num_microbatches_of(usual), SHORT_MICROBATCHES))
    views.append((shorten(profile.layout), short, 0))
    for number, (layout, few, seed) in enumerate(views):
        start = first if number < len(views) - 1 else best()
        told = None if progress is None else functools.partial(_tell, progress, number, len(views))
        improved = hold_weights(_improve(start, profile, layout, few, seed, effort, told), profile, usual)
        candidates.append((improved, cost.by_factor(improved.priority, improved.held_units)))
    return best()


def usual_schedule(layout: Layout) -> Schedule:
    """The schedule of the window that plans are made for where none is given."""
    name = "folded_1f1b" if len(layout.chunks) > layout.num_ranks else "1f1b"
    return build_schedule(name, layout.num_ranks, USUAL_MICROBATCHES)


def num_annealings(layout: Layout) -> int:
    """How many times a search anneals, each time with an effort of up to `EFFORT`."""
    return CHAIN_STARTS * len(chains(layout)) + 1


def chains(layout: Layout, layers: int = CHAIN_LAYERS) -> list[tuple[Layout, Schedule]]:
    """For every kind of layer, the forward of a micro-batch beside the backward of another through several of them."""
    names = dict.fromkeys(name for name in layout.units if layout.graphs[name].forward.repeats)
    schedule = [[Slot(Action(0, "F", 1), Action(0, "B", 0))]]
    units = list(range(layers))
    return [(Layout([name] * len(units), {0: units}, layout.graphs), schedule) for name in names]


def _improve(
    start: Priorities,
    profile: Profile,
    layout: Layout,
    schedule: Schedule,
    seed: int,
    effort: float,
    progress: Progress | None,
) -> Priorities:
    """Returns the priorities that annealing finds for a window."""
    cost = _Cost(start, profile, layout, schedule)
    names, scale = cost.window.work.names, max(start.times.values())

    def propose(current: _Candidate, rng: random.Random) -> _Candidate:
        priority = _changed(current.priority, names, scale, rng)
        return _Candidate(priority, cost(priority))

    best = anneal(
        _Candidate(start.priority, cost(start.priority)),
        propose,
        steps=int(effort * min(MAX_STEPS, EFFORT // cost.effort)),
        rng=random.Random(seed),
        temperature=lambda shortest: HEAT * shortest,
        target=1 + 1e-4,
        progress=progress,
    )
    return replace(start, priority=best.priority)


class _Cost:
    """Seconds of a window over the bound: the mean over `COMPUTE_TIME_FACTORS`."""

    def __init__(self, start: Priorities, profile: Profile, layout: Layout, schedule: Schedule) -> None:
        self.window = ListScheduler(schedule, layout, start.times, start.extra_live_layers)
        self._slowdown = profile.slowdown if profile.pairs else None
        work = self.window.work
        communicates = any(stream != COMPUTE for stream in work.streams)
        factors = COMPUTE_TIME_FACTORS if communicates else COMPUTE_TIME_FACTORS[:1]
        self._bounds = [bound(work.paced(factor), layout) for factor in factors]
        self._first_sum = len(work)
        self._works = [add_sums(work, self.window.window, profile.times).paced(factor) for factor in factors]

    @property
    def effort(self) -> int:
        """Instructions ordered and simulated for one call; with contention a simulated one counts three times."""
        return len(self.window.work) * (1 + len(self._works) * (1 if self._slowdown is None else 3))

    def __call__(self, priority: Priority) -> float:
        return statistics.fmean(self.by_factor(priority))

    def by_factor(self, priority: Priority, held_units: int | None = None) -> list[float]:
        """Seconds over the bound for each of `COMPUTE_TIME_FACTORS`, sums of gradients included."""
        order = self.window.order(priority, held_units=held_units)
        order = order_with_sums(self.window.window, prefetched(self.window.window, order), self._first_sum)
        seconds_by_factor = (simulate(work, self._slowdown, order).seconds for work in self._works)
        return [seconds / limit for seconds, limit in zip(seconds_by_factor, self._bounds, strict=True)]


def _tell(progress: Progress, number: int, count: int, share: float) -> None:
    progress((number + share) / count)


def predict(priorities: Priorities, profile: Profile, schedule: Schedule) -> Timeline:
    """The predicted timeline of a window, on all ranks.

    Args:
        priorities: from which the window is ordered.
        profile: the times of the operators.
        schedule: of the window.
    """
    window = ListScheduler(schedule, profile.layout, priorities.times, priorities.extra_live_layers)
    issued = window.issue(priorities.priority, held_units=priorities.held_units)
    work, order = issued.work(profile.times)
    return simulate(work, profile.slowdown if profile.pairs else None, order)


def shorten(layout: Layout) -> Layout:
    """The layout on one rank, with at most `SHORT_LAYERS` repeating units in a chunk; two chunks for several ranks."""
    model = [unit for unit in range(len(layout.units)) if not layout.transfers(unit)]
    layers = [unit for unit in model if layout.graphs[layout.units[unit]].forward.repeats]
    parts = layout.chunks
    if layout.num_ranks > 1:
        middle = layers[(len(layers) - 1) // 2] if layers else -1
        parts = {0: [unit for unit in model if unit <= middle], 1: [unit for unit in model if unit > middle]}
    units: list[str] = []
    chunks: dict[int, list[int]] = {stage: [] for stage in parts}
    numbers: dict[int, int] = {}
    for stage, members in parts.items():
        for place, unit in enumerate(members):
            before = [u for u in members[:place] if u in layers]
            if unit not in layers or len(before) < SHORT_LAYERS:
                numbers[unit] = len(units)
                chunks[stage].append(len(units))
                units.append(layout.units[unit])
    shared = [[(numbers[unit], name) for unit, name in row if unit in numbers] for row in layout.shared]
    graphs = {name: pair for name, pair in layout.graphs.items() if name in units}
    return Layout(units, chunks, graphs, shared)


class _Candidate(NamedTuple):
    """Priorities, and the mean length of the window that they lead to, in parts of the bound."""

    priority: Priority
    value: float


def _changed(priority: Priority, names: Sequence[Name], scale: float, rng: random.Random) -> Priority:
    """Returns the priorities with that of one operator changed by up to `scale` seconds, or drawn anew."""
    name = rng.choice(names)
    change = scale * rng.uniform(-1, 1)
    anew = rng.random() < 0.3
    return {**priority, name: change if anew else priority.get(name, 0.0) + change * rng.choice((0.03, 0.15, 0.6))}


MICROBATCHES = 2
"""Micro-batches, for each rank of the pipeline, of the window on which numbers of units are compared."""

PARTS = 8
"""Numbers of units that are tried at first: so many parts of all units, then those between the best ones."""

GAIN = 1e-4
"""A number of units is taken if it makes the window shorter by more than this part."""


def hold_weights(priorities: Priorities, profile: Profile, schedule: Schedule) -> Priorities:
    """Returns the priorities with the best number of units that hold weight gradients back.

    Args:
        priorities: from which windows are ordered.
        profile: the times of the operators, sums included.
        schedule: of the window.
    """
    layout = profile.layout
    if not layout.sums:
        return priorities
    trial = _Trial(priorities, profile, schedule)
    count = max(len([u for u in layout.units_of(rank) if not layout.transfers(u)]) for rank in range(layout.num_ranks))
    seconds = {held: trial.seconds(held) for held in _spread(0, count)}
    best = min(seconds, key=lambda held: seconds[held])
    near = -(-count // PARTS)
    seconds |= {held: trial.seconds(held) for held in _spread(max(0, best - near), min(count, best + near))}
    best = min(seconds, key=lambda held: seconds[held])
    gains = seconds[best] < (1 - GAIN) * trial.seconds(None)
    return replace(priorities, held_units=best if gains else None)


def _spread(first: int, last: int) -> list[int]:
    return sorted({first + round((last - first) * part / PARTS) for part in range(PARTS + 1)})


class _Trial:
    """A window as short as shows how its last backward ends."""

    def __init__(self, priorities: Priorities, profile: Profile, schedule: Schedule) -> None:
        layout = profile.layout
        few = min(num_microbatches_of(schedule), MICROBATCHES * layout.num_ranks)
        short = without_microbatches(schedule, few)
        self._priority = priorities.priority
        self._scheduler = ListScheduler(short, layout, priorities.times, priorities.extra_live_layers)
        work = self._scheduler.window.work(profile.times)
        self._first = len(work)
        self._work = add_sums(work, self._scheduler.window, profile.times)
        self._slowdown = profile.slowdown if profile.pairs else None
        plain = self._scheduler.peaks(self._scheduler.order(self._priority))
        self._limits = [max(pair) + SLACK for pair in zip(plain, self._scheduler.limits, strict=True)]

    def seconds(self, held_units: int | None) -> float:
        """Returns the seconds of the window; more than any window takes where too many activations would be alive."""
        order = self._scheduler.order(self._priority, held_units=held_units)
        if self._exceeds(order):
            return float("inf")
        order = order_with_sums(self._scheduler.window, prefetched(self._scheduler.window, order), self._first)
        return simulate(self._work, self._slowdown, order).seconds

    def _exceeds(self, order: Sequence[int]) -> bool:
        return any(peak > limit for peak, limit in zip(self._scheduler.peaks(order), self._limits, strict=True))
