"""A rank that calls the model, while the others go on, gets the answer of the uncut model at that moment.

The oracle is a whole model under the stock Trainer, or in a loop of Accelerate.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparisons import is_close
from support.jobs import build
from support.loop_jobs import made, stock_window
from support.marks import slow
from support.models import adapted, sequences, tiny
from transformers import TrainerCallback

from hf_helix import HelixPlugin
from hf_helix.runtime.distributed.mesh import rank

IDS = torch.arange(5, 11)[None]
EVENTS = ("on_pre_optimizer_step", "on_optimizer_step", "on_prediction_step", "on_step_end", "on_train_end")
TRAINING = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}


class Asks(TrainerCallback):
    """Calls the model on rank 0 at one event; with adapters, without them."""

    def __init__(self, event: str) -> None:
        self.answers: list[float] = []
        setattr(self, event, self.ask.__get__(self))

    def ask(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if rank() == 0:
            was_training = model.training
            model.eval()
            self.answers.append(answer(model))
            model.train(was_training)


def answer(model: Any) -> float:
    with torch.no_grad():
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                return float(model(IDS).logits.square().sum())
        return float(model(IDS).logits.square().sum())


def train(folder: str, helix: dict[str, Any] | None, event: str, adapts: bool = False) -> list[float]:
    model, asks = tiny(num_hidden_layers=4), Asks(event)
    data = {"model": adapted(model) if adapts else model, "train_dataset": sequences(40), "eval_dataset": sequences(4)}
    build(folder, helix, TRAINING, **data, callbacks=[asks]).train()
    return asks.answers


def loop(helix: dict[str, Any] | None) -> list[float]:
    """Rank 0 calls the model between a window and the optimizer's step."""
    accelerator, model, optimizer, loader, *_ = made(HelixPlugin(**helix) if helix else None, 2, 8)
    module, answers, batches = getattr(model, "module", model), [], list(loader)
    for first in (0, 2):
        window = batches[first : first + 2]
        if helix:
            model.train_window(window)
        else:
            stock_window(accelerator, model)(window)
        if rank() == 0:
            answers.append(answer(module.eval()))
        optimizer.step()
        optimizer.zero_grad()
    return answers


TP, PP = {"tp_size": 2}, {"pp_size": 2}
CASES = [
    *(slow(TP, event, False, when=event in ("on_optimizer_step", "on_step_end")) for event in EVENTS),
    (TP, "on_step_end", True),
    *(slow(PP, event, True) for event in EVENTS),
]


@pytest.mark.parametrize(("helix", "event", "adapts"), CASES)
def test_a_callback_of_one_rank(
    helix: dict[str, Any], event: str, adapts: bool, cluster_of: Any, tmp_path: Path
) -> None:
    given = {"event": event, "adapts": adapts, "folder": str(tmp_path)}
    (expected,) = cluster_of(1).run(train, helix=None, **given)
    found, _ = cluster_of(2).run(train, helix=helix, **given)
    assert expected
    assert is_close(found, expected)


@pytest.mark.parametrize("helix", [TP, slow(PP)], ids=str)
def test_a_loop_in_which_one_rank_calls(helix: dict[str, Any], cluster_of: Any) -> None:
    (expected,) = cluster_of(1).run(loop, helix=None)
    found, _ = cluster_of(2).run(loop, helix={**helix, "plan": "greedy"})
    assert is_close(found, expected)


def merge(folder: str) -> None:
    data = {"model": adapted(tiny(num_hidden_layers=2)), "train_dataset": sequences(4)}
    model = build(folder, TP, **data).model
    if rank() == 1:
        for module in model.modules():
            if hasattr(module, "merged_adapters"):
                module.merged_adapters = ["default"]
    if rank() == 0:
        answer(model)
    torch.distributed.barrier()


def test_adapters_that_one_rank_has_merged(cluster_of: Any, tmp_path: Path) -> None:
    words = "its adapters are merged on rank 1 only", "merge on every rank"
    cluster_of(2).assert_raises(merge, *words, alike=True, folder=str(tmp_path))
