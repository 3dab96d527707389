"""Schedules from action files, checked.

In:   the path of an action file, the number of pipeline ranks P and of micro-batches M.
Out:  a `Schedule` that can run.
Must hold: errors print the schedule whole.
"""

from __future__ import annotations

from pathlib import Path

from hf_helix.planning.pipeline.actions import (
    Schedule,
    format_schedule,
    num_microbatches_of,
    parse_schedule,
    without_microbatches,
)
from hf_helix.planning.pipeline.placement import FOLD, LINEAR, stage_ranks
from hf_helix.planning.pipeline.validate import validate


def load_schedule(path: str | Path, num_ranks: int, num_microbatches: int | None = None) -> Schedule:
    """Returns the schedule of an action file, validated.

    Args:
        path: of a text as `parse_schedule` reads it.
        num_ranks: of the pipeline.
        num_microbatches: of the window; what the file has beyond them is left out. None for all of the file.

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
            f"most {written_for} micro-batches a step, write the file for {num_microbatches}, or use schedule='auto', "
            "which goes with any number"
        )
    return without_microbatches(schedule, num_microbatches)


def placement_of(schedule: Schedule) -> str:
    """Returns the placement that a schedule is for, by its number of virtual stages.

    Raises:
        ValueError: they are neither one nor two for each rank.
    """
    num_ranks = len(schedule)
    num_stages = 1 + max((action.stage for slots in schedule for slot in slots for action in slot.actions), default=-1)
    for placement in (LINEAR, FOLD):
        if num_stages == len(stage_ranks(placement, num_ranks)):
            return placement
    raise ValueError(
        f"the schedule has {num_stages} virtual stages on {num_ranks} ranks; it needs {num_ranks} (one for each rank) "
        f"or {2 * num_ranks} (folded, two for each):\n{format_schedule(schedule)}"
    )
