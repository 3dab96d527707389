"""What backward runs again: which operators, where they stand, and that only what they begin with is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import graphs as by_hand
from support.graphs import autograd, collective, compute, linear, llama_layer

from hf_helix.config import RECOMPUTE
from hf_helix.planning.graph.backward import GraphPair, derive_backward
from hf_helix.planning.graph.operator import Graph, Kind, Part
from hf_helix.planning.plan.list_scheduler import Priorities
from hf_helix.planning.timing.recompute import FULL, SELECTIVE, recomputed


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.operators]


def again(graph: Graph) -> list[str]:
    return [op.name for op in graph.operators if op.recomputed]


def backward_of(mode: str, forward: Graph | None = None) -> Graph:
    return derive_backward(recomputed(forward or llama_layer(), mode))


def test_full_keeps_nothing_but_the_input_and_stops_before_what_nobody_needs() -> None:
    forward = recomputed(llama_layer(), FULL)
    assert set(names(forward)) - set(again(forward)) == {"mlp.down", "mlp.scatter", "mlp.add"}
    assert derive_backward(forward).saved_values == ("x",)


def test_selective_keeps_what_linears_give_and_runs_no_linear_and_no_scatter_again() -> None:
    forward = recomputed(llama_layer(), SELECTIVE)
    assert again(forward) == ["attn.norm", "attn.gather", "attention", "mlp.norm", "mlp.gather", "mlp.act"]
    kept = {"x", "attn.qkv.q", "attn.qkv.k", "attn.qkv.v", "attn.add", "mlp.up.gate", "mlp.up.up"}
    assert set(derive_backward(forward).saved_values) == kept


def test_full_begins_behind_the_gradients_first_collective_and_runs_the_forward_in_its_order() -> None:
    """Even one strand computes beside the all-gather that backward begins with."""
    order = names(backward_of(FULL))
    assert order[:3] == ["mlp.add", "mlp.scatter", "attn.norm.again"]
    repeats = [name for name in order if name.endswith(".again")]
    assert repeats == [f"{name}.again" for name in again(recomputed(llama_layer(), FULL))]
    assert order[2 : 2 + len(repeats)] == repeats


def test_selective_runs_again_where_it_is_needed_and_gathers_beside_the_input_gradient() -> None:
    order = names(backward_of(SELECTIVE))
    assert order[:6] == ["mlp.add", "mlp.scatter", "mlp.act.again", "mlp.down.I", "mlp.down.W", "mlp.act"]
    place = order.index("mlp.norm.again")
    assert order[place : place + 5] == ["mlp.norm.again", "mlp.gather.again", "mlp.up.I", "mlp.gather", "mlp.up.W"]
    assert order.index("attention.again") > order.index("attn.scatter")


def test_indices_and_counts_are_kept() -> None:
    """How many rows went where is what it was: nothing is asked again."""
    operators = (
        autograd("router", "x", "weights chosen", non_differentiable=("chosen",)),
        compute(
            "permute", "x chosen", "rows places counts", non_differentiable=("places", "counts"), has_saved_state=True
        ),
        collective("announce", "counts", non_differentiable=("announce",)),
        compute("group", "rows announce", "sorted", has_saved_state=True),
        linear("up", "sorted announce", "made", saved_for_backward=("announce",)),
        compute("unpermute", "made weights places", "out", has_saved_state=True),
    )
    forward = recomputed(Graph("g", operators, ("x",), ("out",)), FULL)
    assert again(forward) == ["router", "permute", "group", "up", "unpermute"]
    backward = derive_backward(forward)
    assert backward.saved_values == ("chosen", "places", "announce", "x")
    assert backward["router.again"].writes == ("r.weights",)
    assert backward["permute.again"].reads == ("x", "chosen")
    assert backward["group.again"].reads == ("r.rows", "announce")
    assert backward["up.I"].reads == ("d.made", "announce")
    assert backward["up.W"].reads == ("d.made", "r.sorted", "announce")


def test_a_ring_begins_where_its_keys_come_again() -> None:
    operators = (
        autograd("rotate", "x", "q kv"),
        collective("ring1", "kv", kind=Kind.INTER_NODE, recomputed=True),
        compute("block0", "q kv", saved_for_backward=("q", "kv", "out", "lse")),
        compute("block1", "q ring1 block0", saved_for_backward=("q", "ring1", "out", "lse")),
        compute("join", "block1", "out lse"),
    )
    graph = Graph("g", operators, ("x",), ("out",))
    assert again(recomputed(graph, SELECTIVE)) == ["rotate", "ring1"]
    full = backward_of(FULL, graph)
    assert full.saved_values == ("x",)
    assert full["block1"].reads == ("d.block1", "r.q", "r.ring1", "r.out", "r.lse")
    order = [name for name in names(full) if name.endswith(".again")]
    assert order == [f"{name}.again" for name in ("rotate", "ring1", "block0", "block1", "join")]


@pytest.mark.parametrize("mode", RECOMPUTE)
def test_flows_hold_two_layers_of_what_ran_again_at_most_and_let_forward_go_on_as_far_as_without(mode: str) -> None:
    """Where weight gradients are the least urgent, and would keep what they read of every layer. What may be alive is
    counted in what a layer keeps, whatever its mode."""
    layer = GraphPair.of(recomputed(llama_layer(), mode))
    layout = by_hand.layout_of({**by_hand.LLAMA, "layer": layer}, 4)
    times = by_hand.efforts(layout)
    (program,) = by_hand.list_scheduled(by_hand.schedule_of(5), layout, Priorities(times, {}, extra_live_layers=1))
    assert 4 <= by_hand.most_layers_alive(program, layout) <= 5 + 1e-3
    bias = {name: 1.0 for name in times if name[1].endswith(".W")}
    (program,) = by_hand.list_scheduled(by_hand.schedule_of(3), layout, Priorities(times, bias))
    last = {(i.microbatch, key): place for place, i in enumerate(program) for key in (*i.reads, *i.writes)}
    alive: set[tuple[int, tuple[int, str]]] = set()
    most = 0
    for place, i in enumerate(program):
        alive |= {(i.microbatch, key) for key in i.writes if key[1].startswith("r.")}
        most = max(most, len(alive))
        alive = {value for value in alive if last[value] > place}
    in_a_layer = sum(op.part is Part.R for op in layer.backward.operators)
    assert in_a_layer / 2 <= most <= 2 * in_a_layer


@given(by_hand.graphs(), st.sampled_from([SELECTIVE, FULL]))
def test_whatever_backward_reads_is_kept_or_comes_again(forward: Graph, mode: str) -> None:
    """Of any graph. `Graph` itself refuses a reader before its writer."""
    marked = recomputed(forward, mode)
    backward = derive_backward(marked)
    result = set(names(backward))
    usual = {op.name for op in derive_backward(forward).operators}
    assert result == usual | {f"{name}.again" for name in again(marked)}
    written = {value for op in forward.operators for value in op.writes}
    for op in marked.operators:
        assert not op.recomputed or mode == FULL or op.recompute_when_selective
        if op.recomputed:
            assert not written.intersection(op.writes) & set(backward.saved_values)
        if op.recomputed and op.has_saved_state:
            assert f"{op.name}.again" in backward[op.name].ordered_after
    if mode == FULL:
        assert set(backward.saved_values) <= set(forward.inputs)
    read = {value for op in backward.operators for value in op.reads}
    for op in backward.operators:
        if op.part is Part.R and not marked[op.forward_name].has_saved_state:
            assert read.intersection(op.writes), "nobody needs it"
