"""The W schedule runs on paper under an oracle of its own, and the validator catches schedules that do not."""

from __future__ import annotations

from graphlib import TopologicalSorter
from itertools import pairwise

import pytest

from hf_helix.planning.fold import chunks_of_rank
from hf_helix.planning.schedule import (
    Action,
    Schedule,
    Slot,
    build_schedule,
    format_schedule,
    validate,
    w_schedule,
)

SIZES = [(ranks, batches) for ranks in range(1, 5) for batches in range(1, 10)]
every_size = pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)


def text(schedule: Schedule) -> list[list[str]]:
    return [[str(slot) for slot in slots] for slots in schedule]


def parsed(*ranks: str) -> Schedule:
    return [[Slot.parse(word) for word in rank.split()] for rank in ranks]


def way_of_a_microbatch(num_ranks: int, microbatch: int) -> list[str]:
    """What happens to one micro-batch, in order: forward through every stage, then backward through every stage."""
    stages = range(2 * num_ranks)
    return [f"{stage}F{microbatch}" for stage in stages] + [f"{stage}B{microbatch}" for stage in reversed(stages)]


def start_times(schedule: Schedule, num_microbatches: int) -> dict[str, int]:
    """When each action starts if every slot takes one unit and starts as soon as it can.

    A slot waits for the one before it on its rank and for the action before each of its own; a circle is a deadlock.
    """
    place = {
        str(action): (rank, number)
        for rank, slots in enumerate(schedule)
        for number, slot in enumerate(slots)
        for action in slot.actions
    }
    needs: dict[tuple[int, int], set[tuple[int, int]]] = {node: set() for node in place.values()}
    for rank, number in needs:
        if number:
            needs[rank, number].add((rank, number - 1))
    for microbatch in range(num_microbatches):
        way = way_of_a_microbatch(len(schedule), microbatch)
        for before, after in pairwise(way):
            needs[place[after]].add(place[before])
    start: dict[tuple[int, int], int] = {}
    for node in TopologicalSorter(needs).static_order():
        start[node] = max((start[need] + 1 for need in needs[node]), default=0)
    return {action: start[node] for action, node in place.items()}


@every_size
def test_the_w_schedule_is_valid(num_ranks: int, num_microbatches: int):
    validate(w_schedule(num_ranks, num_microbatches), num_microbatches)
    assert build_schedule("w", num_ranks, num_microbatches) == w_schedule(num_ranks, num_microbatches)


@every_size
def test_every_microbatch_goes_through_the_stages_in_order(num_ranks: int, num_microbatches: int):
    start = start_times(w_schedule(num_ranks, num_microbatches), num_microbatches)
    for microbatch in range(num_microbatches):
        times = [start[action] for action in way_of_a_microbatch(num_ranks, microbatch)]
        assert times == sorted(set(times))
    if num_microbatches >= num_ranks:
        assert 1 + max(start.values()) == 4 * num_ranks + 2 * num_microbatches - 2


@every_size
def test_every_action_is_once_on_the_rank_that_holds_its_stage(num_ranks: int, num_microbatches: int):
    for rank, slots in enumerate(w_schedule(num_ranks, num_microbatches)):
        actions = [str(action) for slot in slots for action in slot.actions]
        chunks = chunks_of_rank(rank, num_ranks)
        assert sorted(actions) == sorted(f"{s}{d}{m}" for s in chunks for d in "FB" for m in range(num_microbatches))


@every_size
def test_microbatches_keep_their_order_on_every_stage(num_ranks: int, num_microbatches: int):
    """Weight gradients accumulate in micro-batch order."""
    for slots in w_schedule(num_ranks, num_microbatches):
        seen: dict[tuple[int, str], list[int]] = {}
        for action in (action for slot in slots for action in slot.actions):
            seen.setdefault((action.stage, action.direction), []).append(action.microbatch)
        assert all(order == list(range(num_microbatches)) for order in seen.values())


@every_size
def test_all_but_the_first_and_last_microbatches_are_fused(num_ranks: int, num_microbatches: int):
    for slots in w_schedule(num_ranks, num_microbatches):
        fused = [slot for slot in slots if slot.forward and slot.backward]
        assert len(fused) == 2 * max(0, num_microbatches - num_ranks)
        assert len(slots) == 4 * num_microbatches - len(fused)


@every_size
def test_a_fused_slot_runs_one_chunk_forward_beside_the_other_backward(num_ranks: int, num_microbatches: int):
    """F of micro-batch k+P beside B of k: two micro-batches, two chunks, nothing between them to wait for."""
    for slot in (slot for slots in w_schedule(num_ranks, num_microbatches) for slot in slots):
        if slot.forward and slot.backward:
            assert slot.forward.stage + slot.backward.stage == 2 * num_ranks - 1
            assert slot.forward.microbatch == slot.backward.microbatch + num_ranks


def test_one_rank_folded_on_itself():
    assert text(w_schedule(1, 2)) == [["0F0", "1F0", "(0F1;1B0)OVERLAP_F_B", "(1F1;0B0)OVERLAP_F_B", "1B1", "0B1"]]


# The text form


@every_size
def test_slots_read_what_they_write(num_ranks: int, num_microbatches: int):
    schedule = w_schedule(num_ranks, num_microbatches)
    assert parsed(*map(" ".join, text(schedule))) == schedule


