"""A window that an error has ended leaves nothing behind: the next window is what it would have been without."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from support.loop_jobs import batches_of, reset, said
from support.models import llama
from support.pipeline_jobs import make

from hf_helix import HelixConfig, HelixPlugin
from hf_helix.engine.cut.microbatches import LossScale
from hf_helix.operators.base import TransferFn
from hf_helix.runtime.divided import full_of

MEMORY = "no memory is left"


def after_error(folder: str, helix: dict[str, Any]) -> dict[str, Any]:
    """Trains a window of which a transfer fails on every rank, and the same window again; then in a trainer
    without the error."""
    found = {}
    for name in ("after an error", "without"):
        trainer = make(folder, {**helix, "plan": "sequential", "cache": False}, {"num_hidden_layers": 4}, {})
        rows = [trainer.train_dataset[place] for place in range(4)]
        batches = [trainer.data_collator(rows[:2]), trainer.data_collator(rows[2:])]
        scale = LossScale(torch.tensor(0.1))
        optimizer = trainer.create_optimizer()
        said = []
        if name == "after an error":
            with mock.patch.object(trainer.helix.runner.executor.streams, "issue", failing(trainer)):
                try:
                    trainer.helix.session.train_window(batches, scale, 0)
                except torch.OutOfMemoryError as error:
                    said = [str(error)]
            optimizer.zero_grad()
        losses = [float(loss) for loss in trainer.helix.session.train_window(batches, scale, 0)]
        norm = float(trainer.helix.gradient_norm())
        gradient = full_of(trainer.model.get_parameter("model.layers.1.mlp.up_proj.weight").grad).clone()
        found[name] = said, losses, norm, gradient.tolist()
        trainer.helix.close()
    return found


def own_loss_after_error() -> list[tuple[str, float, float, list[Any]]]:
    """As `after_error`, of a loss of one's own that fails in the last call of a window."""
    found = []
    for fails in (True, False):
        reset()
        plugin = HelixPlugin(HelixConfig(plan="sequential", cache=False, shard_parameters=True))
        accelerator, calls = Accelerator(cpu=True, parallelism_config=plugin), iter([1, 1, 0] * fails)

        def loss(model: Any, batch: Any, calls: Iterator[int] = calls) -> torch.Tensor:
            if not next(calls, 1):
                raise ValueError(MEMORY)
            return model(**batch).loss

        model, loader = plugin.prepare(accelerator, llama(num_hidden_layers=2), batches_of(12), loss=loss)
        window = list(loader)[:3]
        words = said(partial(model.train_window, window)) if fails else ""
        mean = float(model.train_window(window))
        gradient = full_of(model.module.get_parameter("model.layers.1.mlp.up_proj.weight").grad).clone()
        found.append((words, mean, float(model.engine.gradient_norm()), gradient.tolist()))
        model.engine.close()
    return found


def failing(trainer: Any) -> Callable[..., Any]:
    """The streams' `issue`, whose tenth transfer fails."""
    issue, left = trainer.helix.runner.executor.streams.issue, iter(range(9, -1, -1))

    def fail() -> None:
        raise torch.OutOfMemoryError(MEMORY)

    def issue_some(kind: Any, transfer: TransferFn, *options: Any) -> Any:
        return issue(kind, transfer if next(left, 1) else fail, *options)

    return issue_some


@pytest.mark.parametrize("helix", [{"tp_size": 2}, {"shard_optimizer": True}, {"shard_parameters": True}], ids=str)
def test_the_next_window(cluster_of: Any, tmp_path: Path, helix: dict[str, Any]) -> None:
    for found in cluster_of(2).run(after_error, folder=str(tmp_path), helix=helix):
        said, *result = found["after an error"]
        assert said == [MEMORY]
        assert result == list(found["without"][1:])


def test_the_next_window_of_a_loss_of_ones_own(cluster_of: Any) -> None:
    for (words, *result), (_, *expected) in cluster_of(2).run(own_loss_after_error):
        assert words == MEMORY
        assert result == expected
