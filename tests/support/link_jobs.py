"""Emulated links, for a `Cluster`. Named "support.link_jobs:function" there."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import torch
from support.jobs import _microbatches, make_trainer
from support.tuning_jobs import hasty

from hf_helix.operators.communication.transport import Recorder
from hf_helix.report.comparison import format_comparison, format_speeds, predict_around
from hf_helix.report.scorecard import format_scorecard
from hf_helix.tuning.measure.overlap import forget_gradients, transports

MODEL = {"num_hidden_layers": 4}


def windows(folder: str, helix: dict[str, Any], link: str) -> dict[str, Any]:
    """The same window without a link and with one: losses, gradients, and what a recorder and the link count."""
    found: dict[str, Any] = {}
    for name in (None, link):
        trainer = make_trainer(folder, {**helix, "plan": "greedy", "link": name}, model=MODEL)
        trainer.model.train()
        window, runner, mesh = _microbatches(trainer, 3), trainer.helix.runner, trainer.helix.mesh
        start = time.perf_counter()
        losses = runner.train_window(window)
        seconds = time.perf_counter() - start
        gradients = [parameter.grad.clone() for parameter in runner.stage.placements if parameter.grad is not None]
        forget_gradients(runner)
        found[str(name)] = {"losses": torch.stack(losses), "gradients": gradients, "seconds": seconds}
        if mesh.link is not None:
            with_sums = mesh.link.out.bytes
            recorders = [Recorder(axis.transport) for axis in mesh.axes]
            with transports(mesh.axes, recorders):
                runner.train_window(window, complete=False)
            forget_gradients(runner)
            found |= {
                "link": mesh.link.out.bytes - with_sums,
                "sums": 2 * with_sums - mesh.link.out.bytes,
                "recorded": sum(recorder.bytes_sent for recorder in recorders),
                "tokens": sum(batch.num_tokens for batch in window),
                "parameters": sum(parameter.nbytes for parameter in runner.stage.placements),
                "hidden": trainer.model.config.hidden_size,
            }
        trainer.helix.close()
    bare, linked = found.pop("None"), found.pop(link)
    found["same_losses"] = torch.equal(bare["losses"], linked["losses"])
    found["same_gradients"] = all(map(torch.equal, bare["gradients"], linked["gradients"]))
    return {**found, "seconds": linked["seconds"], "num_gradients": len(linked["gradients"])}


def even(folder: str) -> dict[str, Any]:
    """Train on an even link, compare plans; what was measured, and everything that was said."""
    helix = {"tp_size": 2, "plan": "search", "link": "even", "cache": False}
    training = {"max_steps": 2, "gradient_accumulation_steps": 3}
    trainer = make_trainer(folder, helix, model=MODEL, training=training)
    said = io.StringIO()
    with hasty(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        trainer.train()
        compared = trainer.compare_plans(["sequential"], repeats=1)
        speeds = format_speeds(predict_around(compared), compared)
    trainer.create_model_card()
    card = Path(folder, "README.md")
    return {
        "rate": trainer.helix.mesh.link.rate,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "said": said.getvalue(),
        "table": format_comparison(compared),
        "speeds": speeds,
        "scorecard": format_scorecard(compared.overlaps["search"], "search"),
        "card": card.read_text() if trainer.is_world_process_zero() else "",
        "about": dict(compared.profile.about),
        "bytes": dict(compared.profile.bytes),
        "steps": {rule: overlap.step for rule, overlap in compared.overlaps.items()},
        "bare": dict(compared.bare),
    }
