"""Plain linears with explicit input and weight gradients.

In:   one value [..., features_in] and one or more `nn.Linear` that read it (q, k, v; gate, up), cut or whole.
Out:  one value per linear.
Must hold: W reads only what forward kept and the output gradient, so it can run at any time after them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_helix.operators.base import Call, SplitComputation, Tensors


class Linear(SplitComputation):
    """Linears that read the same value, as one operator.

    Args:
        linears: each gives one output.
        adds_bias: False on all ranks but one of a row-parallel linear, whose partial sums are added up later.
            The gradient of the bias is complete on every rank all the same, since each sees the whole gradient.
    """

    def __init__(self, linears: Sequence[nn.Linear], adds_bias: bool = True) -> None:
        self.linears = tuple(linears)
        self.adds_bias = adds_bias

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Whose gradients W adds to."""
        return tuple(p for linear in self.linears for p in (linear.weight, linear.bias) if p is not None)

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        (value,) = inputs
        if call.training:
            call.saved = value
        with torch.no_grad():
            return tuple(
                functional.linear(value, linear.weight, linear.bias if self.adds_bias else None)
                for linear in self.linears
            )

    def input_gradient(self, call: Call, *gradients: Tensor) -> Tensors:
        first, *others = zip(gradients, self.linears, strict=True)
        with torch.no_grad():
            total = _rows(first[0]) @ first[1].weight
            for gradient, linear in others:
                total.addmm_(_rows(gradient), linear.weight)
        return (total.view(*gradients[0].shape[:-1], total.shape[-1]),)

    def weight_gradient(self, call: Call, *gradients: Tensor) -> None:
        value = _rows(call.saved)
        call.saved = None
        with torch.no_grad():
            for gradient, linear in zip(gradients, self.linears, strict=True):
                rows = _rows(gradient)
                weight, bias = linear.weight, linear.bias
                if weight.requires_grad:
                    if weight.grad is None:
                        weight.grad = rows.t() @ value
                    else:
                        weight.grad.addmm_(rows.t(), value)
                if bias is not None and bias.requires_grad:
                    bias.grad = rows.sum(0) if bias.grad is None else bias.grad.add_(rows.sum(0))


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])
