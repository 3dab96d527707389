"""Plain linears with explicit input and weight gradients.

In:   one value [..., features_in] and one or more linears that read it (q, k, v; gate, up), cut or whole.
Out:  one value per linear.
Must hold: W reads only what forward read and the output gradient, so it can run at any time after them. Weights are
cast to the type of what they meet; what W finds is added up in the type of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.base import Call, SplitComputation, Tensors


class Projection(Protocol):
    """A module that is an affine map: `nn.Linear`, or Transformers' `Conv1D`."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


class Linear(SplitComputation):
    """Linears that read the same value, as one operator.

    Args:
        linears: each gives one output.
        adds_bias: False on all ranks but one of a row-parallel linear, whose partial sums are added up later.
            The gradient of the bias is complete on every rank all the same, since each sees the whole gradient.
        transposed: the weights are [features_in, features_out], as those of `Conv1D`.
    """

    def __init__(self, linears: Sequence[Projection], adds_bias: bool = True, transposed: bool = False) -> None:
        self.linears = tuple(linears)
        self.adds_bias = adds_bias
        self.transposed = transposed

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Whose gradients W adds to."""
        return tuple(p for linear in self.linears for p in (linear.weight, linear.bias) if p is not None)

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        value = call.precision.lowered(inputs[0])
        with torch.no_grad():
            return tuple(
                functional.linear(value, self._matrix(linear, value.dtype), self._bias(linear, value.dtype))
                for linear in self.linears
            )

    def input_gradient(self, call: Call, *gradients: Tensor) -> Tensors:
        first, *others = zip(gradients, self.linears, strict=True)
        dtype = gradients[0].dtype
        with torch.no_grad():
            total = _rows(first[0]) @ self._matrix(first[1], dtype)
            for gradient, linear in others:
                total.addmm_(_rows(gradient), self._matrix(linear, dtype))
        return (total.view(*gradients[0].shape[:-1], total.shape[-1]),)

    def weight_gradient(self, call: Call, *gradients: Tensor) -> None:
        *of_outputs, given = gradients
        value = _rows(call.precision.lowered(given))
        with torch.no_grad():
            for gradient, linear in zip(of_outputs, self.linears, strict=True):
                rows = _rows(gradient)
                weight, bias = linear.weight, linear.bias
                if weight.requires_grad:
                    left, right = (value, rows) if self.transposed else (rows, value)
                    if weight.grad is None:
                        weight.grad = (left.t() @ right).to(weight.dtype)
                    else:
                        add_product(weight.grad, left.t(), right)
                if bias is not None and bias.requires_grad:
                    total = rows.sum(0, dtype=bias.dtype)
                    bias.grad = total if bias.grad is None else bias.grad.add_(total)

    def _matrix(self, linear: Projection, dtype: torch.dtype) -> Tensor:
        """[features_out, features_in]."""
        weight = linear.weight.to(dtype)
        return weight.t() if self.transposed else weight

    def _bias(self, linear: Projection, dtype: torch.dtype) -> Tensor | None:
        return linear.bias.to(dtype) if self.adds_bias and linear.bias is not None else None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices, or of two stacks of them, to a total that may be of higher precision."""
    if total.dtype is not left.dtype:
        total += left @ right
    elif total.dim() == 3:
        total.baddbmm_(left, right)
    else:
        total.addmm_(left, right)


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])
