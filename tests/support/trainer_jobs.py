"""What the processes of a `Cluster` run to see whether HelixTrainer behaves as the stock Trainer does."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.jobs import Recorder, Stream, build, make_trainer
from support.models import arguments, llama, sequences, tiny
from transformers import EarlyStoppingCallback

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.engine.microbatches import LossScale
from hf_helix.operators.base import Call, explicit_gradients
from hf_helix.runtime.divided import plain_parameters

LIVENESS = "hf_helix-liveness"  # one a process, however many trainers it has


class Accuracy:
    """Metrics of all predictions at once, or batch by batch."""

    def __init__(self) -> None:
        self.right = self.all = self.rows = 0

    def __call__(self, result: Any, compute_result: bool = True) -> dict[str, float]:
        predictions, labels = (torch.as_tensor(value) for value in (result.predictions, result.label_ids))
        counted = labels != -100
        self.right += int((predictions == labels)[counted].sum())
        self.all += int(counted.sum())
        self.rows += len(labels)
        if not compute_result:
            return {}
        metrics = {"accuracy": self.right / self.all, "rows": self.rows}
        self.__init__()  # type: ignore[misc]
        for name in ("inputs", "losses"):
            value = getattr(result, name, None)
            if value is not None and not isinstance(value, dict):
                metrics[name] = float(torch.as_tensor(value).double().sum())
        return metrics


def follow(
    folder: str,
    helix: dict[str, Any] | None,
    training: dict[str, Any],
    *,
    model: dict[str, Any] | None = None,
    patience: int = 0,
    optimizer: str = "",
    streamed: bool = False,
    metrics: bool = False,
    lengths: tuple[int, ...] = (17,),
    count: int = 24,
) -> dict[str, Any]:
    """Train, and evaluate where the arguments say so: the log, the events, and the checkpoints that are left."""
    made, recorder = tiny(**(model or {})), Recorder()
    rows = sequences(count, lengths=lengths)
    options: dict[str, Any] = {
        "model": made,
        "train_dataset": Stream(rows) if streamed else rows,
        "eval_dataset": sequences(5, lengths=lengths, seed=9),
        "data_collator": padded,
        "callbacks": [recorder, *([EarlyStoppingCallback(patience)] if patience else [])],
    }
    if optimizer.startswith("passed in"):
        kind = torch.optim.Adagrad if optimizer == "passed in with states" else torch.optim.NAdam
        given = kind(made.parameters(), lr=0.01)
        options["optimizers"] = given, torch.optim.lr_scheduler.ExponentialLR(given, 0.9)
    if optimizer == "class":
        options["optimizer_cls_and_kwargs"] = torch.optim.RAdam, {"lr": 0.01, "eps": 1e-6}
    if metrics:
        options["compute_metrics"] = Accuracy()
        options["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1).roll(1, 1)
    trainer = build(folder, helix, training, **options)
    trainer.train()
    return {
        "log": trainer.state.log_history,
        "events": recorder.events,
        "checkpoints": sorted(path.name for path in Path(folder).glob("checkpoint-*")),
        "best": trainer.state.best_global_step,
    }


def threads_left(folder: str, helix: dict[str, Any]) -> tuple[set[str], list[int]]:
    """The threads that trainers of a loop leave behind, by name, and how many the system sees after each of them."""
    before, left, counts = set(threading.enumerate()), set(), []
    for _ in range(3):
        trainer = make_trainer(folder, helix, {"num_hidden_layers": 4}, training={"max_steps": 1})
        trainer.train()
        mine = set(threading.enumerate()) - before
        del trainer
        gc.collect()
        deadline = time.monotonic() + 10
        while any(thread.is_alive() for thread in mine if thread.name != LIVENESS) and time.monotonic() < deadline:
            time.sleep(0.01)
        left |= {thread.name for thread in mine if thread.is_alive()} - {LIVENESS}
        counts.append(len(os.listdir("/proc/self/task")))
    return left, counts


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of rows of several lengths."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    return {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }


def refused(folder: str, helix: dict[str, Any], training: dict[str, Any], **options: Any) -> None:
    """Only construct."""
    made = llama()
    if options.pop("optimizer", None):
        options["optimizers"] = torch.optim.LBFGS(made.parameters()), None
    if options.pop("streamed", None):
        options["eval_dataset"] = Stream(sequences(4))
    build(folder, helix, training, model=made, **options)


def board(folder: str, helix: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with a folder of its own for every rank, to see who writes."""
    training = {"report_to": ["tensorboard"], "max_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = sequences(8)
    trainer = build(f"{folder}/{rank}", helix, training, model=llama(), train_dataset=rows, eval_dataset=rows[:3])
    trainer.train()
    return trainer.state.log_history


@plain_parameters()
def noise(folder: str, helix: dict[str, Any], alpha: float, model: dict[str, Any] | None = None) -> dict[str, Any]:
    """What NEFTune adds to this rank's embeddings in training and in evaluation."""
    result: dict[str, Any] = {}
    for given in (None, alpha):
        made = tiny(**{"num_hidden_layers": 4, **(model or {})})
        args = arguments(folder, neftune_noise_alpha=given)
        trainer = HelixTrainer(model=made, args=args, train_dataset=sequences(2), helix_config=HelixConfig(**helix))
        stage = trainer.helix.runner.stage
        if stage.layout.rank_of(0) != stage.rank:
            continue
        batch = next(iter(trainer.get_train_dataloader()))
        side = trainer.helix.microbatch(batch, LossScale(torch.ones(())), (0, 0)).prepare()
        for mode in (True, False):
            made.train(mode)
            with explicit_gradients():
                first = stage.model[0].graphs.forward.operators[0].name  # the lookup
                (value,) = stage.model[0].operators[first].forward(Call(side, 5, mode))
            result.setdefault(mode, []).append(value.numpy().copy())
        result["length"], result["hidden"] = batch["input_ids"].shape[1], made.config.hidden_size
    return result


def noisy_losses(folder: str, helix: dict[str, Any], alpha: float | None) -> dict[str, Any]:
    """The losses of a run that learns nothing, and those of its evaluation."""
    training = {"neftune_noise_alpha": alpha, "learning_rate": 0.0, "max_steps": 2, "gradient_accumulation_steps": 2}
    model, rows = llama(num_hidden_layers=2), sequences(8)
    trainer = build(folder, helix, training, model=model, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "eval": trainer.evaluate()["eval_loss"],
    }
