"""Low-rank adapters of a linear of every expert (LoRA), with explicit input and weight gradients.

In:   rows sorted by expert of the linear's input and output, and of their gradients.
Out:  the same with the adapter's part added.
Must hold: as for `GroupedLinear`. The matrices of all experts lie in two, as in PEFT's `ParamWrapper`. Two products of
the rank's width take the place of a merged weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.base import OperatorContext
from hf_helix.operators.experts.grouped_products import Sizes, add_grouped, add_products, grouped
from hf_helix.operators.linears.accumulate import started_gradient

MULTIPLE = 8
"""A grouped GEMM takes rows of a multiple of 16 bytes: 8 elements in half precision."""


@dataclass(frozen=True)
class GroupedLowRank:
    """An adapter's addition to a parameter with a matrix for each expert: `scaling * up @ down`.

    Attributes:
        down: [experts * rank, features in]: one expert after the other.
        up: [features out, rank * experts]: for each column of rank, the experts side by side.
        rank: of an expert's addition.
    """

    down: Tensor
    up: Tensor
    rank: int
    scaling: float

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        return self.down, self.up

    def add(self, total: Tensor, rows: Tensor, sizes: Sizes, ctx: OperatorContext) -> None:
        """Adds the adapter's part to the linear's output.

        Args:
            total: the linear's output [rows, features out]; written to.
            rows: the linear's input [rows, features in], in the type of the products.
            sizes: the rows of every expert.
            ctx: the linear's, of the micro-batch.
        """
        down, up = self._matrices(ctx, rows.dtype, sizes)
        add_grouped(total, self._scaled(rows, down.transpose(1, 2), sizes), up.transpose(1, 2), sizes)

    def add_input_gradient(self, total: Tensor, gradient: Tensor, sizes: Sizes, ctx: OperatorContext) -> None:
        """Adds the adapter's part to the gradient of the linear's input.

        Args:
            total: the gradient of the input [rows, features in]; written to.
            gradient: of the linear's output [rows, features out].
            sizes: the rows of every expert.
            ctx: see `add`.
        """
        down, up = self._matrices(ctx, gradient.dtype, sizes)
        add_grouped(total, self._scaled(gradient, up, sizes), down, sizes)

    def add_weight_gradients(self, rows: Tensor, gradient: Tensor, sizes: Sizes, ctx: OperatorContext) -> None:
        """Adds to the gradients of the adapter's trained weights.

        Args:
            rows: the linear's input [rows, features in].
            gradient: of the linear's output [rows, features out].
            sizes: the rows of every expert.
            ctx: see `add`.
        """
        down, up = self._matrices(ctx, rows.dtype, sizes)
        if self.up.requires_grad:  # transposed: BLAS is twice as fast with the wide rows on the right
            found = torch.zeros(*up.shape[::2], up.shape[1], dtype=self.up.dtype, device=up.device)
            add_products(found, self._scaled(rows, down.transpose(1, 2), sizes), gradient, sizes)
            by_expert = started_gradient(self.up).unflatten(1, (self.rank, -1)).permute(2, 1, 0)
            by_expert += found[:, : self.rank]
        if self.down.requires_grad:
            found = torch.zeros(down.shape, dtype=self.down.dtype, device=down.device)
            add_products(found, self._scaled(gradient, up, sizes), rows, sizes)
            by_expert = started_gradient(self.down).unflatten(0, (-1, self.rank))
            by_expert += found[:, : self.rank]

    def _scaled(self, rows: Tensor, matrices: Tensor, sizes: Sizes) -> Tensor:
        """The values between the two products [rows, rank]; narrow enough to compute anew rather than keep."""
        return grouped(rows, matrices, sizes).mul_(self.scaling)

    def _matrices(self, ctx: OperatorContext, dtype: torch.dtype, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Returns [experts, rank, features in] and [experts, features out, rank] in a type, the same in a window; for a
        grouped GEMM the rank is padded with zeros."""
        weights, padding = ctx.precision.weights, -self.rank % MULTIPLE if isinstance(sizes, Tensor) else 0

        def make() -> tuple[Tensor, Tensor]:
            down = weights.of((self.down,), dtype).unflatten(0, (-1, self.rank))
            up = weights.of((self.up,), dtype).unflatten(1, (self.rank, -1)).permute(2, 0, 1)
            return functional.pad(down, (0, 0, 0, padding)), functional.pad(up, (0, padding)).contiguous()

        matrices: Any = weights.once(("experts", padding, dtype, id(self.down), id(self.up)), make)
        return matrices


class GroupedAdapters(Protocol):
    """The adapters of a parameter with a matrix for each expert."""

    def adapters(self) -> Sequence[GroupedLowRank]:
        """Returns the active adapters, at every call anew."""

    def all_adapters(self) -> Sequence[GroupedLowRank]:
        """Returns all adapters that may become active."""
