"""What the Trainer offers around the training step works on a cut model as it does on a whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import jobs
from support.comparisons import compare_predictions
from support.derived_models import HOME
from support.jobs import predict, train_with

JOB = "support.jobs:"
HELIX = {"tp_size": 2}
PREDICTIONS: dict[str, dict[str, Any]] = {
    "even number": {"count": 6},
    "odd number": {"count": 5},
    "lengths differ between batches": {"count": 7, "lengths": (17, 17, 8, 8, 13, 13)},
    "padded left": {"count": 5, "lengths": (17, 9, 13), "padding": "left"},
}
DERIVED = {"count": 4, "lengths": (17, 17, 8, 8), "model": {"family": f"{HOME}gemma2", "num_hidden_layers": 2}}


QUICK = {("lengths differ between batches", 2, 2), ("padded left", 2, 2)}
QUICK |= {("odd number", 4, 2), ("lengths differ between batches", 4, 2)}


@pytest.mark.parametrize(
    ("case", "ranks", "tp_size"),
    [
        pytest.param(case, *sizes, marks=() if (case, *sizes) in QUICK else pytest.mark.slow)
        for case in PREDICTIONS
        for sizes in ((2, 2), (2, 1), (4, 2))
    ],
)
def test_predict_and_evaluate(case: str, ranks: int, tp_size: int, cluster_of: Any, tmp_path: Any) -> None:
    """Also on data-parallel ranks, where the last batch is filled up and every sample still counts once."""
    expected = predict(str(tmp_path), None, **PREDICTIONS[case])
    helix = {"tp_size": tp_size}
    for result in cluster_of(ranks).run(f"{JOB}predict", folder=str(tmp_path), helix=helix, **PREDICTIONS[case]):
        assert result["predicted"]["test_samples"] == PREDICTIONS[case]["count"]
        # The stock loss is a mean over batches, which are others on data-parallel ranks.
        compare_predictions(result, expected, with_loss=ranks == tp_size)


@pytest.mark.slow
def test_predictions_of_a_derived_model(cluster_of: Any, tmp_path: Path) -> None:
    """Whose logits are capped."""
    expected = predict(str(tmp_path), None, **DERIVED)
    for result in cluster_of(2).run(f"{JOB}predict", folder=str(tmp_path), helix=HELIX, **DERIVED):
        compare_predictions(result, expected, with_loss=True)


ACCUMULATING = {"gradient_accumulation_steps": 2, "max_steps": 4}


@pytest.mark.slow
def test_callbacks_hear_what_they_hear_from_the_stock_trainer(cluster_of: Any, tmp_path: Any) -> None:
    expected = train_with(str(tmp_path), None, ACCUMULATING)
    assert expected["counts"]["on_log"] == 4 + 1  # every step, and once at the end
    assert expected["counts"]["on_substep_end"] == expected["counts"]["on_step_end"] == 4
    for result in cluster_of(2).run(f"{JOB}train_with", folder=str(tmp_path), helix=HELIX, training=ACCUMULATING):
        assert result["events"] == expected["events"]


@pytest.mark.parametrize(
    ("ranks", "tp_size", "count"),
    [
        (2, 2, "all"),
        (4, 2, "non_padding"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 2, "non_padding"), (4, 2, "all"))),
        *(pytest.param(2, 1, count, marks=pytest.mark.slow) for count in ("all", "non_padding")),
    ],
)
def test_input_tokens_are_counted_once(ranks: int, tp_size: int, count: str, cluster_of: Any, tmp_path: Any) -> None:
    """Against the stock Trainer with as many samples a step in one process."""
    case = {"training": {**ACCUMULATING, "include_num_input_tokens_seen": count}}
    case["data"] = {"lengths": (17, 9), "padding": "right"}
    batch = {"per_device_train_batch_size": 2 * ranks // tp_size}
    expected = train_with(str(tmp_path), None, {**case["training"], **batch}, data=case["data"])
    every = 17 * 4 * 4 * ranks // tp_size
    assert expected["seen"] == every if count == "all" else 0 < expected["seen"] < every
    for result in cluster_of(ranks).run(
        f"{JOB}train_with", folder=str(tmp_path), helix={"tp_size": tp_size, "plan": "greedy"}, **case
    ):
        assert result["seen"] == expected["seen"]
        assert result["tokens"] == expected["tokens"]


@pytest.mark.parametrize("how", ["streamed", "from_init"])
def test_iterable_datasets_and_model_init(how: str, cluster_of: Any, tmp_path: Any) -> None:
    expected = train_with(str(tmp_path), None, ACCUMULATING, **{how: True})
    assert len(set(expected["losses"])) == 4
    for result in cluster_of(2).run(
        f"{JOB}train_with", folder=str(tmp_path), helix=HELIX, training=ACCUMULATING, **{how: True}
    ):
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-4)


def test_a_frozen_embedding_trains_like_the_stock_trainer(cluster_of: Any, tmp_path: Path) -> None:
    freeze = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    options = {"folder": str(tmp_path), "training": {"max_steps": 5}, "freeze": freeze}
    expected = jobs.train(helix=None, **options)
    for result in cluster_of(2).run("train", helix={"tp_size": 2}, **options):
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-4)
