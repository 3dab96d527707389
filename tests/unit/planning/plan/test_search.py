"""The search: hardly ever behind list scheduling, within the memory, above the bound, the same every time, soon."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arrays import arrays_of, window_instructions
from support.graphs import (
    LLAMA,
    SMALL,
    SMALL_LAYER,
    autograd,
    collective,
    compute,
    layers,
    layers_only,
    layout_of,
    linear,
    list_scheduled,
    pair,
    profile_of,
    random_times,
    schedule_of,
    timeline_of,
)

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan import search as searching
from hf_helix.planning.plan.bounds import bound, critical_path, lower_bound
from hf_helix.planning.plan.list_scheduler import ListScheduler
from hf_helix.planning.plan.search import CLOSE, greedy, search, shorten
from hf_helix.planning.timing.operator_clock import Timeline, simulate
from hf_helix.planning.timing.profile import Pair, Profile
from hf_helix.planning.window.layout import Name, named_operators
from hf_helix.planning.window.window import WindowArrays


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what holds after any number of them."""
    monkeypatch.setattr(searching, "MAX_STEPS", 20)


def llama_profile(num_layers: int, seed: int, interference: bool = False) -> Profile:
    layout = layout_of(LLAMA, num_layers)
    times = random_times(layout, seed)
    up, gather = ("layer", "F.mlp.up"), ("layer", "F.mlp.gather")
    beside = Pair(1.4 * max(times[up], times[gather]), 1.3 * times[up], 1.2 * times[gather])
    return profile_of(layout, times, pairs={(up, gather): beside} if interference else {})


# Greedy


def test_greedy_waits_for_nothing_and_takes_weight_gradients_last():
    """By hand: both weight gradients wait for the last transfer; once it has arrived, norm goes before the second."""
    layout = layers_only(SMALL_LAYER, 1)
    profile = profile_of(layout)
    result = greedy(profile)
    order = sorted(result.priority, key=result.priority.__getitem__)
    weights = {("layer", "B.up.W"), ("layer", "B.down.W")}
    assert set(order[-2:]) == weights
    assert max(result.priority.values()) < 1e-3 * 2 * max(profile.times.values()) + 1e-12
    (program,) = list_scheduled(schedule_of(1), layout, result)
    names = [made.operator.name for made in program][6:]
    assert names == ["add", "scatter", "down.I", "up.I", "gather", "down.W", "norm", "up.W"]


# Search


def test_hardly_ever_longer_than_greedy(few_steps: None):
    """On the window it is judged by: at most three layers a chunk."""
    profile, schedule = llama_profile(5, 0, interference=True), schedule_of(4)
    flow = search(profile, schedule)
    longest = CLOSE * timeline_of(greedy(profile), profile, schedule).seconds
    assert timeline_of(flow, profile, schedule).seconds <= longest


def ring_profile(slower: float) -> Profile:
    """A layer that sends keys around, as much communication as computation; computation may take longer."""
    layer = pair(
        "layer",
        linear("qkv", "x", "q kv", relative_cost=3),
        collective("ring", "kv", kind=Kind.INTER_NODE),
        autograd("local", "q"),
        autograd("remote", "q ring local"),
        linear("out", "remote"),
        linear("up", "out", relative_cost=6),
        linear("down", "up", relative_cost=3),
        compute("add", "x down"),
        repeats=True,
    )
    layout = layout_of({**SMALL, "layer": layer}, 2)
    times = {
        name: 15e-3 if op.kind is Kind.INTER_NODE else slower * op.relative_cost * 1e-3
        for name, op in named_operators(layout)
    }
    return profile_of(layout, times)


@pytest.mark.slow
def test_communication_is_early_even_where_computation_takes_longest(monkeypatch: pytest.MonkeyPatch):
    """Planned with computations 1.4 times as long as they are then, most orders leave communication for late."""
    monkeypatch.setattr(searching, "MAX_STEPS", 300)
    slow, then, schedule = ring_profile(1.4), ring_profile(1.0), schedule_of(8)
    limit = lower_bound(then, schedule)
    assert timeline_of(greedy(slow), then, schedule).seconds > 1.08 * limit
    assert timeline_of(search(slow, schedule), then, schedule).seconds < 1.05 * limit
    monkeypatch.setattr(searching, "COMPUTE_TIME_FACTORS", (1.0,))
    assert timeline_of(search(slow, schedule), then, schedule).seconds > 1.05 * limit


