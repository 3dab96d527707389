"""What a plan makes of layers in the steady state, and so of the virtual stages of a pipeline.

In:   a plan and a profile.
Out:  seconds of a layer's forward and backward alone, and of both beside each other; `Costs`.
Must hold: a layer takes what one more of them adds to a chain, by the cost function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hf_helix.planning.cost import COMPUTE, STREAMS, Timeline
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.layout import Layout
from hf_helix.planning.pipeline.actions import Action, Slot
from hf_helix.planning.pipeline.costs import Costs, stage_costs
from hf_helix.planning.plans.plan import Plan
from hf_helix.planning.plans.registry import predict_plan, runs_one_strand
from hf_helix.planning.profile import Profile

CHAIN = (6, 10)
"""Layers of the two chains whose difference is what a layer takes."""


@dataclass(frozen=True)
class Layers:
    """What a plan makes of layers in the steady state.

    Attributes:
        forward: seconds of a layer's forward with nothing beside it, by the layer's name.
        backward: likewise, of its backward.
        fused: likewise, of the forward of one micro-batch beside the backward of another.
        exposed: of each kind of communication, the part that runs beside no computation.
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    fused: Mapping[str, float]
    exposed: Mapping[Kind, float]


def steady_layers(plan: Plan, profile: Profile, names: Sequence[str]) -> Layers:
    """Returns what a plan makes of the layers of these names."""
    forward, backward = Action(0, "F", 1), Action(0, "B", 0)
    slots = {"forward": Slot(forward=forward), "backward": Slot(backward=backward), "fused": Slot(forward, backward)}
    if runs_one_strand(plan.rule):
        slots["fused"] = slots["forward"]  # nothing runs beside anything
    found: dict[str, dict[str, float]] = {part: {} for part in slots}
    totals: dict[Kind, tuple[float, float]] = {}
    for name in dict.fromkeys(names):
        for part, slot in slots.items():
            short, long = (_chain(plan, profile, name, slot, length) for length in CHAIN)
            found[part][name] = (long.seconds - short.seconds) / (CHAIN[1] - CHAIN[0])
            wanted = part in ("forward", "backward") if runs_one_strand(plan.rule) else part == "fused"
            for kind, (alone, exposed) in exposed_seconds(long).items() if wanted else ():
                before = totals.get(kind, (0.0, 0.0))
                totals[kind] = before[0] + alone, before[1] + exposed
    if runs_one_strand(plan.rule):
        found["fused"] = {name: found["forward"][name] + found["backward"][name] for name in found["forward"]}
    shares = {kind: exposed / alone for kind, (alone, exposed) in totals.items() if alone}
    return Layers(found["forward"], found["backward"], found["fused"], shares)


def _chain(plan: Plan, profile: Profile, name: str, slot: Slot, length: int) -> Timeline:
    layout = Layout([name] * length, {0: range(length)}, profile.layout.graphs)
    return predict_plan(plan, replace(profile, layout=layout), [[slot]])[1]


def exposed_seconds(timeline: Timeline, rank: int = 0) -> dict[Kind, tuple[float, float]]:
    """Returns, for each kind of communication, its seconds, and those that run beside no computation of the rank."""
    work = timeline.work
    spans: dict[int, list[tuple[float, float]]] = {}
    for place, entry in enumerate(work.entries):
        if entry >= 0 and work.rank(place) == rank and timeline.ends[place] > timeline.starts[place]:
            spans.setdefault(work.streams[place], []).append((timeline.starts[place], timeline.ends[place]))
    computing = sorted(spans.pop(COMPUTE, []))
    found = {}
    for stream, mine in spans.items():
        alone = sum(end - start for start, end in mine)
        hidden = _common(sorted(mine), computing)
        found[STREAMS[stream]] = alone, alone - hidden
    return found


def _common(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Returns the seconds that two sorted lists of disjoint intervals have in common."""
    total, place = 0.0, 0
    for start, end in first:
        while place < len(second) and second[place][1] <= start:
            place += 1
        at = place
        while at < len(second) and second[at][0] < end:
            total += min(end, second[at][1]) - max(start, second[at][0])
            at += 1
    return total


def costs_under(profile: Profile, layers: Layers) -> Costs:
    """Returns what the virtual stages cost under a plan, whose layers take other times than all their operators."""
    plain = stage_costs(profile)
    layout = profile.layout
    names = [layout.units[unit] for chunk in layout.chunks.values() for unit in chunk]
    counted = [name for name in names if name in layers.forward]
    alone = sum(layers.forward[name] + layers.backward[name] for name in counted)
    fused = sum(layers.fused[name] for name in counted)
    forward, inputs, weights = list(plain.forward), list(plain.input), list(plain.weight)
    for stage, chunk in layout.chunks.items():
        for name in (layout.units[unit] for unit in chunk):
            if name not in layers.forward:
                continue
            parts = dict.fromkeys("FIW", 0.0)
            for letter, graph in (("F", layout.graphs[name].forward), ("B", layout.graphs[name].backward)):
                for op in graph.operators:
                    part = "F" if letter == "F" else "W" if op.part is Part.W else "I"
                    parts[part] += profile.times[name, f"{letter}.{op.name}"]
            ratio = layers.backward[name] / (parts["I"] + parts["W"])
            forward[stage] += layers.forward[name] - parts["F"]
            inputs[stage] += (ratio - 1) * parts["I"]
            weights[stage] += (ratio - 1) * parts["W"]
    return Costs(forward, inputs, weights, plain.transfer, max(1.0, alone / fused))
