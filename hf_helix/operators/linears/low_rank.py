"""Low-rank adapters of a linear (LoRA, arXiv 2106.09685), with explicit input and weight gradients.

In:   rows [tokens, features] of the linear's input and output, and of their gradients.
Out:  the same with the adapter's part added.
Must hold: as for `Linear`, W reads only the inputs of forward and the output gradient. Dropout masks are drawn anew at
every use, from the context's seed, so none is kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_helix.operators.base import OperatorContext
from hf_helix.operators.linears.accumulate import add_product, add_to_bias_gradients, add_to_gradients
from hf_helix.operators.random_numbers import generator


@dataclass(frozen=True)
class LowRank:
    """An adapter's addition to a linear: `scaling * up(down(dropout(rows)))`.

    A rank may hold a part of the input features, and then adds a partial sum; or a part of the output features.

    Attributes:
        down: [rank, features in].
        up: [features out, rank].
        bias: of `up`.
        dropout: the probability.
        magnitude: the trained lengths of rows [features out] (DoRA), see `hf_helix.operators.linears.dora`; None for
            plain LoRA.
    """

    down: Tensor
    up: Tensor
    bias: Tensor | None
    scaling: float
    dropout: float = 0.0
    magnitude: Tensor | None = None

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(p for p in (self.down, self.up, self.bias, self.magnitude) if p is not None)

    def dtype(self, ctx: OperatorContext) -> torch.dtype:
        """Returns the type of the adapter's computation: as in PEFT the type of its weights, unless there is
        autocast."""
        return ctx.precision.autocast_dtype or self.down.dtype

    def add(self, total: Tensor, rows: Tensor, ctx: OperatorContext, mask: Tensor | None, adds_bias: bool) -> None:
        """Adds the adapter's part to the linear's output.

        Args:
            total: the linear's output [tokens, features out]; written to.
            rows: the linear's input [tokens, features in].
            ctx: the linear's, of the micro-batch.
            mask: the dropout mask of `rows`, see `dropout_masks`; None without dropout.
            adds_bias: see `Linear`.
        """
        dtype = self.dtype(ctx)
        low = self._between(masked(rows.to(dtype), mask), ctx)
        add_product(total, low, ctx.precision.weights.of((self.up,), dtype).t())
        if self.bias is not None and adds_bias:
            total.add_(ctx.precision.weights.of((self.bias,), dtype), alpha=self.scaling)

    def below(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of the linear's own product, from the gradient of its output."""
        return gradient

    def add_input_gradient(self, total: Tensor, gradient: Tensor, ctx: OperatorContext, mask: Tensor | None) -> None:
        """Adds the adapter's part to the gradient of the linear's input.

        Args:
            total: the gradient of `rows` [tokens, features in]; written to.
            gradient: of the linear's output [tokens, features out].
            ctx: see `add`.
            mask: see `add`.
        """
        below, down = self._below(gradient, ctx), ctx.precision.weights.of((self.down,), self.dtype(ctx))
        if mask is None:
            add_product(total, below, down)
        else:
            total += (below @ down) * mask

    def add_weight_gradients(self, rows: Tensor, gradient: Tensor, ctx: OperatorContext, mask: Tensor | None) -> None:
        """Adds to the gradients of the adapter's trained weights.

        Args:
            rows: the linear's input [tokens, features in].
            gradient: of the linear's output [tokens, features out].
            ctx: see `add`.
            mask: see `add`.
        """
        rows = masked(rows.to(self.dtype(ctx)), mask)
        if self.up.requires_grad:
            add_to_gradients((self.up,), gradient.to(rows.dtype).t(), self._between(rows, ctx))
        if self.bias is not None and self.bias.requires_grad:
            add_to_bias_gradients((self.bias,), gradient, self.scaling)
        if self.down.requires_grad:
            add_to_gradients((self.down,), self._below(gradient, ctx).t(), rows)

    def _between(self, rows: Tensor, ctx: OperatorContext) -> Tensor:
        """The input of `up` [tokens, rank]; narrow enough to compute anew rather than keep."""
        return (rows @ ctx.precision.weights.of((self.down,), rows.dtype).t()).mul_(self.scaling)

    def _below(self, gradient: Tensor, ctx: OperatorContext) -> Tensor:
        """The gradient of the output of `down` [tokens, rank]."""
        dtype = self.dtype(ctx)
        return (gradient.to(dtype) @ ctx.precision.weights.of((self.up,), dtype)).mul_(self.scaling)


class Adapters(Protocol):
    """The adapters of a linear."""

    def adapters(self) -> Sequence[LowRank]:
        """Returns the active adapters, at every call anew."""

    def all_adapters(self) -> Sequence[LowRank]:
        """Returns all adapters that may become active."""


def dropout_masks(
    ctx: OperatorContext, adapters: Sequence[LowRank], tokens: int, device: torch.device
) -> Iterator[Tensor | None]:
    """Yields the dropout mask for the rows of each adapter [tokens, features in]; None for an adapter without dropout.
    A context always gets the same masks.
    """
    drawn: torch.Generator | None = None
    for adapter in adapters:
        mask = None
        if adapter.dropout:
            drawn = drawn or generator(device, ctx.seed)
            kept = 1 - adapter.dropout
            mask = torch.empty(tokens, adapter.down.shape[1], dtype=adapter.dtype(ctx), device=device)
            mask.bernoulli_(kept, generator=drawn).div_(kept or 1.0)
        yield mask


def masked(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Returns rows after dropout."""
    return rows if mask is None else rows * mask
