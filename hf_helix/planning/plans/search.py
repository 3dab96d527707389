"""Search: how urgent every operator is, so that a window is short.

In:   what the ranks hold, a schedule, and a profile.
Out:  a `Flow`, with its predicted time and the bound that no order can beat.
Must hold: within the memory that `extra_layers` allows; on the window that it is made for never longer, by the cost
function, than `greedy` on the same profile by more than `CLOSE`.

Annealing over the biases of a flow, on one rank: first on a chain of layers, the forward of one micro-batch beside the
backward of another, where only the steady state counts; then, from what was found, on a short window with its ends and
the boundaries between its units. Of what comes out, and of `greedy`, the best on the whole window, on all ranks, is
kept. The cost function judges candidates, contention included: at the times that were measured, and with computations
that take less. No machine keeps to what was measured, and where computation takes longest, an order may leave
communication for late at no cost, and at a high one as soon as it does not.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from hf_helix.planning.annealing import anneal
from hf_helix.planning.cost import COMPUTE, Timeline, Work, simulate, work_of
from hf_helix.planning.graph.operator import Graph, Part
from hf_helix.planning.instructions import window_instructions
from hf_helix.planning.layout import Layout
from hf_helix.planning.pipeline.schedule_file import (
    Action,
    Schedule,
    Slot,
    build_schedule,
    num_microbatches_of,
    without_microbatches,
)
from hf_helix.planning.plans.list_scheduler import EXTRA_LAYERS, Bias, Flow, Window
from hf_helix.planning.profile import Name, Profile, named_operators

EFFORT = 1_800_000  # of one annealing: instructions ordered and simulated, see `_Judge.effort`
MOST_STEPS = 6000
HEAT = 0.001  # by which part a change may make a window longer at first
CHAIN_LAYERS, CHAIN_STARTS = 10, 2
SHORT_LAYERS, SHORT_MICROBATCHES = 3, 5  # of a chunk, and of the window; more of the same need no search of their own
USUAL_MICROBATCHES = 8
PACES = (1.0, 0.8)  # how long computations take, in parts of what was measured; the first is that
CLOSE = 1.005  # of two windows that differ by less at the first pace, the better at all of them

Progress = Callable[[float], object]
"""Told how much of a search is done, from 0 to 1."""


def usual_extra(layout: Layout) -> int:
    """Layers whose activations may be alive beyond what the schedule's strands keep in turns.

    One; none on several ranks, whose fused slots keep one layer more than a single strand would (paper, section 6.5).
    """
    return EXTRA_LAYERS if layout.num_ranks == 1 else 0


def greedy(profile: Profile, extra_layers: int | None = None) -> Flow:
    """The flow without a search: what can start soonest, then the shortest; weight gradients last.

    Args:
        extra_layers: see `Flow`; None for `usual_extra`.
    """
    longest = max(profile.times.values())
    bias = {
        name: 1e-3 * (profile.times[name] + (longest if op.part is Part.W else 0.0))
        for name, op in named_operators(profile.layout)
    }
    return Flow(profile.times, bias, usual_extra(profile.layout) if extra_layers is None else extra_layers)


def search(
    profile: Profile,
    schedule: Schedule | None = None,
    extra_layers: int | None = None,
    progress: Progress | None = None,
    effort: float = 1.0,
) -> Flow:
    """The best flow found.

    Args:
        schedule: of the window that the flow is made for; by default eight micro-batches of the W schedule, or of 1F1B
            where every rank has one chunk.
        extra_layers: as for `greedy`.
        effort: the length of the search, in parts of the usual one.
    """
    num_ranks = profile.layout.num_ranks
    name = "w" if len(profile.layout.chunks) > num_ranks else "1f1b"
    usual = schedule or build_schedule(name, num_ranks, USUAL_MICROBATCHES)

    first = greedy(profile, extra_layers)
    judge = _Judge(first, profile, profile.layout, usual)
    found = [(first, judge.at_paces(first.bias))]

    def best() -> Flow:
        shortest = min(measured for _, (measured, *_) in found)
        close = [(flow, judged) for flow, judged in found if judged[0] <= CLOSE * shortest]
        return min(close, key=lambda each: sum(each[1]))[0]

    views = [(*view, seed) for view in chains(profile.layout) for seed in range(CHAIN_STARTS)]
    if num_ranks == 1:
        short = without_microbatches(usual, SHORT_MICROBATCHES)
    else:
        short = build_schedule("w", 1, min(num_microbatches_of(usual), SHORT_MICROBATCHES))
    views.append((shorten(profile.layout), short, 0))
    for number, (layout, few, seed) in enumerate(views):
        start = first if number < len(views) - 1 else best()
        told = None if progress is None else functools.partial(_tell, progress, number, len(views))
        flow = _improve(start, profile, layout, few, seed, effort, told)
        found.append((flow, judge.at_paces(flow.bias)))
    return best()


def num_annealings(layout: Layout) -> int:
    """How many times a search anneals, each time with an effort of up to `EFFORT`."""
    return CHAIN_STARTS * len(chains(layout)) + 1


def chains(layout: Layout, layers: int = CHAIN_LAYERS) -> list[tuple[Layout, Schedule]]:
    """Of every kind of layer: the forward of a micro-batch beside the backward of another through several of them."""
    names = dict.fromkeys(name for name in layout.units if layout.graphs[name].forward.repeats)
    schedule = [[Slot(Action(0, "F", 1), Action(0, "B", 0))]]
    units = list(range(layers))
    return [(Layout([name] * len(units), {0: units}, layout.graphs), schedule) for name in names]


def _improve(
    start: Flow,
    profile: Profile,
    layout: Layout,
    schedule: Schedule,
    seed: int,
    effort: float,
    progress: Progress | None,
) -> Flow:
    """The flow with the biases that annealing finds for a window."""
    judge = _Judge(start, profile, layout, schedule)
    names, scale = judge.window.work.names, max(profile.times.values())

    def propose(current: _Candidate, rng: random.Random) -> _Candidate:
        bias = _changed(current.bias, names, scale, rng)
        return _Candidate(bias, judge(bias))

    found = anneal(
        _Candidate(start.bias, judge(start.bias)),
        propose,
        steps=int(effort * min(MOST_STEPS, EFFORT // judge.effort)),
        rng=random.Random(seed),
        temperature=lambda shortest: HEAT * shortest,
        target=1 + 1e-4,
        progress=progress,
    )
    return replace(start, bias=found.bias)


class _Judge:
    """How long a window is, in parts of the bound: the mean over `PACES`."""

    def __init__(self, flow: Flow, profile: Profile, layout: Layout, schedule: Schedule) -> None:
        self.window = Window(schedule, layout, flow.times, flow.extra_layers)
        self._slowdown = profile.slowdown if profile.pairs else None
        work = self.window.work
        paces = PACES if any(stream != COMPUTE for stream in work.streams) else PACES[:1]
        self._works = [work.paced(pace) for pace in paces]
        self._bounds = [bound(work, layout) for work in self._works]

    @property
    def effort(self) -> int:
        """Instructions ordered and simulated for one answer, those that slow each other counted three times."""
        return len(self.window.program) * (1 + len(self._works) * (1 if self._slowdown is None else 3))

    def __call__(self, bias: Bias) -> float:
        return statistics.fmean(self.at_paces(bias))

    def at_paces(self, bias: Bias) -> list[float]:
        """The same for each of `PACES`."""
        order = self.window.order(bias)
        found = (simulate(work, self._slowdown, order).seconds for work in self._works)
        return [seconds / limit for seconds, limit in zip(found, self._bounds, strict=True)]


def _tell(progress: Progress, number: int, count: int, share: float) -> None:
    progress((number + share) / count)


def predict(flow: Flow, profile: Profile, schedule: Schedule) -> Timeline:
    """What the cost function says of a window under a flow."""
    window = Window(schedule, profile.layout, flow.times, flow.extra_layers)
    work = work_of(window.program, profile.layout, profile.times)
    return simulate(work, profile.slowdown if profile.pairs else None, window.order(flow.bias))


def lower_bound(profile: Profile, schedule: Schedule) -> float:
    """No order of this window takes less, see `bound`."""
    made = window_instructions(schedule, profile.layout)
    return bound(work_of(made, profile.layout, profile.times), profile.layout)


def bound(work: Work, layout: Layout) -> float:
    """No order of a window takes less: the busiest stream, and each strand's way through a rank's layers, W off it.

    Where two micro-batches of one direction run beside each other (warm-up and cool-down on several ranks, evaluation),
    half of both strands' ways.
    """
    found = [max(work.loads().values())]
    for rank in range(layout.num_ranks):
        forward, backward = (_way(work, layout, letter, rank) for letter in "FB")
        single = layout.num_ranks == 1 and forward and backward
        found.append(max(forward, backward) if single else (forward + backward) / 2)
    return max(found)


def _way(work: Work, layout: Layout, strand: str, rank: int) -> float:
    """Seconds of the longest chain through every repeating unit of a strand of a rank, one after the other."""
    times = dict(zip(work.entries, work.seconds, strict=True))
    seconds = {name: times[number] for number, name in enumerate(work.names)}
    total = 0.0
    for unit, pair in layout.graphs.items():
        graph = pair.forward if strand == "F" else pair.backward
        first = (unit, f"{strand}.{graph.operators[0].name}")
        if graph.repeats and first in seconds:
            number = work.names.index(first)
            visits = sum(entry == number and work.rank(place) == rank for place, entry in enumerate(work.entries))
            total += visits * longest_way(
                graph, {op.name: seconds[unit, f"{strand}.{op.name}"] for op in graph.operators}
            )
    return total


def longest_way(graph: Graph, seconds: dict[str, float]) -> float:
    """The longest chain from what enters a unit to what leaves it."""
    reached = dict.fromkeys(graph.inputs, 0.0)
    ended: dict[str, float] = {}
    for op in graph.operators:
        ways = [reached[value] for value in op.depends_on if value in reached]
        ways += [ended[name] for name in op.after if name in ended]
        if ways and op.part is not Part.W:
            ended[op.name] = max(ways) + seconds[op.name]
            reached.update(dict.fromkeys(op.writes, ended[op.name]))
    return max((reached[value] for value in graph.outputs if value in reached), default=0.0)


def shorten(layout: Layout) -> Layout:
    """The layout on one rank, with at most `SHORT_LAYERS` repeating units in a chunk; of ranks, in two chunks."""
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
    """Biases, and the mean length of the window that they lead to, in parts of the bound."""

    bias: Bias
    value: float


def _changed(bias: Bias, names: Sequence[Name], scale: float, rng: random.Random) -> Bias:
    """The biases with that of one operator changed by up to `scale`, or set anew."""
    name = rng.choice(names)
    change = scale * rng.uniform(-1, 1)
    anew = rng.random() < 0.3
    return {**bias, name: change if anew else bias.get(name, 0.0) + change * rng.choice((0.03, 0.15, 0.6))}
