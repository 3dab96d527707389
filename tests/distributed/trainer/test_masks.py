"""Masks of tokens, of any form, where ranks share a sequence: a mask hides keys, and what queries give may be read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.jobs import build
from support.marks import slow
from support.models import sequences, tiny

LENGTH = 18
HIDDEN = {
    "right": {0: slice(9, LENGTH)},  # by more than windows have
    "hole": {0: slice(4, 7), 1: slice(10, 12)},
    "left": {0: slice(0, 8)},
    "row": {1: slice(0, LENGTH)},
    "batch": {0: slice(0, LENGTH), 1: slice(0, LENGTH)},
}
"""What is hidden of the rows of a batch of two, by the kind of the mask."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama, eager": {"family": "llama", "attn_implementation": "eager"},
    "windows": {"family": "mistral"},
    "windows, eager": {"family": "mistral", "attn_implementation": "eager"},
    "windows, balanced experts": {"family": "phimoe", "output_router_logits": True, "sliding_window": 7},
}
RING, UNCOUNTED, GATHERED = (
    ({"cp_size": 2}, True),
    ({"cp_size": 2}, False),
    ({"cp_size": 2, "cp_method": "all_gather"}, True),
)
BALANCED = "windows, balanced experts"
CASES = [(RING, "llama"), (UNCOUNTED, "llama, eager"), (GATHERED, BALANCED)]
SLOW = [
    *((RING, name) for name in ("llama, eager", "windows", "windows, eager", BALANCED)),
    *((({"cp_size": 2, other: 2}, True), name) for other in ("tp_size", "pp_size") for name in ("llama", BALANCED)),
    (GATHERED, "windows, eager"),
]


@pytest.mark.parametrize(("case", "name"), [*CASES, *(slow(*case) for case in SLOW)], ids=str)
def test_masks_of_every_kind(
    case: tuple[dict[str, Any], bool], name: str, cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    """The labels of padding count or do not, as `counted` says."""
    helix, counted = case
    job = {"model": {"num_hidden_layers": 2 * helix.get("pp_size", 1), **MODELS[name]}, "counted": counted}
    expected, _ = stock(train, **job)
    ranks = 2 * helix.get("tp_size", 1) * helix.get("pp_size", 1)
    for result in cluster_of(ranks).run(train, folder=str(tmp_path), helix={**helix, "plan": "sequential"}, **job):
        for what, values in expected.items():
            np.testing.assert_allclose(result[what], values, rtol=1e-4, atol=2e-5, err_msg=what)


# In the processes of a cluster


def train(folder: str, helix: dict[str, Any] | None, model: dict[str, Any], counted: bool) -> dict[str, Any]:
    """A step with a batch of every kind, its loss alone in evaluation, and its logits."""
    without = ["batch"] if "output_router_logits" in model else []  # of no token, Transformers balances 0 / 0
    data = [batch_of(kind, counted) for kind in HIDDEN if kind not in without]
    training = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "max_steps": len(data)}
    options = {"model": tiny(**model), "train_dataset": data, "data_collator": lambda batches: batches[0]}
    trainer = build(folder, helix, training, **options)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [float(entry["grad_norm"]) for entry in logs],
        "eval": [trainer.evaluate([batch])["eval_loss"] for batch in data],
        "logits": trainer.predict(data, ignore_keys=["past_key_values", "router_logits", "aux_loss"]).predictions,
    }


def batch_of(kind: str, counted: bool) -> dict[str, Any]:
    """Hidden tokens are like others, and so are their labels, unless these do not count."""
    ids, labels = (
        torch.stack([row[name] for row in sequences(2, lengths=(LENGTH,), seed=len(kind))])
        for name in ("input_ids", "labels")
    )
    mask = torch.ones_like(ids)
    for row, hidden in HIDDEN[kind].items():
        mask[row, hidden] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels if counted or kind == "batch" else labels.where(mask > 0, -100),
    }
