"""Plans drawn at random among all that are valid.

In:   a profile and a seed.
Out:  a plan: a random order of every block, or random times and priorities for a whole window.
Must hold: the same plan for the same seed, on every rank.
"""

import functools
import random
from collections.abc import Mapping

from hf_helix.planning.graph.operator import Graph
from hf_helix.planning.plan.block_plan import BARRIER, BlockPlan, Order, OrderBlock, entries
from hf_helix.planning.plan.list_scheduler import Priorities, PriorityPlan
from hf_helix.planning.plan.plan import Plan, graphs_digest
from hf_helix.planning.timing.profile import Profile

BARRIERS = 0.05  # of all places
MILLISECOND = 1e-3


def random_plan(seed: int, profile: Profile, *, model: str, mesh: Mapping[str, int]) -> Plan:
    """Even seeds order every block, odd ones the window as a whole."""
    if seed % 2:
        graphs, priorities = graphs_digest(profile.layout.graphs), random_priorities(seed, profile)
        return PriorityPlan("random", model, dict(mesh), graphs, priorities)
    return BlockPlan.of("random", random_orders(seed), profile, model=model, mesh=mesh)


def random_orders(seed: int) -> OrderBlock:
    """A rule that draws the order of every block."""
    return functools.partial(random_order, random.Random(seed))


def random_order(draw: random.Random, forward: Graph | None, backward: Graph | None, _: Profile) -> Order:
    """Any order in which operators come after what they read, with barriers at any place."""
    left = entries(forward, backward)
    written = {(letter, v) for letter, graph in (("F", forward), ("B", backward)) if graph for v in graph.inputs}
    written |= {("B", value) for value in (backward.saved_values if backward else ())}
    order: list[str] = []
    while left:
        ready = [
            entry
            for entry, op in left.items()
            if all((entry[0], value) in written for value in op.depends_on)
            and not any(f"{entry[0]}.{name}" in left for name in op.ordered_after)
        ]
        chosen = draw.choice(ready)
        written.update((chosen[0], value) for value in left.pop(chosen).writes)
        order += [chosen, *([BARRIER] if draw.random() < BARRIERS else [])]
    return tuple(order)


def random_priorities(seed: int, profile: Profile) -> Priorities:
    """Times and priorities that have nothing to do with the operators."""
    draw = random.Random(seed)
    times = {name: draw.uniform(0.01, 1.0) * MILLISECOND for name in profile.times}
    priority = {name: draw.uniform(-3.0, 3.0) * MILLISECOND for name in profile.times}
    return Priorities(times, priority, draw.randint(0, 3))
