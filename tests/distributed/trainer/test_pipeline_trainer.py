"""HelixTrainer over a pipeline does what the stock Trainer does: losses, norms, rates, evaluation, weights, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import pipeline_trainer_jobs as jobs
from support.comparisons import compare_weights
from support.models import arguments, sequences
from transformers import AutoModelForCausalLM, Trainer

from hf_helix import HelixConfig, HelixTrainer

# -- what the ranks run ------------------------------------------------------------------------------------------------


def train_on(folder: str, helix: dict[str, Any] | None, source: str, steps: int = 5) -> list[float]:
    """Load a checkpoint, train a little more on other data, save; the losses."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    common: dict[str, Any] = {
        "model": model,
        "args": arguments(folder, max_steps=steps, gradient_accumulation_steps=3),
        "train_dataset": sequences(40, seed=7),
    }
    trainer = Trainer(**common) if helix is None else HelixTrainer(**common, helix_config=HelixConfig(**helix))
    trainer.train()
    trainer.save_model(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# -- the tests --------------------------------------------------------------------------------------------------------

JOB = "support.pipeline_trainer_jobs:"
GREEDY = {"plan": "greedy"}
SLOW = pytest.mark.slow

# What the pipeline runs, and what both trainers run.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "w, untied, clipping, M=3": (
        {"schedule": "folded_1f1b"},
        {"training": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.3}},
    ),
    "w, tied, padded left, last window shorter": ({"schedule": "folded_1f1b"}, jobs.PADDED),
    "dualpipe_v, tied, padded right, M=6": (
        {"schedule": "dualpipe_v"},
        {
            "model": {"tie_word_embeddings": True, "num_key_value_heads": 4},
            "data": {"count": 120, "lengths": (17, 9, 13), "padding": "right"},
            "training": {"gradient_accumulation_steps": 6, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        },
    ),
    "dualpipe_v, untied, fewer micro-batches than ranks": ({"schedule": "dualpipe_v"}, {}),
    "1f1b, untied, eager, biases, no clipping": (
        {"schedule": "1f1b"},
        {
            "model": {"attention_bias": True, "mlp_bias": True, "attn_implementation": "eager"},
            "training": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.0, "optim": "adamw_torch_fused"},
        },
    ),
    "auto, untied, layers by hand, in halves": (
        {"schedule": "auto", "layers_per_stage": (1.5, 1, 1.5, 1)},
        {"training": {"gradient_accumulation_steps": 4, "average_tokens_across_devices": False}},
    ),
}
SOME = ("w, tied, padded left, last window shorter", "dualpipe_v, untied, fewer micro-batches than ranks")


@pytest.mark.parametrize(
    ("case", "tp", "dp"),
    [
        *(pytest.param(case, 1, 1, marks=() if case == SOME[1] else SLOW) for case in CASES),
        *(
            pytest.param(case, tp, dp, marks=() if (case, tp) == (SOME[0], 2) else SLOW)
            for case in CASES
            for tp, dp in ((2, 1), (1, 2))
        ),
        *(pytest.param(case, 2, 2, marks=SLOW) for case in CASES if "by hand" not in case),
    ],
)
def test_pipelines_equal_the_stock_trainer(case: str, tp: int, dp: int, like_stock: Any) -> None:
    """Beside tensor parallelism, too; with dp, against DDP, which evaluates an odd number of samples on two ranks."""
    options, given = CASES[case]
    like_stock(2 * tp * dp, {"tp_size": tp, "pp_size": 2, **GREEDY, **options}, jobs.train, **given)


# Checkpoints


def test_training_goes_on_from_a_checkpoint(cluster_of: Any, tmp_path: Path) -> None:
    """Of a pipeline with tensor parallelism, on a pipeline without and on the stock Trainer."""
    source, ours, theirs = (str(tmp_path / name) for name in ("source", "ours", "theirs"))
    job = {
        "helix": {"pp_size": 2, "tp_size": 2, **GREEDY},
        "training": {"gradient_accumulation_steps": 2, "max_steps": 3},
    }
    cluster_of(4).run(f"{JOB}train", folder=source, **job)
    expected = train_on(theirs, None, source)
    for losses in cluster_of(2).run(train_on, folder=ours, helix={"pp_size": 2, **GREEDY}, source=source):
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    compare_weights(ours, theirs)


def test_two_calls_of_train(cluster_of: Any, tmp_path: Path) -> None:
    options = {"training": {"max_steps": 3, "gradient_accumulation_steps": 2}}
    expected = jobs.train_twice(str(tmp_path), None, **options)
    helix = {"pp_size": 2, **GREEDY}
    for losses in cluster_of(2).run(f"{JOB}train_twice", folder=str(tmp_path), helix=helix, **options):
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
