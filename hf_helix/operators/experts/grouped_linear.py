"""A linear for each expert, with explicit input and weight gradients.

In:   rows sorted by expert, and the number of rows of each expert; without these numbers all have the same.
Out:  the same number of rows.
Must hold: what W finds of an expert's weight and bias is added up over its rows in their order; the host learns how
many rows there are only where each expert's product is a kernel of its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_helix.operators.base import OperatorContext, SplitComputation, Tensors
from hf_helix.operators.experts.grouped_low_rank import GroupedAdapters, GroupedLowRank
from hf_helix.operators.experts.grouped_products import Sizes, add_products, add_rows, grouped
from hf_helix.operators.experts.moe import RowCounts
from hf_helix.operators.linears.accumulate import DEVICES, started_gradient
from hf_helix.operators.linears.linear import SMALL
from hf_helix.planning.graph.operator import Part


class GroupedLinear(SplitComputation):
    """A linear for each expert over its rows: grouped GEMMs.

    Values: rows sorted by expert, and without a capacity the number of each. Output: the same number of rows.

    Args:
        weight: [experts, features out, features in], of this rank's experts.
        row_counts: the numbers of the layer's rows on the host.
        bias: [experts, features out].
        transposed: the weight is [experts, features in, features out].
        adapters: of the weight; None for none.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        row_counts: RowCounts | None = None,
        bias: nn.Parameter | None = None,
        transposed: bool = False,
        adapters: GroupedAdapters | None = None,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.transposed = transposed
        self.row_counts = row_counts or RowCounts()
        self._adapters = adapters

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        own = (self.weight,) if self.bias is None else (self.weight, self.bias)
        return *own, *self._of_adapters()

    @property
    def cast_parameters(self) -> tuple[Tensor, ...]:
        return self.parameters

    def weights_read_by(self, part: Part) -> tuple[Tensor, ...]:
        return tuple(self._of_adapters()) if part is Part.W else self.parameters

    @property
    def trained(self) -> float:
        if self.weight.requires_grad:
            return 1.0
        return SMALL if any(parameter.requires_grad for parameter in self.parameters) else 0.0

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        rows, *given = inputs
        rows = ctx.precision.cast_for_matmul(rows)
        sizes = self._sizes(ctx, rows, given)
        bias = None if self.bias is None else ctx.precision.weights.of((self.bias,), rows.dtype)
        out = grouped(rows, self._matrices(ctx, rows).transpose(1, 2), sizes, bias)
        for adapter in self._active():
            adapter.add(out, rows, sizes, ctx)
        return (out,)

    def input_gradient(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        gradient, *given = gradients
        sizes = self._sizes(ctx, gradient, given)
        total = grouped(gradient, self._matrices(ctx, gradient), sizes)
        for adapter in self._active():
            adapter.add_input_gradient(total, gradient, sizes, ctx)
        return (total,)

    def weight_gradient(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        gradient, rows, *given = gradients
        rows = ctx.precision.cast_for_matmul(rows)
        sizes = self._sizes(ctx, rows, given)
        if self.weight.requires_grad:
            left, right = (rows, gradient) if self.transposed else (gradient, rows)
            add_products(started_gradient(self.weight), left, right, sizes)
        if self.bias is not None and self.bias.requires_grad:
            add_rows(started_gradient(self.bias), gradient, sizes)
        for adapter in self._active():
            adapter.add_weight_gradients(rows, gradient, sizes, ctx)
        return ()

    def _active(self) -> Sequence[GroupedLowRank]:
        return () if self._adapters is None else self._adapters.adapters()

    def _of_adapters(self) -> list[Tensor]:
        return [] if self._adapters is None else [p for a in self._adapters.all_adapters() for p in a.parameters]

    def _matrices(self, ctx: OperatorContext, rows: Tensor) -> Tensor:
        """Returns the weight [experts, features out, features in] in the type of the rows."""
        weight = ctx.precision.weights.of((self.weight,), rows.dtype)
        return weight.transpose(1, 2) if self.transposed else weight

    def _sizes(self, ctx: OperatorContext, rows: Tensor, sizes: Sequence[Tensor]) -> Sizes:
        """Returns the numbers of rows in the form that serves these rows."""
        if not sizes:
            return None
        return sizes[0].cumsum(0).int() if _in_one_kernel(rows) else self.row_counts.by_expert(ctx, rows, sizes[0])


def _in_one_kernel(rows: Tensor) -> bool:
    """Whether torch has a grouped GEMM for these; otherwise each expert's runs by itself, and the host needs sizes."""
    return rows.device.type in DEVICES and rows.dtype is torch.bfloat16
