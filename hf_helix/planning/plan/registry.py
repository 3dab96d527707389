"""The rules that make plans, by the names of `HelixConfig(plan=...)`.

In:   a rule's name and a profile.
Out:  a plan.
Must hold: every rule makes its plan from the profile alone, so no model is needed. The names are
`hf_helix.config.RULES`: options are checked without an import of planning.
"""

from collections.abc import Mapping

from hf_helix.planning.plan.baselines.dhelix import dhelix
from hf_helix.planning.plan.baselines.intra_batch import IntraBatchPlan
from hf_helix.planning.plan.block_plan import BlockPlan, OrderBlock, round_robin, sequential
from hf_helix.planning.plan.list_scheduler import PriorityPlan
from hf_helix.planning.plan.plan import Plan, graphs_digest
from hf_helix.planning.plan.search import Progress, defer_weight_gradients, greedy, search, usual_schedule
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.timing.profile import Profile, rough_profile
from hf_helix.planning.window.layout import Layout

OF_BLOCKS: Mapping[str, OrderBlock] = {"sequential": sequential, "round_robin": round_robin, "dhelix": dhelix}
"""The rules that order blocks independently."""

NEED_PROFILE = ("dhelix", "search")
"""The rules that need measured times; other rules also make plans before a measurement."""

ONE_STRAND = ("sequential", "intra_batch")


def runs_one_strand(name: str) -> bool:
    """Returns whether a name is a rule that runs one micro-batch at a time, so that a window may have only one."""
    return name in ONE_STRAND


def make_plan(
    rule: str,
    profile: Profile,
    *,
    model: str,
    mesh: Mapping[str, int],
    schedule: Schedule | None = None,
    progress: Progress | None = None,
    search_share: float = 1.0,
) -> Plan:
    """Returns the plan of a rule.

    Args:
        profile: the times of the operators.
        model, mesh: the model's class and the sizes of the mesh, for plan files.
        schedule: of the window of a searched plan.
        search_share: the length of a search, relative to the usual length.

    Raises:
        KeyError: no rule has this name.
    """
    if rule in OF_BLOCKS:
        return BlockPlan.of(rule, OF_BLOCKS[rule], profile, model=model, mesh=mesh)
    if rule == "intra_batch":  # a tile for each rank of a collective
        return IntraBatchPlan.of(rule, sequential, profile, model=model, mesh=mesh, tiles=mesh["tp_size"])
    if rule == "greedy":
        found = defer_weight_gradients(greedy(profile), profile, schedule or usual_schedule(profile.layout))
    elif rule == "search":
        found = search(profile, schedule, progress=progress, search_share=search_share)
    else:
        raise KeyError(rule)
    return PriorityPlan(rule, model, dict(mesh), graphs_digest(profile.layout.graphs), found)


def baseline_plan(layout: Layout, *, model: str, mesh: Mapping[str, int]) -> Plan:
    """Returns the plan `sequential`, made without a measurement.

    Args:
        model, mesh: as of `make_plan`.
    """
    return make_plan("sequential", rough_profile(layout), model=model, mesh=mesh)
