"""The same windows with and without recompute, for a `Cluster`: "support.recompute_jobs:function" there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from support.jobs import make_trainer
from support.pipeline_jobs import make, runner_of, window_of
from support.tuning_jobs import hasty

from hf_helix.tuning.measure.memory import peak_bytes
from hf_helix.tuning.measure.overlap import trace_window

MODES = ("none", "selective", "full")


def compare(
    folder: str,
    helix: dict[str, Any],
    model: dict[str, Any],
    cases: Sequence[tuple[str, str]],
    count: int = 3,
    lengths: Sequence[int] = (17, 9, 13),
    kind: str = "dense",
    training: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """A window for each mode and (plan, schedule): what differs from the same without recompute."""
    usual: dict[tuple[str, str], dict[str, Any]] = {}
    rows = []
    for mode in MODES:
        trainer = make(folder, {**helix, "plan": "sequential", "recompute": mode}, model, training)
        trainer.model.train()
        for case in cases:
            with hasty():
                runner = runner_of(trainer, *case)
            losses = runner.train_window(window_of(trainer, count, 2, lengths, kind))
            found = {
                "losses": [loss.item() for loss in losses],
                "gradients": {
                    n: p.grad.float().numpy() for n, p in trainer.model.named_parameters() if p.grad is not None
                },
                "meters": [m.read(trainer.mesh.device).tolist() for u in runner.whole.model.values() for m in u.meters],
            }
            trainer.model.zero_grad()
            expected = usual.setdefault(case, found)
            names = expected["gradients"]
            rows.append(
                {
                    "what": (mode, *case),
                    "losses": found["losses"] == expected["losses"],
                    "differing": [n for n in names if not np.array_equal(names[n], found["gradients"][n])],
                    "meters": found["meters"] == expected["meters"],
                    "compared": len(names),
                    "read": any(map(sum, found["meters"])),
                }
            )
        trainer.runner.executor.streams.close()
    return rows


def peaks(folder: str, helix: dict[str, Any], model: dict[str, Any], plans: Sequence[str], **window: Any) -> Any:
    """Bytes alive at most on this rank, by plan and mode."""
    found: dict[str, dict[str, int]] = {plan: {} for plan in plans}
    for mode in MODES:
        trainer = make(folder, {**helix, "plan": "sequential", "recompute": mode}, model)
        trainer.model.train()
        for plan in plans:
            runner = runner_of(trainer, plan, window.get("schedule", "w"))
            found[plan][mode] = peak_bytes(runner, window_of(trainer, window["count"], 1, (window["length"],)))
        trainer.runner.executor.streams.close()
    return found


def train_and_measure(
    folder: str, helix: dict[str, Any] | None, marked: bool = False, **options: Any
) -> dict[str, Any]:
    """Train a little: losses, which operators ran again in which layer, and the most bytes alive.

    Args:
        marked: switch checkpointing on in the model, as a user may.
    """
    from support.models import tiny
    from transformers import Trainer

    trainer: Any
    if marked:
        from support.models import arguments, sequences

        from hf_helix import HelixConfig, HelixTrainer

        model = tiny(**options.get("model", {}))
        model.gradient_checkpointing_enable()
        args = arguments(folder, **options.get("training", {}))
        trainer = HelixTrainer(
            model=model, args=args, train_dataset=sequences(60), helix_config=HelixConfig(**helix or {})
        )
    else:
        trainer = make_trainer(folder, helix, **options)
    trainer.train()
    found = {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
    if helix is None:
        assert type(trainer) is Trainer
        return found
    spans = trace_window(trainer.runner, trainer._engine.last_window).spans
    again = [span.label.split(".", 1)[1] for span in spans if span.label.endswith(".again")]
    return found | {
        "again": sorted({".".join(label.split(".")[:2]) for label in again}),
        "memory": trainer.measure_memory(),
        "about": dict(trainer._engine.tuner.fingerprint),
    }
