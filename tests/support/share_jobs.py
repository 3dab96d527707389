"""Tuning in proportion to a run, for a `Cluster`. Named "support.share_jobs:function" there."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
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
from hf_helix.tuning import tuner as tuning
from hf_helix.tuning.budget import FULL, QUICK, SHORT, StepTimer, Tier

MODEL = {"attention_dropout": 0.1}


PICKLED = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
"""What exchanges objects between ranks."""


@dataclass
class Counts:
    """What happened in a run.

    Attributes:
        measured: grows by one with every measurement of operators.
        pickled: grows by one with every exchange of objects.
        in_windows: how many of these each call of `Engine.train_window` made.
        modules: the modules of the library whose functions `Engine.train_window` entered.
        output: what is printed.
    """

    measured: list[int] = field(default_factory=list)
    pickled: list[str] = field(default_factory=list)
    in_windows: list[int] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    output: io.StringIO = field(default_factory=io.StringIO)


@contextlib.contextmanager
def entered(modules: set[str]) -> Iterator[None]:
    """Collect the modules of the library whose functions this thread enters."""

    def note(frame: Any, event: str, argument: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("hf_helix."):
            modules.add(name)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def counted(cache: str, costs: dict[Tier, float]) -> Iterator[Counts]:
    """Under a clock by which every step takes a second, and estimates that are known: work is counted, not timed."""
    counts = Counts()
    usual, train_window, clock = tuning.measure_profile, Engine.train_window, [0.0]

    def measure(*args: Any, **kwargs: Any) -> Any:
        counts.measured.append(1)
        return usual(*args, **kwargs)

    def counting(name: str) -> Any:
        exchange = getattr(dist, name)

        def exchange_counted(*args: Any, **kwargs: Any) -> Any:
            counts.pickled.append(name)
            return exchange(*args, **kwargs)

        return exchange_counted

    def train_for_a_second(*args: Any, **kwargs: Any) -> Any:
        clock[0] += 1.0
        before = len(counts.pickled)
        with entered(counts.modules):
            losses = train_window(*args, **kwargs)
        counts.in_windows.append(len(counts.pickled) - before)
        return losses

    def timer() -> StepTimer:
        return StepTimer(clock=lambda: clock[0])

    def cost(wanted: Tier, *args: Any, **kwargs: Any) -> float:
        return costs[wanted]

    with (
        mock.patch.dict(os.environ, {"HELIX_CACHE": cache}),
        mock.patch.object(tuning, "measure_profile", measure),
        mock.patch.multiple(dist, **{name: counting(name) for name in PICKLED}),
        mock.patch("hf_helix.tuning.tuner.tuning_cost", cost),
        mock.patch("hf_helix.tuning.tuner.StepTimer", timer),
        mock.patch.object(Engine, "train_window", train_for_a_second),
        hasty(),
        contextlib.redirect_stdout(counts.output),
    ):
        yield counts


def follow(trainer: Any, name: str, counts: Counts) -> list[tuple[int, int]]:
    """For every call of a method: how often was measured until its end, and how often it exchanged objects."""
    usual, calls = getattr(trainer, name), []

    def followed(*args: Any, **kwargs: Any) -> Any:
        before = len(counts.pickled)
        result = usual(*args, **kwargs)
        calls.append((len(counts.measured), len(counts.pickled) - before))
        return result

    setattr(trainer, name, followed)
    return calls


def train(
    folder: str, share: float, cache: str, training: dict[str, Any], helix: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a run found; for every step, how often was measured until then, and objects were exchanged before it and
    within it."""
    with counted(cache, {QUICK: 0.05, SHORT: 1.2, FULL: 2.4}) as counts:
        helix = {**(helix or {"tp_size": 2}), "tuning_share": share}
        model = {**MODEL, "num_hidden_layers": 2 * helix.get("pp_size", 1)}
        trainer: Any = make_trainer(folder, helix, model=model, data={"lengths": (9,)}, training=training)
        before, within = (follow(trainer, name, counts) for name in ("get_batch_samples", "training_step"))
        trainer.train()
    return {
        "measured": [count for count, _ in before],
        "pickled": [count for _, count in before],
        "pickled_within": [count for _, count in within],
        "in_windows": counts.in_windows,
        "modules": counts.modules,
        "tier": trainer.tuning and trainer.tuning.tier,
        "rule": trainer.plan.rule,
        "schedule": trainer.helix.runner.scheduler.name,
        "eval": trainer.evaluate()["eval_loss"],
        "said": said(counts.output),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def loop(cache: str, share: float, steps: int) -> dict[str, Any]:
    """A loop of one's own that adds up gradients: how often was measured until each step, and their norms."""
    with counted(cache, {QUICK: 1.6, SHORT: 2.1, FULL: 4.1}) as counts:
        AcceleratorState._reset_state()
        plugin = HelixPlugin(HelixConfig(tp_size=2, tuning_share=share, cache=share > 0))
        accelerator = Accelerator(cpu=True, parallelism_config=plugin, gradient_accumulation_steps=2)
        model = plugin.prepare(accelerator, tiny(num_hidden_layers=2), seed=3)
        window = [{key: value[None] for key, value in row.items()} for row in sequences(2, lengths=(9,))]
        result, losses, norms = [], [], []
        for _ in range(steps):
            losses.append(model.train_window(window).item())
            result.append(len(counts.measured))
            norms.append(model.engine.gradient_norm().item())
    return {"measured": result, "losses": losses, "norms": norms, "said": said(counts.output)}


def said(output: io.StringIO) -> list[str]:
    """The lines of the library."""
    return [line for line in output.getvalue().splitlines() if line.startswith("hf_helix: ")]
