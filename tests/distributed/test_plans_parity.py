"""No plan and no ablation changes a bit of losses or gradients, but tiles, which round; all equal the unsplit model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import jobs

from hf_helix.planning.graph.ablation import ABLATIONS

PLANS: list[dict[str, Any]] = [{"plan": plan} for plan in ("sequential", "round_robin", "greedy", "search", "dhelix")]
ABLATED: list[dict[str, Any]] = [
    {"plan": plan, "without": without}
    for without in (("local",), ("wgrad",), ("comm_beside_comm", "cross"), ABLATIONS)
    for plan in ("greedy", "search", "round_robin", "sequential")
]
PADDED = {"lengths": (17, 9, 13), "padding": "left"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one micro-batch, odd lengths": (1, {"data": PADDED}),
    "two, tied, biases": (2, {"model": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}}),
    "three, tied, mha, eager": (
        3,
        {
            "model": {"tie_word_embeddings": True, "num_key_value_heads": 4, "attn_implementation": "eager"},
            "data": {"lengths": (15, 7), "padding": "right"},
        },
    ),
    "five, six layers, odd lengths": (5, {"model": {"num_hidden_layers": 6}, "data": PADDED}),
    "three, one layer": (3, {"model": {"num_hidden_layers": 1}, "data": {"lengths": (1, 2, 3), "padding": "right"}}),
}


USUAL = ("one micro-batch, odd lengths", "three, tied, mha, eager")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in USUAL)) for c in CASES])
def test_every_plan_gives_the_bits_of_sequential_and_the_unsplit_models_values(
    case: str, cluster_of: Any, tmp_path: Any
) -> None:
    num_microbatches, options = CASES[case]
    expected = jobs.reference_gradients(str(tmp_path), num_microbatches, **options)
    plans = [*PLANS, {"plan": "intra_batch"}]
    found = compare(cluster_of(2), plans, num_microbatches, str(tmp_path), **options)
    for rank in found:
        np.testing.assert_allclose(rank["rows"][0]["losses"], expected["losses"], rtol=0, atol=1e-5)
        if "tied" not in case:
            check_same(plans[:-1], rank["rows"][:-1])
        for row in rank["rows"]:
            check_tiled(row, rank["rows"][0])
    gradients = found[0]["gradients"]
    assert gradients.keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        distance = np.linalg.norm(gradients[name].astype(np.float64) - gradient)
        assert distance <= 1e-4 * np.linalg.norm(gradient), name


def test_every_plan_gives_the_same_bits_of_tied_embeddings(cluster_of: Any, tmp_path: Any) -> None:
    options = {"model": {"tie_word_embeddings": True, "num_key_value_heads": 4}}
    for rank in compare(cluster_of(2), PLANS, 5, str(tmp_path), **options):
        check_same(PLANS, rank["rows"])


@pytest.mark.slow
def test_every_ablation_gives_the_same_bits(cluster_of: Any, tmp_path: Any) -> None:
    """With dropout, whose numbers depend on no plan either."""
    options = {"model": {"attention_dropout": 0.2, "num_hidden_layers": 4}, "data": PADDED}
    plans = [*PLANS, *ABLATED]
    for rank in compare(cluster_of(2), plans, 3, str(tmp_path), **options):
        check_same(plans, rank["rows"])


def test_dropout_does_not_depend_on_tiles(cluster_of: Any, tmp_path: Any) -> None:
    options = {"model": {"attention_dropout": 0.2}, "data": PADDED}
    plans = [
        {"plan": "sequential"},
        {"plan": "intra_batch"},
        *({"plan": "intra_batch", "without": (n,)} for n in ABLATIONS),
    ]
    for rank in compare(cluster_of(2), plans, 2, str(tmp_path), **options):
        for row in rank["rows"][1:]:
            check_tiled(row, rank["rows"][0])


def events_of(cluster: Any, folder: str, without: tuple[str, ...]) -> list[tuple[str, str]]:
    case = {"helix": {"tp_size": 2, "plan": "greedy"}, "without": without, "num_microbatches": 2, "traced": True}
    return cluster.run("window_gradients", folder=folder, **case)[0]["events"]


def test_without_local_everything_runs_on_the_compute_stream(cluster_of: Any, tmp_path: Any) -> None:
    events = events_of(cluster_of(2), str(tmp_path), ("local",))
    assert {verb for verb, _ in events} == {"run"}
    assert sum(label.endswith(".mlp.gather") for _, label in events) == 2 * 2 * 3
    usual = events_of(cluster_of(2), str(tmp_path), ("cross",))  # of which there is none
    assert {verb for verb, _ in usual} == {"run", "issue", "wait"}
    assert sorted(label for verb, label in usual if verb != "wait") == sorted(label for _, label in events)


def test_without_wgrad_weight_gradients_stay_where_they_are(cluster_of: Any, tmp_path: Any) -> None:
    """By themselves they wait till the end of the chain."""
    for without, stays in ((("wgrad",), True), ((), False)):
        events = events_of(cluster_of(2), str(tmp_path), without)
        order = [label for verb, label in events if verb in ("run", "issue")]
        for layer in range(3):
            place = f"B0.layers.{layer}."
            assert (order.index(f"{place}mlp.down.W") < order.index(f"{place}mlp.act")) == stays
            assert (order.index(f"{place}attn.out.W") < order.index(f"{place}attention")) == stays


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5])
@pytest.mark.parametrize("without", [(name,) for name in ABLATIONS] + [("wgrad", "comm_beside_comm"), ABLATIONS])
def test_ablations_of_every_plan(
    without: tuple[str, ...], num_microbatches: int, cluster_of: Any, tmp_path: Any
) -> None:
    options = {"model": {"attention_dropout": 0.1}, "data": PADDED}
    plans = [*PLANS, *({**plan, "without": without} for plan in PLANS)]
    for rank in compare(cluster_of(2), plans, num_microbatches, str(tmp_path), **options):
        check_same(plans, rank["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_four_ranks(num_microbatches: int, cluster_of: Any, tmp_path: Any) -> None:
    options = {"model": {"num_key_value_heads": 4}, "data": PADDED}
    plans = [{"plan": plan, "tp_size": 4} for plan in ("sequential", "round_robin", "greedy", "intra_batch")]
    expected = jobs.reference_gradients(str(tmp_path), num_microbatches, **options)
    for rank in compare(cluster_of(4), plans, num_microbatches, str(tmp_path), **options):
        np.testing.assert_allclose(rank["rows"][0]["losses"], expected["losses"], rtol=0, atol=1e-5)
        check_same(plans[:-1], rank["rows"][:-1])
        check_tiled(rank["rows"][-1], rank["rows"][0])


def compare(cluster: Any, plans: list[dict[str, Any]], num_microbatches: int, folder: str, **options: Any) -> Any:
    found = cluster.run(
        "support.tuning_jobs:compare_plans", folder=folder, plans=plans, num_microbatches=num_microbatches, **options
    )
    assert found[0]["rows"][1]["compared"] == len(found[0]["gradients"]) > 10
    return found


def check_same(plans: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    for plan, row in zip(plans, rows, strict=True):
        assert row["losses"] == rows[0]["losses"], plan
        assert row["differing"] == [], plan


def check_tiled(row: dict[str, Any], first: dict[str, Any]) -> None:
    np.testing.assert_allclose(row["losses"], first["losses"], rtol=0, atol=1e-6)
    assert row["distance"] <= 1e-6
