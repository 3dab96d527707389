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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hf_helix.config import parse_link
from hf_helix.planning.annealing import anneal
from hf_helix.planning.cost import COMPUTE, STREAMS, Timeline, Work, busiest_link, simulate
from hf_helix.planning.gradient_sums import add_sums, order_with_sums
from hf_helix.planning.graph.operator import Graph, Kind, Part
from hf_helix.planning.layout import Layout
from hf_helix.planning.pipeline.actions import Action, Schedule, Slot, num_microbatches_of, without_microbatches
from hf_helix.planning.pipeline.named import build_schedule
from hf_helix.planning.pipeline.periodic import Periodic
from hf_helix.planning.plans.holding import hold_weights
from hf_helix.planning.plans.list_scheduler import EXTRA_LIVE_LAYERS, ListScheduler, Priorities, Priority
from hf_helix.planning.prefetch import prefetched
from hf_helix.planning.profile import (
    EMULATED_LINK,
    SUMS_OVER,
    Name,
    Profile,
    named_operators,
    names_of_window,
    seconds_of_window,
)
from hf_helix.planning.window import Window

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


def lower_bound(profile: Profile, schedule: Schedule) -> float:
    """Seconds that no order of this window can beat: `bound`, to which every micro-batch adds the same, or what the
    busiest link of a rank carries, gathers of weights and sums of gradients included."""
    layout, count = profile.layout, num_microbatches_of(schedule)
    work = Window(without_microbatches(schedule, 1), layout).work(profile.times)
    links = [busiest_link(_link_loads(profile, work, rank, count)) for rank in range(layout.num_ranks)]
    return max(count * bound(work, layout), *links)


def _link_loads(profile: Profile, work: Work, rank: int, count: int) -> Iterator[tuple[str, float]]:
    """Yields what a window communicates, for `busiest_link`: by streams, each on a link of its own, sums of gradients
    on that of the stream that the profile names. All of it shares an emulated link, of which the profile knows the
    bytes. What goes between ranks of a pipeline is left out.

    Args:
        profile: the times and bytes of the operators.
        work: of a window of one micro-batch.
        rank: of the pipeline.
        count: the micro-batches of the window.
    """
    moving = {kind: load for kind, load in work.loads_of(rank).items() if kind not in (Kind.COMPUTE, Kind.PIPELINE)}
    yield from ((kind.value, count * load) for kind, load in moving.items())
    emulated, own = profile.about.get(EMULATED_LINK), Kind.GRADIENTS.value
    yield own if emulated else profile.about.get(SUMS_OVER, own), seconds_of_window(profile, rank)
    if emulated:
        streams = {STREAMS.index(kind) for kind in moving}
        mine = (place for place in range(len(work)) if work.rank(place) == rank and work.streams[place] in streams)
        sent = count * sum(profile.bytes.get(work.names[work.entries[place]], 0) for place in mine)
        sent += sum(profile.bytes.get(name, 0) for name in names_of_window(profile.layout, rank))
        yield "all", parse_link(emulated).seconds(sent)


def bound(work: Work, layout: Layout) -> float:
    """Seconds that no order of a window can beat: the load of the busiest stream, and the critical path of each strand
    through a rank's layers, weight gradients left out.

    Where two micro-batches of one direction run beside each other (warm-up and cool-down on several ranks, evaluation),
    half of the sum of both strands' critical paths.
    """
    limits = [max(work.loads().values())]
    for rank in range(layout.num_ranks):
        forward, backward = (_critical_path(work, layout, letter, rank) for letter in "FB")
        single = layout.num_ranks == 1 and forward and backward
        limits.append(max(forward, backward) if single else (forward + backward) / 2)
    return max(limits)


def _critical_path(work: Work, layout: Layout, strand: str, rank: int) -> float:
    """Seconds of the critical paths through every repeating unit of a strand of a rank, one after the other."""
    times = dict(zip(work.entries, work.seconds, strict=True))
    seconds = {name: times[number] for number, name in enumerate(work.names)}
    total = 0.0
    for unit, pair in layout.graphs.items():
        graph = pair.forward if strand == "F" else pair.backward
        first = (unit, f"{strand}.{graph.operators[0].name}")
        if graph.repeats and first in seconds:
            number = work.names.index(first)
            unit_passes = sum(entry == number and work.rank(place) == rank for place, entry in enumerate(work.entries))
            total += unit_passes * critical_path(
                graph, {op.name: seconds[unit, f"{strand}.{op.name}"] for op in graph.operators}
            )
    return total


def critical_path(graph: Graph, seconds: dict[str, float]) -> float:
    """Seconds of the longest chain from what enters a unit to what leaves it."""
    reached = dict.fromkeys(graph.inputs, 0.0)
    ended: dict[str, float] = {}
    for op in graph.operators:
        begins = [reached[value] for value in op.depends_on if value in reached]
        begins += [ended[name] for name in op.ordered_after if name in ended]
        if begins and op.part is not Part.W:
            ended[op.name] = max(begins) + seconds[op.name]
            reached.update(dict.fromkeys(op.writes, ended[op.name]))
    return max((reached[value] for value in graph.outputs if value in reached), default=0.0)


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
