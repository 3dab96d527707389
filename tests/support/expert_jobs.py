"""Mixtures of experts that drop or draw, and the same by plain loops over the unsplit model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from support.models import arguments, tiny
from support.pipeline_jobs import batches_of, items_in, make, runner_of, whole_gradients, window_of
from torch import Tensor

from hf_helix.engine.diagnostics import router_entries
from hf_helix.runtime.microbatch import derive_seed


def kept_in_order(chosen: Tensor, rows: int, num_experts: int, factor: float) -> Tensor:
    """Which choices [tokens, k] of a batch find room: first choices first, then position by position of all rows."""
    tokens, choices = chosen.shape
    room = [math.ceil(factor * tokens * choices / num_experts)] * num_experts
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    length = tokens // rows
    for choice in range(choices):
        for position in range(length):
            for row in range(rows):
                token = row * length + position
                expert = int(chosen[token, choice])
                if room[expert]:
                    room[expert] -= 1
                    kept[token, choice] = True
    return kept


def reference_that_drops(model: dict[str, Any], count: int, lengths: Sequence[int], factor: float) -> dict[str, Any]:
    """Losses and gradients of the unsplit model, whose experts never see what does not fit; and how much that is."""
    made = tiny(**model).train()
    batches = batches_of(count, lengths=lengths)
    dropped: list[float] = []
    for layer in made.model.layers:
        experts = layer.mlp.experts

        def drop(_: Any, given: tuple[Tensor, Tensor, Tensor], num_experts: int = len(experts.gate_up_proj)) -> Any:
            hidden, chosen, weights = given
            kept = kept_in_order(chosen, 2, num_experts, factor)
            dropped.append(1 - kept.float().mean().item())
            return hidden, chosen, weights * kept

        experts.register_forward_pre_hook(drop)
    losses = []
    for batch in batches:
        loss = made(**batch, num_items_in_batch=items_in(batches), use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    gradients = {name: parameter.grad.numpy().copy() for name, parameter in made.named_parameters()}
    return {"losses": losses, "gradients": gradients, "dropped": sum(dropped) / len(dropped)}


def reference_that_draws(model: dict[str, Any], count: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Losses and gradients of the unsplit model, one row at a time, whose routers draw what one rank of ours draws."""
    made = tiny(**model).train()
    batches = batches_of(count, rows=1, lengths=lengths)
    seed, place = arguments("unused").seed, 0
    for number, layer in enumerate(made.model.layers):

        def draw_alike(*_: Any, unit: str = f"layers.{number}") -> None:
            torch.manual_seed(derive_seed(seed, 0, place, unit, "mlp.router"))

        layer.mlp.register_forward_pre_hook(draw_alike)
    losses = []
    for place, batch in enumerate(batches):  # noqa: B007  (the hooks read it)
        loss = made(**batch, num_items_in_batch=items_in(batches), use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    gradients = {name: parameter.grad.numpy().copy() for name, parameter in made.named_parameters()}
    return {"losses": losses, "gradients": gradients}


def windows(
    folder: str,
    helix: dict[str, Any],
    model: dict[str, Any],
    plans: Sequence[str],
    lengths: Sequence[int],
    rows: int = 2,
) -> list[dict[str, Any]]:
    """A window of three micro-batches for each plan: losses, whole gradients, and what the routers did."""
    trainer = make(folder, helix, model)
    trainer.model.train()
    result = []
    for plan in plans:
        runner = runner_of(trainer, plan, "folded_1f1b")
        window = window_of(trainer, 3, rows, lengths)
        losses = [loss.item() for loss in runner.train_window(window)]
        capped = trainer.helix_config.expert_capacity_factor is not None
        entries = router_entries(runner.stage, trainer.helix.mesh, capped)
        result.append({"losses": losses, "gradients": whole_gradients(trainer), "entries": entries})
        trainer.model.zero_grad()
    trainer.helix.runner.executor.streams.close()
    return result
