"""Mixtures of experts on several ranks do what the unsplit models do, wherever their experts are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.parity import KINDS, PLANS, check, check_saved, references

FAMILIES = ("mixtral", "phimoe", "qwen3_moe")
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
FEW = ("sequential", "greedy")
# Context, tensor, pipeline and data parallelism, and of the last, how many ranks share the experts.
EP2, TENSOR, PIPE, CONTEXT = (1, 1, 1, 2, 2), (1, 2, 1, 1, 1), (1, 1, 2, 1, 1), (2, 1, 1, 1, 1)
EP4, EP2_DP4, TENSOR_EP, PIPE_EP, CONTEXT_EP = (
    (1, 1, 1, 4, 4),
    (1, 1, 1, 4, 2),
    (1, 2, 1, 2, 2),
    (1, 1, 2, 2, 2),
    (2, 1, 1, 2, 2),
)


@pytest.fixture(scope="module")
def expected() -> Any:
    return references()


def check_experts(cluster_of: Any, sizes: tuple[int, ...], folder: Path, *args: Any, **changes: Any) -> None:
    cp, tp, pp, dp, ep = sizes
    check(cluster_of(cp * tp * pp * dp), folder, *args, ep_size=ep, **changes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("sizes", "kind", "changes"),
    [(EP2, "left", BALANCED), (TENSOR, "right", {}), (PIPE, "packed", BALANCED), (CONTEXT, "dense", BALANCED)],
    ids=["ep", "tp", "pp", "cp"],
)
def test_two_ranks(
    family: str,
    sizes: tuple[int, ...],
    kind: str,
    changes: dict[str, Any],
    cluster_of: Any,
    expected: Any,
    tmp_path: Path,
) -> None:
    check_experts(cluster_of, sizes, tmp_path, expected, sizes[:4], kind, FEW, family=family, **changes)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("phimoe", TENSOR_EP), ("mixtral", PIPE_EP), ("phimoe", EP4), ("qwen3_moe", CONTEXT_EP), ("mixtral", EP2_DP4)],
    ids=str,
)
def test_four_ranks(family: str, sizes: tuple[int, ...], cluster_of: Any, expected: Any, tmp_path: Path) -> None:
    check_experts(cluster_of, sizes, tmp_path, expected, sizes[:4], "right", FEW, family=family, **BALANCED)


@pytest.mark.parametrize(("all_to", "choices"), [((3, 2), 2), ((1,), 1)], ids=str)
@pytest.mark.parametrize("sizes", [EP2, EP4], ids=str)
def test_some_ranks_get_no_token(
    sizes: tuple[int, ...], all_to: tuple[int, ...], choices: int, cluster_of: Any, expected: Any, tmp_path: Path
) -> None:
    changes = {"family": "mixtral", "all_to": all_to, "num_experts_per_tok": choices, **BALANCED}
    check_experts(cluster_of, sizes, tmp_path, expected, sizes[:4], "dense", FEW, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, BALANCED], ids=["plain", "balanced"])
@pytest.mark.parametrize(
    "sizes",
    [EP2, TENSOR, PIPE, CONTEXT, EP4, EP2_DP4, TENSOR_EP, PIPE_EP, CONTEXT_EP, (1, 2, 2, 2, 2), (2, 1, 2, 2, 2)],
    ids=str,
)
def test_every_layout(
    family: str,
    kind: str,
    changes: dict[str, Any],
    sizes: tuple[int, ...],
    cluster_of: Any,
    expected: Any,
    tmp_path: Path,
) -> None:
    check_experts(cluster_of, sizes, tmp_path, expected, sizes[:4], kind, PLANS, family=family, **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_saves_what_transformers_loads(family: str, cluster_of: Any, tmp_path: Path) -> None:
    check_saved(cluster_of(2), tmp_path, family, {"ep_size": 2})
