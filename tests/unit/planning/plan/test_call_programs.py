"""The programs of a decoder that is called are a schedule that can run."""

import pytest

from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.plan.call_programs import mirrored, moved_by, schedule_of_both
from hf_helix.planning.schedule.actions import Slot, num_microbatches_of
from hf_helix.planning.schedule.placement import FOLD, LINEAR, stage_ranks
from hf_helix.planning.schedule.validate import validate


@pytest.mark.parametrize(("name", "placement"), [("auto", FOLD), ("1f1b", LINEAR)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("pieces", [1, 3, 8])
def test_the_programs_of_three_calls_are_a_schedule(name: str, placement: str, num_ranks: int, pieces: int) -> None:
    schedule = Scheduler(name, num_ranks)(pieces)
    forward = [[Slot(forward=slot.forward) for slot in slots if slot.forward] for slots in schedule]
    both = schedule_of_both(forward, placement)
    programs = [forward, both, moved_by(both, pieces), moved_by(mirrored(forward), 2 * pieces)]
    whole = [[slot for program in programs for slot in program[rank]] for rank in range(num_ranks)]
    assert num_microbatches_of(whole) == 3 * pieces
    validate(whole, 3 * pieces, stage_ranks(placement, num_ranks))
    if placement == FOLD:
        assert all(slot.fused for slots in both for slot in slots)
