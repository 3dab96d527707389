"""Sums of gradients in a window: issued with the last that adds to them, predicted, and hidden by held back W's."""

from collections import Counter
from dataclasses import replace

import pytest
from hf_helix.planning.plan.files import parse_plan
from support.graphs import SMALL, UNTILED, layout_of, loss_gradient, profile_of, schedule_of, timeline_of

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.plan import search as searching
from hf_helix.planning.plan.bounds import lower_bound
from hf_helix.planning.plan.registry import make_plan
from hf_helix.planning.plan.search import defer_weight_gradients, greedy
from hf_helix.planning.timing.predict import predict
from hf_helix.planning.timing.profile import EMULATED_LINK, REDUCTIONS_OVER, Profile, rough_profile
from hf_helix.planning.timing.profile_file import load_profile, save_profile
from hf_helix.planning.window.layout import GradientReduction, Layout, Name, named_copies, named_reductions
from hf_helix.planning.window.program import build_program, build_programs, validate_program
from hf_helix.planning.window.window import COMPUTE, STREAMS, Window

LAYERS, SUM_MS = 8, 8.0


def adders_of(pair: GraphPair, unit: int) -> tuple[tuple[int, str], ...]:
    adding = (op for op in pair.backward.operators if op.part in (Part.W, Part.B) and not op.kind.communicates)
    return tuple((unit, op.name) for op in adding)


def summed(layout: Layout) -> Layout:
    """A sum for every unit, in the order of backward."""
    sums = [
        GradientReduction(adders_of(layout.graphs[layout.units[unit]], unit), 4000)
        for unit in reversed(range(len(layout.units)))
    ]
    return replace(layout, reductions=sums)


def profile_with_sums(sum_ms: float = SUM_MS, layers: int = LAYERS) -> Profile:
    """Computation of 20 ms in the backward of a layer, collectives as good as free, and sums of equal length."""
    layout = summed(layout_of(SMALL, layers))
    rough = rough_profile(layout)
    times = {name: 1e-5 if rough.kind(name).communicates else 4e-3 for name in rough.times}
    times |= {name: sum_ms / 1e3 for name, _ in named_reductions(layout)}
    return profile_of(layout, times)


def often(profile: Profile, on_host: bool = False) -> Profile:
    """The profile with sums of every micro-batch, but for the first."""
    first, *others = profile.layout.reductions
    sums = [first, *(replace(each, every_microbatch=True) for each in others)]
    layout = replace(profile.layout, reductions=sums, on_host=on_host)
    return replace(
        profile, layout=layout, times={**dict.fromkeys((n for n, _ in named_copies(layout)), 1e-3), **profile.times}
    )


def exposed(rule: str, profile: Profile, count: int) -> float:
    """The part of a window in which sums run behind the last computation."""
    plan = make_plan(rule, profile, model="m", mesh={"tp_size": 2}, schedule=schedule_of(count))
    predicted = predict(plan, profile, schedule_of(count), timeline=True)
    timeline = predicted.timeline
    streams = timeline.arrays.streams
    computed = max(end for end, stream in zip(timeline.ends, streams, strict=True) if stream == COMPUTE)
    return (timeline.seconds - computed) / timeline.seconds


@pytest.mark.parametrize("rule", UNTILED)
def test_every_sum_is_issued_once_behind_the_last_that_adds_to_it(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "MAX_STEPS", 20)
    profile = profile_with_sums(layers=3)
    layout, schedule = profile.layout, schedule_of(3)
    plan = make_plan(rule, profile, model="m", mesh={"tp_size": 2})
    (program,) = build_programs(schedule, layout, plan)
    validate_program(program, [loss_gradient(layout)], layout, schedule[0])
    issued = {made.reduction: place for place, made in enumerate(program) if made.reduction >= 0}
    assert sorted(issued) == list(range(len(layout.reductions)))
    for number, result in enumerate(layout.reductions):
        adds = [
            place
            for place, made in enumerate(program)
            if made.operator and made.operator.part is not Part.F and (made.unit, made.operator.name) in result.adders
        ]
        between = program[max(adds) + 1 : issued[number]]
        assert all(made.reduction >= 0 for made in between), "nothing but other sums"
        assert issued[number] > max(adds)


