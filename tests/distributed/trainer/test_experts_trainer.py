"""Experts through the Trainer, experts that drop, routers that draw, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import jobs
from support.comparisons import compare_runs, compare_weights
from support.derived_models import HOME
from support.expert_jobs import reference_that_draws, reference_that_drops, windows
from support.parity import KINDS, check, references

PHIMOE = {"family": "phimoe", "num_hidden_layers": 2}
BALANCE = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
BALANCED = {**PHIMOE, **BALANCE}
LENGTHS = (24, 16, 8)
JOB = "support.expert_jobs:windows"
CASE = {
    "model": BALANCED,
    "data": {"lengths": (17, 9), "padding": "right"},
    "training": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3, "per_device_eval_batch_size": 1},
}


@pytest.mark.parametrize(
    ("ranks", "helix"),
    [
        (2, {"ep_size": 2, "cache": False}),  # chooses its plan by measuring
        pytest.param(4, {"ep_size": 2, "tp_size": 2, "plan": "greedy"}, marks=pytest.mark.slow),
        pytest.param(4, {"ep_size": 2, "pp_size": 2, "plan": "dhelix"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_equals_the_stock_trainer(
    ranks: int, helix: dict[str, Any], cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    """On two processes (DDP)."""
    case = {**CASE, "model": {**BALANCED, "num_hidden_layers": 4}} if helix.get("pp_size") else CASE
    expected, folder = stock(jobs.train, 2, **case)
    ours = str(tmp_path / "helix")
    for result in cluster_of(ranks).run("support.tuning_jobs:train", folder=ours, helix=helix, **case):
        compare_runs(result, expected)
        for entry in result["logs"]:
            assert entry["helix/router_z"] > 0
            assert entry["helix/expert_imbalance"] >= 1
            assert "helix/dropped_tokens" not in entry
    compare_weights(ours, folder)


DERIVED: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"family": f"{HOME}qwen2_moe", "mlp_only_layers": [1], **BALANCE},
    "gpt_oss": {"family": f"{HOME}gpt_oss", **BALANCE},
}


@pytest.mark.parametrize(
    ("name", "ranks", "helix"),
    [
        ("qwen2_moe", 2, {"ep_size": 2}),
        pytest.param("gpt_oss", 2, {"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", 2, {"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", 2, {"pp_size": 2}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 2, {"ep_size": 2}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 4, {"tp_size": 2, "pp_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_derived_mixtures_balance_their_experts(
    name: str, ranks: int, helix: dict[str, Any], cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    """The loss has the part of the routers, and the logs tell how even the loads are."""
    case = {**CASE, "model": {**DERIVED[name], "num_hidden_layers": 2 * helix.get("pp_size", 1)}}
    case["training"] = {**CASE["training"], "max_steps": 3}
    dp = ranks // (helix.get("tp_size", 1) * helix.get("pp_size", 1))
    expected, folder = stock(jobs.train, dp, **case)
    ours = str(tmp_path / "helix")
    for result in cluster_of(ranks).run("train", folder=ours, helix={**helix, "plan": "greedy"}, **case):
        compare_runs(result, expected, steps=3)
        assert all(entry["helix/router_z"] > 0 and entry["helix/expert_imbalance"] >= 1 for entry in result["logs"])
    compare_weights(ours, folder)


@pytest.mark.slow
def test_routers_without_a_balance_are_counted_as_well(cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    """DeepSeek-V3 records what its routers say, and adds nothing to its loss."""
    case = {**CASE, "model": {"family": f"{HOME}deepseek_v3", "num_hidden_layers": 2, "output_router_logits": True}}
    case["training"] = {**CASE["training"], "max_steps": 2}
    expected, _ = stock(jobs.train, 1, **case)
    helix = {"tp_size": 2, "plan": "greedy"}
    for result in cluster_of(2).run("train", folder=str(tmp_path), helix=helix, **case):
        compare_runs(result, expected, steps=2)
        assert all(entry["helix/router_z"] > 0 and entry["helix/expert_imbalance"] >= 1 for entry in result["logs"])


@pytest.mark.parametrize(
    ("ranks", "helix"),
    [
        (1, {}),
        (2, {"ep_size": 2}),
        pytest.param(4, {"ep_size": 4}, marks=pytest.mark.slow),
        (4, {"ep_size": 2, "pp_size": 2}),
    ],
    ids=str,
)
def test_with_a_capacity_experts_drop_what_a_plain_loop_drops(
    ranks: int, helix: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    model = {**BALANCED, "num_hidden_layers": 2 * helix.get("pp_size", 1)}
    dp = ranks // helix.get("pp_size", 1)
    expected = reference_that_drops(model, 3 * dp, LENGTHS, 1.0)
    assert expected["dropped"] > 0.05
    helix = {**helix, "expert_capacity_factor": 1.0}
    job = {
        "folder": str(tmp_path),
        "helix": helix,
        "model": model,
        "plans": ("greedy", "sequential"),
        "lengths": LENGTHS,
    }
    results = cluster_of(ranks).run(JOB, **job)
    for result in results[0]:
        for name, gradient in expected["gradients"].items():
            distance = np.linalg.norm(result["gradients"][name].astype(np.float64) - gradient)
            assert distance <= 1e-4 * np.linalg.norm(gradient) + 1e-12, name
        assert result["entries"]["helix/dropped_tokens"] > 0.05
    mine = dp * np.array(expected["losses"])
    np.testing.assert_allclose(results[0][0]["losses"], mine[:3], rtol=0, atol=1e-5 * dp)
    np.testing.assert_allclose(results[-1][0]["losses"], mine[-3:], rtol=0, atol=1e-5 * dp)
    for name, gradient in results[0][0]["gradients"].items():
        np.testing.assert_array_equal(gradient, results[0][1]["gradients"][name], err_msg=name)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (1, 2, 1, 1)], ids=["ep", "tp"])
@pytest.mark.parametrize("kind", ["left", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != "left")])
def test_with_room_for_all_nothing_changes(sizes: tuple[int, ...], kind: str, cluster_of: Any, tmp_path: Path) -> None:
    """Static shapes, and padding that takes no place, against the unsplit model."""
    changes = {**BALANCED, "expert_capacity_factor": 2.0, "ep_size": sizes[3]}
    del changes["num_hidden_layers"]
    check(cluster_of(2), tmp_path, references(), sizes, kind, ("sequential", "greedy"), **changes)


def test_routers_draw_what_the_unsplit_model_would_draw(tmp_path: Path) -> None:
    """Sparsemixer in training, with noise on the tokens, given the same seeds."""
    model = {**BALANCED, "random": True, "input_jitter_noise": 0.1}
    expected = reference_that_draws(model, 3, LENGTHS)
    result = windows(str(tmp_path), {}, model, ("sequential",), LENGTHS, rows=1)[0]
    np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
    for name, gradient in expected["gradients"].items():
        distance = np.linalg.norm(result["gradients"][name].astype(np.float64) - gradient)
        assert distance <= 1e-4 * np.linalg.norm(gradient) + 1e-12, name


def test_what_routers_draw_depends_on_no_plan(cluster_of: Any, tmp_path: Path) -> None:
    model = {**BALANCED, "random": True, "input_jitter_noise": 0.1}
    plans = ("sequential", "greedy", "round_robin", "dhelix", "greedy")
    job = {"folder": str(tmp_path), "helix": {"ep_size": 2}, "model": model, "plans": plans, "lengths": LENGTHS}
    first, *others = cluster_of(2).run(JOB, **job)[0]
    steady = cluster_of(2).run(JOB, **{**job, "model": BALANCED, "plans": ("greedy",)})[0][0]
    assert first["losses"] != steady["losses"], "something was drawn"
    for other in others:
        assert other["losses"] == first["losses"]
        for name, gradient in first["gradients"].items():
            np.testing.assert_array_equal(other["gradients"][name], gradient, err_msg=name)


@pytest.mark.parametrize(
    ("ranks", "helix", "model", "words"),
    [
        (2, {"ep_size": 2}, {**PHIMOE, "num_local_experts": 5}, ["ep_size=2", "5 experts", "ep_size: 1, 5"]),
        (2, {"ep_size": 4}, PHIMOE, ["ep_size=4 must divide the world size, 2 processes", "data-parallel", "1, 2"]),
        (2, {"ep_size": 2, "tp_size": 2}, PHIMOE, ["ep_size=2 must divide the 1 process that tp_size=2 leaves of 2"]),
        (2, {"ep_size": 2}, {"family": "llama"}, ["ep_size", "LlamaForCausalLM has no experts", "ep_size=1"]),
        (2, {"expert_capacity_factor": 2.0}, {"family": "gpt2"}, ["expert_capacity_factor=None", "no experts"]),
        (2, {"tp_size": 2}, {**PHIMOE, "num_local_experts": 5}, ["tp_size=2", "5 experts", "a tp_size that divides 5"]),
    ],
    ids=str,
)
def test_what_cannot_be_shared_is_refused(
    ranks: int, helix: dict[str, Any], model: dict[str, Any], words: list[str], cluster_of: Any, tmp_path: Path
) -> None:
    for failure in cluster_of(ranks).errors("train", folder=str(tmp_path), helix=helix, model=model):
        assert failure.kind == "ValueError"
        for word in words:
            assert word in failure.message
