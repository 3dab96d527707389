"""Plain linears with explicit input and weight gradients, and the low-rank adapters beside them.

In:   one value [..., features_in] and one or more linears that read it (q, k, v; gate, up), cut or whole.
Out:  one value per linear.
Must hold: W reads only what forward read and the output gradient, so it can run at any time after them. Weights are
cast to the type of what they meet, once in a window; what W finds is added up in the type of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.accumulate import add_to_bias_gradient, add_to_gradient
from hf_helix.operators.base import Call, SplitComputation, Tensors
from hf_helix.operators.low_rank import Adapters, LowRank, masks

SMALL = 0.1  # the W of biases or low-rank adapters, by that of a weight: roughly, until it is measured


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
        adapters: beside each linear; empty where no linear has any.
    """

    def __init__(
        self,
        linears: Sequence[Projection],
        adds_bias: bool = True,
        transposed: bool = False,
        adapters: Sequence[Adapters] = (),
    ) -> None:
        self.linears = tuple(linears)
        self.adds_bias = adds_bias
        self.transposed = transposed
        self._adapters = tuple(adapters)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Whose gradients W adds to."""
        own = [p for linear in self.linears for p in (linear.weight, linear.bias) if p is not None]
        return *own, *self._of_adapters()

    @property
    def trained(self) -> float:
        if self._trains_weights():
            return 1.0
        return SMALL if any(p.requires_grad for p in self.parameters) else 0.0

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        value = call.precision.lowered(inputs[0])
        with torch.no_grad():
            outputs = tuple(
                functional.linear(value, self._matrix(call, linear, value.dtype), self._bias(call, linear, value.dtype))
                for linear in self.linears
            )
            for output, adapter, mask in self._each(call, outputs):
                adapter.add(output.view(-1, output.shape[-1]), _rows(value), call, mask, self.adds_bias)
        return outputs

    def input_gradient(self, call: Call, *gradients: Tensor) -> Tensors:
        first, *others = zip(gradients, self.linears, strict=True)
        dtype = gradients[0].dtype
        with torch.no_grad():
            total = _rows(first[0]) @ self._matrix(call, first[1], dtype)
            for gradient, linear in others:
                total.addmm_(_rows(gradient), self._matrix(call, linear, dtype))
            for gradient, adapter, mask in self._each(call, gradients):
                adapter.add_input_gradient(total, _rows(gradient), call, mask)
        return (total.view(*gradients[0].shape[:-1], total.shape[-1]),)

    def weight_gradient(self, call: Call, *gradients: Tensor) -> None:
        *of_outputs, given = gradients
        value = _rows(call.precision.lowered(given))
        with torch.no_grad():
            for gradient, linear in zip(of_outputs, self.linears, strict=True):
                weight, bias, rows = linear.weight, linear.bias, _rows(gradient)
                if weight.requires_grad:
                    left, right = (value, rows) if self.transposed else (rows, value)
                    add_to_gradient(weight, left.t(), right)
                if bias is not None and bias.requires_grad:
                    add_to_bias_gradient(bias, rows)
            for gradient, adapter, mask in self._each(call, tuple(of_outputs)):
                adapter.add_weight_gradients(value, _rows(gradient), call, mask)

    def _trains_weights(self) -> bool:
        return any(linear.weight.requires_grad for linear in self.linears)

    def _of_adapters(self) -> list[Tensor]:
        return [p for beside in self._beside() for adapter in beside for p in adapter.parameters]

    def _beside(self) -> list[Sequence[LowRank]]:
        """The adapters that are switched on, linear by linear."""
        return [adapters() for adapters in self._adapters]

    def _each(self, call: Call, values: Tensors) -> Iterator[tuple[Tensor, LowRank, Tensor | None]]:
        """Every adapter with what belongs to its linear, and with what dropout multiplies its input with."""
        if not self._adapters:
            return
        pairs = [(value, adapter) for value, found in zip(values, self._beside(), strict=True) for adapter in found]
        tokens = values[0].numel() // values[0].shape[-1]
        drawn = masks(call, [adapter for _, adapter in pairs], tokens, values[0].device)
        yield from ((value, adapter, mask) for (value, adapter), mask in zip(pairs, drawn, strict=True))

    def _matrix(self, call: Call, linear: Projection, dtype: torch.dtype) -> Tensor:
        """[features_out, features_in]."""
        weight = call.precision.weights.of((linear.weight,), dtype)
        return weight.t() if self.transposed else weight

    def _bias(self, call: Call, linear: Projection, dtype: torch.dtype) -> Tensor | None:
        if not self.adds_bias or linear.bias is None:
            return None
        return call.precision.weights.of((linear.bias,), dtype)


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])
