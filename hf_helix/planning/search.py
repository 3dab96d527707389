"""Search: how urgent every operator is, so that a window is short.

In:   what a rank holds, its slots, and a profile.
Out:  a `Flow`, with its predicted time and the bound that no order can beat.
Must hold: the same on every machine for the same profile; within the memory that `extra_layers` allows; never longer,
by the cost function, than `greedy` on the same profile.

Annealing over the biases of a flow. A candidate is judged by the cost function on a window of a few micro-batches and
layers, contention included; steady state, ends and boundaries between layers all count, as they do in a real window.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from hf_helix.planning.cost import Timeline, Work, simulate, work_of
from hf_helix.planning.flow import EXTRA_LAYERS, Bias, Flow, Window
from hf_helix.planning.graph import Graph, Part
from hf_helix.planning.profile import Name, Profile, named_operators
from hf_helix.planning.schedule import Slot, build_schedule
from hf_helix.planning.window import Layout, window_instructions

EFFORT = 3_000_000  # instructions ordered and simulated in one search
MOST_STEPS = 6000
TUNED_LAYERS = 3  # of a chunk; more of the same need no search of their own
TUNED_MICROBATCHES = 5

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
        slots: what the rank runs, for the judgement; by default a few micro-batches of the W schedule on one rank.
    """
    layout = shorten(profile.layout)
    slots = slots or build_schedule("w", 1, TUNED_MICROBATCHES)[0]
    program = window_instructions(slots, layout)
    window = Window(program, slots, layout, profile.times, extra_layers)
    slowdown = profile.slowdown if profile.pairs else None

    def cost(bias: Bias) -> float:
        return simulate(window.work, slowdown, window.order(bias)).seconds

    flow = greedy(profile, extra_layers)
    steps = min(MOST_STEPS, EFFORT // (2 * len(program)))
    best = _anneal(flow.bias, max(profile.times.values()), cost, steps, bound(window.work, layout), progress)
    return replace(flow, bias=best)


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
    """The layout with at most `TUNED_LAYERS` repeating units in a chunk."""
    units: list[str] = []
    chunks: dict[int, list[int]] = {}
    for stage, members in layout.chunks.items():
        chunks[stage], seen = [], 0
        for unit in members:
            repeats = layout.graphs[layout.units[unit]].forward.repeats
            seen += repeats
            if not repeats or seen <= TUNED_LAYERS:
                chunks[stage].append(len(units))
                units.append(layout.units[unit])
    return Layout(units, chunks, layout.graphs)


def _anneal(
    start: Bias, scale: float, cost: Callable[[Bias], float], steps: int, goal: float, progress: Progress | None
) -> dict[Name, float]:
    """The best bias seen; one operator's changes at a time."""
    dice = random.Random(0)
    names = list(start)
    current = dict(start)
    lowest = now = cost(current)
    best = current
    for step in range(steps):
        if progress is not None and step % 50 == 0:
            progress(step / steps)
        if lowest <= goal * (1 + 1e-4):
            break
        name = dice.choice(names)
        candidate = dict(current)
        if dice.random() < 0.3:
            candidate[name] = scale * dice.uniform(-1, 1)
        else:
            candidate[name] += scale * dice.uniform(-1, 1) * dice.choice((0.03, 0.15, 0.6))
        seconds = cost(candidate)
        heat = 0.001 * lowest * (1 - step / steps) + 1e-12
        if seconds <= now or dice.random() < math.exp((now - seconds) / heat):
            current, now = candidate, seconds
            if now < lowest:
                best, lowest = current, now
    return best
