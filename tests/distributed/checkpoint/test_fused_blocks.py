"""Matrices of unequal widths in one linear: each is cut by itself, and checkpoints go from any layout into any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from support.comparisons import assert_same, stored
from support.declared_jobs import phi3
from support.parity import check, references

JOB = "support.declared_jobs:"
MODEL = {"family": f"{JOB}phi3"}


@pytest.mark.parametrize("lora", [None, {"target_modules": ["qkv_proj", "gate_up_proj"]}], ids=["plain", "lora"])
def test_equals_the_unsplit_model(lora: Any, cluster_of: Any, tmp_path: Path) -> None:
    job, plans = f"{JOB}windows", ("sequential", "greedy")
    check(cluster_of(2), tmp_path, references(), (1, 2, 1, 1), "left", plans, job, lora=lora, **MODEL)


@pytest.mark.slow
def test_a_folder_gives_what_from_pretrained_gives(cluster_of: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    phi3().save_pretrained(source, max_shard_size="20KB")
    job = {"folder": str(tmp_path), "helix": {"tp_size": 2}, "source": str(source), **MODEL, "changes": {}}
    for rank in cluster_of(2).run(f"{JOB}start_in_every_way", train=True, **job):
        assert rank["differences"] == {"named": [], "meta": [], "again": []}
        assert all(result == rank["losses"][0] for result in rank["losses"])


@pytest.mark.parametrize(
    ("before", "after"), [("tp_size", "pp_size"), pytest.param("pp_size", "tp_size", marks=pytest.mark.slow)]
)
def test_another_layout_goes_on(before: str, after: str, cluster_of: Any, tmp_path: Path) -> None:
    """Weights and states of the optimizer; without a step in between, the weights keep every bit."""
    first, second = ({"plan": "greedy", size: 2} for size in (before, after))
    options = {"model": MODEL}
    whole, rest = str(tmp_path / "whole"), str(tmp_path / "rest")
    expected = cluster_of(2).run(f"{JOB}run", folder=whole, helix=first, **options)
    result = cluster_of(2).run(f"{JOB}run", folder=rest, helix=second, resume=f"{whole}/checkpoint-2", **options)
    for mine, theirs in zip(result, expected, strict=True):
        given = [[*run["losses"].values(), run["eval"]] for run in (mine, theirs)]
        np.testing.assert_allclose(*given, rtol=0, atol=1e-5)


def test_two_ranks_save_what_one_saves(cluster_of: Any, tmp_path: Path) -> None:
    """The files of an untrained model, byte for byte."""
    model = phi3(num_hidden_layers=4)
    model.save_pretrained(tmp_path / "stock")
    training = {"max_steps": 1, "save_steps": 1, "learning_rate": 0.0, "weight_decay": 0.0, "warmup_steps": 0}
    job = {"folder": str(tmp_path / "ours"), "helix": {"tp_size": 2}, "model": MODEL, "training": training}
    cluster_of(2).run(f"{JOB}run", **job)
    saved = tmp_path / "ours" / "checkpoint-1"
    assert_same(stored(saved), stored(tmp_path / "stock"))
    assert load_file(saved / "model.safetensors")["model.layers.0.self_attn.qkv_proj.weight"].shape == (64, 32)
