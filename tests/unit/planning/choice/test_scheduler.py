"""Schedulers: a window's schedule by name, by search or from a file, always the same, on a placement known before."""

from pathlib import Path

import pytest
from support.graphs import SMALL, efforts, layout_of, pipeline_of, profile_of

from hf_helix.config import AUTO, SCHEDULES, HelixConfig
from hf_helix.planning.choice import auto
from hf_helix.planning.choice.auto import choose_schedule
from hf_helix.planning.choice.scheduler import Scheduler, candidates, schedule_names
from hf_helix.planning.choice.slot_clock import Costs, SlotClock, simulate_schedule, stage_costs
from hf_helix.planning.schedule.actions import format_schedule
from hf_helix.planning.schedule.named import FOLDED, NAMED_SCHEDULES, PLACEMENT_OF, build_schedule
from hf_helix.planning.schedule.placement import FOLD, stage_ranks
from hf_helix.planning.schedule.validate import validate
from hf_helix.planning.timing.profile import Profile


def profile_on(num_ranks: int, placement: str = FOLD) -> Profile:
    """Two layers on each virtual stage, everything taking its effort."""
    ranks = stage_ranks(placement, num_ranks)
    return profile_of(pipeline_of(SMALL, [2] * len(ranks), ranks))


def written(path: Path, name: str, num_ranks: int, num_microbatches: int) -> str:
    path.write_text(format_schedule(build_schedule(name, num_ranks, num_microbatches)))
    return str(path)


@pytest.mark.parametrize("name", PLACEMENT_OF)
def test_a_name_gives_its_schedule_for_any_window(name: str):
    num_ranks = 3
    scheduler = Scheduler(name, num_ranks)
    assert scheduler.placement == PLACEMENT_OF[name]
    for count in (1, 4, 7):
        assert scheduler(count) == build_schedule(name, num_ranks, count)


def test_auto_goes_by_the_costs(monkeypatch: pytest.MonkeyPatch):
    """Where weight gradients take nothing, nothing is gained by keeping them apart."""
    monkeypatch.setattr(auto, "TRIALS", 200)
    even = Costs([1.0] * 4, [1.0] * 4, [1.0] * 4)
    uneven = Costs([1.0, 5.0, 1.0, 1.0], [1.0] * 4, [4.0] * 4, gain=1.5)
    assert Scheduler(AUTO, 2, even)(6) != Scheduler(AUTO, 2, uneven)(6)


def test_a_file_says_where_its_stages_are_and_serves_shorter_windows(tmp_path: Path):
    path = tmp_path / "actions.txt"
    for name in ("folded_1f1b", "1f1b"):
        scheduler = Scheduler(written(path, name, 2, 3), 2)
        assert scheduler.placement == PLACEMENT_OF[name]
        assert scheduler(3) == build_schedule(name, 2, 3)
        validate(scheduler(2), 2, stage_ranks(PLACEMENT_OF[name], 2))
        with pytest.raises(ValueError, match=r"actions.txt is for 3 micro-batches and the window has 4"):
            scheduler(4)
    with pytest.raises(ValueError, match=r"actions.txt"):
        Scheduler(str(path), 3)
    path.write_text("0F0 0B0 0F0\n")
    with pytest.raises(ValueError, match=r"actions.txt"):
        Scheduler(str(path), 2)
    with pytest.raises(ValueError, match=r"absent.txt.* is neither the name of a schedule nor an existing file"):
        Scheduler(str(tmp_path / "absent.txt"), 2)


# What a run may choose from


def test_what_is_named_and_one_rank_have_one_candidate():
    cases = [(name, profile_on(2, PLACEMENT_OF[name]), 2) for name in PLACEMENT_OF]
    for name, profile, num_ranks in (*cases, (AUTO, profile_of(layout_of(SMALL, 3)), 1)):
        (result,) = candidates(name, profile)
        assert (result.name, result.num_ranks) == (name, num_ranks)


def test_auto_chooses_among_those_on_the_fold_with_the_measured_costs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(auto, "TRIALS", 200)
    result = candidates(AUTO, profile_on(2))
    assert {each.name for each in result} == {"folded_1f1b", "dualpipe_v", AUTO}
    assert all(each.placement == FOLD for each in result)
    (searched,) = [each for each in result if each.name == AUTO]
    assert searched(6) == Scheduler(AUTO, 2, stage_costs(profile_on(2)))(6)


def test_costs_of_stages_are_the_sums_of_their_operators():
    """By hand, in units of a millisecond: SMALL's operators take their efforts."""
    layout = pipeline_of(SMALL, [1, 1, 2, 1], stage_ranks(FOLD, 2))
    times = {**efforts(layout), ("send", "F.transfer"): 7e-3}
    costs = stage_costs(profile_of(layout, times))
    forward = 1 + 4 + 4 + 4 + 4 + 1  # norm, gather, up, down, scatter, add
    backward = 2 + 4 + 4 + 4 + 4 + 2  # the same; up and down have a W apart, norm and add take twice as long
    weight = 4 + 4
    found = [[1e3 * seconds for seconds in part] for part in (costs.forward, costs.input, costs.weight)]
    assert found == [  # embedding and head: lookup and scatter; logits and loss
        pytest.approx([2 + forward, forward, 2 * forward, forward + 2]),
        pytest.approx([2 + 1 + backward, backward, 2 * backward, backward + 1 + 2]),
        pytest.approx([weight, weight, 2 * weight, weight + 1]),
    ]
    assert costs.transfer == 7e-3
    total = sum((*costs.forward, *costs.input, *costs.weight))
    layers = 5
    computing = layers * (1 + 4 + 4 + 1 + 2 + 4 + 4 + 4 + 4 + 2) + (1 + 1 + 1) + (2 + 1 + 1 + 2)
    assert costs.gain == pytest.approx(total / (computing / 1e3))


def test_auto_is_the_default_and_keeps_layers_where_they_are():
    assert (AUTO, *NAMED_SCHEDULES) == SCHEDULES
    assert HelixConfig().schedule == AUTO
    for num_ranks in (1, 2, 4):
        for name in schedule_names(AUTO, num_ranks):
            assert Scheduler(name, num_ranks).placement == FOLD
    for costs in (None, Costs.of_layers([3, 1])):  # on one rank
        assert Scheduler(AUTO, 1, costs)(6) == build_schedule("folded_1f1b", 1, 6)


@pytest.mark.parametrize("num_ranks", [2, 3])
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
    slots: list[int] = []
    run, made = SlotClock.run, auto.list_schedule

    def counting_list(*arguments: object) -> object:
        result = made(*arguments)
        slots.extend(map(len, result[0]))
        return result

    monkeypatch.setattr(SlotClock, "run", lambda clock, rows: slots.extend(map(len, rows)) or run(clock, rows))
    monkeypatch.setattr(auto, "list_schedule", counting_list)
    schedule = Scheduler(AUTO, 4)(128)
    assert 0 < sum(slots) < 10 * sum(map(len, schedule)), slots
