"""Periodic schedules: valid for any costs, few micro-batches under way, near the time of the heaviest rank."""

import random

import pytest

from hf_helix.planning.choice.auto import choose_schedule
from hf_helix.planning.choice.slot_clock import Costs, simulate_schedule
from hf_helix.planning.schedule.placement import SPREAD, stage_ranks
from hf_helix.planning.schedule.validate import validate


@pytest.mark.parametrize("number", range(12))
def test_periodic_schedules_can_run(number: int) -> None:
    """`validate` shares no code with the builder."""
    rng = random.Random(number)
    num_ranks, count = rng.randint(2, 5), rng.randint(1, 9)
    ranks = stage_ranks(SPREAD, num_ranks)
    parts = [[rng.choice([0.0, 0.3, 1.0, rng.random()]) + (part == 0) for _ in ranks] for part in range(3)]
    costs = Costs(*parts, transfer=rng.choice([0.0, 0.4]))
    _, schedule = choose_schedule(num_ranks, count, costs, search=False, placement=SPREAD)
    validate(schedule, count, ranks)


@pytest.mark.slow
def test_slices_shorten_the_window_of_a_heavy_head() -> None:
    """One billion parameters, a vocabulary of 128 thousand, eight ranks: the head weighs 4.7 of 16 layers."""
    count, head, hop = 64, 4.7, 0.25
    whole = [1.0] * 15 + [1.0 + head]
    _, usual = choose_schedule(8, count, Costs(whole, whole, whole, hop), search=False)
    today = simulate_schedule(usual, stage_ranks("fold", 8), Costs(whole, whole, whole, hop))
    sliced = [0.02] * 7 + [1.0] * 15 + [1.0 + head / 8] + [head / 8] * 7
    costs = Costs(sliced, sliced, sliced, hop)
    _, schedule = choose_schedule(8, count, costs, search=False, placement=SPREAD)
    spread = simulate_schedule(schedule, stage_ranks(SPREAD, 8), costs)
    assert spread.seconds < today.seconds / 1.9
    assert max(spread.shares) < 16  # twice the ranks
