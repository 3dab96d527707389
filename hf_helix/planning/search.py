"""Search: how urgent every operator is, so that a window is short.

In:   what a rank holds, its slots, and a profile.
Out:  a `Flow`, with its predicted time and the bound that no order can beat.
Must hold: within the memory that `extra_layers` allows; on the window that it is made for never longer, by the cost
function, than `greedy` on the same profile.

Annealing over the biases of a flow, first on a chain of layers, the forward of one micro-batch beside the backward of
another, where only the steady state counts; then, from what was found, on a short window with its ends and the
boundaries between its units. A candidate is judged by the cost function, contention included. Of what comes out, and of
`greedy`, the best on the whole window is kept.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hf_helix.planning.cost import Timeline, Work, simulate, work_of
from hf_helix.planning.flow import EXTRA_LAYERS, Bias, Flow, Window
from hf_helix.planning.graph import Graph, Part
from hf_helix.planning.profile import Name, Profile, named_operators
from hf_helix.planning.schedule import Action, Slot, build_schedule
from hf_helix.planning.window import Layout, window_instructions

EFFORT = 1_200_000  # of one annealing: instructions ordered and simulated, twice as dear where they slow each other
MOST_STEPS = 6000
CHAIN_LAYERS, CHAIN_STARTS = 10, 2
SHORT_LAYERS, SHORT_MICROBATCHES = 3, 5  # of a chunk, and of the window; more of the same need no search of their own
USUAL_MICROBATCHES = 8

Progress = Callable[[float], object]
"""Told how much of a search is done, from 0 to 1."""


def greedy(profile: Profile, extra_layers: int = EXTRA_LAYERS) -> Flow:
    """The flow without a search: what can start soonest, then the shortest; weight gradients last."""
    longest = max(profile.times.values())
    bias = {
        name: 1e-3 * (profile.times[name] + (longest if op.part is Part.W else 0.0))
        for name, op in named_operators(profile.layout)
    }
    return Flow(profile.times, bias, extra_layers)


def search(
    profile: Profile,
    slots: Sequence[Slot] | None = None,
    extra_layers: int = EXTRA_LAYERS,
    progress: Progress | None = None,
) -> Flow:
    """The best flow found.

    Args:
        slots: what the rank runs in the window that the flow is made for; by default eight micro-batches of the W
            schedule on one rank.
    """
    slots = slots or build_schedule("w", 1, USUAL_MICROBATCHES)[0]

    def best(flows: Sequence[Flow]) -> Flow:
        return min(flows, key=lambda flow: predict(flow, profile, slots).seconds)

    found = [greedy(profile, extra_layers)]
    views = [(*view, seed) for view in chains(profile.layout) for seed in range(CHAIN_STARTS)]
    views.append((shorten(profile.layout), shorten_slots(slots), 0))
    for number, (layout, few, seed) in enumerate(views):
        start = found[0] if number < len(views) - 1 else best(found)
        told = None if progress is None else functools.partial(_tell, progress, number, len(views))
        found.append(_improve(start, profile, layout, few, seed, told))
    return best(found)


def chains(layout: Layout) -> list[tuple[Layout, list[Slot]]]:
    """Of every kind of layer: the forward of a micro-batch beside the backward of another through several of them."""
    names = dict.fromkeys(name for name in layout.units if layout.graphs[name].forward.repeats)
    slots = [Slot(Action(0, "F", 1), Action(0, "B", 0))]
    units = list(range(CHAIN_LAYERS))
    return [(Layout([name] * len(units), {0: units}, {name: layout.graphs[name]}), slots) for name in names]


def _improve(
    start: Flow, profile: Profile, layout: Layout, slots: Sequence[Slot], seed: int, progress: Progress | None
) -> Flow:
    """The flow with the biases that annealing finds for a window."""
    program = window_instructions(slots, layout)
    window = Window(program, slots, layout, profile.times, start.extra_layers)
    slowdown = profile.slowdown if profile.pairs else None

    def cost(bias: Bias) -> float:
        return simulate(window.work, slowdown, window.order(bias)).seconds

    annealer = _Annealer(
        names=window.work.names,
        scale=max(profile.times.values()),
        cost=cost,
        steps=min(MOST_STEPS, EFFORT // (len(program) * (2 if slowdown is None else 4))),
        goal=bound(window.work, layout),
        dice=random.Random(seed),
    )
    return replace(start, bias=annealer.run(start.bias, progress))


def _tell(progress: Progress, number: int, count: int, share: float) -> None:
    progress((number + share) / count)


def predict(flow: Flow, profile: Profile, slots: Sequence[Slot]) -> Timeline:
    """What the cost function says of a window under a flow."""
    program = window_instructions(slots, profile.layout)
    window = Window(program, slots, profile.layout, flow.times, flow.extra_layers)
    work = work_of(program, profile.layout, profile.times)
    return simulate(work, profile.slowdown if profile.pairs else None, window.order(flow.bias))


def bound(work: Work, layout: Layout) -> float:
    """No order of a window takes less: the busiest stream, and each strand's way through its layers, W off it."""
    return max(max(work.loads().values()), *(_way(work, layout, letter) for letter in "FB"))


