"""Plans drawn at random among all that are valid.

In:   a profile and a seed.
Out:  a plan: a random order of every block, or random times and priorities for a whole window.
Must hold: the same plan for the same seed, on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from hf_helix.planning.graph.operator import Graph
from hf_helix.planning.plans.baselines.intra_batch import IntraBatchPlan
from hf_helix.planning.plans.block_plan import BARRIER, BlockPlan, Order, entries
from hf_helix.planning.plans.list_scheduler import Priorities
from hf_helix.planning.plans.plan import Plan, graphs_digest
from hf_helix.planning.plans.priority_plan import PriorityPlan
from hf_helix.planning.profile import Profile

BARRIERS = 0.05  # of all places
MILLISECOND = 1e-3


def random_plan(seed: int, profile: Profile, *, model: str, mesh: Mapping[str, int], tiles: int = 1) -> Plan:
    """Even seeds order every block, odd ones the window as a whole. Of tiles there are plans of blocks only."""
    draw = random.Random(seed)

    def order_block(*block: Any) -> Order:
        return random_order(draw, *block)

    if tiles > 1:
        return IntraBatchPlan.of_tiles("random", order_block, profile, model=model, mesh=mesh, tiles=tiles)
    if seed % 2:
        graphs = graphs_digest(profile.layout.graphs)
        return PriorityPlan("random", model, mesh, graphs, random_priorities(draw, profile))
    return BlockPlan.of("random", order_block, profile, model=model, mesh=mesh)


def random_order(draw: random.Random, forward: Graph | None, backward: Graph | None, _: Profile) -> Order:
    """Any order in which operators come after what they read, with barriers at any place."""
    left = entries(forward, backward)
    written = {(letter, v) for letter, graph in (("F", forward), ("B", backward)) if graph for v in graph.inputs}
    written |= {("B", value) for value in (backward.kept if backward else ())}
    order: list[str] = []
    while left:
        ready = [
            entry
            for entry, op in left.items()
            if all((entry[0], value) in written for value in op.depends_on)
            and not any(f"{entry[0]}.{name}" in left for name in op.after)
        ]
        chosen = draw.choice(ready)
        written.update((chosen[0], value) for value in left.pop(chosen).writes)
        order += [chosen, *([BARRIER] if draw.random() < BARRIERS else [])]
    return tuple(order)


def random_priorities(draw: random.Random, profile: Profile) -> Priorities:
    """Times and priorities that have nothing to do with the operators."""
    times = {name: draw.uniform(0.01, 1.0) * MILLISECOND for name in profile.times}
    priority = {name: draw.uniform(-3.0, 3.0) * MILLISECOND for name in profile.times}
    return Priorities(times, priority, draw.randint(0, 3))