@pytest.mark.slow
def test_interference_is_searched_around(monkeypatch: pytest.MonkeyPatch):
    """What is best where nothing interferes is not best where a computation slows the transfer beside it down."""
    monkeypatch.setattr(searching, "MAX_STEPS", 100)
    monkeypatch.setattr(searching, "COMPUTE_TIME_FACTORS", (1.0,))
    profile, schedule = llama_profile(1, 3, interference=True), schedule_of(3)
    blind = profile_of(profile.layout, profile.times)
    assert (
        timeline_of(search(profile, schedule), profile, schedule).seconds
        < timeline_of(search(blind, schedule), profile, schedule).seconds
    )


def test_the_search_is_the_same_every_time(few_steps: None):
    profile = llama_profile(3, 0, interference=True)
    state = random.getstate()
    first = search(profile)
    assert random.getstate() == state
    random.seed(5)
    assert search(profile) == first
    assert first != greedy(profile)


def test_a_search_that_has_reached_the_bound_stops(monkeypatch: pytest.MonkeyPatch):
    """Without communication there is nothing to find. Others tell how far they are, from nothing to nearly all."""
    layer = pair("layer", compute("norm", "x"), linear("up", "norm"), repeats=True)
    lookup = pair("embedding", compute("e"), inputs="")
    profile = profile_of(layout_of({"embedding": lookup, "layer": layer, "head": SMALL["head"]}, 2))
    told: list[float] = []
    assert search(profile, progress=told.append) == greedy(profile)
    assert told == [0.0, 1 / 3, 2 / 3]  # the start of each annealing
    monkeypatch.setattr(searching, "MAX_STEPS", 60)
    told.clear()
    search(llama_profile(2, 0), schedule_of(2), progress=told.append)
    assert told[0] == 0.0
    assert told == sorted(told)
    assert 0.9 < told[-1] < 1


@pytest.mark.slow
def test_a_search_takes_seconds(monkeypatch: pytest.MonkeyPatch):
    """Three annealings and their outcomes on a whole window: so many instructions simulated, a million a second."""
    simulated = 0

    def counting(work: WindowArrays, *rest: Any) -> Timeline:
        nonlocal simulated
        simulated += len(work)
        return simulate(work, *rest)

    monkeypatch.setattr(searching, "simulate", counting)
    search(llama_profile(32, 0, interference=True))
    assert 0 < simulated < 3.2 * searching.EFFORT, simulated


def test_a_long_layout_is_shortened_for_the_search():
    short = shorten(layout_of(LLAMA, 9))
    assert list(short.units) == ["embedding", *["layer"] * 6, "head"]
    assert short.chunks == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    few = layout_of(LLAMA, 3)
    assert shorten(few) == few


# The bound


def test_the_bound_by_hand():
    """Two layers of norm 1, gather 4, up 2 | I 2, W 2, gather 4, norm 2, with two micro-batches; lookup and loss 1."""
    layer = SMALL_LAYER
    layout = layers_only(layer, 2)
    times = dict.fromkeys(random_times(layout, 0), 1.0)
    way = 4  # of 6 forward operators all are on the way; backward all but the two W

    def of(changes: dict[Name, float]) -> float:
        result = {**times, **changes}
        made = window_instructions(schedule_of(1), layout)
        return bound(arrays_of(made, layout, result), layout)

    # 2 layers: 4 computations forward, 6 backward each; ways of 6 each.
    assert of({}) == 2 * (4 + 6)
    assert of({("layer", "B.gather"): 20.0}) == max(2 * (1 + 20), 2 * (5 + 20))
    assert of({("layer", "F.scatter"): 3.0, ("layer", "F.gather"): 20.0}) == 2 * (way + 3 + 20)
    assert critical_path(layer.forward, {op.name: 1.0 for op in layer.forward.operators}) == 6


@given(layers(), st.integers(1, 3), st.integers(1, 4), st.integers(0, 9999))
def test_no_valid_order_beats_the_bound(layer: GraphPair, num_layers: int, num_microbatches: int, seed: int):
    """Any order that keeps the flow's rules but for urgency: values, strands and gradients."""
    layout = layout_of({**LLAMA, "layer": layer}, num_layers)
    times, draw = random_times(layout, seed), random.Random(seed)
    window = ListScheduler(schedule_of(num_microbatches), layout, times, extra_live_layers=9)
    waiting = {place: set(needs) for place, needs in enumerate(window.needs)}
    order: list[int] = []
    while waiting:
        order.append(draw.choice([place for place, needs in waiting.items() if not needs]))
        del waiting[order[-1]]
        for needs in waiting.values():
            needs.discard(order[-1])
    limit = bound(window.arrays, layout)
    assert simulate(window.arrays, order=order).seconds >= limit - 1e-9
    assert simulate(window.arrays, lambda a, b: 1.5).seconds >= limit - 1e-9
