"""Plain linears with explicit input and weight gradients, and the low-rank adapters beside them.

In:   one value [..., features_in] and one or more linears that read it (q, k, v; gate, up), cut or whole.
Out:  one value per linear.
Must hold: W reads only what forward read and the output gradient, so it can run at any time after them. Weights are
cast to the type of what they meet once in a window, where they become one matrix; outputs are slices then. What W finds
is added up in the type of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.accumulate import add_to_bias_gradients, add_to_gradients
from hf_helix.operators.base import Call, SplitComputation, Tensors
from hf_helix.operators.low_rank import Adapters, LowRank, masks
from hf_helix.operators.side_by_side import join_columns

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
        # Rows, since torch makes a product for every token of a micro-batch of one sequence that attention transposed.
        value = _rows(call.precision.lowered(inputs[0]))
        outputs: list[Tensor] = []
        with torch.no_grad():
            for linears in self._by_gemm(value.dtype):
                matrix, bias = self._matrix(call, linears, value.dtype), self._bias(call, linears, value.dtype)
                whole = functional.linear(value, matrix, bias)
                outputs += [whole] if len(linears) == 1 else whole.split(_sizes(linears), -1)
            for output, adapter, mask in self._each(call, tuple(outputs)):
                adapter.add(output, value, call, mask, self.adds_bias)
        return tuple(output.unflatten(0, inputs[0].shape[:-1]) for output in outputs)

    def input_gradient(self, call: Call, *gradients: Tensor) -> Tensors:
        total: Tensor | None = None
        with torch.no_grad():
            for linears, rows in self._rows_by_gemm(gradients):
                matrix = self._matrix(call, linears, rows.dtype)
                total = rows @ matrix if total is None else total.addmm_(rows, matrix)
            assert total is not None
            for gradient, adapter, mask in self._each(call, gradients):
                adapter.add_input_gradient(total, _rows(gradient), call, mask)
        return (total.view(*gradients[0].shape[:-1], total.shape[-1]),)

    def weight_gradient(self, call: Call, *gradients: Tensor) -> None:
        *of_outputs, given = gradients
        value = _rows(call.precision.lowered(given))
        with torch.no_grad():
            for linears, rows in self._rows_by_gemm(of_outputs):
                if linears[0].weight.requires_grad:
                    left, right = (value, rows) if self.transposed else (rows, value)
                    add_to_gradients([linear.weight for linear in linears], left.t(), right)
                biases = [linear.bias for linear in linears if linear.bias is not None]
                if biases and biases[0].requires_grad:
                    add_to_bias_gradients(biases, rows)
            for gradient, adapter, mask in self._each(call, tuple(of_outputs)):
                adapter.add_weight_gradients(value, _rows(gradient), call, mask)

    def _by_gemm(self, dtype: torch.dtype) -> list[tuple[Projection, ...]]:
        """The linears whose products of a type are one GEMM.

        All of them are where their weights are copied to that type anyway, which puts them in one piece.
        """
        if len(self.linears) == 1:
            return [self.linears]
        copied = all(linear.weight.dtype is not dtype for linear in self.linears)
        if copied and not self.transposed and len({_kind(linear) for linear in self.linears}) == 1:
            return [self.linears]
        return [(linear,) for linear in self.linears]

    def _rows_by_gemm(self, gradients: Sequence[Tensor]) -> Iterator[tuple[tuple[Projection, ...], Tensor]]:
        """The linears of every GEMM with the gradients of their outputs [tokens, features of all]."""
        rows = iter([_rows(gradient) for gradient in gradients])
        for linears in self._by_gemm(gradients[0].dtype):
            yield linears, join_columns([next(rows) for _ in linears])

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

    def _matrix(self, call: Call, linears: Sequence[Projection], dtype: torch.dtype) -> Tensor:
        """[features_out, features_in]."""
        weight = call.precision.weights.of([linear.weight for linear in linears], dtype)
        return weight.t() if self.transposed else weight

    def _bias(self, call: Call, linears: Sequence[Projection], dtype: torch.dtype) -> Tensor | None:
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return call.precision.weights.of(biases, dtype) if self.adds_bias and biases else None


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])


def _sizes(linears: Sequence[Projection]) -> list[int]:
    return [len(linear.weight) for linear in linears]


def _kind(linear: Projection) -> tuple[object, ...]:
    """What linears of one GEMM have in common: the types of their parameters, and which of these are trained."""
    return tuple(None if p is None else (p.dtype, p.requires_grad) for p in (linear.weight, linear.bias))
