"""The validator catches every schedule that cannot run, and files that do not hold one."""

import random
from pathlib import Path

import pytest
from support.schedules import every_name, oracle_can_run, parsed, text

from hf_helix.planning.choice.scheduler import load_schedule, placement_of
from hf_helix.planning.schedule.actions import Schedule, Slot, format_schedule, num_microbatches_of
from hf_helix.planning.schedule.named import PLACEMENT_OF, build_schedule, folded_1f1b
from hf_helix.planning.schedule.placement import FOLD, LINEAR, stage_ranks
from hf_helix.planning.schedule.validate import validate


def folded(schedule: Schedule, num_microbatches: int) -> None:
    """Validate on the fold."""
    validate(schedule, num_microbatches, stage_ranks(FOLD, len(schedule)))


def refused(schedule: Schedule, num_microbatches: int, placement: str = FOLD) -> str:
    """What it says, which ends with the whole schedule; without that."""
    with pytest.raises(ValueError, match="the schedule cannot run past '>>>'") as error:
        validate(schedule, num_microbatches, stage_ranks(placement, len(schedule)))
    lines = str(error.value).splitlines()
    assert "\n".join(lines[-len(schedule) :]).replace(" >>>", "") == format_schedule(schedule)
    return str(error.value)


def test_a_swapped_order_cannot_run():
    schedule = folded_1f1b(1, 2)
    schedule[0][:2] = schedule[0][1::-1]
    assert "rank 0 waits for 0F0 before 1F0\nrank 0: >>> 1F0 0F0 " in refused(schedule, 2)


def test_ranks_that_wait_for_each_other_are_both_marked():
    assert refused(parsed("0F0 0B0 3F0 3B0", "1F0 2F0 2B0 1B0"), 1).splitlines() == [
        "the schedule cannot run past '>>>': rank 0 waits for 1B0 or 1I0 before 0B0",
        "rank 1 waits for 3B0 or 3I0 before 2B0",
        "rank 0: 0F0 >>> 0B0 3F0 3B0",
        "rank 1: 1F0 2F0 >>> 2B0 1B0",
    ]


def test_a_fused_slot_may_not_feed_itself_and_a_weight_gradient_may_wait_but_not_run_ahead():
    folded(parsed("0F0 1F0 1B0 0B0"), 1)
    for backward in "BI":
        said = refused(parsed(f"0F0 (1F0;1{backward}0)OVERLAP_F_B 1W0 0B0"), 1)
        assert f"waits for 1F0 before (1F0;1{backward}0)OVERLAP_F_B" in said
    folded(parsed("0F0 1F0 1I0 0I0 1W0 0W0"), 1)
    folded(parsed("0F0 1F0 1I0 (0F1;1W0)OVERLAP_F_B 0B0 1F1 1B1 0B1"), 2)
    assert "waits for 1B0 or 1I0 before 1W0" in refused(parsed("0F0 1F0 1W0 1I0 0B0"), 1)
    for double in ("1B0", "1W0", "1I0"):  # a backward runs whole or apart, not both
        assert f"{double} runs twice" in refused(parsed(f"0F0 1F0 1B0 {double} 0B0"), 1)
    assert ">>> 1W0" in refused(parsed("0F0 1F0 1I0 1W0 1W0 0B0"), 1)
    assert ">>> 1B0" in refused(parsed("0F0 1F0 1I0 1B0 0B0"), 1)


def test_gradients_add_up_in_the_order_of_micro_batches():
    folded(parsed("0F0 0F1 1F0 1F1 1I0 1I1 1W0 1W1 0B0 0B1"), 2)
    said = refused(parsed("0F0 0F1 1F0 1F1 1I0 1I1 1W1 1W0 0B0 0B1"), 2)
    assert "1W1 runs before micro-batch 0" in said
    assert ">>> 1W1 1W0" in said
    assert ">>> 1B1" in refused(parsed("0F0 0F1 1F0 1F1 1I0 1B1 1W0 0B0 0B1"), 2), "its W would come before that of 0"
    assert "1B1 runs before" in refused(parsed("0F0 0F1 1F0 1F1 1B1 1B0 0B0 0B1"), 2)
    assert ">>> 0F1 0F0" in refused(parsed("0F1 0F0 1F0 1F1 1B0 1B1 0B0 0B1"), 2)


@every_name
def test_every_missing_and_every_repeated_slot_is_found(name: str):
    ranks = stage_ranks(PLACEMENT_OF[name], 2)
    for rank, slots in enumerate(build_schedule(name, 2, 3)):
        for place, slot in enumerate(slots):
            schedule = build_schedule(name, 2, 3)
            schedule[rank].pop(place)
            with pytest.raises(ValueError, match=">>>"):
                validate(schedule, 3, ranks)
            schedule[rank][place:place] = [slot, slot]
            with pytest.raises(ValueError, match="cannot run past") as error:
                validate(schedule, 3, ranks)
            cells = text(schedule)[rank]
            cells[place + 1] = f">>> {cells[place + 1]}"
            assert f"rank {rank}: {' '.join(cells)}" in str(error.value)


