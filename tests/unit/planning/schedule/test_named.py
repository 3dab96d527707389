"""Named schedules run under an oracle of its own, and are those of the paper and of torch."""

import re

import pytest
from support.schedules import SIZES, every_name, every_size, live_activations, slots_by_part, start_times, text

from hf_helix.planning.schedule.named import PLACEMENT_OF, build_schedule, dualpipe_v, folded_1f1b, one_f_one_b
from hf_helix.planning.schedule.placement import stage_ranks

# Every named schedule


@every_name
@every_size
def test_every_part_runs_once_where_its_stage_is_in_an_order_that_works(
    num_ranks: int, num_microbatches: int, name: str
):
    schedule = build_schedule(name, num_ranks, num_microbatches)
    ranks = stage_ranks(PLACEMENT_OF[name], num_ranks)
    place = slots_by_part(schedule)
    assert place.keys() == {f"{s}{d}{m}" for s in range(len(ranks)) for d in "FIW" for m in range(num_microbatches)}
    assert all(rank == ranks[int(re.match(r"\d+", part)[0])] for part, (rank, _) in place.items())
    start_times(schedule, len(ranks), num_microbatches)  # raises where ranks wait in a circle


@every_name
@every_size
def test_microbatches_keep_their_order_on_every_stage(num_ranks: int, num_microbatches: int, name: str):
    """Weight gradients accumulate in micro-batch order."""
    for slots in build_schedule(name, num_ranks, num_microbatches):
        seen: dict[tuple[int, str], list[int]] = {}
        for action in (action for slot in slots for action in slot.actions):
            for part in action.computation_type.replace("B", "IW"):
                seen.setdefault((action.stage, part), []).append(action.microbatch)
        assert all(order == list(range(num_microbatches)) for order in seen.values())


@every_name
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_microbatches_do_not_enter_memory(num_ranks: int, name: str):
    few, many = (build_schedule(name, num_ranks, count) for count in (3 * num_ranks, 12 * num_ranks))
    assert [live_activations(slots) for slots in few] == [live_activations(slots) for slots in many]


@pytest.mark.parametrize("arguments", [("nope", 2, 1), ("folded_1f1b", 0, 1), ("folded_1f1b", 1, 0), ("auto", 2, 2)])
def test_what_cannot_be_built_is_named(arguments: tuple[str, int, int]):
    with pytest.raises(ValueError, match="schedules: folded_1f1b, dualpipe_v, 1f1b, with at least one of each"):
        build_schedule(*arguments)


# W, as in the paper


@every_size
def test_what_w_takes_and_keeps(num_ranks: int, num_microbatches: int):
    schedule = folded_1f1b(num_ranks, num_microbatches)
    start = start_times(schedule, 2 * num_ranks, num_microbatches)
    if num_microbatches >= num_ranks:
        assert 1 + max(start.values()) == 4 * num_ranks + 2 * num_microbatches - 2
    for rank, slots in enumerate(schedule):
        assert sum(slot.fused for slot in slots) == 2 * max(0, num_microbatches - num_ranks)
        most = min(2 * num_ranks + 1, 2 * num_microbatches)  # the first where M >= 2P
        assert live_activations(slots) == min(most, num_microbatches + rank + 1)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [size for size in SIZES if size[1] >= size[0]])
def test_w_is_1f1b_over_units(num_ranks: int, num_microbatches: int):
    """Unit k starts every other slot, goes down the stages and up, and does F of k beside B of k-P on the way."""
    last = 2 * num_ranks - 1
    for rank, slots in enumerate(folded_1f1b(num_ranks, num_microbatches)):
        units: dict[int, set[str]] = {}
        for unit in range(num_microbatches + num_ranks):
            for step in (rank, last - rank):
                result = units.setdefault(2 * unit + step, set())
                result |= {f"{step}F{unit}"} if unit < num_microbatches else set()
                result |= {f"{last - step}B{unit - num_ranks}"} if unit >= num_ranks else set()
        assert [{str(action) for action in slot.actions} for slot in slots] == [units[time] for time in sorted(units)]


# Torch's own


def of_torch(name: str, num_ranks: int, num_microbatches: int) -> list[list[str]]:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops(name, num_ranks, num_microbatches)
    return [[str(op) for op in row if op is not None and "REDUCE_GRAD" not in str(op)] for row in rows]


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches"), [*((p, m) for p in range(1, 5) for m in (2 * p, 2 * p + 1, 2 * p + 5)), (5, 30)]
)
def test_dualpipe_v_is_that_of_torch(num_ranks: int, num_microbatches: int):
    result = text(dualpipe_v(num_ranks, num_microbatches))
    assert result == of_torch("DualPipeV", num_ranks, num_microbatches)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(p, m) for p in range(1, 7) for m in (p, p + 1, 4 * p)])
def test_1f1b_is_that_of_torch(num_ranks: int, num_microbatches: int):
    *ours, last = text(one_f_one_b(num_ranks, num_microbatches))
    *theirs, their_last = of_torch("1F1B", num_ranks, num_microbatches)
    assert ours == theirs
    # Torch 2.11 numbers the F of the last rank from 1; its runtime does not use that table.
    stage = num_ranks - 1
    assert last == [f"{stage}{d}{m}" for m in range(num_microbatches) for d in "FB"]
    assert their_last in (last, [f"{stage}{d}{m + (d == 'F')}" for m in range(num_microbatches) for d in "FB"])


@every_size
def test_few_microbatches_run_as_in_a_longer_dualpipe_v(num_ranks: int, num_microbatches: int):
    schedule = dualpipe_v(num_ranks, num_microbatches)
    full = max(num_microbatches, 2 * num_ranks)
    longer = [[a for slot in slots for a in slot.actions] for slots in dualpipe_v(num_ranks, full)]
    kept = [[a for a in actions if a.microbatch < num_microbatches] for actions in longer]
    assert [[a for slot in slots for a in slot.actions] for slots in schedule] == kept
