"""The backward graph derived from a layer is the one a person would write: its operators, their order, their sums."""

from dataclasses import replace

import pytest
from support.graphs import collective, compute, linear, llama_layer, llama_layer_on_one_rank

from hf_helix.planning.graph.backward import SEND, derive_backward, transfer_graphs
from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part, digest

BACKWARD = [
    "mlp.add", "mlp.scatter", "mlp.down.I", "mlp.down.W", "mlp.act", "mlp.up.I", "mlp.gather", "mlp.up.W", "mlp.norm",
    "attn.add", "attn.scatter", "attn.out.I", "attn.out.W", "attention", "attn.qkv.I", "attn.gather", "attn.qkv.W",
    "attn.norm",
]  # fmt: skip


def names(graph: Graph) -> list[str]:
    return [operator.name for operator in graph.operators]


def test_a_layer_of_14_operators_has_a_backward_of_18():
    forward = llama_layer()
    assert len(forward.operators) == 14
    assert names(derive_backward(forward)) == BACKWARD
    assert len(BACKWARD) == 18


def test_the_backward_of_the_residual_sums_in_one_fixed_order():
    backward = derive_backward(llama_layer())
    for first, second, value in (("attn.add", "attn.norm", "x"), ("mlp.add", "mlp.norm", "attn.add")):
        assert f"d.{value}@{first}" in backward[first].writes
        assert set(backward[first].accumulates) == {None}
        assert backward[second].writes == (f"d.{value}",)
        assert backward[second].accumulates == (f"d.{value}@{first}",)


def test_three_readers_make_a_chain_and_the_collective_begins_it():
    operators = (compute("a", "x"), compute("b", "x"), collective("gather", "x"), compute("sum", "a b gather"))
    backward = derive_backward(Graph("g", operators, ("x",), ("sum",)))
    chain = [(backward[name].accumulates, backward[name].writes) for name in ("gather", "b", "a")]
    assert chain == [
        ((None,), ("d.x@gather",)),
        (("d.x@gather",), ("d.x@b",)),
        (("d.x@b",), ("d.x",)),
    ]


def test_indices_pass_through_without_gradient_and_without_a_backward_of_what_only_they_depend_on():
    """The linear that only indices depend on has no backward; they enter and leave beside the hidden states."""
    choose = replace(compute("choose", "score"), non_differentiable=("choose",))
    graph = Graph(
        "g",
        (linear("score", "x"), choose, compute("attend", "x before"), linear("out", "attend")),
        ("x", "before"),
        ("out", "choose"),
        repeats=True,
        plain_inputs=("before",),
    )
    backward = derive_backward(graph)
    assert names(backward) == ["out.I", "out.W", "attend"]
    assert (backward.inputs, backward.outputs) == (("d.out",), ("d.x",))
    assert graph.passing == (False, True)
    pair = transfer_graphs(graph.passing)[SEND]
    assert (pair.forward.inputs, pair.backward.outputs) == (("x0", "x1"), ("d.x0",))


def test_a_collective_whose_backward_computes_may_share_its_value():
    gathers = [collective(name, "x", backward_kind=Kind.COMPUTE) for name in ("left", "right")]
    backward = derive_backward(Graph("g", (*gathers, compute("sum", "left right")), ("x",), ("sum",)))
    assert backward["right"].kind is backward["left"].kind is Kind.COMPUTE
    assert backward["left"].accumulates == ("d.x@right",)


def test_what_two_collectives_bring_is_summed_by_an_operator_of_its_own():
    operators = (collective("left", "x"), collective("right", "x"), compute("join", "left right"))
    backward = derive_backward(Graph("g", operators, ("x",), ("join",)))
    assert names(backward) == ["join", "right", "left", "x.sum"]
    assert backward["x.sum"].reads == ("d.x@right", "d.x@left")
    assert backward["x.sum"].writes == ("d.x",)
    assert backward["left"].accumulates == backward["right"].accumulates == (None,)


def test_a_ring_is_fetched_again_and_its_gradients_go_back_beside_the_blocks():
    """Three ranks: block i reads what the i-th step brought, while the next step is under way."""
    operators = (
        compute("rotate", "x", "q kv"),
        collective("ring1", "kv", kind=Kind.INTER_NODE, recomputed=True),
        compute("block0", "q kv", saved_for_backward=("q", "kv", "out", "lse")),
        collective("ring2", "ring1", kind=Kind.INTER_NODE, recomputed=True),
        compute("block1", "q ring1 block0", saved_for_backward=("q", "ring1", "out", "lse")),
        compute("block2", "q ring2 block1", saved_for_backward=("q", "ring2", "out", "lse")),
        compute("join", "block2", "out lse"),
    )
    backward = derive_backward(Graph("g", operators, ("x",), ("out",)))
    assert names(backward) == [
        *("ring1.again", "ring2.again", "join", "block2", "ring2", "block1", "ring1.sum", "ring1", "block0", "kv.sum"),
        "rotate",
    ]
    assert backward.saved_values == ("q", "kv", "out", "lse")
    assert backward["join"].reads == ("d.out",)  # nothing comes back for what is only kept
    assert backward["block2"].reads == ("d.block2", "q", "r.ring2", "out", "lse")
    assert backward["block0"].reads == ("d.block0", "q", "kv", "out", "lse")
    assert backward["ring1.again"].reads == ("kv",)
    assert backward["ring1.again"].control_deps == ("d.out",)
    assert backward["ring2.again"].reads == ("r.ring1",)
    assert backward["ring2.again"].part is Part.R
    assert backward["ring1.sum"].reads == ("d.ring1@block1", "d.ring1@ring2")
    assert backward["block0"].writes == ("d.q", "d.kv@block0")
    assert backward["block0"].accumulates == ("d.q@block1", None)


