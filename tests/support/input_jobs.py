"""Inputs that go wrong quietly: ids, labels and positions out of range, and windows without any label."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.loop_jobs import made, stock_window
from support.models import VOCABULARY, sequences, tiny
from support.more_jobs import build

from hf_helix import HelixConfig, HelixPlugin

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


def refusals(folder: str, helix: dict[str, Any] | None, kinds: list[str], evaluated: bool = True) -> dict[str, Any]:
    """What training, evaluation and prediction say of each kind of bad rows."""
    training = {"max_steps": 1, "train_sampling_strategy": "sequential"}
    found = {}
    for kind in kinds:
        rows = BAD[kind]()
        model = tiny(num_hidden_layers=2)
        trainer = build(folder, helix, training, model=model, train_dataset=rows)
        held = {name: value.detach().clone() for name, value in model.named_parameters()}
        actions = {"train": trainer.train}
        if evaluated:
            actions |= {"evaluate": lambda t=trainer, r=rows: t.evaluate(r)}
            actions |= {"predict": lambda t=trainer, r=rows: t.predict(r)}
        found[kind] = {name: said(action) for name, action in actions.items()}
        found[kind]["untouched"] = all(torch.equal(value, held[name]) for name, value in model.named_parameters())
    return found


def unlabelled_rows() -> list[dict[str, Any]]:
    """The second window of four has no label, and one batch of the third has none."""
    rows = sequences(ROWS)
    for place in (*NONE_IN_WINDOW, *NONE_IN_BATCH):
        rows[place]["labels"][:] = -100
    return rows


def unlabelled(folder: str, helix: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """Train over windows without labels, and evaluate: all that is logged, and the weights where they are whole."""
    rows = unlabelled_rows()
    training = {
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
        **changes,
    }
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
    found: dict[str, Any] = {"losses": losses, "norms": norms}
    if plugin:
        for kind, make in BAD.items():
            bad = collate(make())
            found[kind] = [said(lambda b=bad: train([b, b])), said(lambda b=bad: evaluate(b))]
        model.engine.close()
    return found
