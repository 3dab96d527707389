"""Low-rank adapters beside a linear (LoRA, arXiv 2106.09685), with explicit input and weight gradients.

In:   rows [tokens, features] of what the linear reads and gives, and of their gradients.
Out:  the same with the adapter's part added.
Must hold: as for `Linear`: W reads only what forward read and the output gradient. Dropout is drawn anew where it is
needed, from the call's seed, so no mask is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_helix.operators.base import Call
from hf_helix.operators.linears.accumulate import add_product, add_to_bias_gradients, add_to_gradients


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a linear: `scaling * up(down(dropout(rows)))`.

    A rank may hold a part of the features that go in, and then adds a partial sum; or a part of those that come out.

    Attributes:
        down: [rank, features in].
        up: [features out, rank].
        bias: of `up`.
        dropout: the probability.
    """

    down: Tensor
    up: Tensor
    bias: Tensor | None
    scaling: float
    dropout: float = 0.0

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(p for p in (self.down, self.up, self.bias) if p is not None)

    def dtype(self, call: Call) -> torch.dtype:
        """What the adapter computes in: as in PEFT the type of its weights, unless there is autocast."""
        return call.precision.autocast_dtype or self.down.dtype

    def add(self, total: Tensor, rows: Tensor, call: Call, mask: Tensor | None, adds_bias: bool) -> None:
        """Adds the adapter's part to what the linear gives.

        Args:
            total: what the linear gives [tokens, features out]; written to.
            rows: what the linear reads [tokens, features in].
            call: the micro-batch's call of the linear.
            mask: what dropout multiplies `rows` with, see `dropout_masks`; None without dropout.
            adds_bias: as of `Linear`.
        """
        dtype = self.dtype(call)
        low = self._between(_masked(rows.to(dtype), mask), call)
        add_product(total, low, call.precision.weights.of((self.up,), dtype).t())
        if self.bias is not None and adds_bias:
            total.add_(call.precision.weights.of((self.bias,), dtype), alpha=self.scaling)

    def add_input_gradient(self, total: Tensor, gradient: Tensor, call: Call, mask: Tensor | None) -> None:
        """Adds the adapter's part to the gradient of what the linear reads.

        Args:
            total: the gradient of `rows` [tokens, features in]; written to.
            gradient: that of what the linear gives [tokens, features out].
            call: as of `add`.
            mask: as of `add`.
        """
        below, down = self._below(gradient, call), call.precision.weights.of((self.down,), self.dtype(call))
        if mask is None:
            add_product(total, below, down)
        else:
            total += (below @ down) * mask

    def add_weight_gradients(self, rows: Tensor, gradient: Tensor, call: Call, mask: Tensor | None) -> None:
        """Adds to the gradients of those of the adapter's own weights that are trained.

        Args:
            rows: what the linear read [tokens, features in].
            gradient: that of what the linear gave [tokens, features out].
            call: as of `add`.
            mask: as of `add`.
        """
        rows = _masked(rows.to(self.dtype(call)), mask)
        if self.up.requires_grad:
            add_to_gradients((self.up,), gradient.to(rows.dtype).t(), self._between(rows, call))
        if self.bias is not None and self.bias.requires_grad:
            add_to_bias_gradients((self.bias,), gradient, self.scaling)
        if self.down.requires_grad:
            add_to_gradients((self.down,), self._below(gradient, call).t(), rows)

    def _between(self, rows: Tensor, call: Call) -> Tensor:
        """What `up` reads [tokens, rank]; so narrow that it is computed anew rather than kept."""
        return (rows @ call.precision.weights.of((self.down,), rows.dtype).t()).mul_(self.scaling)

    def _below(self, gradient: Tensor, call: Call) -> Tensor:
        """The gradient of what `down` gives [tokens, rank]."""
        dtype = self.dtype(call)
        return (gradient.to(dtype) @ call.precision.weights.of((self.up,), dtype)).mul_(self.scaling)


class Adapters(Protocol):
    """The adapters beside a linear."""

    def adapters(self) -> Sequence[LowRank]:
        """Returns those that are switched on, whenever it is asked."""

    def all_adapters(self) -> Sequence[LowRank]:
        """Returns those that may be switched on."""


def dropout_masks(
    call: Call, adapters: Sequence[LowRank], tokens: int, device: torch.device
) -> Iterator[Tensor | None]:
    """Yields what dropout multiplies the rows of each adapter with [tokens, features in]; None for an adapter without
    dropout. A call gets the same masks whenever it asks.

    Args:
        call: whose seed the masks are drawn from.
        adapters: those that are switched on.
        tokens: how many rows there are.
        device: where the masks are drawn.
    """
    generator: torch.Generator | None = None
    for adapter in adapters:
        mask = None
        if adapter.dropout:
            generator = generator or torch.Generator(device).manual_seed(call.seed)
            kept = 1 - adapter.dropout
            mask = torch.empty(tokens, adapter.down.shape[1], dtype=adapter.dtype(call), device=device)
            mask.bernoulli_(kept, generator=generator).div_(kept or 1.0)
        yield mask


def _masked(rows: Tensor, mask: Tensor | None) -> Tensor:
    return rows if mask is None else rows * mask
