"""The names of schedules: one registry, the names that users may give, and what `auto` does before a measurement."""

from __future__ import annotations

import pytest

from hf_helix.config import AUTO, SCHEDULES, HelixConfig
from hf_helix.planning.schedule import auto
from hf_helix.planning.schedule.auto import choose_schedule
from hf_helix.planning.schedule.named import FOLDED, NAMED_SCHEDULES, build_schedule
from hf_helix.planning.schedule.placement import FOLD, stage_ranks
from hf_helix.planning.schedule.scheduler import Scheduler, schedule_names
from hf_helix.planning.schedule.slot_clock import Costs, SlotClock, simulate_schedule
from hf_helix.planning.schedule.validate import validate


def test_the_options_are_the_registry():
    assert (AUTO, *NAMED_SCHEDULES) == SCHEDULES


def test_auto_is_the_default_and_keeps_layers_where_they_are():
    assert HelixConfig().schedule == AUTO
    for num_ranks in (1, 2, 4):
        for name in schedule_names(AUTO, num_ranks):
            assert Scheduler(name, num_ranks).placement == FOLD


def test_auto_on_one_rank_is_the_named_schedule():
    for costs in (None, Costs.of_layers([3, 1])):
        assert Scheduler(AUTO, 1, costs)(6) == build_schedule("folded_1f1b", 1, 6)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_auto_before_a_measurement(num_ranks: int):
    """No slower than the named schedules, and in short windows as good as a search that takes its time."""
    ranks = stage_ranks(FOLD, num_ranks)
    costs = Costs.even(len(ranks))
    scheduler = Scheduler(AUTO, num_ranks)
    for count in (1, num_ranks, 2 * num_ranks, 5 * num_ranks):
        schedule = scheduler(count)
        validate(schedule, count, ranks)
        assert schedule == Scheduler(AUTO, num_ranks)(count)
        seconds = simulate_schedule(schedule, ranks, costs).seconds
        named = [simulate_schedule(build_schedule(name, num_ranks, count), ranks, costs).seconds for name in FOLDED]
        assert seconds <= min(named)
        if count == num_ranks:
            _, searched = choose_schedule(num_ranks, count, costs)
            assert seconds <= 1.02 * simulate_schedule(searched, ranks, costs).seconds < 0.9 * min(named)


def test_auto_searches_nothing_before_a_measurement(monkeypatch: pytest.MonkeyPatch):
    """A long window costs a few runs over its slots."""
    slots = 0
    run, made = SlotClock.run, auto.list_schedule

    def counting_run(clock: SlotClock, rows: list[list[object]]) -> object:
        nonlocal slots
        slots += sum(map(len, rows))
        return run(clock, rows)

    def counting_list(*arguments: object) -> object:
        nonlocal slots
        result = made(*arguments)
        slots += sum(map(len, result[0]))
        return result

    monkeypatch.setattr(SlotClock, "run", counting_run)
    monkeypatch.setattr(auto, "list_schedule", counting_list)
    schedule = Scheduler(AUTO, 8)(256)
    assert 0 < slots < 10 * sum(map(len, schedule)), slots
