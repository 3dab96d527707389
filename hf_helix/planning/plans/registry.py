"""The rules by the names that `HelixConfig(plan=...)` takes.

In:   a rule's name and a profile.
Out:  a plan.
Must hold: every rule makes its plan from the profile alone, so a plan can be made where no model is.
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_helix.planning.cost import Timeline, simulate, work_of
from hf_helix.planning.instructions import Instruction
from hf_helix.planning.pipeline.actions import Schedule
from hf_helix.planning.plans.baselines.dhelix import dhelix
from hf_helix.planning.plans.baselines.interleave import round_robin, sequential
from hf_helix.planning.plans.baselines.intra_batch import tile_profile
from hf_helix.planning.plans.plan import Plan, Rule, block_plan, graphs_digest
from hf_helix.planning.plans.search import Progress, greedy, search
from hf_helix.planning.profile import Profile
from hf_helix.planning.program import build_programs

TILED = "intra_batch"
BLOCK_RULES: dict[str, Rule] = {
    "sequential": sequential,
    TILED: sequential,
    "round_robin": round_robin,
    "dhelix": dhelix,
}
FLOW_RULES = ("greedy", "search")
RULES = (*BLOCK_RULES, *FLOW_RULES)


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
    """The plan of a rule.

    Args:
        rule: its name.
        profile: the times of the operators.
        model: the model's class, for plan files.
        mesh: the sizes of the mesh, for plan files.
        schedule: of the window that a searched plan is made for.
        progress: told how much of the work is done.
        searching: the length of a search, in parts of the usual one.

    Raises:
        KeyError: no rule has this name.
    """
    if rule in FLOW_RULES:
        flow = greedy(profile) if rule == "greedy" else search(profile, schedule, progress=progress, effort=searching)
        return Plan(rule, model, dict(mesh), graphs_digest(profile.layout.graphs), {}, flow)
    tiles = mesh["tp_size"] if rule == TILED else 1
    return block_plan(rule, BLOCK_RULES[rule], tiled(profile, tiles), model=model, mesh=mesh, tiles=tiles)


def tiled(profile: Profile, tiles: int) -> Profile:
    """The profile of the graphs with their collectives cut into tiles."""
    return profile if tiles == 1 else tile_profile(profile, tiles)


def predict_plan(plan: Plan, profile: Profile, schedule: Schedule) -> tuple[list[Instruction], Timeline]:
    """The programs of a plan, rank by rank in one list, and what the cost function says of them."""
    profile = tiled(profile, plan.tiles)
    program = [made for found in build_programs(schedule, profile.layout, plan) for made in found]
    work = work_of(program, profile.layout, profile.times)
    return program, simulate(work, profile.slowdown if profile.pairs else None)
