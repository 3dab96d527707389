"""Windows in bf16 through the unsplit model, and what a window in bf16 moves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from support.models import tiny
from support.pipeline_jobs import Batch, items_in, make, window_of

from hf_helix.operators.communication.transport import Recorder

Window = dict[str, Any]


def unsplit(model: dict[str, Any], batches: Sequence[Batch], *, autocast: bool = False, exact: bool = False) -> Window:
    """Losses and gradients of a window.

    Args:
        autocast: as the stock Trainer with `bf16=True`.
        exact: in fp64, from the same weights.
    """
    made = tiny(**model).train()
    if exact:
        made.set_experts_implementation("eager")  # the grouped GEMMs of torch take no fp64
        for parameter in made.parameters():
            parameter.data = parameter.data.double()
    count = items_in(batches)
    losses = []
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = made(**batch, num_items_in_batch=count, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    gradients = {name: parameter.grad.double().numpy().copy() for name, parameter in made.named_parameters()}
    return {"losses": losses, "gradients": gradients}


def types(folder: str, helix: dict[str, Any], model: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    """The types of what a window moves between tensor-parallel ranks with how often, and of what it leaves."""
    trainer = make(folder, helix, model, training)
    trainer.model.train()
    axis = trainer.mesh.tp
    axis.transport = recorder = Recorder(axis.transport)
    trainer.runner.train_window(window_of(trainer, 1, 2, (9,)), complete=False)
    trainer.runner.executor.streams.synchronize()
    axis.transport = recorder.inner
    trainer.runner.executor.streams.close()
    moved: dict[str, int] = {}
    for move in recorder.moved:
        name = str(move.value[1])
        moved[name] = moved.get(name, 0) + 1
    gradients = {str(parameter.grad.dtype) for parameter in trainer.model.parameters()}
    return {"moved": moved, "gradients": gradients, "about": trainer._engine.tuner.fingerprint}
