"""Gathers of weights and sums of gradients in a window: once, in time, predicted, and hidden beside computation."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.graphs import SMALL, layout_of, loss_gradient, profile_of, schedule_of, timeline_of
from support.programs import build_programs

from hf_helix.config import RULES
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.plan import search as searching
from hf_helix.planning.plan.bounds import lower_bound
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.plan.program import build_program, validate_program
from hf_helix.planning.plan.search import defer_weight_gradients, greedy
from hf_helix.planning.rules.registry import make_plan, parse_plan
from hf_helix.planning.timing.profile import EMULATED_LINK, REDUCTIONS_OVER, Profile, rough_profile
from hf_helix.planning.timing.profile_file import load_profile, save_profile
from hf_helix.planning.traffic import Bucket, FlatWeights, Traffic
from hf_helix.planning.window.layout import Layout, Name, named_traffic, with_traffic
from hf_helix.planning.window.window import COMPUTE, Window

LAYERS = 8


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "MAX_STEPS", 20)


def gathered(layout: Layout) -> list[FlatWeights]:
    """Two gathers for every unit, and one that the first unit shares with the last."""
    last = len(layout.units) - 1
    weights = [FlatWeights((unit,), name, 4000) for unit in range(last + 1) for name in ("weights", "weights.products")]
    return [*weights[:2], FlatWeights((0, last), "weights.shared", 4000), *weights[2:]]


def summed(layout: Layout) -> list[Bucket]:
    """A sum for every unit, in the order of backward; all but the first may be of every micro-batch."""

    def sum_of(unit: int) -> Bucket:
        operators = layout.graphs[layout.units[unit]].backward.operators
        adding = [op for op in operators if op.part in (Part.W, Part.B) and not op.kind.communicates]
        adders = tuple((unit, op.name) for op in adding)
        return Bucket((), adders, 4000, can_reduce_often=unit < len(layout.units) - 1)

    return [sum_of(unit) for unit in reversed(range(len(layout.units)))]


def profile_with(gather_ms: float = 0.0, sum_ms: float = 0.0, layers: int = 3) -> Profile:
    """Computation of 20 ms in the backward of a layer, collectives as good as free, gathers and sums of equal length;
    without those that take no time."""
    layout = layout_of(SMALL, layers)
    layout = with_traffic(layout, summed(layout) if sum_ms else [], gathered(layout) if gather_ms else [])
    rough = rough_profile(layout)
    times = {name: 1e-5 if rough.kind(name).communicates else 4e-3 for name in rough.times}
    times |= dict.fromkeys(names_of(layout.gathers), gather_ms / 1000.0)
    times |= dict.fromkeys(names_of(layout.reductions), sum_ms / 1000.0)
    return profile_of(layout, times)


def often(profile: Profile, on_host: bool = False) -> Profile:
    """The profile with sums of every micro-batch, but for the first."""
    plain = replace(profile.layout, traffic=())
    weights = gathered(plain) if profile.layout.gathers else []
    layout = with_traffic(plain, summed(plain), weights, on_host, often=True)
    copies = dict.fromkeys([name for name, op in named_traffic(layout) if op.kind.copies], 1e-3)
    return replace(profile, layout=layout, times={**copies, **profile.times})


def names_of(traffic: Sequence[Traffic]) -> list[Name]:
    """The names of all their operators."""
    return [name for each in traffic for name, _ in each.named_operators]


def plan_of(rule: str, profile: Profile, count: int | None = None) -> Plan:
    schedule = schedule_of(count) if count else None
    return make_plan(rule, profile, model="m", mesh={"tp_size": 2}, schedule=schedule)


@pytest.mark.parametrize("rule", RULES)
def test_gathers_come_first_and_sums_behind_the_last_that_adds_to_them(rule: str) -> None:
    profile, schedule = profile_with(gather_ms=1.0, sum_ms=8.0), schedule_of(3)
    layout, count = profile.layout, len(profile.layout.gathers)
    (program,) = build_programs(schedule, layout, plan_of(rule, profile))
    validate_program(program, [loss_gradient(layout)], layout, schedule[0])
    gathers = {each.unit for each in layout.gathers}
    assert [made.unit for made in program[:count]] == sorted(gathers)
    assert not any(made.unit in gathers for made in program[count:])
    issued = {made.unit: place for place, made in enumerate(program) if made.is_traffic and place >= count}
    assert sorted(issued) == [each.unit for each in layout.reductions]
    for result in layout.reductions:
        last = max(
            place
            for place, made in enumerate(program)
            if made.operator and made.operator.part is not Part.F and (made.unit, made.operator.name) in result.adders
        )
        assert issued[result.unit] > last
        assert all(made.is_traffic for made in program[last + 1 : issued[result.unit]]), "nothing but other sums"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("on_host", [False, True])
def test_sums_of_every_micro_batch_follow_its_last_addition(rule: str, on_host: bool) -> None:
    """Copies to the host follow the last of them alone; a sum once in a window stays so."""
    profile, schedule = often(profile_with(sum_ms=8.0), on_host), schedule_of(4)
    layout = profile.layout
    (program,) = build_programs(schedule, layout, plan_of(rule, profile))
    validate_program(program, [loss_gradient(layout)], layout, schedule[0])
    program = [made for made in program if made.operator]
    sums = [made for made in program if made.is_traffic and made.operator.kind is Kind.GRADIENTS]
    first, *others = [each.unit for each in layout.reductions]
    assert [made.unit for made in sums if made.unit == first] == [first], "the first is once in a window"
    for unit in others:
        assert [made.microbatch for made in sums if made.unit == unit] == [0, 1, 2, 3]
    copied = [made.unit for made in program if made.operator.kind is Kind.DOWN]
    assert sorted(copied) == ([first, *others] if on_host else [])
    last: dict[int, tuple[int, int]] = {}
    for made in program:
        for result in layout.reductions:
            if made.operator.part is not Part.F and (made.unit, made.operator.name) in result.adders:
                last[result.unit] = made.microbatch, 0
        if made in sums and made.unit != first:
            assert last[made.unit] == (made.microbatch, 0), "right behind the last addition"
            last[made.unit] = made.microbatch, 1


@pytest.mark.parametrize("rule", RULES)
def test_long_windows_have_gathers_once_and_repeat_their_sums(rule: str) -> None:
    """The program that holds its repeated part once issues what the program written out issues."""
    profile, schedule = often(profile_with(gather_ms=1.0, sum_ms=8.0)), schedule_of(40)
    plan = plan_of(rule, profile, 8)
    (whole,) = build_programs(schedule, profile.layout, plan)
    program = build_program(schedule, profile.layout, plan, 0)
    assert program.repeats > 0
    assert [each for each in program if each.operator] == [each for each in whole if each.operator]


@pytest.mark.parametrize("rule", ["sequential", "greedy", "dhelix"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_predictions_are_those_of_the_whole_window(rule: str, count: int) -> None:
    schedule = schedule_of(count)
    once = profile_with(gather_ms=12.0, sum_ms=8.0)
    for profile in (once, often(once)):
        plan = plan_of(rule, profile, min(count, 8))
        whole = predict(plan, profile, schedule, timeline=True).seconds
        assert predict(plan, profile, schedule).seconds == pytest.approx(whole, rel=1e-9)


def test_sums_longer_than_all_computation_decide_a_window() -> None:
    """The bound knows them."""
    profile, schedule = often(profile_with(sum_ms=500.0)), schedule_of(40)
    sums = 0.5 * (1 + 40 * (len(profile.layout.reductions) - 1))
    assert lower_bound(profile, schedule) == pytest.approx(sums)
    assert sums < predict(plan_of("greedy", profile, 8), profile, schedule).seconds < 1.1 * sums


def test_arrays_of_scaled_times_share_nothing_with_their_original() -> None:
    """A barrier that is added to a copy is not in the original."""
    profile = often(profile_with(sum_ms=8.0), on_host=True)
    window = Window(schedule_of(2), profile.layout)
    arrays, same = (window.arrays(profile.times, traffic=True) for _ in range(2))
    scaled = arrays.with_compute_scaled(2.0)
    assert scaled.needs == arrays.needs
    assert scaled.loads()[Kind.COMPUTE] == pytest.approx(2 * arrays.loads()[Kind.COMPUTE])
    scaled.needs[0].append(scaled.append_barrier([], 0))
    assert arrays == same != scaled


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gather", "comes before its weights are gathered"),
        ("sum", "adds to gradients that have been summed over ranks"),
        ("every sum", "adds to gradients that have been summed over ranks"),
    ],
)
def test_the_validator_finds_what_runs_too_early(kind: str, said: str) -> None:
    profile = profile_with(gather_ms=1.0, sum_ms=8.0, layers=1)
    profile = often(profile) if kind == "every sum" else profile
    layout = profile.layout
    (program,) = build_programs(schedule_of(2), layout, plan_of("sequential", profile))
    if kind == "gather":
        program.append(program.pop(0))
    else:
        sums = [each.unit for each in layout.reductions][int(kind == "every sum") :]
        place = next(place for place, made in enumerate(program) if made.unit in sums)
        program.insert(place - 1, program.pop(place))
    with pytest.raises(ValueError, match=said):
        validate_program(program, [loss_gradient(layout)], layout)


# -- hidden beside computation ---------------------------------------------------------------------------------------


def test_only_the_first_gathers_are_exposed_where_layers_take_longer() -> None:
    """Nothing runs beside the gathers of the first unit; where they are slower than computation, all show."""

    def exposed(gather_ms: float) -> float:
        profiles = [profile_with(ms, layers=LAYERS) for ms in (gather_ms, 1e-6)]
        plan = plan_of("sequential", profiles[0])
        slow, fast = (predict(plan, profile, schedule_of(2)).seconds for profile in profiles)
        return slow - fast

    assert exposed(1.0) == pytest.approx(3e-3, rel=1e-3)
    slow = profile_with(100.0, layers=LAYERS)
    assert exposed(100.0) > 0.8 * 0.1 * len(slow.layout.gathers)
    assert lower_bound(slow, schedule_of(2)) >= 0.1 * len(slow.layout.gathers)


@pytest.mark.parametrize("sum_ms", [2.0, 12.0])
def test_sums_shorter_than_a_backward_are_hidden_in_a_window_of_eight(sum_ms: float) -> None:
    """Hardly any time passes behind the last computation."""
    profile, schedule = profile_with(sum_ms=sum_ms, layers=LAYERS), schedule_of(8)
    timeline = predict(plan_of("greedy", profile, 8), profile, schedule, timeline=True).timeline
    streams = timeline.arrays.streams
    computed = max(end for end, stream in zip(timeline.ends, streams, strict=True) if stream == COMPUTE)
    assert (timeline.seconds - computed) / timeline.seconds <= 0.02


def test_few_units_wait_for_their_last_weight_gradient() -> None:
    """A plan that puts weight gradients off finishes those of a unit before those of two units later."""
    once = profile_with(sum_ms=8.0, layers=LAYERS)
    assert most_begun(often(once)) <= 3 < most_begun(once)


def most_begun(profile: Profile) -> int:
    """The most units with some of their weight gradients of a micro-batch, under a plan that likes to put them off."""
    layout, names = profile.layout, [name for name in profile.times if name[1].endswith(".up.W")]
    plan = plan_of("greedy", profile)
    priorities = replace(plan.priorities, priority=dict.fromkeys(names, 10.0), extra_live_layers=LAYERS)
    (program,) = build_programs(schedule_of(6), layout, replace(plan, priorities=priorities))
    weights = [(made.microbatch, made.unit) for made in program if made.operator and made.operator.part is Part.W]
    left, begun, most = Counter(weights), set(), 0
    for key in weights:
        left[key] -= 1
        begun.add(key)
        begun -= set() if left[key] else {key}
        most = max(most, len(begun))
    return most


def test_the_best_number_of_units_is_found() -> None:
    """Against every number of them, on the window that they are compared on; without sums nothing is put off."""
    profile, schedule = profile_with(sum_ms=8.0, layers=LAYERS), schedule_of(2)
    first = greedy(profile)
    chosen = timeline_of(defer_weight_gradients(first, profile, schedule), profile, schedule).seconds
    every = [replace(first, num_units_with_deferred_wgrad=held) for held in (None, *range(LAYERS + 3))]
    assert chosen <= 1.01 * min(timeline_of(each, profile, schedule).seconds for each in every)
    plain = plan_of("greedy", profile_with())
    assert plain.priorities.num_units_with_deferred_wgrad is None
    assert "held_units" not in plain.to_json()


def test_the_bound_knows_which_link_sums_share() -> None:
    """Collectives take longer than anything else, and sums half as long as they."""
    quiet = profile_with(sum_ms=1e-3, layers=LAYERS)
    moving = [name for name in quiet.times if quiet.kind(name) is Kind.INTRA_NODE]
    times = {**quiet.times, **dict.fromkeys(moving, 0.1)}
    alone = lower_bound(replace(quiet, times=times), schedule_of(2))
    sums = names_of(quiet.layout.reductions)
    times |= dict.fromkeys(sums, alone / 2 / len(sums))
    for over, expected in {"": alone, "inter_node": alone, "intra_node": 1.5 * alone}.items():
        about = {**quiet.about, **({REDUCTIONS_OVER: over} if over else {})}
        assert lower_bound(replace(quiet, times=times, about=about), schedule_of(2)) == pytest.approx(expected)


def test_the_bound_counts_the_bytes_that_an_emulated_link_carries() -> None:
    """1 MB a second, of everything; latencies may pass side by side."""
    profile = profile_with(sum_ms=1e-3, layers=LAYERS)
    moving = [name for name in profile.times if profile.kind(name).communicates]
    about = {**profile.about, EMULATED_LINK: "8mbit,1ms", REDUCTIONS_OVER: "intra_node"}
    linked = replace(profile, about=about, bytes=dict.fromkeys(moving, 1_000_000))
    entries = [(name, entry) for name in profile.layout.units for entry, _ in profile.layout.graphs[name].entries()]
    calls = sum(profile.kind(name).communicates for name in entries)
    assert lower_bound(linked, schedule_of(3)) == pytest.approx(3 * calls + len(profile.layout.reductions) + 1e-3)


def test_files_keep_them(tmp_path: Path) -> None:
    once = profile_with(gather_ms=1.0, sum_ms=8.0)
    plan, graphs = plan_of("greedy", once), once.layout.graphs
    assert parse_plan(plan.to_json(), graphs, model="m", mesh={"tp_size": 2}).data() == plan.data()
    path = tmp_path / "profile.json"
    for profile in (once, often(once)):
        save_profile(profile, path)
        loaded = load_profile(path).layout
        assert (loaded.gathers, loaded.reductions) == (profile.layout.gathers, profile.layout.reductions)
    gathers, sums = len(once.layout.gathers), len(once.layout.reductions)
    lacks_gathers = f"gathers of weights \\({gathers} here", {"sum_ms": 8.0}
    lacks_sums = f"sums of gradients \\({sums} here", {"gather_ms": 1.0}
    assert gathers != sums
    for said, lacking in (lacks_gathers, lacks_sums):
        save_profile(profile_with(**lacking), path)
        with pytest.raises(ValueError, match=f"does not cover the {said}"):
            load_profile(path, layout=once.layout)
