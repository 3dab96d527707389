"""Relatives of Llama do on several ranks what their unsplit models do, windows and norms of heads included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.parity import KINDS, PLANS, check, check_saved, references

FAMILIES = ("mistral", "qwen2", "qwen3")
CONTEXT, TENSOR, PIPE = (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1)
FEW = ("sequential", "greedy")
# Parts of a sequence are 9, 4 and 6 tokens: a window within one, over two, over three, and over everything.
WINDOWS = (3, 7, 15, 64)


@pytest.fixture(scope="module")
def expected() -> Any:
    return references()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("sizes", "kind"), [(TENSOR, "left"), (PIPE, "packed"), (CONTEXT, "dense")], ids=["tp", "pp", "cp"]
)
def test_two_ranks(
    family: str, sizes: tuple[int, ...], kind: str, cluster_of: Any, expected: Any, tmp_path: Path
) -> None:
    check(cluster_of(2), tmp_path, expected, sizes, kind, FEW, family=family)


@pytest.mark.parametrize(
    ("window", "kind", "method"),
    [(3, "packed", "ring"), (15, "left", "ring"), (64, "dense", "ring"), (3, "dense", "all_gather")],
)
def test_windows_over_a_shared_sequence(
    window: int, kind: str, method: str, cluster_of: Any, expected: Any, tmp_path: Path
) -> None:
    changes = {"family": "mistral", "sliding_window": window, "cp_method": method}
    check(cluster_of(2), tmp_path, expected, CONTEXT, kind, FEW, **changes)


@pytest.mark.parametrize(("sizes", "kind"), [(TENSOR, "right"), (CONTEXT, "left")], ids=["tp", "cp"])
def test_eager_attention(sizes: tuple[int, ...], kind: str, cluster_of: Any, expected: Any, tmp_path: Path) -> None:
    check(cluster_of(2), tmp_path, expected, sizes, kind, FEW, family="qwen3", attn_implementation="eager")


@pytest.mark.parametrize("family", FAMILIES)
def test_saves_what_transformers_loads(family: str, cluster_of: Any, tmp_path: Path) -> None:
    check_saved(cluster_of(2), tmp_path, family, {"tp_size": 2})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes", [TENSOR, PIPE, CONTEXT, (2, 2, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1), (1, 2, 1, 2)], ids=str
)
def test_every_layout(
    family: str, sizes: tuple[int, ...], kind: str, cluster_of: Any, expected: Any, tmp_path: Path
) -> None:
    cp, tp, pp, dp = sizes
    check(cluster_of(cp * tp * pp * dp), tmp_path, expected, sizes, kind, PLANS, family=family)


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_window(
    window: int, kind: str, method: str, ranks: int, cluster_of: Any, expected: Any, tmp_path: Path
) -> None:
    changes = {"family": "mistral", "sliding_window": window, "cp_method": method}
    check(cluster_of(ranks), tmp_path, expected, (ranks, 1, 1, 1), kind, FEW, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [TENSOR, CONTEXT], ids=["tp", "cp"])
def test_eager_everywhere(
    family: str, sizes: tuple[int, ...], kind: str, cluster_of: Any, expected: Any, tmp_path: Path
) -> None:
    check(cluster_of(2), tmp_path, expected, sizes, kind, FEW, family=family, attn_implementation="eager")
