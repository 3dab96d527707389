"""Batches that the stock Trainer raises for are refused by name; those that it survives are survived, equally."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.input_jobs import BAD, loop, refusals, unlabelled
from support.models import VOCABULARY, llama, sequences, tiny
from support.more_jobs import build

JOB = "support.input_jobs:"
RESIZE = "model.resize_token_embeddings(len(tokenizer))"
WORDS = {
    "id": [f"token id {VOCABULARY}", f"{VOCABULARY} rows", RESIZE],
    "negative id": ["token id -3", f"{VOCABULARY} rows"],
    "label": ["label 5000", f"{VOCABULARY} rows", RESIZE],
}
RUNS = ("train", "evaluate", "predict")


def check_refusals(found: dict[str, Any], runs: tuple[str, ...] = RUNS) -> None:
    for kind, said in found.items():
        for run in runs:
            assert said[run].startswith("ValueError"), f"{kind}, {run}: {said[run]}"
            for word in WORDS[kind]:
                assert word in said[run]
        assert said["untouched"]


def test_ids_and_labels_out_of_range_of_one_process(tmp_path: Path) -> None:
    for kind, said in refusals(str(tmp_path), None, ["id", "label"]).items():
        assert all(said[run].startswith("IndexError") for run in RUNS), kind
    check_refusals(refusals(str(tmp_path), {}, list(BAD)))


@pytest.mark.parametrize(
    ("helix", "kinds"),
    [
        ({"tp_size": 2}, ["id", "label"]),
        ({"pp_size": 2, "schedule": "1f1b"}, ["id"]),
        ({"cp_size": 2}, ["id"]),
    ],
    ids=str,
)
def test_ids_and_labels_out_of_range(helix: dict[str, Any], kinds: list[str], cluster_of: Any, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "helix": {"plan": "sequential", **helix}, "kinds": kinds}
    for found in cluster_of(2).run(f"{JOB}refusals", **options):
        check_refusals(found)


def test_ids_of_one_data_parallel_rank(cluster_of: Any, tmp_path: Path) -> None:
    """The first has the batch; both say so."""
    options = {"folder": str(tmp_path), "helix": {"plan": "sequential"}, "kinds": ["label"], "evaluated": False}
    for found in cluster_of(2).run(f"{JOB}refusals", **options):
        check_refusals(found, ("train",))
        assert "in a batch of rank 0" in found["label"]["train"]


def test_long_sequences(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A table of positions ends; a rope does not, and is warned of once."""
    rows = sequences(4, lengths=(65,))
    training = {"max_steps": 2}
    trainer = build(str(tmp_path), {}, training, model=tiny("gpt2", num_hidden_layers=1), train_dataset=rows)
    with pytest.raises(ValueError, match=r"position 64.*64 positions.*max_length=64"):
        trainer.train()
    with caplog.at_level(logging.WARNING):
        build(str(tmp_path), {}, training, model=llama(num_hidden_layers=1), train_dataset=rows).train()
    said = [text for text in caplog.messages if "max_position_embeddings" in text]
    assert len(said) == 1
    assert "65 tokens" in said[0]
    assert "64" in said[0]


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-5, nan_ok=True)
    assert len(found["log"]) == len(wanted["log"])
    for mine, stock in zip(found["log"], wanted["log"], strict=True):
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in stock:
                assert mine[name] == pytest.approx(stock[name], rel=1e-4, abs=1e-5, nan_ok=True), stock["step"]


@pytest.mark.parametrize("filtered", [True, False])
def test_windows_without_labels(filtered: bool, cluster_of: Any, tmp_path: Path) -> None:
    """Their loss is 0 / 0, which is left out of the logs by default, and their gradient is zero."""
    changes = {"logging_nan_inf_filter": filtered}
    wanted = unlabelled(str(tmp_path), None, **changes)
    losses = [entry["loss"] for entry in wanted["log"] if "loss" in entry]
    assert len(losses) == 4
    assert np.isfinite(losses).all() == filtered
    compare(unlabelled(str(tmp_path), {"plan": "sequential"}, **changes), wanted)
    if filtered:
        helix = {"tp_size": 2, "plan": "sequential"}
        for found in cluster_of(2).run(f"{JOB}unlabelled", folder=str(tmp_path), helix=helix, **changes):
            compare(found, wanted)


def test_windows_without_labels_log_as_often_as_they_are(tmp_path: Path) -> None:
    """Several steps are logged together, so that what each micro-batch adds in place of its loss shows."""
    changes = {"logging_steps": 4, "label_smoothing_factor": 0.1}
    wanted = unlabelled(str(tmp_path), None, **changes)
    compare(unlabelled(str(tmp_path), {"plan": "sequential"}, **changes), wanted)


def test_a_loop(cluster_of: Any) -> None:
    wanted = loop(None)
    assert np.isnan(wanted["losses"]).tolist() == [False, True, False, False, True]
    for found in cluster_of(2).run(f"{JOB}loop", helix={"tp_size": 2}):
        np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(found["norms"], wanted["norms"], rtol=1e-4, atol=1e-7)
        for kind in BAD:
            for said in found[kind]:
                assert said.startswith("ValueError")
                for word in WORDS[kind]:
                    assert word in said
