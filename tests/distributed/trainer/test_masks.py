"""Masks of tokens, of any form, where ranks share a sequence: a mask hides keys, and what queries give may be read."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.jobs import build
from support.models import sequences, tiny

LENGTH = 18  # longer than the window of Mistral by more than what is padded
HIDDEN = {
    "right": {0: slice(9, LENGTH)},
    "hole": {0: slice(4, 7), 1: slice(10, 12)},
    "left": {0: slice(0, 8)},
    "row of padding": {1: slice(0, LENGTH)},
    "batch of padding": {0: slice(0, LENGTH), 1: slice(0, LENGTH)},
}
"""What is hidden of the rows of a batch of two, by the kind of the mask."""

MODELS = [("llama", "sdpa"), ("llama", "eager"), ("mistral", "sdpa"), ("mistral", "eager")]
SLOW = pytest.mark.slow


def batches(counted: bool) -> list[dict[str, Any]]:
    """A batch of every kind. Labels are copies of the ids, with padding counted or left out."""
    result = []
    for kind, hidden in HIDDEN.items():
        rows = sequences(2, lengths=(LENGTH,), seed=len(kind))
        batch = {"input_ids": torch.stack([row["input_ids"] for row in rows])}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        for row, tokens in hidden.items():
            batch["attention_mask"][row, tokens] = 0

        shown = batch["attention_mask"] > 0
        result.append(
            {**batch, "labels": batch["input_ids"].where(shown | counted | (kind == "batch of padding"), -100)}
        )
    return result


def train(folder: str, helix: dict[str, Any] | None, model: dict[str, Any], counted: bool = True) -> dict[str, Any]:
    """A step with every kind, then losses without logits, and logits."""
    data = batches(counted)
    training = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "max_steps": len(data)}
    options = {
        "model": tiny(**model),
        "train_dataset": data,
        "eval_dataset": data,
        "data_collator": lambda items: items[0],
    }
    trainer = build(folder, helix, training, **options)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [float(entry["grad_norm"]) for entry in logs],
        "eval": [trainer.evaluate(data[place : place + 1])["eval_loss"] for place in range(len(data))],
        "logits": trainer.predict(data).predictions,
    }


@functools.cache
def expected(folder: str, family: str, attention: str, counted: bool) -> dict[str, Any]:
    return train(folder, None, {"family": family, "attn_implementation": attention}, counted)


@pytest.mark.parametrize(("family", "attention"), MODELS)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    "helix",
    [
        {"cp_size": 2},
        {"cp_size": 2, "cp_method": "all_gather"},
        pytest.param({"cp_size": 2, "tp_size": 2}, marks=SLOW),
        pytest.param({"cp_size": 2, "pp_size": 2}, marks=SLOW),
    ],
    ids=str,
)
def test_masks_of_every_kind(
    helix: dict[str, Any], counted: bool, family: str, attention: str, cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    case = {"model": {"family": family, "attn_implementation": attention}, "counted": counted}
    wanted, _ = stock(train, **case)
    ranks = 2 * helix.get("tp_size", 1) * helix.get("pp_size", 1)
    for result in cluster_of(ranks).run(train, folder=str(tmp_path), helix={**helix, "plan": "sequential"}, **case):
        for name, values in wanted.items():
            np.testing.assert_allclose(result[name], values, rtol=1e-4, atol=2e-5, err_msg=name)
