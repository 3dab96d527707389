"""Schedules: what each rank runs in each slot, by name or from a file, checked.

In:   a schedule's name or the path of an action file, the number of pipeline ranks P and of micro-batches M.
Out:  a `Schedule` that can run.
Must hold: `validate` knows nothing of the builders; errors print the schedule whole.
"""

from __future__ import annotations

from pathlib import Path

from hf_helix.planning.pipeline.actions import (
    Action,
    Schedule,
    Slot,
    format_schedule,
    parse_schedule,
    without_microbatches,
)
from hf_helix.planning.pipeline.named import BUILDERS
from hf_helix.planning.pipeline.placement import FOLD, LINEAR, stage_ranks
from hf_helix.planning.pipeline.validate import validate

__all__ = [
    "PLACEMENT_OF",
    "Action",
    "Schedule",
    "Slot",
    "build_schedule",
    "format_schedule",
    "load_schedule",
    "num_microbatches_of",
    "parse_schedule",
    "placement_of",
    "validate",
    "without_microbatches",
]

PLACEMENT_OF = {"w": FOLD, "dualpipe_v": FOLD, "1f1b": LINEAR}
"""Where the virtual stages of each named schedule are."""


def build_schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule called `name`, validated.

    Raises:
        ValueError: an unknown name, or fewer than one rank or micro-batch.
    """
    if name not in BUILDERS or num_ranks < 1 or num_microbatches < 1:
        raise ValueError(
            f"no schedule {name!r} for {num_ranks} ranks and {num_microbatches} micro-batches; "
            f"schedules: {', '.join(BUILDERS)}, with at least one of each"
        )
    schedule = BUILDERS[name](num_ranks, num_microbatches)
    validate(schedule, num_microbatches, stage_ranks(PLACEMENT_OF[name], num_ranks))
    return schedule


def load_schedule(path: str | Path, num_ranks: int, num_microbatches: int | None = None) -> Schedule:
    """The schedule of an action file, validated.

    Args:
        path: of a text as `parse_schedule` reads it.
        num_ranks: of the pipeline.
        num_microbatches: of the window; those that the file has more are left out. None for all of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no schedule, cannot run, or is for fewer micro-batches.
    """
    try:
        schedule = parse_schedule(Path(path).read_text(), num_ranks)
        written_for = num_microbatches_of(schedule)
        validate(schedule, written_for, stage_ranks(placement_of(schedule), num_ranks))
    except ValueError as error:
        raise ValueError(f"schedule file {path}: {error}") from error
    if num_microbatches is None:
        return schedule
    if written_for < num_microbatches:
        raise ValueError(
            f"schedule file {path} is for {written_for} micro-batches and the window has {num_microbatches}; take at "
            f"most {written_for} micro-batches a step, write the file for {num_microbatches}, or use schedule='w', "
            "which goes with any number"
        )
    return without_microbatches(schedule, num_microbatches)


def placement_of(schedule: Schedule) -> str:
    """The placement that a schedule is for, by its number of virtual stages.

    Raises:
        ValueError: they are neither one nor two for each rank.
    """
    num_ranks = len(schedule)
    num_stages = 1 + max((action.stage for action in _actions(schedule)), default=-1)
    for placement in (LINEAR, FOLD):
        if num_stages == len(stage_ranks(placement, num_ranks)):
            return placement
    raise ValueError(
        f"the schedule has {num_stages} virtual stages on {num_ranks} ranks; it needs {num_ranks} (one for each rank) "
        f"or {2 * num_ranks} (folded, two for each):\n{format_schedule(schedule)}"
    )


def num_microbatches_of(schedule: Schedule) -> int:
    """How many micro-batches a schedule is for."""
    return 1 + max((action.microbatch for action in _actions(schedule)), default=-1)


def _actions(schedule: Schedule) -> list[Action]:
    return [action for slots in schedule for slot in slots for action in slot.actions]
