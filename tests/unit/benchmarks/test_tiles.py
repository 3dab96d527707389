"""Tiled graphs: the same values in and out, orders in which one strand overlaps, gradients that add up in one order."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import graphs as by_hand
from support.arrays import window_instructions
from support.graphs import (
    LLAMA,
    ORDER_BLOCK,
    check_whole_and_in_order,
    collective,
    compute,
    layers_only,
    layout_of,
    linear,
    llama_layer,
    llama_layer_on_one_rank,
    operators_of,
    pair,
    pipeline_of,
    profile_of,
    random_times,
    schedule_of,
)

from benchmarks.paper.tiles import sites, tile_graph, tile_layout, tile_pair, tile_profile
from hf_helix.planning.graph.backward import SEND, GraphPair, derive_backward
from hf_helix.planning.graph.operator import Graph, Kind, Part
from hf_helix.planning.plan.block_plan import BlockPlan, validate_order
from hf_helix.planning.timing.profile import Pair
from hf_helix.planning.timing.recompute import FULL, SELECTIVE, recomputed
from hf_helix.planning.traffic import FlatWeights
from hf_helix.planning.window.layout import named_traffic, with_traffic

TILES = [2, 3, 4]


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.operators]


def part_of(graph: Graph, *prefixes: str) -> list[str]:
    return [name for name in names(graph) if name.startswith(prefixes)]


def tiled(layer: Graph, tiles: int) -> GraphPair:
    return tile_pair(GraphPair.of(layer), tiles)


# Graphs


def test_a_gather_and_its_linear_become_tiles_with_every_gather_first() -> None:
    graph = tile_graph(llama_layer(), 2)
    assert part_of(graph, "attn.gather", "attn.qkv") == [
        "attn.gather.cut", "attn.gather.0", "attn.gather.1", "attn.qkv.0", "attn.qkv.1", "attn.qkv.join",
    ]  # fmt: skip
    assert graph["attn.gather.cut"].reads == ("attn.norm",)
    assert graph["attn.gather.1"].reads == graph["attn.gather.cut"].writes[1:]
    assert graph["attn.qkv.1"].reads == graph["attn.gather.1"].writes
    assert graph["attn.qkv.join"].reads == graph["attn.qkv.0"].writes + graph["attn.qkv.1"].writes
    assert graph["attn.qkv.join"].writes == ("attn.qkv.q", "attn.qkv.k", "attn.qkv.v")


def test_a_linear_and_its_scatter_become_tiles_in_turn() -> None:
    graph = tile_graph(llama_layer(), 2)
    assert part_of(graph, "mlp.down", "mlp.scatter") == [
        "mlp.down.cut", "mlp.down.0", "mlp.scatter.0", "mlp.down.1", "mlp.scatter.1", "mlp.scatter.join",
    ]  # fmt: skip
    assert graph["mlp.scatter.1"].reads == graph["mlp.down.1"].writes
    assert graph["mlp.scatter.join"].writes == ("mlp.scatter",)


@pytest.mark.parametrize("tiles", TILES)
def test_weight_gradients_of_the_tiles_declare_one_order(tiles: int) -> None:
    backward = tiled(llama_layer(), tiles).backward
    for tile in range(tiles):
        later = {f"mlp.up.{other}.W" for other in range(tile + 1, tiles)}
        assert set(backward[f"mlp.up.{tile}.W"].ordered_after) == later
        assert backward[f"mlp.up.{tile}.I"].ordered_after == ()
        assert backward[f"mlp.up.{tile}.W"].part is Part.W


def test_what_cannot_be_tiled_stays() -> None:
    assert tile_graph(llama_layer_on_one_rank(), 4) == llama_layer_on_one_rank()
    assert tile_graph(llama_layer(), 1) == llama_layer()
    assert tile_graph(LLAMA["embedding"].forward, 2) == LLAMA["embedding"].forward  # a lookup is no linear
    head = tile_graph(LLAMA["head"].forward, 2)
    assert "loss.gather" in names(head)
    assert "gather.1" in names(head)
    for operators in (
        (collective("gather", "x"), linear("a", "gather"), linear("b", "gather"), compute("add", "a b")),
        (collective("gather", "x"), compute("act", "gather")),  # no linear
        (collective("gather", "x", backward_kind=Kind.COMPUTE), linear("a", "gather"), compute("act", "a")),
        (linear("a", "x", "p q"), collective("scatter", "p"), compute("add", "scatter q")),  # two outputs
        (compute("a", "x"), collective("scatter", "a"), compute("act", "scatter")),
    ):
        forward = pair("g", *operators).forward
        assert sites(forward) == []
        assert tile_graph(forward, 2) == forward
    # A linear between two collectives goes with the gather.
    forward = pair("g", collective("gather", "x"), linear("a", "gather"), collective("scatter", "a")).forward
    (site,) = sites(forward)
    assert (site.first.name, site.second.name) == ("gather", "a")
    assert "scatter" in names(tile_graph(forward, 2))


@given(graph=by_hand.graphs(), tiles=st.integers(2, 4))
def test_any_graph_keeps_its_ends_and_has_a_backward(graph: Graph, tiles: int) -> None:
    pair = tiled(graph, tiles)
    cut = pair.forward
    assert cut == tile_graph(graph, tiles)
    assert (cut.inputs, cut.outputs) == (graph.inputs, graph.outputs)
    assert len(cut.operators) == len(graph.operators) + len(sites(graph)) * 2 * tiles
    validate_order([f"B.{name}" for name in names(pair.backward)], None, pair.backward)
    whole = GraphPair.of(graph).backward
    assert (pair.backward.inputs, pair.backward.outputs) == (whole.inputs, whole.outputs)


@pytest.mark.parametrize("mode", [SELECTIVE, FULL])
def test_tiles_keep_no_more(mode: str) -> None:
    whole = recomputed(llama_layer(), mode)
    backward = tiled(whole, 2).backward
    assert backward.saved_values == derive_backward(whole).saved_values
    assert {"mlp.gather.cut.again", "mlp.gather.0.again", "mlp.gather.1.again"} <= set(names(backward))
    assert backward["mlp.down.1.W"].reads == ("d.mlp.down.1", "r.mlp.down.cut.1")


def test_tiles_of_frozen_linears_have_no_weight_gradients() -> None:
    frozen = tuple(replace(op, wgrad_fraction=0) if op.splits_dgrad_wgrad else op for op in llama_layer().operators)
    backward = tiled(replace(llama_layer(), operators=frozen), 2).backward
    assert not [op for op in backward.operators if op.part is Part.W]


# Orders


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("rule", ["sequential", "round_robin"])
def test_every_tile_of_a_microbatch_adds_up_before_the_next(rule: str, tiles: int) -> None:
    profile, schedule = profile_of(layout_of(LLAMA, 3)), schedule_of(4)
    derived = tile_profile(profile, tiles)
    plan, layout = BlockPlan.of(rule, ORDER_BLOCK[rule], derived, model="m", mesh={}), derived.layout
    program = operators_of(plan.issue(schedule, layout).program(0))
    check_whole_and_in_order(program, window_instructions(schedule, layout))
    adding: dict[tuple[int, str], list[int]] = {}  # by weight, the micro-batches in the order in which they add to it
    for i in program:
        if i.operator.part is Part.W:
            adding.setdefault((i.unit, i.operator.forward_name.rstrip("0123456789")), []).append(i.microbatch)
    assert all(order == sorted(order) for order in adding.values())


# Profiles


@pytest.mark.parametrize("tiles", TILES)
def test_a_tiled_profile_divides_the_measured_times(tiles: int) -> None:
    layout = layout_of(LLAMA, 2)
    whole = profile_of(layout, random_times(layout, 3))
    derived = tile_profile(whole, tiles)
    assert derived.about == {**whole.about, "tiled": "derived, not measured"}
    for entry, tile in (
        ("F.attn.gather", "F.attn.gather.1"),
        ("F.mlp.up", "F.mlp.up.1"),
        ("B.mlp.up.W", "B.mlp.up.0.W"),
    ):
        assert derived.times["layer", tile] == pytest.approx(whole.times["layer", entry] / tiles)
    assert derived.times["layer", "B.attention"] == whole.times["layer", "B.attention"]
    local = ("attn.norm", "attn.add", "mlp.norm", "mlp.add", "mlp.act", "attention")
    lightest = min(whole.times["layer", f"F.{name}"] for name in local)
    for entry in ("F.attn.gather.cut", "B.attn.gather.cut", "F.mlp.scatter.join", "B.mlp.scatter.join"):
        assert derived.times["layer", entry] == lightest, "copies are light"
    assert tile_profile(whole, 1) is whole


def test_a_tiled_profile_slows_tiles_down_as_the_whole() -> None:
    gather, act, up = ("layer", "F.mlp.gather"), ("layer", "B.mlp.act"), ("layer", "B.mlp.up.I")
    layout = layout_of(LLAMA, 2)
    times = {**random_times(layout, 3), gather: 6e-3, act: 4e-3, up: 9e-3}
    pairs = {(gather, act): Pair(8e-3, 8e-3, 5e-3), (gather, up): Pair(12e-3, 9e-3, 12e-3)}
    like = {("layer", "F.attn.gather"): gather}
    whole = profile_of(layout, times, pairs=pairs, like=like)
    derived = tile_profile(whole, 2)
    for other, tile in ((act, act), (up, ("layer", "B.mlp.up.1.I"))):
        for place in ("F.mlp.gather.0", "F.mlp.gather.1", "F.attn.gather.1"):
            beside = ("layer", place)
            assert derived.slowdown(beside, tile) == pytest.approx(whole.slowdown(gather, other))
            assert derived.slowdown(tile, beside) == pytest.approx(whole.slowdown(other, gather))


def test_sums_of_gradients_that_a_cut_takes_over_have_no_slowdowns() -> None:
    """As behind the residuals of Olmo2, which are gathered without a norm."""
    operators = (
        collective("gather", "x"),
        linear("up", "gather"),
        collective("scatter", "up"),
        compute("add", "x scatter"),
    )
    layout = layers_only(pair("layer", *operators), 2)
    profile = profile_of(layout)
    added, moved = ("layer", "B.x.sum"), ("layer", "B.scatter")
    assert added in profile.times
    profile = replace(profile, pairs={(added, moved): Pair.of(profile.times[added], profile.times[moved], 1.5, 1.2)})
    result = tile_profile(profile, 2)
    assert added not in result.times
    assert result.pairs == {}


def test_tiles_leave_gathers_of_weights() -> None:
    layout = layout_of(LLAMA, 2)
    gathered = with_traffic(layout, [], [FlatWeights((unit,), "weights", 4000) for unit in range(len(layout.units))])
    times = random_times(layout, 1) | {name: 1e-3 for name, _ in named_traffic(gathered)}
    assert tile_profile(profile_of(gathered, times), 2).layout.gathers == gathered.gathers


def test_tiles_leave_the_ways_between_ranks() -> None:
    layout = pipeline_of(LLAMA, (1, 1, 1, 1), (0, 1, 1, 0))
    cut = tile_layout(layout, 2)
    assert cut.describe() == layout.describe()
    assert cut.graphs[SEND] == layout.graphs[SEND]
    assert cut.graphs["layer"] != layout.graphs["layer"]
