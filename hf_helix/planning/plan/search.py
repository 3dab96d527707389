"""Search: priorities of operators that make a window short; the number of units that defer weight gradients.

In:   a profile and a schedule.
Out:  `Priorities`.
Must hold: within the memory of `extra_live_layers`; the window is at most `CLOSE` times as long as under `greedy`.

    candidates = [greedy]
    for each kind of layer:
        anneal on a chain of layers, a forward concurrent with a backward: the steady state of a rank
        candidates += [result]
    anneal from the best candidate on a short window with warm-up, cool-down and all kinds of units
    return the best candidate on the full window on all ranks, of a long window on `JUDGED` periods

Candidates are compared by simulation, contention included. Measured times drift, and an order with late collectives
looks good while computation is the bottleneck; so candidates are also simulated with computation 20 % faster.
"""

import functools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from hf_helix.config import AUTO
from hf_helix.planning.annealing import anneal
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.plan.bounds import bound
from hf_helix.planning.plan.list_scheduler import EXTRA_LIVE_LAYERS, SLACK, ListScheduler, Priorities, Priority
from hf_helix.planning.plan.repetition import Periodic
from hf_helix.planning.schedule.actions import Action, Schedule, Slot, num_microbatches_of, without_microbatches
from hf_helix.planning.schedule.named import build_schedule
from hf_helix.planning.timing.operator_clock import simulate
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.layout import Layout, Name, named_operators, sub_layout
from hf_helix.planning.window.passes import run_passes
from hf_helix.planning.window.window import COMPUTE

# Ratios below are windows over the bound, the mean of three eight-layer Llamas with drawn times on one rank and 16
# micro-batches: 1.0156 with these numbers.
# Instructions ordered and simulated in one annealing, see `_Cost.effort`, orders seen before included; with six such
# Llamas 1.0156, with twice as much 1.0142, with half 1.0156. With drawn slowdowns, twelve: 1.078, 1.073 and 1.080.
EFFORT = 900_000
MAX_STEPS = 6000  # for small windows; in those three cases the effort ends an annealing before 1500
HEAT = 0.001  # the part by which a change may make a window longer at first; 0.01 gave 1.0190, 0.1 1.0176, 0 1.0151
CHAIN_LAYERS, CHAIN_STARTS = 10, 2  # one start gave 1.0161; chains of 4 layers gave the same
SHORT_LAYERS = 3  # of a chunk in the short window; 1 gave 1.0166
SHORT_MICROBATCHES = 5  # of the short window; 2 gave 1.0184
USUAL_MICROBATCHES = 8
JUDGED = 16  # periods of the window for comparing candidates; 4 gave 1.0165

COMPUTE_TIME_FACTORS = (1.0, 0.8)
"""On the seconds of computations; the first is as measured. Judged only as measured, orders that delay communication
were up to a fifth longer on a machine that had become faster."""

CLOSE = 1.005  # windows with a smaller ratio under the first factor are compared under all factors

Progress = Callable[[float], object]
"""Called with the finished part of a search, from 0 to 1."""


def greedy(profile: Profile) -> Priorities:
    """Priorities without a search: the earliest start, then the shortest operator; weight gradients last. A layer of
    activations is alive beyond one strand; on several ranks none, as fused slots already keep one more layer (paper,
    section 6.5)."""
    times = {name: profile.times[name] for name, _ in named_operators(profile.layout)}
    longest = max(times.values())
    priority = {
        name: 1e-3 * (times[name] + (longest if op.part is Part.W else 0.0))
        for name, op in named_operators(profile.layout)
    }
    return Priorities(times, priority, EXTRA_LIVE_LAYERS if profile.layout.num_ranks == 1 else 0)


def search(
    profile: Profile,
    schedule: Schedule | None = None,
    progress: Progress | None = None,
    search_share: float = 1.0,
) -> Priorities:
    """The best priorities found."""
    num_ranks = profile.layout.num_ranks
    periodic = Periodic(schedule or usual_schedule(profile.layout))
    usual = periodic.keep(min(JUDGED, periodic.periods)) if periodic.periods else periodic.schedule

    first = defer_weight_gradients(greedy(profile), profile, usual)
    cost = _Cost(first, profile, profile.layout.without_gathers, usual)
    candidates = [(first, cost.of(first))]

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
        told = progress and functools.partial(_tell, progress, number, len(views))
        improved = defer_weight_gradients(
            _improve(start, profile, layout, few, seed, search_share, told), profile, usual
        )
        candidates.append((improved, cost.of(improved)))
    return best()


