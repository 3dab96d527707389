"""The search: valid, never behind list scheduling, optimal on small blocks, at the bound on a layer's real times."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from support.models import llama

from hf_helix.adapters.llama import Llama
from hf_helix.operators.collectives import Axis, SilentTransport
from hf_helix.planning.graph import Graph, Kind, Operator, derive_backward
from hf_helix.planning.greedy import greedy
from hf_helix.planning.plan import LATE, GraphPair, entries, validate_order
from hf_helix.planning.search import lower_bound, search, steady_period

# A Llama layer (hidden 1024, sequence 256, micro-batch 2, tp 2) on two CPU cores, measured in ms.
MEASURED = {
    "F": {"norm": 1.5, "qkv": 13, "attention": 9, "out": 4.5, "add": 0.6, "up": 22, "act": 3.5, "down": 11},
    "B": {"norm": 3, "qkv": 13, "attention": 16, "out": 4.5, "add": 0.1, "up": 22, "act": 6, "down": 11},
}


def small(efforts: list[float]) -> GraphPair:
    """A layer of two linears and a gather."""
    kinds = [("norm", "x", "n", Kind.COMPUTE), ("gather", "n", "g", Kind.LOCAL), ("up", "g", "y", Kind.COMPUTE)]
    operators = tuple(
        Operator(name=name, kind=kind, reads=(reads,), writes=(writes,), split=name == "up", effort=effort)
        for (name, reads, writes, kind), effort in zip(kinds, efforts, strict=True)
    )
    forward = Graph("layer", operators, ("x",), ("y",), repeats=True)
    return GraphPair(forward, derive_backward(forward))


def layer(transfer: float) -> GraphPair:
    """The real Llama layer with measured times."""
    pair = Llama().units(llama(), Axis(SilentTransport(2, 0)))[1].graphs

    def timed(graph: Graph, letter: str) -> Graph:
        def effort(op: Operator) -> float:
            name = op.of.removeprefix("attn.").removeprefix("mlp.")
            return transfer if op.kind.communicates else MEASURED[letter][name]

        return replace(graph, operators=tuple(replace(op, effort=effort(op)) for op in graph.operators))

    return GraphPair(timed(pair.forward, "F"), timed(pair.backward, "B"))


@pytest.mark.parametrize(("transfer", "slack"), [(29.0, 1.06), (14.5, 1.001), (8.7, 1.001)])
def test_a_real_layer_comes_close_to_the_bound(transfer: float, slack: float) -> None:
    pair = layer(transfer)
    order = search(pair.forward, pair.backward)
    validate_order(order, pair.forward, pair.backward)
    assert steady_period(order, pair.forward, pair.backward) <= slack * lower_bound(pair.forward, pair.backward)


@pytest.mark.parametrize("seed", range(6))
def test_never_behind_list_scheduling_nor_below_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    pair = small([draw.choice([0.5, 1, 2, 4, 8]) for _ in range(3)])
    order = search(pair.forward, pair.backward)
    validate_order(order, pair.forward, pair.backward)
    period = steady_period(order, pair.forward, pair.backward)
    assert period <= steady_period(greedy(pair.forward, pair.backward), pair.forward, pair.backward)
    assert period >= lower_bound(pair.forward, pair.backward) - 1e-9


@pytest.mark.parametrize("efforts", [[1, 4, 2], [2, 3, 1], [0.5, 1, 4]])
def test_optimal_on_a_small_block(efforts: list[float]) -> None:
    """Against every valid order with every choice of late operators."""
    pair = small(efforts)
    names = list(entries(pair.forward, pair.backward))
    best = float("inf")
    for permutation in itertools.permutations(names):
        for late in itertools.product((False, True), repeat=len(names)):
            order = tuple(name + LATE if is_late else name for name, is_late in zip(permutation, late, strict=True))
            try:
                validate_order(order, pair.forward, pair.backward)
            except ValueError:
                continue
            best = min(best, steady_period(order, pair.forward, pair.backward))
    found = steady_period(search(pair.forward, pair.backward), pair.forward, pair.backward)
    assert found == pytest.approx(best)


def test_blocks_that_do_not_repeat_are_left_to_list_scheduling() -> None:
    pair = small([1, 4, 2])
    assert search(pair.forward, None) == greedy(pair.forward, None)
    once = GraphPair(*(replace(graph, repeats=False) for graph in (pair.forward, pair.backward)))
    assert search(once.forward, once.backward) == greedy(once.forward, once.backward)


def test_the_period_of_a_known_order() -> None:
    """By hand: norm 1, gather 4, up 2 forward; backward up.I 2, gather 4, up.W 2, norm 2 (twice the forward)."""
    pair = small([1, 4, 2])
    one_by_one = ("F.norm", "F.gather", "F.up", "B.up.I", "B.gather", "B.up.W", "B.norm")
    assert steady_period(one_by_one, pair.forward, pair.backward) == 1 + 4 + 2 + 2 + 4 + 2
    # Both transfers are busy all the time: nothing can be faster.
    assert lower_bound(pair.forward, pair.backward) == max(4 + 4, 1 + 2 + 2 + 2 + 2, 1 + 4 + 2, 2 + 4 + 2)
