"""A linear for each expert, with explicit input and weight gradients.

In:   rows sorted by expert, and the number of rows of each expert; without these numbers all have the same.
Out:  the same number of rows.
Must hold: what W finds of an expert's weight and bias is added up over its rows in their order; the host learns how
many rows there are only where each expert's product is a kernel of its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_helix.operators.base import OperatorContext, SplitComputation, Tensors
from hf_helix.operators.experts.moe import RowCounts
from hf_helix.operators.linears.accumulate import DEVICES, add_product, started_gradient
from hf_helix.operators.linears.linear import SMALL

Sizes = Tensor | list[int] | None
"""The rows of every expert: their ends, for the device; their numbers, for the host; None if all are equal."""


class GroupedLinear(SplitComputation):
    """A linear for each expert over its rows: grouped GEMMs.

    Values: rows sorted by expert, and without a capacity the number of each. Output: the same number of rows.

    Args:
        weight: [experts, features out, features in], of this rank's experts.
        row_counts: the numbers of the layer's rows on the host.
        bias: [experts, features out].
        transposed: the weight is [experts, features in, features out].
    """

    def __init__(
        self,
        weight: nn.Parameter,
        row_counts: RowCounts | None = None,
        bias: nn.Parameter | None = None,
        transposed: bool = False,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.transposed = transposed
        self.row_counts = row_counts or RowCounts()

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def cast_parameters(self) -> tuple[Tensor, ...]:
        return self.parameters

    @property
    def trained(self) -> float:
        if self.weight.requires_grad:
            return 1.0
        return SMALL if any(parameter.requires_grad for parameter in self.parameters) else 0.0

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        rows, *sizes = inputs
        rows = ctx.precision.cast_for_matmul(rows)
        bias = None if self.bias is None else ctx.precision.weights.of((self.bias,), rows.dtype)
        return (_grouped(rows, self._matrices(ctx, rows).transpose(1, 2), self._sizes(ctx, rows, sizes), bias),)

    def input_gradient(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        gradient, *sizes = gradients
        return (_grouped(gradient, self._matrices(ctx, gradient), self._sizes(ctx, gradient, sizes)),)

    def weight_gradient(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        gradient, rows, *given = gradients
        rows = ctx.precision.cast_for_matmul(rows)
        sizes = self._sizes(ctx, rows, given)
        if self.weight.requires_grad:
            left, right = (rows, gradient) if self.transposed else (gradient, rows)
            _add_products(started_gradient(self.weight), left, right, sizes)
        if self.bias is not None and self.bias.requires_grad:
            _add_rows(started_gradient(self.bias), gradient, sizes)
        return ()

    def _matrices(self, ctx: OperatorContext, rows: Tensor) -> Tensor:
        """Returns the weight [experts, features out, features in] in the type of the rows."""
        weight = ctx.precision.weights.of((self.weight,), rows.dtype)
        return weight.transpose(1, 2) if self.transposed else weight

    def _sizes(self, ctx: OperatorContext, rows: Tensor, sizes: Sequence[Tensor]) -> Sizes:
        """Returns the numbers of rows in the form that serves these rows."""
        if not sizes:
            return None
        return sizes[0].cumsum(0).int() if _in_one_kernel(rows) else self.row_counts.by_expert(ctx, rows, sizes[0])


def _grouped(rows: Tensor, matrices: Tensor, sizes: Sizes, bias: Tensor | None = None) -> Tensor:
    """Returns the rows of every expert [rows, features in] times its matrix [experts, features in, features out], plus
    its bias [experts, features out]."""
    if sizes is None:
        blocks = rows.unflatten(0, (len(matrices), -1))
        out = torch.bmm(blocks, matrices) if bias is None else torch.baddbmm(bias.unsqueeze(1), blocks, matrices)
        return out.flatten(0, 1)
    if isinstance(sizes, Tensor):
        out = functional.grouped_mm(rows, matrices, offs=sizes)
        return out if bias is None else out.add_(bias[_experts_of(rows, sizes)])
    out = rows.new_empty(len(rows), matrices.shape[2])
    for expert, (piece, made) in enumerate(zip(rows.split(sizes), out.split(sizes), strict=True)):
        if bias is None:
            torch.mm(piece, matrices[expert], out=made)
        else:
            torch.addmm(bias[expert], piece, matrices[expert], out=made)
    return out


def _add_products(total: Tensor, left: Tensor, right: Tensor, sizes: Sizes) -> None:
    """Adds to [experts, features of the left, features of the right] the products of each expert's rows."""
    if sizes is None:
        left, right = (value.unflatten(0, (len(total), -1)) for value in (left, right))
        add_product(total, left.transpose(1, 2), right)
    elif isinstance(sizes, Tensor):
        total += functional.grouped_mm(left.t(), right, offs=sizes)
    else:
        for sum_, ours, theirs in zip(total, left.split(sizes), right.split(sizes), strict=True):
            add_product(sum_, ours.t(), theirs)


def _add_rows(total: Tensor, rows: Tensor, sizes: Sizes) -> None:
    """Adds to [experts, features] the sum of each expert's rows."""
    if sizes is None:
        total += rows.unflatten(0, (len(total), -1)).sum(1, dtype=total.dtype)
    elif isinstance(sizes, Tensor):
        # A product, since sums by index run in no fixed order on a GPU.
        is_of = _experts_of(rows, sizes) == torch.arange(len(total), device=rows.device).unsqueeze(1)
        add_product(total, is_of.to(rows.dtype), rows)
    else:
        for sum_, piece in zip(total, rows.split(sizes), strict=True):
            sum_ += piece.sum(0, dtype=total.dtype)


def _experts_of(rows: Tensor, ends: Tensor) -> Tensor:
    """Returns the expert of every row, on the device."""
    return torch.searchsorted(ends, torch.arange(len(rows), device=rows.device, dtype=ends.dtype), right=True)


def _in_one_kernel(rows: Tensor) -> bool:
    """Whether torch has a grouped GEMM for these; otherwise each expert's runs by itself, and the host needs sizes."""
    return rows.device.type in DEVICES and rows.dtype is torch.bfloat16