def _way(work: Work, layout: Layout, strand: str) -> float:
    """Seconds of the longest chain through every repeating unit of a strand, one after the other."""
    times = dict(zip(work.entries, work.seconds, strict=True))
    seconds = {name: times[number] for number, name in enumerate(work.names)}
    total = 0.0
    for unit, pair in layout.graphs.items():
        graph = pair.forward if strand == "F" else pair.backward
        first = (unit, f"{strand}.{graph.operators[0].name}")
        if graph.repeats and first in seconds:
            visits = work.entries.count(work.names.index(first))
            total += visits * longest_way(
                graph, {op.name: seconds[unit, f"{strand}.{op.name}"] for op in graph.operators}
            )
    return total


def longest_way(graph: Graph, seconds: dict[str, float]) -> float:
    """The longest chain from what enters a unit to what leaves it."""
    reached = dict.fromkeys(graph.inputs, 0.0)
    for op in graph.operators:
        ways = [reached[value] for value in op.depends_on if value in reached]
        if ways and op.part is not Part.W:
            reached.update(dict.fromkeys(op.writes, max(ways) + seconds[op.name]))
    return max((reached[value] for value in graph.outputs if value in reached), default=0.0)


def shorten(layout: Layout) -> Layout:
    """The layout with at most `SHORT_LAYERS` repeating units in a chunk."""
    units: list[str] = []
    chunks: dict[int, list[int]] = {}
    numbers: dict[int, int] = {}
    for stage, members in layout.chunks.items():
        chunks[stage], seen = [], 0
        for unit in members:
            repeats = layout.graphs[layout.units[unit]].forward.repeats
            seen += repeats
            if not repeats or seen <= SHORT_LAYERS:
                numbers[unit] = len(units)
                chunks[stage].append(len(units))
                units.append(layout.units[unit])
    shared = [[(numbers[unit], name) for unit, name in row if unit in numbers] for row in layout.shared]
    return Layout(units, chunks, layout.graphs, shared)


def shorten_slots(slots: Sequence[Slot]) -> list[Slot]:
    """The slots without the micro-batches beyond the first `SHORT_MICROBATCHES`."""

    def kept(action: Action | None) -> Action | None:
        return action if action is not None and action.microbatch < SHORT_MICROBATCHES else None

    few = [Slot(kept(slot.forward), kept(slot.backward)) for slot in slots]
    return [slot for slot in few if slot.actions]


@dataclass(frozen=True)
class _Annealer:
    """One operator's bias changes at a time; what is longer is taken now and then, ever more rarely."""

    names: Sequence[Name]
    scale: float
    cost: Callable[[Bias], float]
    steps: int
    goal: float
    dice: random.Random

    def run(self, start: Bias, progress: Progress | None) -> Bias:
        """The best bias seen."""
        current = best = start
        lowest = now = self.cost(current)
        for step in range(self.steps):
            if progress is not None and step % 50 == 0:
                progress(step / self.steps)
            if lowest <= self.goal * (1 + 1e-4):
                break
            candidate = self._neighbour(current)
            seconds = self.cost(candidate)
            heat = 0.001 * lowest * (1 - step / self.steps) + 1e-12
            if seconds <= now or self.dice.random() < math.exp((now - seconds) / heat):
                current, now = candidate, seconds
                if now < lowest:
                    best, lowest = current, now
        return best

    def _neighbour(self, bias: Bias) -> Bias:
        name = self.dice.choice(self.names)
        change = self.scale * self.dice.uniform(-1, 1)
        anew = self.dice.random() < 0.3
        return {**bias, name: change if anew else bias.get(name, 0.0) + change * self.dice.choice((0.03, 0.15, 0.6))}
