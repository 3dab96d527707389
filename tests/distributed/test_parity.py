"""HelixTrainer on several processes does what the stock Trainer does on one: losses, norms, evaluation, weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from transformers import AutoModelForCausalLM

CASES: dict[str, dict[str, Any]] = {
    "gqa, untied, accumulation 1, clipping": {
        "training": {"max_grad_norm": 0.3},
    },
    "mha, tied, accumulation 2, padded right": {
        "model": {"num_key_value_heads": 4, "tie_word_embeddings": True},
        "data": {"lengths": (17, 9, 13), "padding": "right"},
        "training": {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 4},
    },
    "gqa, tied, accumulation 5, padded left, last window shorter": {
        "model": {"tie_word_embeddings": True},
        "data": {"count": 22, "lengths": (15, 8, 12), "padding": "left"},
        # 11 micro-batches an epoch: windows of 5, 5 and 1.
        "training": {"gradient_accumulation_steps": 5, "max_steps": -1, "num_train_epochs": 4, "max_grad_norm": 0.5},
    },
    "tokens counted per device": {
        "training": {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    },
    "biases, eager attention, no clipping": {
        "model": {"attention_bias": True, "mlp_bias": True, "attn_implementation": "eager"},
        "training": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "optim": "adamw_torch_fused"},
    },
}


RARE = (
    "mha, tied, accumulation 2, padded right",
    "tokens counted per device",
    "biases, eager attention, no clipping",
)  # among the slow tests


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The stock Trainer's result for a case, run once."""
    found: dict[str, tuple[dict[str, Any], str]] = {}

    def get(case: str) -> tuple[dict[str, Any], str]:
        if case not in found:
            folder = str(tmp_path_factory.mktemp("reference"))
            found[case] = jobs.train(folder, None, **CASES[case]), folder
        return found[case]

    return get


@pytest.mark.parametrize(
    ("case", "ranks", "tp_size"),
    [pytest.param(case, 2, 2, marks=[pytest.mark.slow] if case in RARE else []) for case in CASES]
    + [
        ("gqa, untied, accumulation 1, clipping", 1, 1),
        pytest.param("gqa, tied, accumulation 5, padded left, last window shorter", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_training_equals_the_stock_trainer(
    case: str, ranks: int, tp_size: int, cluster_of: Any, reference: Any, tmp_path: Any
) -> None:
    expected, expected_folder = reference(case)
    results = cluster_of(ranks).run("train", folder=str(tmp_path), helix={"tp_size": tp_size}, **CASES[case])
    for result in results:
        compare_runs(result, expected)
    compare_weights(str(tmp_path), expected_folder)


@pytest.mark.parametrize(("ranks", "tp_size"), [pytest.param(2, 1, marks=pytest.mark.slow), (4, 2)])
def test_data_parallel_ranks_share_the_batch(ranks: int, tp_size: int, cluster_of: Any, tmp_path: Any) -> None:
    """Against the stock Trainer on two processes (DDP), which evaluates an odd number of samples, too."""
    case = {
        "data": {"count": 60, "lengths": (17, 9), "padding": "right"},
        "training": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3, "per_device_eval_batch_size": 1},
    }
    expected = cluster_of(2).run("train", folder=str(tmp_path / "stock"), helix=None, **case)[0]
    folder = str(tmp_path / "helix")
    helix = {"tp_size": tp_size, "plan": "greedy"}
    for result in cluster_of(ranks).run("train", folder=folder, helix=helix, **case):
        compare_runs(result, expected)
    compare_weights(folder, str(tmp_path / "stock"))


def compare_runs(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["steps"] == expected["steps"] >= 12
    assert result["rates"] == expected["rates"]
    np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-4)
    np.testing.assert_allclose(result["eval"], expected["eval"], rtol=0, atol=1e-5)


def compare_weights(folder: str, expected_folder: str) -> None:
    """Both load as plain Transformers checkpoints with the same names and nearly the same values."""
    ours = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(expected_folder).state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        distance = torch.linalg.vector_norm(ours[name].double() - weight.double())
        assert distance <= 1e-4 * torch.linalg.vector_norm(weight.double()), name