def test_the_last_action_of_one_microbatch_is_missed():
    schedule = folded_1f1b(2, 3)
    assert str(schedule[0].pop()) == "0B2"
    said = refused(schedule, 3)
    assert "'>>>': it never runs 0B2\nrank 0: " in said
    assert said.splitlines()[-2].endswith(" >>>")
    assert "it never runs 0W0" in refused(parsed("0F0 1F0 1B0 0I0"), 1)


def test_foreign_actions_empty_slots_and_other_numbers_of_ranks_are_refused():
    for foreign, said in (("0F1", "of micro-batch 1; they are 0 to 0"), ("2F0", "of stage 2; the stages are 0 to 1")):
        message = refused([[*folded_1f1b(1, 1)[0], Slot.parse(foreign)]], 1)
        assert f">>> {foreign}" in message
        assert said in message
    assert "1F0 is on rank 0, but rank 1 holds stage 1" in refused(folded_1f1b(2, 3)[::-1], 3)
    assert "1F0 is on rank 0, but rank 1 holds stage 1" in refused(parsed("0F0 1F0 1B0 0B0", ""), 1, LINEAR)
    with pytest.raises(ValueError, match="empty slot"):
        validate([[Slot(), *folded_1f1b(1, 1)[0]]], 1, (0, 0))
    with pytest.raises(ValueError, match="is for 1 ranks and the stages are on 2"):
        validate(folded_1f1b(1, 1), 1, (0, 1))


def test_random_changes_are_valid_exactly_if_the_oracle_can_run_them():
    """Two slots of a rank swapped: the validator and the topological order agree."""
    rng, outcomes = random.Random(0), []
    for _ in range(400):
        name, num_ranks, count = rng.choice(list(PLACEMENT_OF)), rng.randint(1, 3), rng.randint(1, 5)
        schedule = build_schedule(name, num_ranks, count)
        slots = rng.choice(schedule)
        a = rng.randrange(len(slots))
        b = min(len(slots) - 1, a + rng.randint(1, 3))
        slots[a], slots[b] = slots[b], slots[a]
        ranks = stage_ranks(PLACEMENT_OF[name], num_ranks)
        try:
            validate(schedule, count, ranks)
            valid = True
        except ValueError:
            valid = False
        assert valid == oracle_can_run(schedule, len(ranks), count)
        outcomes.append(valid)
    assert 20 < sum(outcomes) < 380


# Files


@every_name
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_file_says_what_placement_it_is_for(num_ranks: int, name: str, tmp_path: Path):
    schedule = build_schedule(name, num_ranks, 5)
    (tmp_path / "schedule.txt").write_text(format_schedule(schedule) + "\n")
    assert load_schedule(tmp_path / "schedule.txt", num_ranks, 5) == schedule
    assert load_schedule(str(tmp_path / "schedule.txt"), num_ranks) == schedule
    assert placement_of(schedule) == PLACEMENT_OF[name]
    assert num_microbatches_of(schedule) == 5
    fewer = load_schedule(tmp_path / "schedule.txt", num_ranks, 3)
    assert num_microbatches_of(fewer) == 3
    validate(fewer, 3, stage_ranks(PLACEMENT_OF[name], num_ranks))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("0F0 0B0\n1F0 oops", ">>> oops"),
        ("", "lines for 0 ranks"),
        ("0F0 0B0\n1F0", ">>>"),
        ("0F0 0B0 2F0 2B0\n1F0 1B0", r"3 virtual stages on 2 ranks; it needs 2 .* or 4"),
        ("0F0 0B0\n1F0 1B0", r"is for 1 micro-batches and the window has 2; take at most 1 .* write the file for 2"),
    ],
)
def test_files_that_do_not_do_are_refused_by_name(written: str, said: str, tmp_path: Path):
    path = tmp_path / "schedule.txt"
    path.write_text(written)
    with pytest.raises(ValueError, match=said) as error:
        load_schedule(path, 2, 2)
    assert str(error.value).startswith(f"schedule file {path}")


def test_what_is_no_text_is_refused(tmp_path: Path):
    (tmp_path / "schedule.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="schedule file"):
        load_schedule(tmp_path / "schedule.txt", 2, 2)


GOOD = format_schedule(build_schedule("folded_1f1b", 2, 3))
WRONG: dict[str, tuple[str, str]] = {
    "runs twice": (GOOD.replace("0F1", "0F0", 1), "runs twice"),
    "an action of another rank": (GOOD.replace("rank 0: 0F0", "rank 0: 1F0"), "rank 1 holds stage 1"),
    "waits for ever": ("rank 0: 3F0 0F0 3B0 0B0\nrank 1: 1F0 2F0 2B0 1B0", "rank 0 waits for 2F0 before 3F0"),
    "nothing at the end": (GOOD.replace(" 0B2", ""), "it never runs 0B2"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_invalid_file_is_printed_whole(wrong: str, tmp_path: Path):
    written, problem = WRONG[wrong]
    (tmp_path / "actions.txt").write_text(written)
    with pytest.raises(ValueError, match=f"^schedule file {tmp_path}/actions.txt: ") as error:
        load_schedule(tmp_path / "actions.txt", 2, 3)
    message = str(error.value)
    assert problem in message
    shown = message[message.index("rank 0:") :]
    assert shown.count(">>>") == (2 if wrong == "waits for ever" else 1)
    assert shown.replace(">>> ", "").replace(" >>>", "").split() == written.split()
