"""HelixTrainer over a pipeline does what the stock Trainer does: losses, norms, rates, evaluation, weights, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import pipeline_trainer_jobs as jobs
from support.comparisons import compare_predictions, compare_runs, compare_weights
from support.models import llama
from transformers import AutoModelForCausalLM

JOB = "support.pipeline_trainer_jobs:"
GREEDY = {"plan": "greedy"}

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
    "auto, untied, layers by hand": (
        {"schedule": "auto", "layers_per_stage": (1, 1, 2, 1)},
        {"training": {"gradient_accumulation_steps": 4, "average_tokens_across_devices": False}},
    ),
}
SOME = ("w, tied, padded left, last window shorter", "dualpipe_v, untied, fewer micro-batches than ranks")


def check(case: str, tp: int, pp: int, dp: int, cluster_of: Any, stock: Any, folder: Path) -> None:
    expected, expected_folder = stock(jobs.train, dp, **CASES[case][1])
    helix = {"tp_size": tp, "pp_size": pp, **GREEDY, **CASES[case][0]}
    for result in cluster_of(tp * pp * dp).run(f"{JOB}train", folder=str(folder), helix=helix, **CASES[case][1]):
        compare_runs(result, expected, steps=4)
    compare_weights(folder, expected_folder)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in SOME)) for c in CASES])
def test_two_pipeline_ranks_equal_the_stock_trainer(case: str, cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    check(case, 1, 2, 1, cluster_of, stock, tmp_path)


@pytest.mark.parametrize(
    ("case", "tp", "dp"),
    [
        pytest.param(case, *sizes, marks=() if (case, sizes) == (SOME[0], (2, 1)) else pytest.mark.slow)
        for case in SOME
        for sizes in ((2, 1), (1, 2))
    ],
)
def test_beside_tensor_or_data_parallelism(
    case: str, tp: int, dp: int, cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    """With dp, against DDP, which evaluates an odd number of samples on two ranks, too."""
    check(case, tp, 2, dp, cluster_of, stock, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in SOME])
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2)])
def test_every_case_beside_tensor_or_data_parallelism(
    case: str, tp: int, dp: int, cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    check(case, tp, 2, dp, cluster_of, stock, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if "by hand" not in case])
def test_eight_processes(case: str, cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    check(case, 2, 2, 2, cluster_of, stock, tmp_path)


# Evaluation

PREDICTIONS: dict[str, dict[str, Any]] = {
    "odd number": {"count": 5},
    "lengths differ between batches": {"count": 7, "lengths": (17, 17, 8, 8, 13, 13)},
    "padded left": {"count": 5, "lengths": (17, 9, 13), "padding": "left"},
}


@pytest.mark.parametrize("case", PREDICTIONS)
@pytest.mark.parametrize(
    ("tp", "dp", "schedule"),
    [
        (1, 1, "folded_1f1b"),
        pytest.param(1, 1, "1f1b", marks=pytest.mark.slow),
        pytest.param(2, 1, "folded_1f1b", marks=pytest.mark.slow),
        (1, 2, "folded_1f1b"),
        pytest.param(2, 2, "dualpipe_v", marks=pytest.mark.slow),
    ],
)
def test_predictions_and_metrics(case: str, tp: int, dp: int, schedule: str, cluster_of: Any, tmp_path: Path) -> None:
    """Logits of every sample once and in order, on every rank, also of those without the head."""
    expected = jobs.predict(str(tmp_path), None, **PREDICTIONS[case])
    helix = {"tp_size": tp, "pp_size": 2, "schedule": schedule, **GREEDY}
    ranks = cluster_of(2 * tp * dp).run(f"{JOB}predict", folder=str(tmp_path), helix=helix, **PREDICTIONS[case])
    for result in ranks:
        compare_predictions(result, expected, with_loss=dp == 1)  # a mean over batches, which are others with dp


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 2)])
def test_input_tokens_and_callbacks(tp: int, dp: int, cluster_of: Any, tmp_path: Path) -> None:
    """Tokens are counted once, and callbacks hear what they hear from the stock Trainer with as large a batch."""
    training = {"gradient_accumulation_steps": 2, "max_steps": 4, "include_num_input_tokens_seen": "all"}
    batch = {"per_device_train_batch_size": 2 * dp}
    expected = jobs.train_with(str(tmp_path), None, training={**training, **batch})
    helix = {"tp_size": tp, "pp_size": 2, **GREEDY}
    for result in cluster_of(2 * tp * dp).run(f"{JOB}train_with", folder=str(tmp_path), helix=helix, training=training):
        assert result["seen"] == expected["seen"] > 0
        assert result["tokens"] == expected["tokens"]
        assert result["events"] == expected["events"]


@pytest.mark.parametrize("how", ["streamed", "from_init"])
def test_iterable_datasets_and_model_init(how: str, cluster_of: Any, tmp_path: Path) -> None:
    training = {"gradient_accumulation_steps": 2, "max_steps": 4}
    expected = jobs.train_with(str(tmp_path), None, training=training, **{how: True})
    helix = {"pp_size": 2, **GREEDY}
    ranks = cluster_of(2).run(f"{JOB}train_with", folder=str(tmp_path), helix=helix, training=training, **{how: True})
    for result in ranks:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-4)


# Checkpoints


@pytest.mark.parametrize(
    ("processes", "helix", "tied"),
    [
        (2, {"pp_size": 2}, True),
        (4, {"pp_size": 2, "tp_size": 2}, False),
        (4, {"pp_size": 2, "tp_size": 2}, True),
        (4, {"pp_size": 2}, False),
        (2, {"pp_size": 2, "schedule": "1f1b"}, False),
    ],
    ids=str,
)
def test_a_pipeline_saves_the_model_bit_for_bit(
    processes: int, helix: dict[str, Any], tied: bool, cluster_of: Any, tmp_path: Path
) -> None:
    """Rank 0's weights, as one process would save them, from any layout."""
    model = {"tie_word_embeddings": tied}
    job = {"folder": str(tmp_path), "helix": {**helix, **GREEDY}, "model": model, "own_weights": True}
    cluster_of(processes).run(f"{JOB}save_untrained", **job)
    original = llama(**jobs.model_of(**model)).state_dict()
    loaded, how = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(how[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.state_dict().keys() == original.keys()
    for name, weight in original.items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def test_training_goes_on_from_a_checkpoint(cluster_of: Any, tmp_path: Path) -> None:
    """Of a pipeline with tensor parallelism, on a pipeline without and on the stock Trainer."""
    source, ours, theirs = (str(tmp_path / name) for name in ("source", "ours", "theirs"))
    job = {
        "helix": {"pp_size": 2, "tp_size": 2, **GREEDY},
        "training": {"gradient_accumulation_steps": 2, "max_steps": 3},
    }
    cluster_of(4).run(f"{JOB}train", folder=source, **job)
    expected = jobs.train_on(theirs, None, source)
    for losses in cluster_of(2).run(f"{JOB}train_on", folder=ours, helix={"pp_size": 2, **GREEDY}, source=source):
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    compare_weights(ours, theirs)


def test_two_calls_of_train(cluster_of: Any, tmp_path: Path) -> None:
    options = {"training": {"max_steps": 3, "gradient_accumulation_steps": 2}}
    expected = jobs.train_twice(str(tmp_path), None, **options)
    helix = {"pp_size": 2, **GREEDY}
    for losses in cluster_of(2).run(f"{JOB}train_twice", folder=str(tmp_path), helix=helix, **options):
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
