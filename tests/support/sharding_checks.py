"""What holds of any way to spread a model over data-parallel ranks: parameters, or what the optimizer steps.

In:   the options that spread it, and a case: ranks, further options, the model, the training.
Out:  nothing; a difference is an AssertionError.
Must hold: what is compared with is data parallelism that spreads nothing, ours and the stock Trainer's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs, sharding_jobs
from support.cluster import Cluster
from support.comparisons import compare_runs, compare_weights
from transformers import AutoModelForCausalLM

FEW_PLANS = ("sequential", "greedy", "dhelix")
PLANS = (*FEW_PLANS, "round_robin", "search")

WindowCase = tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]
"""Ranks, options of HelixConfig, the model, the training."""

TrainingCase = tuple[int, dict[str, Any], dict[str, Any]]
"""Ranks, options of HelixConfig, options of the job that trains."""


def check_windows(
    cluster_of: Callable[[int], Cluster],
    folder: Path,
    sharded: dict[str, Any],
    case: WindowCase,
    plans: tuple[str, ...] = FEW_PLANS,
) -> None:
    """The bits of all plans are the same; over two ranks they are those of the all-reduce of whole gradients."""
    ranks, helix, model, training = case
    results = cluster_of(ranks).run(
        sharding_jobs.windows,
        folder=str(folder),
        sharded=sharded,
        helix={"cache": False, **helix},
        model={"num_hidden_layers": 2, **model},
        plans=plans,
        training=training,
    )
    rounding = 2**-8 if model.get("dtype") == "bfloat16" else 1e-5  # norms of bfloat16 are bfloat16, of parts as well
    sizes = np.prod([size for name, size in helix.items() if name in ("tp_size", "pp_size")])
    for rank in results:
        assert rank["shards"] > 0
        for plan, result in rank["plans"].items():
            assert result["losses"] == rank["expected"], plan
            assert result["unlike the first plan"] == [], plan
            assert result["left"] == [], plan
            assert result["norm"] == pytest.approx(rank["norm"], rel=rounding), plan
            if ranks // int(sizes) == 2:
                assert result["differing"] == [], plan
            assert result["error"] <= 1e-5, plan


def check_training(
    cluster_of: Callable[[int], Cluster], stock: Any, folder: Path, sharded: dict[str, Any], case: TrainingCase
) -> None:
    """Losses, norms, rates, evaluation and saved weights are those of the stock Trainer on as many processes as there
    are data-parallel ranks (DDP)."""
    ranks, helix, options = case
    dp_size = ranks // (helix.get("tp_size", 1) * helix.get("pp_size", 1))
    expected, expected_folder = stock(jobs.train, dp=dp_size, **options)
    helix = {**sharded, "plan": "greedy", **helix}
    for result in cluster_of(ranks).run("train", folder=str(folder), helix=helix, **options):
        compare_runs(result, expected)
    compare_weights(str(folder), expected_folder)


def check_bits_in_bf16(
    cluster_of: Callable[[int], Cluster], folder: Path, sharded: dict[str, Any], helix: dict[str, Any]
) -> None:
    """Training with `bf16=True` is that without sharding, which is compared with the stock Trainer elsewhere, and its
    checkpoint has the same fp32 weights: bit for bit, where gradients are not scaled by their norm, whose squares add
    up in another order."""
    ranks = 2 * helix.get("tp_size", 1)
    training = {"gradient_accumulation_steps": 2, "bf16": True, "max_grad_norm": 1e6}
    plain, mine = (
        cluster_of(ranks).run("train", folder=str(folder / name), helix={**options, **helix}, training=training)
        for name, options in {
            "plain": {"cache": False, "plan": "greedy"},
            "sharded": {**sharded, "plan": "greedy"},
        }.items()
    )
    for ours, theirs in zip(mine, plain, strict=True):
        assert ours["losses"] == theirs["losses"]
        assert ours["eval"] == theirs["eval"]
        np.testing.assert_allclose(ours["norms"], theirs["norms"], rtol=1e-5)
    saved, others = (AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("sharded", "plain"))
    assert any(not torch.equal(value, value.bfloat16()) for value in others.values()), "masters have more digits"
    for name, value in others.items():
        assert torch.equal(saved[name], value), name
