"""Batches that the stock Trainer raises for are refused by name; those that it survives are survived, equally."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.jobs import build
from support.loop_jobs import made, stock_window
from support.marks import slow
from support.models import VOCABULARY, llama, sequences, tiny
from transformers import DataCollatorWithFlattening

from hf_helix import HelixConfig, HelixPlugin

# What the ranks run

ROWS = 14
NONE_IN_WINDOW, NONE_IN_BATCH = range(4, 8), range(8, 10)


def changed(name: str, value: int, length: int = 17) -> list[dict[str, Any]]:
    """Sequences of which one has a value that it must not have, in the middle."""
    rows = sequences(4, lengths=(length,))
    if name:
        rows[1][name][length // 2] = value
    return rows


BAD: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "id": lambda: changed("input_ids", VOCABULARY),
    "negative id": lambda: changed("input_ids", -3),
    "label": lambda: changed("labels", 5000),
}


def said(action: Callable[[], Any]) -> str:
    """An error with its kind; empty without one."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(folder: str, helix: dict[str, Any], kinds: list[str], evaluated: bool = True) -> dict[str, Any]:
    """What training, evaluation and prediction say of each kind of bad rows."""
    training = {"max_steps": 1, "train_sampling_strategy": "sequential"}
    result = {}
    for kind in kinds:
        rows = BAD[kind]()
        model = tiny(num_hidden_layers=2)
        trainer = build(folder, helix, training, model=model, train_dataset=rows)
        held = {name: value.detach().clone() for name, value in model.named_parameters()}
        actions = {"train": trainer.train}
        if evaluated:
            actions |= {"evaluate": lambda t=trainer, r=rows: t.evaluate(r)}
            actions |= {"predict": lambda t=trainer, r=rows: t.predict(r)}
        result[kind] = {name: said(action) for name, action in actions.items()}
        result[kind]["untouched"] = all(torch.equal(value, held[name]) for name, value in model.named_parameters())
    return result


def unlabelled_rows() -> list[dict[str, Any]]:
    """The second window of four has no label, and one batch of the third has none."""
    rows = sequences(ROWS)
    for place in (*NONE_IN_WINDOW, *NONE_IN_BATCH):
        rows[place]["labels"][:] = -100
    return rows