@pytest.mark.parametrize("rule", UNTILED)
@pytest.mark.parametrize("on_host", [False, True])
def test_sums_of_every_micro_batch_follow_its_last_addition(
    rule: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to the host follow the last of them alone; a sum once in a window stays so."""
    monkeypatch.setattr(searching, "MAX_STEPS", 20)
    profile = often(profile_with_sums(layers=3), on_host)
    layout, schedule = profile.layout, schedule_of(4)
    plan = make_plan(rule, profile, model="m", mesh={"tp_size": 2})
    (program,) = build_programs(schedule, layout, plan)
    validate_program(program, [loss_gradient(layout)], layout, schedule[0])
    program = [made for made in program if made.operator]
    sums = [made for made in program if made.reduction >= 0 and made.operator.kind is Kind.GRADIENTS]
    assert [made.reduction for made in sums if made.reduction == 0] == [0], "the first is once in a window"
    for number in range(1, len(layout.reductions)):
        assert [made.microbatch for made in sums if made.reduction == number] == [0, 1, 2, 3]
    copied = [made.reduction for made in program if made.operator.kind is Kind.DOWN]
    assert sorted(copied) == (list(range(len(layout.reductions))) if on_host else [])
    last: dict[int, tuple[int, int]] = {}
    for made in program:
        for number, result in enumerate(layout.reductions):
            if made.operator.part is not Part.F and (made.unit, made.operator.name) in result.adders:
                last[number] = made.microbatch, 0
        if made in sums and made.reduction:
            assert last[made.reduction] == (made.microbatch, 0), "right behind the last addition"
            last[made.reduction] = made.microbatch, 1


@pytest.mark.parametrize("rule", UNTILED)
def test_long_windows_repeat_their_sums(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that holds its repeated part once issues what the program written out issues."""
    monkeypatch.setattr(searching, "MAX_STEPS", 20)
    profile = often(profile_with_sums(layers=3))
    layout, schedule = profile.layout, schedule_of(40)
    plan = make_plan(rule, profile, model="m", mesh={"tp_size": 2}, schedule=schedule_of(8))
    (whole,) = build_programs(schedule, layout, plan)
    program = build_program(schedule, layout, plan, 0)
    assert program.repeats > 0
    assert [each for each in program if each.operator] == [each for each in whole if each.operator]


@pytest.mark.parametrize("rule", ["sequential", "greedy", "dhelix"])
def test_predictions_count_the_sums_of_every_micro_batch(rule: str) -> None:
    """However long the window; sums longer than all computation decide it, and the bound knows them."""
    profile, schedule = often(profile_with_sums(layers=3)), schedule_of(40)
    plan = make_plan(rule, profile, model="m", mesh={"tp_size": 2}, schedule=schedule_of(8))
    whole = predict(plan, profile, schedule, timeline=True).seconds
    assert predict(plan, profile, schedule).seconds == pytest.approx(whole, rel=1e-9)
    slow = often(profile_with_sums(sum_ms=500.0, layers=3))
    sums = 0.5 * (1 + 40 * (len(slow.layout.reductions) - 1))
    assert lower_bound(slow, schedule) == pytest.approx(sums)
    assert sums < predict(plan, slow, schedule).seconds < 1.1 * sums


def test_arrays_of_scaled_times_share_nothing_with_their_original() -> None:
    """A barrier that is added to a copy is not in the original."""
    profile = often(profile_with_sums(layers=3), on_host=True)
    window = Window(schedule_of(2), profile.layout)
    arrays, same = (window.arrays(profile.times, per_step=True) for _ in range(2))
    scaled = arrays.with_compute_scaled(2.0)
    assert scaled.needs == arrays.needs
    assert scaled.loads()[Kind.COMPUTE] == pytest.approx(2 * arrays.loads()[Kind.COMPUTE])
    scaled.needs[0].append(scaled.append(COMPUTE, 0.0, [], 0))
    assert arrays == same != scaled


def test_few_units_wait_for_their_last_weight_gradient() -> None:
    """A plan that puts weight gradients off finishes those of a unit before those of two units later."""
    assert most_begun(often(profile_with_sums())) <= 3 < most_begun(profile_with_sums())


def most_begun(profile: Profile) -> int:
    """The most units with some of their weight gradients of a micro-batch, under a plan that likes to put them off."""
    layout, names = profile.layout, [name for name in profile.times if name[1].endswith(".up.W")]
    plan = make_plan("greedy", profile, model="m", mesh={"tp_size": 2})
    priorities = replace(plan.priorities, priority=dict.fromkeys(names, 10.0), extra_live_layers=LAYERS)
    (program,) = build_programs(schedule_of(6), layout, replace(plan, priorities=priorities))
    weights = [made for made in program if made.operator and made.operator.part is Part.W]
    left = Counter((made.microbatch, made.unit) for made in weights)
    begun: set[tuple[int, int]] = set()
    most = 0
    for made in weights:
        key = made.microbatch, made.unit
        left[key] -= 1
        begun.add(key)
        begun -= set() if left[key] else {key}
        most = max(most, len(begun))
    return most


@pytest.mark.parametrize("every_microbatch", [False, True])
def test_the_validator_finds_what_is_added_after_the_sum(every_microbatch: bool) -> None:
    profile = profile_with_sums(layers=1)
    profile = often(profile) if every_microbatch else profile
    layout, schedule = profile.layout, schedule_of(2)
    plan = make_plan("sequential", profile, model="m", mesh={"tp_size": 2})
    (program,) = build_programs(schedule, layout, plan)
    place = next(place for place, made in enumerate(program) if made.reduction >= int(every_microbatch))
    early = [*program[: place - 1], program[place], program[place - 1], *program[place + 1 :]]
    with pytest.raises(ValueError, match="adds to gradients that have been summed over ranks"):
        validate_program(early, [loss_gradient(layout)], layout)


@pytest.mark.parametrize("rule", ["sequential", "greedy", "dhelix"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_predictions_are_those_of_the_whole_window(rule: str, count: int) -> None:
    profile, schedule = profile_with_sums(layers=3), schedule_of(count)
    plan = make_plan(rule, profile, model="m", mesh={"tp_size": 2}, schedule=schedule_of(min(count, 8)))
    whole = predict(plan, profile, schedule, timeline=True).seconds
    assert predict(plan, profile, schedule).seconds == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("sum_ms", [2.0, 8.0, 12.0])
def test_sums_shorter_than_a_backward_are_hidden_in_a_window_of_eight(sum_ms: float) -> None:
    assert exposed("greedy", profile_with_sums(sum_ms), 8) <= 0.02


def test_the_best_number_of_units_is_found() -> None:
    """Against every number of them, on the window that they are compared on."""
    profile, schedule = profile_with_sums(), schedule_of(2)
    first = greedy(profile)
    chosen = timeline_of(defer_weight_gradients(first, profile, schedule), profile, schedule).seconds
    every = [replace(first, num_units_with_deferred_wgrad=held) for held in (None, *range(LAYERS + 3))]
    assert chosen <= 1.01 * min(timeline_of(each, profile, schedule).seconds for each in every)


def test_without_sums_nothing_changes() -> None:
    profile = profile_of(layout_of(SMALL, 3))
    plan = make_plan("greedy", profile, model="m", mesh={"tp_size": 2})
    assert plan.priorities.num_units_with_deferred_wgrad is None
    assert "held_units" not in plan.to_json()
    assert Kind.GRADIENTS in STREAMS


def test_plans_and_profiles_keep_them_on_file(tmp_path) -> None:
    profile = profile_with_sums()
    plan = make_plan("greedy", profile, model="m", mesh={"tp_size": 2})
    assert parse_plan(plan.to_json(), profile.layout.graphs, model="m", mesh={"tp_size": 2}).data() == plan.data()
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json").layout.reductions == profile.layout.reductions
    save_profile(often(profile), tmp_path / "often.json")
    assert load_profile(tmp_path / "often.json").layout.reductions == often(profile).layout.reductions
    bare = replace(profile.layout, reductions=())
    save_profile(profile_of(bare), tmp_path / "old.json")
    with pytest.raises(ValueError, match="does not cover the sums of gradients"):
        load_profile(tmp_path / "old.json", layout=profile.layout)


def test_the_bound_knows_which_link_sums_share() -> None:
    """Collectives take longer than anything else, and sums half as long as they."""
    quiet = profile_with_sums(1e-3)
    moving = [name for name in quiet.times if quiet.kind(name) is Kind.INTRA_NODE]
    times = {**quiet.times, **dict.fromkeys(moving, 0.1)}
    schedule = schedule_of(2)
    alone = lower_bound(replace(quiet, times=times), schedule)
    sums = [name for name, _ in named_reductions(quiet.layout)]
    times |= dict.fromkeys(sums, alone / 2 / len(sums))
    for over, expected in {"": alone, "inter_node": alone, "intra_node": 1.5 * alone}.items():
        about = {**quiet.about, **({REDUCTIONS_OVER: over} if over else {})}
        assert lower_bound(replace(quiet, times=times, about=about), schedule) == pytest.approx(expected)


def test_the_bound_counts_the_bytes_that_an_emulated_link_carries() -> None:
    """1 MB a second, of everything; latencies may pass side by side."""
    profile = profile_with_sums(1e-3)
    moving = [name for name in profile.times if profile.kind(name).communicates]
    about = {**profile.about, EMULATED_LINK: "8mbit,1ms", REDUCTIONS_OVER: "intra_node"}
    linked = replace(profile, about=about, bytes=dict.fromkeys(moving, 1_000_000))
    calls = sum(profile.kind(name).communicates for name in calls_of(profile.layout))
    assert lower_bound(linked, schedule_of(3)) == pytest.approx(3 * calls + len(profile.layout.reductions) + 1e-3)


def calls_of(layout: Layout) -> list[Name]:
    """Every operator that a micro-batch runs in a layout, as often as it does."""
    return [(name, entry) for name in layout.units for entry, _ in layout.graphs[name].entries()]