def usual_schedule(layout: Layout) -> Schedule:
    """Returns the default schedule of plans."""
    if layout.is_spread:
        return Scheduler(AUTO, layout.num_ranks, spread=True)(USUAL_MICROBATCHES)
    name = "folded_1f1b" if len(layout.chunks) > layout.num_ranks else "1f1b"
    return build_schedule(name, layout.num_ranks, USUAL_MICROBATCHES)


def num_annealings(layout: Layout) -> int:
    """How many times a search anneals, each time with an effort of up to `EFFORT`."""
    return CHAIN_STARTS * len(chains(layout)) + 1


def chains(layout: Layout, layers: int = CHAIN_LAYERS) -> list[tuple[Layout, Schedule]]:
    """Returns, for every kind of layer, several layers with a forward and a backward micro-batch."""
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
    search_share: float,
    progress: Progress | None,
) -> Priorities:
    """Returns the priorities found by annealing for a window."""
    cost = _Cost(start, profile, layout, schedule)
    names, scale = cost.names, max(start.times.values())

    def propose(current: _Candidate, rng: random.Random) -> _Candidate:
        priority = _changed(current.priority, names, scale, rng)
        return _Candidate(priority, cost(priority))

    best = anneal(
        _Candidate(start.priority, cost(start.priority)),
        propose,
        steps=int(search_share * min(MAX_STEPS, EFFORT // cost.effort)),
        rng=random.Random(seed),
        temperature=lambda shortest: HEAT * shortest,
        target=1 + 1e-4,
        progress=progress,
    )
    return replace(start, priority=best.priority)


class _Cost:
    """Seconds of a window over the bound: the mean over `COMPUTE_TIME_FACTORS`."""

    def __init__(self, start: Priorities, profile: Profile, layout: Layout, schedule: Schedule) -> None:
        self._scheduler = ListScheduler(schedule, layout, start.times, start.extra_live_layers)
        self._contention = profile.contention
        alone = self._scheduler.arrays
        communicates = any(stream != COMPUTE for stream in alone.streams)
        factors = COMPUTE_TIME_FACTORS if communicates else COMPUTE_TIME_FACTORS[:1]
        self._bounds = [bound(alone.with_compute_scaled(factor), layout) for factor in factors]
        arrays = self._scheduler.window.arrays(profile.times, traffic=True)
        self._arrays = [arrays.with_compute_scaled(factor) for factor in factors]
        self._known: dict[tuple[int, ...], float] = {}
        self.names = alone.names

    @property
    def effort(self) -> int:
        """Instructions ordered and simulated for a call; with contention a simulated instruction counts three times."""
        return len(self._scheduler.arrays) * (1 + len(self._arrays) * (1 if self._contention is None else 3))

    def __call__(self, priority: Priority) -> float:
        order = tuple(self._scheduler.order(priority))
        if order not in self._known:  # three of four changes leave the order as it was, or as it has been
            self._known[order] = statistics.fmean(self._by_factor(order))
        return self._known[order]

    def of(self, priorities: Priorities) -> list[float]:
        """Seconds over the bound for each of `COMPUTE_TIME_FACTORS`, gradient reductions included."""
        deferred = priorities.num_units_with_deferred_wgrad
        return self._by_factor(self._scheduler.order(priorities.priority, deferred=deferred))

    def _by_factor(self, order: Sequence[int]) -> list[float]:
        issued = run_passes(self._scheduler.window, order)
        seconds_by_factor = (simulate(arrays, self._contention, issued).seconds for arrays in self._arrays)
        return [seconds / limit for seconds, limit in zip(seconds_by_factor, self._bounds, strict=True)]


def _tell(progress: Progress, number: int, count: int, share: float) -> None:
    progress((number + share) / count)


def shorten(layout: Layout) -> Layout:
    """Returns the layout on one rank, with at most `SHORT_LAYERS` repeating units in a chunk; for several ranks two
    chunks."""
    model = [unit for unit in range(len(layout.units)) if not layout.transfers(unit)]
    layers = [unit for unit in model if layout.graphs[layout.units[unit]].forward.repeats]
    parts = layout.chunks
    if layout.num_ranks > 1:
        middle = layers[(len(layers) - 1) // 2] if layers else -1
        parts = {0: [unit for unit in model if unit <= middle], 1: [unit for unit in model if unit > middle]}
    stages = []
    for members in parts.values():
        further = [unit for unit in members if unit in layers][SHORT_LAYERS:]
        stages.append([unit for unit in members if unit not in further])
    short = sub_layout(layout, stages)
    return replace(short, graphs={name: pair for name, pair in layout.graphs.items() if name in short.units})


class _Candidate(NamedTuple):
    """Priorities, and the resulting mean length of the window, in parts of the bound."""

    priority: Priority
    value: float


def _changed(priority: Priority, names: Sequence[Name], scale: float, rng: random.Random) -> Priority:
    """Returns the priorities with one operator changed by up to `scale` seconds, or drawn anew. Only small changes
    (0.03) gave 1.0199, see `EFFORT`; only large ones, or another share drawn anew, 1.0157 to 1.0160."""
    name = rng.choice(names)
    change = scale * rng.uniform(-1, 1)
    anew = rng.random() < 0.3
    return {**priority, name: change if anew else priority.get(name, 0.0) + change * rng.choice((0.03, 0.15, 0.6))}


# -- deferred weight gradients -----------------------------------------------------------------------------------------

MICROBATCHES = 2  # for each pipeline rank, of the window for comparing numbers of units
PARTS = 8  # numbers of units to try first, evenly spaced; then the same count around the best number
GAIN = 1e-4  # a number of units is taken if the window becomes shorter by more than this part


def defer_weight_gradients(priorities: Priorities, profile: Profile, schedule: Schedule) -> Priorities:
    """Returns the priorities with the best number of units that defer their weight gradients in the last backward.

    All gradient reductions, of S seconds, fall into the last backward, of B seconds, and after it. Computations and
    reductions are a flow shop of two machines: bucket k is computed for a_k seconds, then reduced for b_k.

    1. S < B: the last bucket is exposed: the embedding's, often the largest. By Johnson's rule (1954)
       jobs with a_k < b_k go first, so the chain of input gradients should end early. The weight gradients of the first
       layers can wait: deferred, they overlap the reduction of the embedding. Deferring all would leave nothing to
       reduce before the chain ends. The best number depends on all times, and is found by trial.
    2. S > B: S less the computation before the first bucket is exposed under every plan, and nothing is deferred.
       Reducing earlier contributions first would hide nothing (the last micro-batch adds to every element) and change
       the bits; interleaving the last two backwards would keep twice the activations of a stage.

    No more activations are alive than without deferring, or than the memory limit allows; the window is never longer.
    """
    if not profile.layout.reductions:
        return priorities
    layout = profile.layout.without_gathers
    # A window just long enough to show how its last backward ends.
    short = without_microbatches(schedule, min(num_microbatches_of(schedule), MICROBATCHES * layout.num_ranks))
    scheduler = ListScheduler(short, layout, priorities.times, priorities.extra_live_layers)
    arrays = scheduler.window.arrays(profile.times, traffic=True)
    plain = scheduler.peaks(scheduler.order(priorities.priority))
    limits = [max(pair) + SLACK for pair in zip(plain, scheduler.limits, strict=True)]

    @functools.cache
    def seconds(deferred: int | None) -> float:
        """The seconds of the window without copies to the host at its end, which updates of weights on the host hide;
        infinity if too many activations would be alive."""
        order = scheduler.order(priorities.priority, deferred=deferred)
        if any(peak > limit for peak, limit in zip(scheduler.peaks(order), limits, strict=True)):
            return math.inf
        timeline = simulate(arrays, profile.contention, run_passes(scheduler.window, order))
        return timeline.seconds_without(Kind.DOWN)

    count = max(len([u for u in layout.units_of(rank) if not layout.transfers(u)]) for rank in range(layout.num_ranks))
    tried = _spread(0, count)
    best, near = min(tried, key=seconds), -(-count // PARTS)
    best = min([*tried, *_spread(max(0, best - near), min(count, best + near))], key=seconds)
    gains = seconds(best) < (1 - GAIN) * seconds(None)
    return replace(priorities, num_units_with_deferred_wgrad=best if gains else None)


def _spread(first: int, last: int) -> list[int]:
    return sorted({first + round((last - first) * part / PARTS) for part in range(PARTS + 1)})
