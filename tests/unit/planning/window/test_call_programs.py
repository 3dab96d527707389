"""The programs of a decoder that is called are a schedule that can run, and free what nobody reads."""

import pytest

from hf_helix.planning.schedule.actions import Slot, num_microbatches_of
from hf_helix.planning.schedule.placement import FOLD, LINEAR, stage_ranks
from hf_helix.planning.schedule.scheduler import Scheduler
from hf_helix.planning.schedule.validate import validate
from hf_helix.planning.window.call_programs import mirrored, moved_by, schedule_of_both


@pytest.mark.parametrize("name", ["auto", "1f1b"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("pieces", [1, 3, 8])
def test_the_programs_of_three_calls_are_a_schedule(name: str, num_ranks: int, pieces: int) -> None:
    scheduler = Scheduler(name, num_ranks)
    placement = FOLD if name == "auto" else LINEAR
    assert scheduler.placement == placement
    forward = [[Slot(forward=slot.forward) for slot in slots if slot.forward] for slots in scheduler(pieces)]
    both = schedule_of_both(forward, placement)

    def later(schedule: list[list[Slot]], count: int) -> list[list[Slot]]:
        parts = [
            (moved_by([[Slot(s.forward)] if s.forward else [] for s in slots], count), slots) for slots in schedule
        ]
        moved = []
        for shifted, slots in parts:
            row = []
            for new, old in zip(shifted, slots, strict=True):
                back = None
                if old.backward is not None:
                    back = type(old.backward)(old.backward.stage, "B", old.backward.microbatch + count)
                row.append(Slot(new[0].forward if new else None, back))
            moved.append(row)
        return moved

    programs = [forward, both, later(both, pieces), later(mirrored(forward), 2 * pieces)]
    whole = [[slot for program in programs for slot in program[rank]] for rank in range(num_ranks)]
    assert num_microbatches_of(whole) == 3 * pieces
    validate(whole, 3 * pieces, stage_ranks(placement, num_ranks))
    if placement == FOLD:
        assert all(slot.fused for slots in both for slot in slots)
