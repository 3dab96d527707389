"""Ranks that share a sequence do what the unsplit model does: losses and gradients by name, under every plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.pipeline_jobs import batches_of, reference

KINDS = ("dense", "left", "right", "packed")
LENGTHS = (33, 16, 21)  # two of them do not divide
PLANS = ("sequential", "greedy", "round_robin", "dhelix")


@pytest.fixture(scope="module")
def expected() -> Any:
    """The unsplit model's windows, each run once."""
    known: dict[Any, Any] = {}

    def get(model: dict[str, Any], count: int, kind: str) -> Any:
        key = (str(sorted(model.items())), count, kind)
        if key not in known:
            known[key] = reference(model, batches_of(count, lengths=LENGTHS, kind=kind))
        return known[key]

    return get


def check(
    cluster: Any, folder: Any, expected: Any, sizes: tuple[int, ...], kind: str, plans: tuple[str, ...], **changes: Any
) -> None:
    cp, tp, pp, dp = sizes
    options = {key: changes.pop(key) for key in ("cp_method", "cross_node") if key in changes}
    model = {"num_hidden_layers": max(2, 2 * pp), **changes}
    count = 3
    helix = {"cp_size": cp, "tp_size": tp, "pp_size": pp, "plan": "sequential", **options}
    cases = [(plan, "w", count) for plan in plans]
    job = {"folder": str(folder), "helix": helix, "model": model, "cases": cases, "lengths": LENGTHS, "kind": kind}
    ranks = cluster.run("support.pipeline_jobs:windows", **job)
    wanted = expected(model, count * dp, kind)
    share = cp * tp * pp
    for place, plan in enumerate(plans):
        for d in range(dp):
            mine = dp * np.array(wanted["losses"][d * count : (d + 1) * count])
            for rank in range(d * share, (d + 1) * share):
                np.testing.assert_allclose(ranks[rank][place]["losses"], mine, rtol=0, atol=1e-5 * dp, err_msg=plan)
            found = ranks[d * share][place]["gradients"]
            assert found.keys() == wanted["gradients"].keys()
            for name, gradient in wanted["gradients"].items():
                distance = np.linalg.norm(found[name].astype(np.float64) - gradient)
                assert distance <= 1e-4 * np.linalg.norm(gradient) + 1e-12, f"{plan}: {name}"
        assert ranks[0][place]["losses"] == ranks[0][0]["losses"]
        for name, gradient in ranks[0][place]["gradients"].items():
            np.testing.assert_array_equal(gradient, ranks[0][0]["gradients"][name], err_msg=f"{plan}: {name}")


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_share_a_sequence(kind: str, cluster_of: Any, expected: Any, tmp_path: Any) -> None:
    check(cluster_of(2), tmp_path, expected, (2, 1, 1, 1), kind, PLANS)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [((4, 1, 1, 1), "dense"), ((4, 1, 1, 1), "packed"), ((2, 2, 1, 1), "left"), ((2, 1, 2, 1), "dense")],
    ids=str,
)
def test_beside_other_dimensions(
    sizes: tuple[int, ...], kind: str, cluster_of: Any, expected: Any, tmp_path: Any
) -> None:
    check(cluster_of(4), tmp_path, expected, sizes, kind, ("sequential", "greedy"), cross_node=["cp"])


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_all_gather(kind: str, cluster_of: Any, expected: Any, tmp_path: Any) -> None:
    check(cluster_of(2), tmp_path, expected, (2, 1, 1, 1), kind, ("sequential", "greedy"), cp_method="all_gather")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"attn_implementation": "eager"},
        {"tie_word_embeddings": True, "attention_bias": True},
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 2.1, 2.2, 2.3],
                "original_max_position_embeddings": 20,
                "factor": 3.2,
            }
        },
    ],
    ids=["mha", "eager", "tied", "longrope"],
)
def test_other_models(changes: dict[str, Any], cluster_of: Any, expected: Any, tmp_path: Any) -> None:
    check(cluster_of(2), tmp_path, expected, (2, 1, 1, 1), "dense", ("sequential", "greedy"), **changes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes",
    [(2, 2, 2, 1), (4, 2, 1, 1), (2, 2, 1, 2), (4, 1, 2, 1), (4, 1, 1, 2), (2, 1, 2, 2), (2, 1, 1, 2), (4, 1, 1, 1)],
    ids=str,
)
def test_every_layout(sizes: tuple[int, ...], kind: str, cluster_of: Any, expected: Any, tmp_path: Any) -> None:
    cp, tp, pp, dp = sizes
    check(cluster_of(cp * tp * pp * dp), tmp_path, expected, sizes, kind, PLANS)
