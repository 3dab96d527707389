"""Profiles: files come back the same, slowdowns and OEF are the ones by hand, and a wrong file says what is wrong."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from support.graphs import (
    LLAMA,
    SMALL,
    collective,
    compute,
    efforts,
    layout_of,
    linear,
    pair,
    pipeline_of,
    profile_of,
    random_times,
)

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Kind
from hf_helix.planning.schedule.placement import FOLD, stage_ranks
from hf_helix.planning.text import format_json
from hf_helix.planning.timing.profile import Pair, Profile, rough_profile
from hf_helix.planning.timing.profile_file import load_profile, profile_json, save_profile
from hf_helix.planning.window.layout import Layout, named_operators

LAYOUT = layout_of(LLAMA, 3)
UP, DOWN, ACT = ("layer", "F.mlp.up"), ("layer", "F.mlp.down"), ("layer", "F.mlp.act")
GATHER, SCATTER = ("layer", "F.mlp.gather"), ("layer", "F.mlp.scatter")
ABOUT = {"model": "Llama", "hardware": "two cores", "mesh": "tp_size=2"}


def measured() -> Profile:
    pairs = {(UP, GATHER): Pair(14e-3, 12e-3, 14e-3), (ACT, GATHER): Pair(9e-3, 2e-3, 9e-3)}
    times = {**random_times(LAYOUT, 0), UP: 10e-3, ACT: 2e-3, GATHER: 8e-3}
    spread = dict.fromkeys(times, 0.125)
    return Profile(ABOUT, LAYOUT, times, spread, pairs, {SCATTER: GATHER})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_profile(measured(), tmp_path / "profile.json")
    return tmp_path / "profile.json"


# Slowdown and OEF


@pytest.mark.parametrize(
    ("alone", "beside", "other", "expected"),
    [
        (10, 12, 20, 1.2),  # beside the other all the time: 12 / 10
        (10, 12, 12, 1.2),
        (10, 12, 8, 8 / 6),  # 8 beside it and 4 alone; so 6 of its 10 were done in 8
        (10, 10, 8, 1.0),
        (10, 9, 8, 1.0),  # faster than alone: noise
        (10, 100, 100, 10.0),
        (10, 30, 20, 10.0),  # nothing was done beside it: 20, then 10 alone
        (10, 40, 20, 10.0),
    ],
)
def test_slowdown_by_hand(alone: float, beside: float, other: float, expected: float):
    times = {**efforts(LAYOUT), UP: alone * 1e-3}
    pairs = {(UP, GATHER): Pair(max(beside, other) * 1e-3, beside * 1e-3, other * 1e-3)}
    assert profile_of(LAYOUT, times, pairs=pairs).slowdown(UP, GATHER) == pytest.approx(expected)
    mirrored = {(GATHER, UP): Pair(max(beside, other) * 1e-3, other * 1e-3, beside * 1e-3)}
    assert profile_of(LAYOUT, times, pairs=mirrored).slowdown(UP, GATHER) == pytest.approx(expected)


@pytest.mark.parametrize(("alone", "other"), [(10, 4), (4, 10), (7, 7)])
@pytest.mark.parametrize(("slow", "other_slow"), [(1.0, 1.0), (1.5, 1.2), (1.0, 2.0), (3.0, 1.1)])
def test_a_pair_of_slowdowns_says_them(alone: float, other: float, slow: float, other_slow: float):
    times = {**efforts(LAYOUT), UP: alone * 1e-3, GATHER: other * 1e-3}
    made = Pair.of(times[UP], times[GATHER], slow, other_slow)
    assert made.together == max(made.first, made.second)
    profile = profile_of(LAYOUT, times, pairs={(UP, GATHER): made})
    assert profile.slowdown(UP, GATHER) == pytest.approx(slow)
    assert profile.slowdown(GATHER, UP) == pytest.approx(other_slow)


def test_pairs_that_were_not_measured_get_the_mean_of_their_kinds():
    """Weighted by time: computations beside communication 1.2 (10 ms) and 2.0 (2 ms)."""
    pairs = {(UP, GATHER): Pair(20e-3, 12e-3, 20e-3), (ACT, GATHER): Pair(20e-3, 4e-3, 20e-3)}
    times = {**efforts(LAYOUT), UP: 10e-3, ACT: 2e-3, GATHER: 20e-3}
    profile = profile_of(LAYOUT, times, pairs=pairs)
    assert profile.slowdown(UP, GATHER) == pytest.approx(1.2)
    assert profile.slowdown(ACT, GATHER) == pytest.approx(2.0)
    assert profile.slowdown(DOWN, SCATTER) == pytest.approx((1.2 * 10 + 2.0 * 2) / 12)
    assert profile.slowdown(SCATTER, DOWN) == 1.0
    assert profile.slowdown(UP, DOWN) == 1.0, "of these kinds nothing was measured"


def test_means_are_of_the_same_kinds_only():
    gather = collective("gather", "norm", kind=Kind.INTER_NODE)
    crossing = pair("layer", compute("norm", "x"), gather, compute("up", "gather"))
    layout = layout_of({**LLAMA, "layer": crossing}, 2)
    pairs = {(("layer", "F.up"), ("layer", "F.gather")): Pair(9e-3, 2e-3, 9e-3)}
    profile = profile_of(layout, {**efforts(layout), ("layer", "F.gather"): 9e-3}, pairs=pairs)
    assert profile.slowdown(("layer", "F.norm"), ("layer", "B.gather")) == pytest.approx(2.0)
    assert profile.slowdown(("layer", "F.norm"), ("head", "F.gather")) == 1.0


def test_operators_that_do_the_same_share_a_measurement():
    profile = measured()
    assert profile.slowdown(UP, SCATTER) == profile.slowdown(UP, GATHER) == pytest.approx(1.2)
    assert profile.slowdown(SCATTER, UP) == profile.slowdown(GATHER, UP) != profile.slowdown(GATHER, DOWN)


def test_oef_is_the_papers_equation_1():
    """(10 + 8 - P) / 8."""
    for together, oef in ((10, 1.0), (14, 0.5), (18, 0.0), (20, -0.25)):
        pairs = {(UP, GATHER): Pair(together * 1e-3, 1e-3, 1e-3)}
        profile = profile_of(LAYOUT, {**efforts(LAYOUT), UP: 10e-3, GATHER: 8e-3}, pairs=pairs)
        assert profile.overlap_efficiency(UP, GATHER) == pytest.approx(oef)


def test_without_a_measurement_times_are_efforts():
    layout = layout_of(SMALL, 2)
    profile = rough_profile(layout)
    assert profile.times["layer", "F.gather"] == 4e-3
    assert profile.times["layer", "B.norm"] == 2e-3, "a whole backward is twice its forward"
    assert profile.slowdown(("layer", "F.up"), ("layer", "F.gather")) == 1.0


# Files


def test_a_saved_profile_comes_back_the_same(file: Path):
    loaded = load_profile(file, about=ABOUT, layout=LAYOUT)
    assert loaded == measured()
    assert profile_json(loaded) == file.read_text()
    names = [name for name, _ in named_operators(LAYOUT)]
    assert [loaded.slowdown(a, b) for a in names for b in names] == pytest.approx(
        [measured().slowdown(a, b) for a in names for b in names]
    )


def test_times_are_kept_to_six_digits(tmp_path: Path):
    times = {name: seconds * math.pi / 7 for name, seconds in random_times(LAYOUT, 1).items()}
    profile = profile_of(LAYOUT, times)
    save_profile(profile, tmp_path / "profile.json")
    loaded = load_profile(tmp_path / "profile.json")
    assert loaded.times == pytest.approx(times, rel=1e-5)
    assert profile_json(loaded) == profile_json(profile)


def test_layouts_and_declared_properties_of_operators_survive(tmp_path: Path):
    path, layer = (
        tmp_path / "profile.json",
        pair(
            "layer",
            compute("split", "x", "a b", relative_cost=0.5),
            collective("left", "a", backward_kind=Kind.COMPUTE, kind=Kind.INTER_NODE),
            collective("right", "b", ordered_after=("left",)),
            linear("join", "left right", wgrad_fraction=0.1),
            repeats=True,
        ),
    )
    split = layout_of({**SMALL, "layer": layer}, 2)
    for layout in (split, pipeline_of(SMALL, [2, 1, 1, 2], stage_ranks(FOLD, 2))):
        save_profile(profile_of(layout), path)
        assert load_profile(path).layout == layout
        check_refused(path, "is for other operators", layout=layout_of(SMALL, 6))
    whole = linear("join", "left right")
    save_profile(profile_of(split), path)
    operators = [*layer.forward.operators[:-1], whole]
    other = layout_of({**SMALL, "layer": pair("layer", *operators, repeats=True)}, 2)
    check_refused(path, r"other operators.*wgrad_fraction", layout=other)


def test_graphs_survive_that_show_values_or_hand_on_values_without_gradients(tmp_path: Path):
    """As of experts below a loss of the caller's own, and of layers that hand on the tokens that they chose."""
    ends = {"name": "layer", "repeats": True, "outputs": ("mix",)}
    router = compute("router", "x", "logits chosen")
    shows = Graph(operators=(router, compute("mix", "chosen")), inputs=("x",), shown=("logits",), **ends)
    passing = compute("pass", "before", "after", non_differentiable=("after",))
    ends |= {"inputs": ("x", "before"), "outputs": ("mix", "after"), "plain_inputs": ("before",)}
    hands_on = Graph(operators=(compute("mix", "x before"), passing), **ends)
    for graph in (shows, hands_on):
        layout = Layout(["layer", "layer"], {0: [0, 1]}, {"layer": GraphPair.of(graph)})
        save_profile(profile_of(layout), tmp_path / "profile.json")
        assert load_profile(tmp_path / "profile.json", layout=layout).layout == layout


