"""Rows of several documents, by positions that start anew: one answer in training, evaluation and losses of one's own,
and a warning if the stock Trainer, or the data, would have another."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.jobs import build
from support.marks import slow
from support.models import VOCABULARY, llama

LENGTH = 16
CACHE = "use_cache=True and position_ids that start anew in a row: attention stays within each document"
MASK = "attention_mask beside position_ids that start anew in a row: documents attend to each other"


def packed(kind: str) -> list[dict[str, Any]]:
    """Four batches of one row of three documents; `mask` adds one of ones, `left` hides the first tokens."""
    dice = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (4, 1, LENGTH), generator=dice)
    starts = torch.cat([torch.arange(5), torch.arange(7), torch.arange(4)])[None]
    rows = [{"input_ids": row, "labels": row, "position_ids": starts} for row in ids]
    if kind == "mask":
        rows = [{**row, "attention_mask": torch.ones(1, LENGTH, dtype=torch.long)} for row in rows]
    if kind == "left":
        mask = (torch.arange(LENGTH) >= 5)[None].long()
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
        rows = [{**row, "attention_mask": mask, "position_ids": positions} for row in rows]
    return rows


def train(
    folder: str, helix: dict[str, Any] | None, kind: str = "", use_cache: bool = False, own_loss: bool = False
) -> dict[str, Any]:
    """The losses of two steps and of an evaluation, and what is warned of."""
    data = packed(kind)
    training = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "max_steps": 2}
    given: dict[str, Any] = {"train_dataset": data[:2], "eval_dataset": data[2:], "data_collator": lambda rows: rows[0]}
    if own_loss:
        given["compute_loss_func"] = lambda outputs, labels, num_items_in_batch=None: (
            outputs.logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None]).neg().mean()
        )
    with mock.patch("hf_helix.engine.cut.microbatches.logger") as logger:
        trainer = build(folder, helix, {**training, "use_cache": use_cache}, model=llama(num_hidden_layers=4), **given)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [*losses, evaluated],
        "said": sorted({call.args[0] for call in logger.warning_once.call_args_list}),
    }


HERE: dict[str, Any] = {"plan": "sequential"}


def check(found: dict[str, Any], wanted: dict[str, Any], *words: str) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
    assert len(found["said"]) == len(words)
    assert all(line.startswith(word) for line, word in zip(found["said"], words, strict=True)), found["said"]


@pytest.mark.parametrize("own_loss", [False, True])
def test_a_cache_does_not_join_documents(own_loss: bool, tmp_path: Path) -> None:
    stock = train(str(tmp_path), None, own_loss=own_loss)
    joined = train(str(tmp_path), None, use_cache=True, own_loss=own_loss)
    assert joined["losses"] != pytest.approx(stock["losses"], abs=1e-4)  # the stock Trainer's answer depends on it
    check(train(str(tmp_path), HERE, own_loss=own_loss), stock)
    check(train(str(tmp_path), HERE, use_cache=True, own_loss=own_loss), stock, CACHE)


@pytest.mark.parametrize(("kind", "words"), [("mask", [MASK]), ("left", [])])
def test_a_mask_joins_documents(kind: str, words: list[str], tmp_path: Path) -> None:
    check(train(str(tmp_path), HERE, kind=kind), train(str(tmp_path), None, kind=kind), *words)


@pytest.mark.parametrize(
    ("helix", "own_loss"),
    [slow({"tp_size": 2}, False), slow({"tp_size": 2}, True), slow({"pp_size": 2}, False), slow({"cp_size": 2}, True)],
)
def test_on_two_ranks(helix: dict[str, Any], own_loss: bool, cluster_of: Any, tmp_path: Path) -> None:
    """Rank 0 warns."""
    for kind, use_cache, words in (("", True, [CACHE]), ("mask", False, [MASK])):
        wanted = train(str(tmp_path), None, kind=kind, own_loss=own_loss)
        job = {"kind": kind, "use_cache": use_cache, "own_loss": own_loss}
        first, second = cluster_of(2).run(train, folder=str(tmp_path), helix={**HERE, **helix}, **job)
        check(first, wanted, *words)
        check(second, wanted)
