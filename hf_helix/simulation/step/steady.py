"""What a plan makes of layers in the steady state, and so of the virtual stages of a pipeline.

In:   a plan and a profile.
Out:  seconds of a layer's forward and backward alone, and of both beside each other; `Costs`.
Must hold: a layer takes what one more of them adds to a chain, by the cost function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.schedule.actions import Action, Slot
from hf_helix.planning.schedule.clock import Costs, part_of, stage_costs
from hf_helix.planning.timing.clock import Timeline
from hf_helix.planning.timing.predict import predict
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.window import COMPUTE, STREAMS
from hf_helix.runtime.trace import Interval, common, merge

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
    """Returns what a plan makes of the layers of these names.

    Args:
        plan: the order in which operators are issued.
        profile: the times of the operators.
        names: of units that are layers.
    """
    forward, backward = Action(0, "F", 1), Action(0, "B", 0)
    slots = {"forward": Slot(forward=forward), "backward": Slot(backward=backward), "fused": Slot(forward, backward)}
    found: dict[str, dict[str, float]] = {part: {} for part in slots}
    totals: dict[Kind, tuple[float, float]] = {}
    for name in dict.fromkeys(names):
        chains = [_chain(profile, name, length) for length in CHAIN]
        for part, slot in slots.items():
            short, long = (predict(plan, chain, [[slot]], timeline=True).timeline for chain in chains)
            found[part][name] = (long.seconds - short.seconds) / (CHAIN[1] - CHAIN[0])
            for kind, (alone, exposed) in exposed_seconds(long).items() if part == "fused" else ():
                before = totals.get(kind, (0.0, 0.0))
                totals[kind] = before[0] + alone, before[1] + exposed
    shares = {kind: exposed / alone for kind, (alone, exposed) in totals.items() if alone}
    return Layers(found["forward"], found["backward"], found["fused"], shares)


def _chain(profile: Profile, name: str, length: int) -> Profile:
    """Returns the profile of a chain of layers of one name."""
    return replace(profile, layout=Layout([name] * length, {0: range(length)}, profile.layout.graphs))


def exposed_seconds(timeline: Timeline, rank: int = 0) -> dict[Kind, tuple[float, float]]:
    """Returns, for each kind of communication, its seconds, and those that run beside no computation of the rank."""
    work = timeline.arrays
    spans: dict[int, list[Interval]] = {}  # of each queue, which runs one instruction after the other
    streams: dict[int, int] = {}
    for place, queue in enumerate(work.queues()):
        if work.entries[place] >= 0 and work.rank(place) == rank and timeline.ends[place] > timeline.starts[place]:
            spans.setdefault(queue, []).append((timeline.starts[place], timeline.ends[place]))
            streams[queue] = work.streams[place]
    computing = merge(span for queue, mine in spans.items() if streams[queue] == COMPUTE for span in mine)
    found: dict[Kind, tuple[float, float]] = {}
    for queue, mine in spans.items():
        if streams[queue] != COMPUTE:
            alone = sum(end - start for start, end in sorted(mine))  # the same floats, however a timeline is numbered
            hidden = sum(end - start for start, end in common(merge(mine), computing))
            before = found.get(STREAMS[streams[queue]], (0.0, 0.0))
            found[STREAMS[streams[queue]]] = before[0] + alone, before[1] + alone - hidden
    return found


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
        for unit in chunk:
            name = layout.units[unit]
            ahead, behind = (_ahead_seconds(profile, layers, unit, passing) for passing in (True, False))
            if name not in layers.forward:
                ends = [
                    (part_of(op), profile.times[name, entry]) for entry, op in layout.graphs[name].entries() if op.ahead
                ]
                forward[stage] += ahead - sum(seconds for part, seconds in ends if part == "F")
                inputs[stage] += behind - sum(seconds for part, seconds in ends if part != "F")
                continue
            parts = dict.fromkeys("FIW", 0.0)
            for entry, op in layout.graphs[name].entries():
                parts[part_of(op)] += profile.times[name, entry]
            ratio = layers.backward[name] / (parts["I"] + parts["W"])
            forward[stage] += layers.forward[name] - parts["F"] + ahead
            inputs[stage] += (ratio - 1) * parts["I"] + behind
            weights[stage] += (ratio - 1) * parts["W"]
    # Below 1 where two strands lose by their plan: barriers keep each waiting for the other's communication.
    return Costs(forward, inputs, weights, plain.transfer, alone / fused)


def _ahead_seconds(profile: Profile, layers: Layers, unit: int, forward: bool) -> float:
    """Returns for how many seconds more a pass waits for what is issued ahead than its layers' times say.

    What is issued ahead for a unit between layers goes beside the unit itself, and beside a layer of each direction
    that comes before (`planning.window.passes`), as far as these leave the link free. And where layers wait for the
    link, a unit that needs it for less time than it computes lets it go ahead.
    """
    name = profile.layout.units[unit]
    passes = [(each, passing) for each in layers.fused for passing in (True, False)]
    if name in layers.forward or not any(_gather_seconds(profile, *each) for each in passes):
        return 0.0
    taken = sum(layers.fused.values())
    left, lacking = (
        max(0.0, taken - sum(found(profile, *each) for each in passes)) / len(layers.fused)
        for found in (_gather_seconds, _own_seconds)
    )
    more = _gather_seconds(profile, name, forward) - _own_seconds(profile, name, forward)
    return max(0.0, more - left) if more > 0 else -min(lacking, -more)


def _gather_seconds(profile: Profile, name: str, forward: bool) -> float:
    """Returns the seconds of what is issued ahead for a unit, forward or backward."""
    entries = profile.layout.graphs[name].entries()
    return sum(profile.times[name, entry] for entry, op in entries if op.ahead and (op.part is Part.F) is forward)


def _own_seconds(profile: Profile, name: str, forward: bool) -> float:
    """Returns the seconds of what a unit runs forward or backward, but for what is issued ahead."""
    entries = profile.layout.graphs[name].entries()
    return sum(profile.times[name, entry] for entry, op in entries if not op.ahead and (op.part is Part.F) is forward)
