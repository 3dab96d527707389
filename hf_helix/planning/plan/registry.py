"""The rules that make plans, by the names of `HelixConfig(plan=...)`.

In:   a rule's name and a profile.
Out:  a plan.
Must hold: every rule makes its plan from the profile alone, so no model is needed. The names equal
`hf_helix.config.RULES`, in order: options are checked without an import of planning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hf_helix import config
from hf_helix.planning.plan.baselines.dhelix import dhelix
from hf_helix.planning.plan.baselines.in_turn import round_robin, sequential
from hf_helix.planning.plan.baselines.intra_batch import IntraBatchPlan
from hf_helix.planning.plan.block_plan import BlockPlan, OrderBlock
from hf_helix.planning.plan.list_scheduler import Priorities, PriorityPlan
from hf_helix.planning.plan.plan import Plan, graphs_digest
from hf_helix.planning.plan.search import Progress, defer_weight_gradients, greedy, search, usual_schedule
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.timing.profile import Profile, rough_profile
from hf_helix.planning.window.layout import Layout


class Request(NamedTuple):
    """The arguments of `make_plan`."""

    rule: str
    profile: Profile
    model: str
    mesh: Mapping[str, int]
    schedule: Schedule | None
    progress: Progress | None
    searching: float


@dataclass(frozen=True)
class Rule:
    """A way to make plans.

    Attributes:
        name: for `HelixConfig(plan=...)` and `hf-helix plan --rule`.
        make: makes the plan.
        needs_profile: whether the rule needs measured times; other rules also make plans before a measurement.
        runs_one_strand: whether one micro-batch runs at a time, so that a window may have a single micro-batch.
    """

    name: str
    make: Callable[[Request], Plan]
    needs_profile: bool = False
    runs_one_strand: bool = False


def _by_blocks(order_block: OrderBlock) -> Callable[[Request], Plan]:
    return lambda request: BlockPlan.of(
        request.rule, order_block, request.profile, model=request.model, mesh=request.mesh
    )


def _in_tiles(request: Request) -> Plan:
    """Returns the plan with a tile for each rank of a collective."""
    model, mesh = request.model, request.mesh
    return IntraBatchPlan.of(request.rule, sequential, request.profile, model=model, mesh=mesh, tiles=mesh["tp_size"])


def _by_priorities(find: Callable[[Request], Priorities]) -> Callable[[Request], Plan]:
    def make(request: Request) -> Plan:
        graphs = graphs_digest(request.profile.layout.graphs)
        return PriorityPlan(request.rule, request.model, dict(request.mesh), graphs, find(request))

    return make


def _greedy(request: Request) -> Priorities:
    profile = request.profile
    return defer_weight_gradients(greedy(profile), profile, request.schedule or usual_schedule(profile.layout))


def _search(request: Request) -> Priorities:
    return search(request.profile, request.schedule, progress=request.progress, effort=request.searching)


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("sequential", _by_blocks(sequential), runs_one_strand=True),
        Rule("intra_batch", _in_tiles, runs_one_strand=True),
        Rule("round_robin", _by_blocks(round_robin)),
        Rule("dhelix", _by_blocks(dhelix), needs_profile=True),
        Rule("greedy", _by_priorities(_greedy)),
        Rule("search", _by_priorities(_search), needs_profile=True),
    )
}
assert tuple(RULES) == config.RULES, (
    f"a rule needs its name in hf_helix.config.RULES, too, in the same order: {tuple(RULES)} here, {config.RULES} there"
)


def runs_one_strand(name: str) -> bool:
    """Returns whether a name is a rule that runs one micro-batch at a time."""
    return name in RULES and RULES[name].runs_one_strand


def make_plan(
    rule: str,
    profile: Profile,
    *,
    model: str,
    mesh: Mapping[str, int],
    schedule: Schedule | None = None,
    progress: Progress | None = None,
    searching: float = 1.0,
) -> Plan:
    """Returns the plan of a rule.

    Args:
        profile: the times of the operators.
        model, mesh: the model's class and the sizes of the mesh, for plan files.
        schedule: of the window of a searched plan.
        searching: the length of a search, relative to the usual length.

    Raises:
        KeyError: no rule has this name.
    """
    return RULES[rule].make(Request(rule, profile, model, mesh, schedule, progress, searching))


def baseline_plan(layout: Layout, *, model: str, mesh: Mapping[str, int]) -> Plan:
    """Returns the plan `sequential`, made without a measurement.

    Args:
        model, mesh: as of `make_plan`.
    """
    return make_plan("sequential", rough_profile(layout), model=model, mesh=mesh)
