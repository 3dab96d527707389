"""What families that are derived need of the builder, declared by hand, equals the unsplit model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.parity import check, references

JOB = "support.declared_jobs:"
LORA = {"target_modules": ["gate_proj", "down_proj", "q_proj", "embed_tokens"]}


@pytest.mark.parametrize(
    ("sizes", "kind", "changes"),
    [
        pytest.param((1, 2, 1, 1), "left", {}, id="tp"),
        pytest.param((1, 2, 1, 1), "dense", {"lora": LORA, "recompute": "selective"}, id="tp, lora, recompute"),
        pytest.param((1, 2, 1, 1), "dense", {"half_replicated": True, "lora": LORA}, id="tp, on the whole sequence"),
        pytest.param((1, 1, 2, 1), "dense", {}, id="pp"),
        pytest.param((1, 4, 1, 1), "dense", {"num_key_value_heads": 4}, id="tp4", marks=pytest.mark.slow),
    ],
)
def test_copies_on_shards_and_sums_over_ranks(
    sizes: tuple[int, ...], kind: str, changes: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    """Linears of which every rank has a copy, weights that are cut beside sums over ranks, a scaled embedding."""
    count = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    plans = ("sequential", "greedy")
    model = {"family": f"{JOB}olmo2", **changes}
    check(cluster_of(count), tmp_path, references(), sizes, kind, plans, f"{JOB}windows", **model)