def test_torch_reads_every_slot():
    from torch.distributed.pipelining.schedules import OVERLAP_F_B, _Action

    slots = [slot for slots in w_schedule(3, 12) for slot in slots]
    assert any(len(slot.actions) == 2 for slot in slots)
    for slot in slots:
        read = _Action.from_str(str(slot))
        assert str(read) == str(slot)
        assert (read.computation_type == OVERLAP_F_B) == (len(slot.actions) == 2)
        for ours, theirs in zip(slot.actions, read.sub_actions or (read,), strict=True):
            assert (ours.stage, ours.microbatch) == (theirs.stage_index, theirs.microbatch_index)
            assert ours.direction == theirs.computation_type.value


@pytest.mark.parametrize("word", ["", "0F", "F0", "0W1", "0F1 ", "-1F0", "(0F1;1B0)", "(1B0;0F1)OVERLAP_F_B"])
def test_what_is_not_an_action_is_refused(word: str):
    with pytest.raises(ValueError, match="not an action"):
        Slot.parse(word)


# The validator


def test_a_swapped_order_cannot_run():
    schedule = w_schedule(1, 2)
    schedule[0][:2] = schedule[0][1::-1]
    with pytest.raises(ValueError, match="cannot run past") as error:
        validate(schedule, 2)
    assert "rank 0: >>> 1F0 0F0 " in str(error.value)


def test_every_swap_on_a_chain_is_found():
    """With one micro-batch a rank's four actions have only one order."""
    for rank in range(2):
        for place in range(3):
            schedule = w_schedule(2, 1)
            slots = schedule[rank]
            slots[place], slots[place + 1] = slots[place + 1], slots[place]
            with pytest.raises(ValueError, match=">>>"):
                validate(schedule, 1)


def test_ranks_that_wait_for_each_other_are_both_marked():
    with pytest.raises(ValueError, match="cannot run") as error:
        validate(parsed("0F0 0B0 3F0 3B0", "1F0 2F0 2B0 1B0"), 1)
    assert str(error.value).splitlines()[1:] == [
        "rank 0: 0F0 >>> 0B0 3F0 3B0",
        "rank 1: 1F0 2F0 >>> 2B0 1B0",
    ]


def test_a_fused_slot_may_not_feed_itself():
    validate(parsed("0F0 1F0 1B0 0B0"), 1)
    with pytest.raises(ValueError, match=r">>> \(1F0;1B0\)OVERLAP_F_B"):
        validate(parsed("0F0 (1F0;1B0)OVERLAP_F_B 0B0"), 1)


@pytest.mark.parametrize("place", range(4))
def test_a_missing_action_is_found(place: int):
    schedule = w_schedule(1, 1)
    gone = schedule[0].pop(place)
    message = f"never runs {gone}" if place == 3 else r"cannot run past(.|\n)*>>>"  # nothing waits for the last one
    with pytest.raises(ValueError, match=message):
        validate(schedule, 1)


def test_the_last_action_of_one_microbatch_is_missed():
    schedule = w_schedule(2, 3)
    assert str(schedule[0].pop()) == "0B2"
    with pytest.raises(ValueError, match=r"never runs 0B2:\nrank 0: "):
        validate(schedule, 3)


def test_a_repeated_action_is_found():
    for rank in range(2):
        for place in range(len(w_schedule(2, 3)[rank])):
            schedule = w_schedule(2, 3)
            schedule[rank].insert(place, schedule[rank][place])
            with pytest.raises(ValueError, match="cannot run past") as error:
                validate(schedule, 3)
            cells = text(schedule)[rank]
            cells[place + 1] = f">>> {cells[place + 1]}"
            assert f"rank {rank}: {' '.join(cells)}" in str(error.value)


@pytest.mark.parametrize("foreign", ["0F1", "2F0"])
def test_a_microbatch_or_stage_that_does_not_exist_is_found(foreign: str):
    schedule = [[*w_schedule(1, 1)[0], Slot.parse(foreign)]]
    with pytest.raises(ValueError, match=f">>> {foreign}"):
        validate(schedule, 1)


def test_format_marks_the_slot_it_is_told():
    schedule = w_schedule(1, 1)
    assert format_schedule(schedule) == "rank 0: 0F0 1F0 1B0 0B0"
    assert format_schedule(schedule, {0: 2}) == "rank 0: 0F0 1F0 >>> 1B0 0B0"


def test_actions_are_plain_data():
    assert Slot.parse("(3F2;0B1)OVERLAP_F_B") == Slot(Action(3, "F", 2), Action(0, "B", 1))


def test_actions_on_ranks_that_do_not_hold_their_stage_are_refused():
    with pytest.raises(ValueError, match=">>>"):
        validate(w_schedule(2, 3)[::-1], 3)


def test_empty_slots_are_refused():
    with pytest.raises(ValueError, match=">>>"):
        validate([[Slot(), *w_schedule(1, 1)[0]]], 1)


@pytest.mark.parametrize("arguments", [("nope", 2, 1), ("w", 0, 1), ("w", 1, 0)])
def test_what_cannot_be_built_is_named(arguments):
    with pytest.raises(ValueError, match="schedules: w"):
        build_schedule(*arguments)
