"""Ranks that share a sequence do what the unsplit model does: losses and gradients by name, under every plan."""

from __future__ import annotations

from typing import Any

import pytest
from support.parity import KINDS, PLANS, check, references


@pytest.fixture(scope="module")
def expected() -> Any:
    return references()


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
