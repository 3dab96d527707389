"""Gathers of weights in a window: once, ahead of their units, predicted, and hidden by the first forward pass."""

from dataclasses import replace

import pytest
from support.arrays import arrays_of
from support.graphs import SMALL, UNTILED, layout_of, loss_gradient, profile_of, schedule_of

from hf_helix.planning.plan import search as searching
from hf_helix.planning.plan.baselines.intra_batch import tile_profile
from hf_helix.planning.plan.bounds import lower_bound
from hf_helix.planning.plan.registry import make_plan
from hf_helix.planning.timing.operator_clock import simulate
from hf_helix.planning.timing.predict import predict
from hf_helix.planning.timing.profile import Profile, rough_profile
from hf_helix.planning.timing.profile_file import load_profile, save_profile
from hf_helix.planning.window.layout import Layout, WeightGather, named_gathers
from hf_helix.planning.window.program import build_program, build_programs, validate_program
from hf_helix.planning.window.window import COMPUTE

LAYERS, COMPUTING_MS = 8, 4.0


def gathering(layout: Layout) -> Layout:
    """Two gathers for every unit, and one that the first unit shares with the last."""
    last = len(layout.units) - 1
    gathers = [
        WeightGather((unit,), name, 4000) for unit in range(last + 1) for name in ("weights", "weights.products")
    ]
    return replace(layout, gathers=[*gathers[:2], WeightGather((0, last), "weights.shared", 4000), *gathers[2:]])


def profile_with_gathers(gather_ms: float, layers: int = LAYERS) -> Profile:
    """Collectives as good as free, and gathers of equal length."""
    layout = gathering(layout_of(SMALL, layers))
    rough = rough_profile(layout)
    times = {name: 1e-5 if rough.kind(name).communicates else COMPUTING_MS / 1e3 for name in rough.times}
    times |= {name: gather_ms / 1e3 for name, _ in named_gathers(layout)}
    return profile_of(layout, times)


@pytest.mark.parametrize("rule", UNTILED)
def test_every_gather_is_issued_once_in_front(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "MAX_STEPS", 20)
    profile = profile_with_gathers(1.0, layers=3)
    layout, schedule = profile.layout, schedule_of(3)
    plan = make_plan(rule, profile, model="m", mesh={"tp_size": 2})
    (program,) = build_programs(schedule, layout, plan)
    validate_program(program, [loss_gradient(layout)], layout, schedule[0])
    count = len(layout.gathers)
    assert [made.gather for made in program[:count]] == list(range(count))
    assert all(made.gather < 0 for made in program[count:])


def test_the_validator_finds_what_computes_before_its_weights() -> None:
    profile = profile_with_gathers(1.0, layers=1)
    layout = profile.layout
    plan = make_plan("sequential", profile, model="m", mesh={"tp_size": 2})
    (program,) = build_programs(schedule_of(1), layout, plan)
    late = [*program[1:], program[0]]
    with pytest.raises(ValueError, match="comes before its weights are gathered"):
        validate_program(late, [loss_gradient(layout)], layout)


@pytest.mark.parametrize("rule", ["sequential", "greedy"])
def test_a_long_window_has_them_once(rule: str) -> None:
    """Its steady state is issued again and again, without them."""
    profile, schedule = profile_with_gathers(1.0, layers=3), schedule_of(40)
    layout = profile.layout
    plan = make_plan(rule, profile, model="m", mesh={"tp_size": 2})
    program = build_program(schedule, layout, plan, 0)
    assert program.repeats > 0
    validate_program(list(program), [loss_gradient(layout)], layout)
    whole = [made for made in build_programs(schedule, layout, plan)[0] if made.gather < 0]
    assert [made.gather for made in program if made.gather >= 0] == list(range(len(layout.gathers)))
    assert len([made for made in program if made.gather < 0]) == len(whole)


@pytest.mark.parametrize("rule", ["sequential", "greedy", "dhelix"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_predictions_are_those_of_the_whole_window(rule: str, count: int) -> None:
    profile, schedule = profile_with_gathers(12.0, layers=3), schedule_of(count)
    plan = make_plan(rule, profile, model="m", mesh={"tp_size": 2}, schedule=schedule_of(min(count, 8)))
    whole = predict(plan, profile, schedule, timeline=True).seconds
    assert predict(plan, profile, schedule).seconds == pytest.approx(whole, rel=1e-9)


def exposed(gather_ms: float, rule: str = "sequential") -> float:
    """Seconds that gathers add to a window."""
    profile, schedule = profile_with_gathers(gather_ms), schedule_of(2)
    plan = make_plan(rule, profile, model="m", mesh={"tp_size": 2})
    return predict(plan, profile, schedule).seconds - predict(plan, profile_with_gathers(1e-6), schedule).seconds


def test_only_the_first_ones_are_exposed_where_layers_take_longer() -> None:
    """Nothing runs beside the gathers of the first unit; where they are slower than computation, all show."""
    assert exposed(1.0) == pytest.approx(3e-3, rel=1e-3)
    slow = profile_with_gathers(100.0)
    assert exposed(100.0) > 0.8 * 0.1 * len(slow.layout.gathers)
    assert lower_bound(slow, schedule_of(2)) >= 0.1 * len(slow.layout.gathers)


@pytest.mark.parametrize("gather_ms", [1.0, 12.0])
def test_programs_wait_as_windows_do(gather_ms: float) -> None:
    """A program as numbers has the same times as the window that it was made of."""
    profile, schedule = profile_with_gathers(gather_ms, layers=3), schedule_of(2)
    plan = make_plan("sequential", profile, model="m", mesh={"tp_size": 2})
    issued = plan.issue(schedule, profile.layout)
    arrays, order = issued.arrays(profile.times)
    program = arrays_of(issued.program(0), profile.layout, profile.times)
    assert simulate(program).seconds == pytest.approx(simulate(arrays, order=order).seconds, rel=1e-9)
    assert sum(stream == COMPUTE for stream in program.streams) == sum(stream == COMPUTE for stream in arrays.streams)


def test_tiles_and_files_keep_them(tmp_path) -> None:
    profile = profile_with_gathers(1.0)
    assert tile_profile(profile, 2).layout.gathers == profile.layout.gathers
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json").layout.gathers == profile.layout.gathers
    save_profile(profile_of(replace(profile.layout, gathers=())), tmp_path / "old.json")
    with pytest.raises(ValueError, match="does not cover the gathers of weights"):
        load_profile(tmp_path / "old.json", layout=profile.layout)
