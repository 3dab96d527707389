"""The programs of all ranks, written out: an oracle for `build_program`, which shortens long windows."""

from collections.abc import Collection

from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.program import free_values
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Key, Layout


def build_programs(
    schedule: Schedule, layout: Layout, plan: Plan, keep: Collection[Key] = (), slots_ahead: int = 1
) -> list[list[Instruction]]:
    """Returns the programs of all ranks, written out."""
    ordered = plan.issue(schedule, layout, slots_ahead)
    return [free_values(ordered.program(rank), keep) for rank in range(len(schedule))]
