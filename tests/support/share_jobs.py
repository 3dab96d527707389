"""Tuning in proportion to a run, for a `Cluster`. Named "support.share_jobs:function" there."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from support.jobs import make_trainer
from support.models import sequences, tiny
from support.tuning_jobs import hasty

from hf_helix import HelixConfig, HelixPlugin
from hf_helix.engine.engine import Engine
from hf_helix.tuning import autotune as tuning
from hf_helix.tuning import effort
from hf_helix.tuning.effort import FULL, QUICK, SHORT, Effort

MODEL = {"num_hidden_layers": 4, "attention_dropout": 0.1}


@contextlib.contextmanager
def counted(cache: str, costs: dict[Effort, float]) -> Iterator[tuple[list[int], list[int], io.StringIO]]:
    """Under a clock by which every step takes a second, and estimates that are known: work is counted, not timed.

    Yields:
        What grows by one with every measurement of operators, and with every gathering of objects; what is printed.
    """
    measured: list[int] = []
    gathered: list[int] = []
    usual, gather, train_window, clock = tuning.measure_profile, dist.all_gather_object, Engine.train_window, [0.0]

    def measure(*args: Any, **kwargs: Any) -> Any:
        measured.append(1)
        return usual(*args, **kwargs)

    def all_gather_object(*args: Any, **kwargs: Any) -> None:
        gathered.append(1)
        gather(*args, **kwargs)

    def train_for_a_second(*args: Any, **kwargs: Any) -> Any:
        clock[0] += 1.0
        return train_window(*args, **kwargs)

    def pace() -> effort.Pace:
        return effort.Pace(clock=lambda: clock[0])

    def cost(wanted: Effort, *args: Any, **kwargs: Any) -> float:
        return costs[wanted]

    with (
        mock.patch.dict(os.environ, {"HELIX_CACHE": cache}),
        mock.patch.object(tuning, "measure_profile", measure),
        mock.patch.object(dist, "all_gather_object", all_gather_object),
        mock.patch("hf_helix.tuning.tuner.tuning_cost", cost),
        mock.patch("hf_helix.tuning.tuner.Pace", pace),
        mock.patch.object(Engine, "train_window", train_for_a_second),
        hasty(),
        contextlib.redirect_stdout(io.StringIO()) as output,
    ):
        yield measured, gathered, output


def train(
    folder: str, share: float, cache: str, training: dict[str, Any], helix: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a run found, and for every step how often was measured until then and objects were gathered in it."""
    with counted(cache, {QUICK: 0.05, SHORT: 1.2, FULL: 2.4}) as (measured, gathered, output):
        helix = {**(helix or {"tp_size": 2}), "tuning_share": share}
        trainer: Any = make_trainer(folder, helix, model=MODEL, data={"lengths": (9,)}, training=training)
        steps: list[tuple[int, int]] = []
        usual = trainer.training_step

        def step(*args: Any, **kwargs: Any) -> Any:
            before = len(gathered)
            found = usual(*args, **kwargs)
            steps.append((len(measured), len(gathered) - before))
            return found

        trainer.training_step = step
        trainer.train()
    steps = steps[:: training["gradient_accumulation_steps"]]
    return {
        "measured": [count for count, _ in steps],
        "gathered": [count for _, count in steps],
        "effort": trainer.tuning and trainer.tuning.effort,
        "rule": trainer.plan.rule,
        "schedule": trainer.helix.runner.scheduler.name,
        "eval": trainer.evaluate()["eval_loss"],
        "said": said(output),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def loop(cache: str, share: float, steps: int) -> dict[str, Any]:
    """A loop of one's own that adds up gradients: how often was measured until each step, and their norms."""
    with counted(cache, {QUICK: 1.6, SHORT: 2.1, FULL: 4.1}) as (measured, _, output):
        AcceleratorState._reset_state()
        plugin = HelixPlugin(HelixConfig(tp_size=2, tuning_share=share, cache=share > 0))
        accelerator = Accelerator(cpu=True, parallelism_config=plugin, gradient_accumulation_steps=2)
        model = plugin.prepare(accelerator, tiny(num_hidden_layers=2), seed=3)
        window = [{key: value[None] for key, value in row.items()} for row in sequences(2, lengths=(9,))]
        found, losses, norms = [], [], []
        for _ in range(steps):
            losses.append(model.train_window(window).item())
            found.append(len(measured))
            norms.append(model.engine.gradient_norm().item())
    return {"measured": found, "losses": losses, "norms": norms, "said": said(output)}


def said(output: io.StringIO) -> list[str]:
    """The lines of the library."""
    return [line for line in output.getvalue().splitlines() if line.startswith("hf_helix: ")]
