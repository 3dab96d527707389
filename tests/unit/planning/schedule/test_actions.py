"""Actions, slots and schedules are plain data; their text is torch's."""

import csv
from pathlib import Path

import pytest
from support.schedules import every_name, every_size, text

from hf_helix.planning.choice.scheduler import load_schedule
from hf_helix.planning.schedule.actions import Action, Slot, format_schedule, parse_schedule, without_microbatches
from hf_helix.planning.schedule.named import PLACEMENT_OF, build_schedule, folded_1f1b
from hf_helix.planning.schedule.placement import stage_ranks
from hf_helix.planning.schedule.validate import validate


def test_torch_reads_every_slot():
    from torch.distributed.pipelining.schedules import OVERLAP_F_B, _Action

    slots = [slot for name in PLACEMENT_OF for slots in build_schedule(name, 3, 12) for slot in slots]
    assert {len(slot.actions) for slot in slots} == {1, 2}
    assert {action.computation_type for slot in slots for action in slot.actions} == set("FBIW")
    for slot in slots:
        read = _Action.from_str(str(slot))
        assert str(read) == str(slot)
        assert (read.computation_type == OVERLAP_F_B) == (len(slot.actions) == 2)
        for ours, theirs in zip(slot.actions, read.sub_actions or (read,), strict=True):
            assert (ours.stage, ours.microbatch) == (theirs.stage_index, theirs.microbatch_index)
            assert ours.computation_type == theirs.computation_type.value


@every_name
@every_size
def test_schedules_read_what_they_write(num_ranks: int, num_microbatches: int, name: str):
    schedule = build_schedule(name, num_ranks, num_microbatches)
    assert parse_schedule(format_schedule(schedule), num_ranks) == schedule


@pytest.mark.parametrize("name", ["DualPipeV", "Interleaved1F1B", "ZBVZeroBubble"])
def test_the_file_that_torch_writes(name: str, tmp_path: Path):
    """With the gaps that torch keeps; the first and the last are of the fold, where ours runs them, too."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops(name, 2, 4)
    with open(tmp_path / "torch.csv", "w", newline="") as file:
        csv.writer(file).writerows([None, *row, None] for row in rows)
    words = [[str(op) for op in row if op is not None and "REDUCE_GRAD" not in str(op)] for row in rows]
    written = (tmp_path / "torch.csv").read_text()
    assert ",," in written or written.startswith(",")
    assert text(parse_schedule(written, 2)) == words
    if name != "Interleaved1F1B":
        assert text(load_schedule(tmp_path / "torch.csv", 2, 4)) == words


@pytest.mark.parametrize("word", ["", "F0", "0X1", "0F1 ", "(0F1;1B0)", "(1B0;0F1)OVERLAP_F_B"])
def test_what_is_not_an_action_is_refused(word: str):
    with pytest.raises(ValueError, match="not an action"):
        Slot.parse(word)


@pytest.mark.parametrize(
    ("written", "marked", "said"),
    [
        ("rank 0: 0F0 oops 0B0\nrank 1: 1F0 1B0", "rank 0: 0F0 >>> oops 0B0\nrank 1: 1F0 1B0", "not an action: 'oops'"),
        ("0F0,,0B0\n1F0,1G0,", "0F0,,0B0\n1F0,>>> 1G0,", "not an action: '1G0'"),
        ("rank 1: 0F0 0B0\nrank 0: 1F0 1B0", ">>> rank 1: 0F0 0B0\nrank 0: 1F0 1B0", "the line of rank 0"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0", "0F0,>>> 0SEND_F0,0B0\n1F0,1B0", "the runner adds itself"),
    ],
)
def test_what_cannot_be_read_is_shown_whole_with_an_arrow(written: str, marked: str, said: str):
    with pytest.raises(ValueError, match=said) as error:
        parse_schedule(written, 2)
    assert str(error.value).endswith(f":\n{marked}")


def test_lines_of_another_number_of_ranks_are_refused():
    with pytest.raises(ValueError, match=r"lines for 2 ranks and pp_size=3 needs 3") as error:
        parse_schedule("0F0 0B0\n\n1F0 1B0\n", 3)
    assert "0F0 0B0" in str(error.value)


def test_actions_are_plain_data():
    assert Slot.parse("(3F2;0B1)OVERLAP_F_B") == Slot(Action(3, "F", 2), Action(0, "B", 1))
    assert Slot.parse("0W1") == Slot(backward=Action(0, "W", 1)) == Slot.alone(Action(0, "W", 1))
    assert not Slot.parse("0I1").fused


def test_format_marks_the_slot_it_is_told():
    schedule = folded_1f1b(1, 1)
    assert format_schedule(schedule) == "rank 0: 0F0 1F0 1B0 0B0"
    assert format_schedule(schedule, {0: 2}) == "rank 0: 0F0 1F0 >>> 1B0 0B0"
    assert format_schedule(schedule, {0: 4}) == "rank 0: 0F0 1F0 1B0 0B0 >>>"


@every_name
@every_size
def test_every_schedule_runs_without_its_last_microbatches(num_ranks: int, num_microbatches: int, name: str):
    schedule = build_schedule(name, num_ranks, num_microbatches)
    for count in range(1, num_microbatches):
        validate(without_microbatches(schedule, count), count, stage_ranks(PLACEMENT_OF[name], num_ranks))