def test_a_file_has_a_line_for_each_operator_and_pair(file: Path):
    lines = file.read_text().splitlines()
    assert ' "F.mlp.up": {"ms": 10.0, "spread": 0.125},' in [line[2:] for line in lines]
    assert sum('"together_ms": 14.0' in line and '"oef": 0.5' in line for line in lines) == 1
    data = json.loads(file.read_text())
    assert json.loads(format_json(data)) == data


# Wrong files and figures


@pytest.mark.parametrize("seconds", [0.0, -1e-3, math.nan, math.inf])
def test_impossible_times_are_refused(seconds: float):
    with pytest.raises(ValueError, match=r"impossible time of layer/F\.mlp\.up: "):
        profile_of(LAYOUT, {**efforts(LAYOUT), UP: seconds})
    for broken in (Pair(seconds, 1e-3, 1e-3), Pair(1e-3, seconds, 1e-3), Pair(1e-3, 1e-3, seconds)):
        with pytest.raises(ValueError, match=r"impossible time of layer/F\.mlp\.up beside layer/F\.mlp\.gather"):
            profile_of(LAYOUT, pairs={(UP, GATHER): broken})


def layer_of(data: dict) -> dict:
    return data["operators"]["layer"]


DAMAGES = [
    (lambda d: d.update(format="hf_helix.profile/0"), r"has format 'hf_helix\.profile/0', this version reads"),
    (lambda d: d.pop("format"), "has format None"),
    (lambda d: layer_of(d).pop("F.mlp.up"), r"damaged: the profile does not cover operator 'layer/F\.mlp\.up'"),
    (lambda d: layer_of(d).update({"F.nope": layer_of(d)["F.mlp.up"]}), r"names 'layer/F\.nope', which is not"),
    (lambda d: layer_of(d)["F.mlp.up"].update(ms=math.nan), r"impossible time of layer/F\.mlp\.up: nan ms"),
    (lambda d: layer_of(d)["F.mlp.up"].update(ms="long"), "damaged: .*'long'"),
    (lambda d: layer_of(d)["F.mlp.up"].pop("ms"), r"damaged: operator layer/F\.mlp\.up lacks 'ms'"),
    (lambda d: layer_of(d)["F.mlp.scatter"].update(like="layer/F.nope"), r"layer/F\.nope"),
    (lambda d: d["pairs"][0].update(first="layer/F.nope"), r"names 'layer/F\.nope'"),
    (lambda d: d["pairs"][0].update(together_ms=0), r"impossible time of layer/F\.mlp\.up beside layer/F\.mlp\.gather"),
    (lambda d: d.pop("operators"), "it lacks 'operators'"),
    (lambda d: d.update(pairs=3), "is damaged"),
    (lambda d: d["layout"]["chunks"]["0"].append(99), "layout names units that it does not hold"),
    (lambda d: d["layout"].update(ranks=[0]), "its layout has 2 stages on 1 ranks"),
    (lambda d: d["graphs"]["layer"]["operators"].pop(), r"outputs \['mlp\.add'\] are never written"),
    (lambda d: d["graphs"]["layer"]["operators"][3].update(kind="magic"), "'magic' is not a valid Kind"),
    (lambda d: d["graphs"]["layer"].update(repeats="x"), "repeats must be true or false, got 'x'"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_file_is_refused_with_the_reason_and_the_command(
    file: Path, damage: Callable[[dict], object], message: str
):
    data = json.loads(file.read_text())
    damage(data)
    file.write_text(json.dumps(data))
    check_refused(file, message)


def check_refused(file: Path, message: str, **wanted: object) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_profile(file, **wanted)
    assert str(file) in str(error.value)
    assert f"`hf-helix profile --model FOLDER --tp_size N --output {file}`" in str(error.value)


def test_a_file_that_is_no_profile_is_refused(file: Path):
    for content in (b"", b"[]", b"{", b"\xff\xfe", file.read_bytes()[:-200]):
        file.write_bytes(content)
        check_refused(file, "is damaged: .*|has format None")
    check_refused(file.with_name("absent.json"), "cannot be read")


def test_a_profile_for_another_case_is_refused(file: Path):
    check_refused(file, "is for model 'Llama', this run has 'Mistral'", about={**ABOUT, "model": "Mistral"})
    check_refused(file, "is for dtype None, this run has 'bf16'", about={**ABOUT, "dtype": "bf16"})
    check_refused(file, r"is for other operators: line \d+: .* against", layout=layout_of(SMALL, 3))