A = compute("a", "x")


@pytest.mark.parametrize(
    ("operators", "inputs", "outputs", "problem"),
    [
        ((compute("a", "x b"), compute("b", "x")), "x", "a", r"graph 'g': operator 'a' reads \['b'\], not yet written"),
        ((compute("a", "x", accumulates=("partial",)),), "x", "a", r"operator 'a' reads \['partial'\]"),
        ((compute("a", "x", ordered_after=("b",)), compute("b", "a")), "x", "b", r"'a' reads \['b'\], not yet written"),
        ((A, compute("b", "x", "a")), "x", "a", "operator 'b' writes 'a' a second time"),
        ((A,), "x", "y", r"outputs \['y'\] are never written"),
        ((compute("a", "x", "y"), compute("a", "x", "z")), "x", "y", "two operators called 'a'"),
        ((), "xx", "", "inputs list 'x' a second time"),
    ],
)
def test_graphs_that_cannot_run_say_why(operators, inputs: str, outputs: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        Graph("g", operators, tuple(inputs), tuple(outputs))


@pytest.mark.parametrize(("size", "forward", "backward"), [(2, 14, 18), (1, 10, 14)])
def test_the_real_llama_adapter_declares_these_layers(size: int, forward: int, backward: int):
    from support.models import llama

    from hf_helix.models.families.llama import Llama
    from hf_helix.models.graph.context import ParallelContext
    from hf_helix.operators.communication.transport import Axis, SilentTransport

    axis = Axis(SilentTransport(2, 0)) if size == 2 else Axis.single()
    units = Llama().units(llama(), ParallelContext(axis))
    layers = [unit for unit in units if unit.name == "layer"]
    assert [unit.name for unit in units] == ["embedding", "layer", "layer", "layer", "head"]
    by_hand = llama_layer() if size == 2 else llama_layer_on_one_rank()
    for unit in layers:
        assert len(unit.graphs.forward.operators) == len(unit.operators) == forward
        assert len(unit.graphs.backward.operators) == backward
        assert shape_of(unit.graphs.forward) == shape_of(by_hand)
        assert shape_of(unit.graphs.backward) == shape_of(derive_backward(by_hand))


def shape_of(graph: Graph) -> list[tuple]:
    """Everything but the efforts, which are only a rule of thumb."""
    return [
        (op.name, op.forward_name, op.part, op.kind, op.reads, op.writes, op.accumulates, op.splits_dgrad_wgrad)
        for op in graph.operators
    ]


def test_where_a_collective_stands_decides_whether_its_gradient_needs_a_sum():
    def backward_of(*operators: Operator, inputs: str = "x") -> Graph:
        return derive_backward(Graph("g", operators, tuple(inputs), ("add",)))

    before = backward_of(collective("gather", "x"), compute("add", "x gather"))
    assert names(before) == ["add", "gather", "x.sum"]
    after = backward_of(compute("norm", "x"), collective("gather", "x"), compute("add", "norm gather"))
    assert after["norm"].accumulates == ("d.x@gather",)
    # One that only happens to be next does not take the weight gradient.
    beside = backward_of(collective("gather", "y"), linear("lin", "x"), compute("add", "lin gather"), inputs="xy")
    assert names(beside) == ["add", "lin.I", "lin.W", "gather"]


def test_the_gradient_of_a_shown_value_enters_beside_those_of_outputs():
    route = Operator(name="route", kind=Kind.COMPUTE, reads=("x",), writes=("weights", "logits"))
    backward = derive_backward(Graph("g", (route, compute("out", "weights")), ("x",), ("out",), shown=("logits",)))
    assert backward["route"].reads == ("d.weights", "d.logits")
    assert backward.inputs == ("d.out",)
    assert "d.logits" in backward.saved_values


@pytest.mark.parametrize(
    ("operators", "outputs", "problem"),
    [
        ((compute("a", "x x"),), ("a",), "is read twice by one operator"),
        ((compute("a", "x"), compute("b", "a")), ("a", "b"), "leaves the unit and is read in it"),
        ((compute("a", "x"), compute("b", "x")), ("b",), "is written and never read"),
    ],
)
def test_forwards_without_a_derivable_gradient_say_why(operators, outputs, problem):
    with pytest.raises(ValueError, match=problem):
        derive_backward(Graph("g", operators, ("x",), outputs))


def test_the_description_tells_properties_apart():
    def text(repeats=False, **changes):
        first = Operator(name="first", kind=Kind.COMPUTE, reads=("x",), writes=("f",))
        op = Operator(**{"name": "a", "kind": Kind.COMPUTE, "reads": ("f",), "writes": ("y",), **changes})
        return Graph("g", (first, op), ("x",), ("y",), repeats).describe()

    others = [
        {"relative_cost": 2.0},
        {"splits_dgrad_wgrad": True},
        {"kind": Kind.INTRA_NODE},
        {"ordered_after": ("first",)},
        {"repeats": True},
    ]
    others += [
        {"recomputed": True},
        {"saved_for_backward": ("f",)},
        {"splits_dgrad_wgrad": True, "wgrad_fraction": 0.1},
    ]
    texts = {text(), *(text(**changes) for changes in others)}
    assert len(texts) == 9
    whole, one = llama_layer(), llama_layer_on_one_rank()
    assert digest([whole]) == digest([llama_layer()])
    assert len({digest([whole]), digest([one]), digest([whole, one]), digest([one, whole])}) == 4


def test_what_repeats_lets_as_many_values_out_as_in():
    operators = (compute("a", "x y"),)
    Graph("g", operators, ("x", "y"), ("a",))
    with pytest.raises(ValueError, match="as many values must leave it as enter it"):
        Graph("g", operators, ("x", "y"), ("a",), repeats=True)
