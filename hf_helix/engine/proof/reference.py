"""The unsplit Transformers model: its own forward and backward on single batches.

In:   a whole model, and batches.
Out:  losses, gradients by name and logits; on demand those of the model in fp64.
Must hold: the given model is left as it was, and nothing of hf_helix computes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_helix.engine.proof.samples import ITEMS, Batch
from hf_helix.models.copies import copy_module

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What a model gives for the batches of a window.

    Attributes:
        losses: the loss of every batch.
        gradients: the gradients of the sum of the losses, by the names of the parameters, in fp64 on the host.
        logits: the logits of the first batch [batch, sequence, vocabulary], likewise.
    """

    losses: tuple[float, ...]
    gradients: Gradients
    logits: Tensor


class Unsplit:
    """An unsplit model, which runs every batch once.

    Args:
        model: the model; a copy of it is run.
        device: where it runs.
        dtype: the type of its weights and activations.

    Attributes:
        model: the copy.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.model = copy_module(model).to(device=device, dtype=dtype)
        self._known: dict[int, tuple[Batch, Outcome]] = {}  # by identity; the batch is kept, so that it stays unique
        self._exact: Unsplit | None = None

    def exact(self) -> Unsplit:
        """Returns the same model in fp64."""
        if self._exact is None:
            self._exact = Unsplit(self.model, self.model.device, torch.float64)
            self._exact.model.set_experts_implementation("eager")  # grouped products have no fp64
        return self._exact

    def run(self, batches: Sequence[Batch]) -> Outcome:
        """Returns the losses, the sum of the gradients, and the logits of the first batch."""
        outcomes = [self._run_one(batch) for batch in batches]
        gradients = add_up(outcome.gradients for outcome in outcomes)
        return Outcome(tuple(outcome.losses[0] for outcome in outcomes), gradients, outcomes[0].logits)

    def draws(self, batch: Batch) -> bool:
        """Returns whether the model draws random numbers: whether two runs of a batch differ by more than rounding."""
        losses = []
        with torch.no_grad():
            for seed in (1, 2):
                torch.manual_seed(seed)
                losses.append(float(self.model(**batch, num_items_in_batch=ITEMS, use_cache=False).loss))
        return abs(losses[0] - losses[1]) > 1e-6 * abs(losses[0])

    def _run_one(self, batch: Batch) -> Outcome:
        if id(batch) in self._known:
            return self._known[id(batch)][1]
        self.model.zero_grad()
        # As the Trainer does: with a cache, Transformers does not look for documents in a row.
        out = self.model(**batch, num_items_in_batch=ITEMS, use_cache=False)
        out.loss.backward()
        gradients = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).double().cpu()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        outcome = Outcome((float(out.loss.detach()),), gradients, out.logits.detach().double().cpu())
        self._known[id(batch)] = batch, outcome
        return outcome


def add_up(parts: Iterable[Gradients]) -> dict[str, Tensor]:
    """Returns the sum of gradients, name by name."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total