def unlabelled(folder: str, helix: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """Train over windows without labels, and evaluate: all that is logged, and the weights where they are whole."""
    rows = unlabelled_rows()
    training = {"max_steps": 4, "gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential", **changes}
    trainer = build(folder, helix, training, model=tiny(num_hidden_layers=2), train_dataset=rows, eval_dataset=rows[4:])
    result = trainer.train()
    trainer.evaluate()
    return {"log": trainer.state.log_history, "loss": result.training_loss}


def loop(helix: dict[str, Any] | None) -> dict[str, Any]:
    """A loop of one's own over such windows; with the plugin, also what it says of bad rows."""
    plugin = None if helix is None else HelixPlugin(HelixConfig(cache=False, plan="greedy", **helix))
    accelerator, model, optimizer, _, _, _ = made(plugin, 2, 2)
    collate = torch.utils.data.default_collate
    rows = unlabelled_rows()
    batches = [collate(rows[place : place + 2]) for place in range(0, 12, 2)]
    train = model.train_window if plugin else stock_window(accelerator, model)
    evaluate = model.evaluate if plugin else lambda batch: model.eval()(**batch)
    losses, norms = [], []
    for place in range(0, len(batches), 2):
        losses.append(float(train(batches[place : place + 2])))
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses += [float(evaluate(batch).loss) for batch in (batches[0], batches[2])]
    result: dict[str, Any] = {"losses": losses, "norms": norms}
    if plugin:
        for kind, make in BAD.items():
            bad = collate(make())
            result[kind] = [said(lambda b=bad: train([b, b])), said(lambda b=bad: evaluate(b))]
        model.engine.close()
    return result


# Tests

RESIZE = "model.resize_token_embeddings(len(tokenizer))"
WORDS = {
    "id": [f"token id {VOCABULARY}", f"{VOCABULARY} rows", RESIZE],
    "negative id": ["token id -3", f"{VOCABULARY} rows"],
    "label": ["label 5000", f"{VOCABULARY} rows", RESIZE],
}
RUNS = ("train", "evaluate", "predict")


def check_refusals(result: dict[str, Any], runs: tuple[str, ...] = RUNS) -> None:
    for kind, said in result.items():
        for run in runs:
            assert said[run].startswith("ValueError"), f"{kind}, {run}: {said[run]}"
            for word in WORDS[kind]:
                assert word in said[run]
        assert said["untouched"]


@pytest.mark.parametrize(
    ("helix", "kinds"),
    [({"tp_size": 2}, ["id", "label"]), ({"pp_size": 2, "schedule": "1f1b"}, ["id"]), ({"cp_size": 2}, ["id"])],
    ids=str,
)
def test_ids_and_labels_out_of_range(helix: dict[str, Any], kinds: list[str], cluster_of: Any, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "helix": {"plan": "sequential", **helix}, "kinds": kinds}
    for result in cluster_of(2).run(refusals, **options):
        check_refusals(result)


def test_ids_of_one_data_parallel_rank(cluster_of: Any, tmp_path: Path) -> None:
    """The first has the batch; both say so."""
    options = {"folder": str(tmp_path), "helix": {"plan": "sequential"}, "kinds": ["label"], "evaluated": False}
    for result in cluster_of(2).run(refusals, **options):
        check_refusals(result, ("train",))
        assert "in a batch of rank 0" in result["label"]["train"]


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


def compare(result: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert result["loss"] == pytest.approx(wanted["loss"], abs=1e-5, nan_ok=True)
    assert len(result["log"]) == len(wanted["log"])
    for mine, stock in zip(result["log"], wanted["log"], strict=True):
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in stock:
                assert mine[name] == pytest.approx(stock[name], rel=1e-4, abs=1e-5, nan_ok=True), stock["step"]


@pytest.mark.parametrize("changes", [{}, slow({"logging_nan_inf_filter": False})], ids=str)
def test_windows_without_labels(changes: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    """Their loss is 0 / 0, which is left out of the logs by default, and their gradient is zero."""
    wanted = unlabelled(str(tmp_path), None, **changes)
    losses = [entry["loss"] for entry in wanted["log"] if "loss" in entry]
    assert len(losses) == 4
    assert np.isfinite(losses).all() == (not changes)
    for result in cluster_of(2).run(unlabelled, folder=str(tmp_path), helix={"tp_size": 2}, **changes):
        compare(result, wanted)


def test_windows_without_labels_log_as_often_as_they_are(tmp_path: Path) -> None:
    """Several steps are logged together, so that what each micro-batch adds in place of its loss shows."""
    changes = {"logging_steps": 4, "label_smoothing_factor": 0.1}
    wanted = unlabelled(str(tmp_path), None, **changes)
    compare(unlabelled(str(tmp_path), {"plan": "sequential"}, **changes), wanted)


def test_a_loop(cluster_of: Any) -> None:
    wanted = loop(None)
    assert np.isnan(wanted["losses"]).tolist() == [False, True, False, False, True]
    for result in cluster_of(2).run(loop, helix={"tp_size": 2}):
        np.testing.assert_allclose(result["losses"], wanted["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], wanted["norms"], rtol=1e-4, atol=1e-7)
        for kind in BAD:
            for said in result[kind]:
                assert said.startswith("ValueError")
                for word in WORDS[kind]:
                    assert word in said


def test_rows_that_are_joined_without_padding(cluster_of: Any, tmp_path: Path) -> None:
    """By the collator of Transformers: one row a batch, whose documents begin where positions do."""
    rows = [{key: row[key].tolist() for key in row} for row in sequences(12, lengths=(9, 14, 5))]
    case: dict[str, Any] = {"model": {"num_hidden_layers": 2}, "training": {"max_steps": 3}}
    case |= {"train_dataset": rows, "data_collator": DataCollatorWithFlattening(return_flash_attn_kwargs=False)}
    expected = jobs.train(str(tmp_path / "stock"), None, **case)
    job = {"folder": str(tmp_path / "helix"), "helix": {"tp_size": 2, "plan": "greedy"}, **case}
    for result in cluster_of(2).run("train", **job):
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-4)
