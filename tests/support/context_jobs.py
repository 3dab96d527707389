"""Runs in which ranks share a sequence, measured."""

from __future__ import annotations

from typing import Any

from support.jobs import make_trainer
from support.pipeline_jobs import make, runner_of, window_of

from hf_helix.measure.memory import peak_bytes
from hf_helix.measure.overlap import record_moves


def measured(folder: str, helix: dict[str, Any], model: dict[str, Any], length: int, count: int) -> dict[str, Any]:
    """The most bytes of activations alive on this rank, and what it sends round the ring, in a window."""
    trainer = make(folder, helix, model)
    runner = runner_of(trainer, "sequential", "folded_1f1b")
    window = window_of(trainer, count, rows=1, lengths=(length,))
    moved = record_moves(runner, window)
    result = {
        "peak": peak_bytes(runner, window),
        "sent": sum(transport.bytes_sent for transport in moved),
        "steps": sorted({move.name for transport in moved for move in transport.moved}),
    }
    trainer.helix.runner.executor.streams.close()
    return result


def long_sequence(folder: str, helix: dict[str, Any], model: dict[str, Any], length: int) -> list[float]:
    """Losses of a few steps on sequences of so many tokens."""
    data = {"count": 4, "lengths": (length,)}
    training = {"max_steps": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer = make_trainer(folder, helix, model=model, data=data, training=training)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
