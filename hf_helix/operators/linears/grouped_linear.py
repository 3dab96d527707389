"""A linear for each expert, with explicit input and weight gradients.

In:   rows sorted by expert, and how many each expert has; without these all have as many.
Out:  as many rows.
Must hold: what W finds of an expert's weight is added up over its rows in their order; the host learns how many rows
there are only where each expert's product is a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_helix.operators.base import Call, SplitComputation, Tensors
from hf_helix.operators.linears.accumulate import add_product
from hf_helix.operators.moe.row_counts import RowCounts

Sizes = Tensor | list[int] | None
"""The rows of every expert: where they end, for the device; how many, for the host; None where all have as many."""


class GroupedLinear(SplitComputation):
    """A linear for each expert over its rows: grouped GEMMs.

    Values: rows sorted by expert, and without a capacity how many each has. Output: as many rows.

    Args:
        weight: [experts, features out, features in], of this rank's experts.
    """

    def __init__(self, weight: nn.Parameter, row_counts: RowCounts | None = None) -> None:
        self.weight = weight
        self.row_counts = row_counts or RowCounts()

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    @property
    def trained(self) -> float:
        return float(self.weight.requires_grad)

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        rows, *sizes = inputs
        rows = call.precision.cast_for_matmul(rows)
        weight = call.precision.weights.of((self.weight,), rows.dtype)
        return (_grouped(rows, weight.transpose(1, 2), self._sizes(call, rows, sizes)),)

    def input_gradient(self, call: Call, *gradients: Tensor) -> Tensors:
        gradient, *sizes = gradients
        weight = call.precision.weights.of((self.weight,), gradient.dtype)
        return (_grouped(gradient, weight, self._sizes(call, gradient, sizes)),)

    def weight_gradient(self, call: Call, *gradients: Tensor) -> Tensors:
        gradient, rows, *sizes = gradients
        if self.weight.requires_grad:
            if self.weight.grad is None:
                self.weight.grad = torch.zeros_like(self.weight)
            rows = call.precision.cast_for_matmul(rows)
            _add_products(self.weight.grad, gradient, rows, self._sizes(call, rows, sizes))
        return ()

    def _sizes(self, call: Call, rows: Tensor, sizes: Sequence[Tensor]) -> Sizes:
        """In the form that serves these rows."""
        if not sizes:
            return None
        return sizes[0].cumsum(0).int() if _in_one_kernel(rows) else self.row_counts.by_expert(call, sizes[0])


def _grouped(rows: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
    """The rows of every expert times its matrix [experts, in, out]."""
    if sizes is None:
        return torch.bmm(rows.unflatten(0, (len(weight), -1)), weight).flatten(0, 1)
    if isinstance(sizes, Tensor):
        return functional.grouped_mm(rows, weight, offs=sizes)
    out = rows.new_empty(len(rows), weight.shape[2])
    for piece, made, matrix in zip(rows.split(sizes), out.split(sizes), weight, strict=True):
        torch.mm(piece, matrix, out=made)
    return out


def _add_products(total: Tensor, gradients: Tensor, rows: Tensor, sizes: Sizes) -> None:
    """Add to [experts, out, in] what each expert's rows give."""
    if sizes is None:
        blocks = (value.unflatten(0, (len(total), -1)) for value in (gradients, rows))
        gradients, rows = blocks
        add_product(total, gradients.transpose(1, 2), rows)
    elif isinstance(sizes, Tensor):
        total += functional.grouped_mm(gradients.t(), rows, offs=sizes)
    else:
        for sum_, left, right in zip(total, gradients.split(sizes), rows.split(sizes), strict=True):
            add_product(sum_, left.t(), right)


def _in_one_kernel(rows: Tensor) -> bool:
    """Whether torch has a grouped GEMM for these; otherwise each expert's runs by itself, and the host needs sizes."""
    return rows.device.type == "cuda" and rows.dtype is torch.bfloat16
