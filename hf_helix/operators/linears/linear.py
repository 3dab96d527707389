"""Linears with explicit input and weight gradients, and their low-rank adapters.

In:   a value [..., features_in], and its linears (q, k, v; gate, up), cut or full.
Out:  one value per linear.
Must hold: W reads only the inputs of forward and the output gradient, so W can run at any time afterwards. Once a
window, weights are cast to the type of their input and joined to a matrix; outputs are slices then. W accumulates in
the type of the weight. The matrix of a weight in 4 bits is made for each product, and never kept. In fp8, weights are
cast once a window too, for forward and for the input gradient; W stays in the type of the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.base import OperatorContext, SplitComputation, Tensors
from hf_helix.operators.float8 import GRADIENTS, MULTIPLE, ROWWISE, Scaled, quantize
from hf_helix.operators.float8 import product as scaled_product
from hf_helix.operators.linears.accumulate import add_product, add_to_bias_gradients, add_to_gradients, product
from hf_helix.operators.linears.dora import Dora, row_norms
from hf_helix.operators.linears.four_bit import FourBit
from hf_helix.operators.linears.low_rank import Adapters, LowRank, dropout_masks
from hf_helix.operators.side_by_side import contiguous_columns, join_columns
from hf_helix.planning.graph.operator import Part

SMALL = 0.1  # the W of biases or low-rank adapters, in W of a weight: a rough value until measured


class Projection(Protocol):
    """An affine map: `nn.Linear`, or Transformers' `Conv1D`."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


class Linear(SplitComputation):
    """Linears with the same input, as a single operator.

    Args:
        linears: each gives an output.
        adds_bias: False on all ranks but one of a row-parallel linear, whose partial sums are added up later. The
            gradient of the bias is complete on every rank all the same, since each rank sees the full gradient.
        transposed: the weights are [features_in, features_out], as in `Conv1D`.
        adapters: of each linear; empty if no linear has any.
        copies: all modules that the linears may stand for at run time; by default themselves.
        four_bit: of each linear its frozen weight in 4 bits, or None; empty if no linear has one.
        takes_norms: whether adapters have magnitudes; the last input is then the squared norms of rows [ranks, features
            of all outputs], see `hf_helix.operators.linears.dora`.

    Attributes:
        float8: the recipe of products in fp8, see `HelixConfig.float8`; None for products in the type of the input.
    """

    float8: str | None = None

    def __init__(
        self,
        linears: Sequence[Projection],
        adds_bias: bool = True,
        transposed: bool = False,
        adapters: Sequence[Adapters] = (),
        copies: Sequence[Projection] = (),
        four_bit: Sequence[FourBit | None] = (),
        takes_norms: bool = False,
    ) -> None:
        self.linears = tuple(linears)
        self.adds_bias = adds_bias
        self.transposed = transposed
        self._adapters = tuple(adapters)
        self._copies = tuple(copies) or self.linears
        self._four_bit = tuple(four_bit) or (None,) * len(self.linears)
        self._takes_norms = takes_norms

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        own = [p for linear in self._copies for p in (linear.weight, linear.bias) if p is not None]
        return *own, *(weight.absmax for weight in self._four_bit if weight is not None), *self._of_adapters()

    @property
    def cast_parameters(self) -> tuple[Tensor, ...]:
        whole = {part for weight in self._four_bit if weight is not None for part in (weight.codes, weight.absmax)}
        whole |= {*self._magnitudes()}
        return tuple(parameter for parameter in self.parameters if parameter not in whole)

    def weights_read_by(self, part: Part) -> tuple[Tensor, ...]:
        return tuple(self._of_adapters()) if part is Part.W and not self._takes_norms else self.parameters

    @property
    def is_plain(self) -> bool:
        """Whether it is a single linear with a weight [features_out, features_in] and perhaps a bias, and no more."""
        return (
            len(self.linears) == 1
            and self.adds_bias
            and not (self.transposed or self._adapters or self._four_bit[0] is not None)
        )

    @property
    def trained(self) -> float:
        weights = [linear.weight for linear in self.linears]
        if any(each.requires_grad for each in (*weights, *self._magnitudes())):
            return 1.0
        return SMALL if any(p.requires_grad for p in self.parameters) else 0.0

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        inputs, norms = self._without_norms(inputs)
        # Rows: of a transposed value (from attention) with a single sequence, torch would multiply token by token.
        shape, value = inputs[0].shape[:-1], _rows(ctx.precision.cast_for_matmul(inputs[0]))
        outputs: list[Tensor] = []
        for gemm in self._gemms(ctx, value.dtype):
            dtype = gemm.dtype(ctx, value.dtype)
            bias = ctx.precision.weights.of(gemm.biases, dtype) if self.adds_bias and gemm.biases else None
            if gemm.float8 is None:
                output = functional.linear(value.to(dtype), self._matrix(ctx, gemm, dtype), bias).to(value.dtype)
            else:
                scaled = self._scaled(ctx, gemm, gemm.float8, dtype)
                output = scaled_product(quantize(value, gemm.float8), scaled, dtype, fast=True)
                output = output if bias is None else output.add_(bias)
            output = output.view(*shape, output.shape[-1])
            outputs += [output] if len(gemm.sizes) == 1 else output.split(gemm.sizes, -1)
        if self._adapters:
            for output, adapter, mask in self._each(ctx, outputs, norms):
                adapter.add(output, value, ctx, mask, self.adds_bias)
        return tuple(outputs)

    def input_gradient(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        gradients, norms = self._without_norms(gradients)
        total: Tensor | None = None
        for gemm, parts in self._with_rows(ctx, self._below(ctx, gradients, norms)):
            kind = parts[0].dtype
            if gemm.float8 is not None:
                scaled = self._scaled(ctx, gemm, gemm.float8, kind, is_backward=True)
                given = quantize(join_columns(parts), gemm.float8, GRADIENTS[gemm.float8])
                made = scaled_product(given, scaled, kind, fast=gemm.float8 == ROWWISE)
                total = made if total is None else total.add_(made)
                continue
            dtype = gemm.dtype(ctx, kind)
            matrices, first = self._matrix(ctx, gemm, dtype, is_backward=True), 0
            for rows in parts:
                matrix = matrices if len(parts) == 1 else matrices.narrow(0, first, rows.shape[-1])
                if total is None:
                    total = product(rows.to(dtype), matrix, kind)
                else:
                    add_product(total, rows.to(dtype), matrix)
                first += rows.shape[-1]
        assert total is not None
        if self._adapters:
            for gradient, adapter, mask in self._each(ctx, gradients, norms):
                adapter.add_input_gradient(total, gradient, ctx, mask)
        return (total.view(*gradients[0].shape[:-1], total.shape[-1]),)

    def weight_gradient(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        (*of_outputs, given), norms = self._without_norms(gradients)
        value = _rows(ctx.precision.cast_for_matmul(given))
        for gemm, parts in self._with_rows(ctx, self._below(ctx, of_outputs, norms)):
            joined = len(parts) == 1
            for index, rows in enumerate(parts):
                if gemm.trains_weights:
                    left, right = (value, rows) if self.transposed else (rows, value)
                    weights = gemm.weights if joined else gemm.weights[index : index + 1]
                    add_to_gradients(weights, left.t(), right)
                if gemm.trains_biases:
                    add_to_bias_gradients(gemm.biases if joined else gemm.biases[index : index + 1], rows)
        if self._adapters:
            for gradient, adapter, mask in self._each(ctx, of_outputs, norms):
                adapter.add_weight_gradients(value, gradient, ctx, mask)
        return ()

    def _gemms(self, ctx: OperatorContext, dtype: torch.dtype) -> list[_Gemm]:
        """Returns the products of forward in a type, the same in a window."""
        gemms: list[_Gemm] = ctx.precision.weights.once((self, dtype), lambda: self._make_gemms(dtype))
        return gemms

    def _make_gemms(self, dtype: torch.dtype) -> list[_Gemm]:
        """Returns one product for all linears if their weights need a cast anyway: the cast joins the weights."""
        apart = [
            _Gemm.of(linear.weight, linear.bias, self.transposed, four_bit)
            for linear, four_bit in zip(self.linears, self._four_bit, strict=True)
        ]
        for gemm, reason in zip(apart, self.reasons_against_float8(), strict=True):
            gemm.float8 = None if reason else self.float8
        copied = all(
            gemm.four_bit is None and (gemm.weights[0].dtype is not dtype or gemm.float8 is not None) for gemm in apart
        )
        if len(apart) == 1 or self.transposed or not copied or len({gemm.kind for gemm in apart}) > 1:
            return apart
        return [_Gemm.joined(apart)]

    def reasons_against_float8(self) -> list[str]:
        """Returns for each linear why its products cannot be in fp8; empty texts if they can."""
        if self._adapters:
            return ["adapters"] * len(self.linears)
        return [
            "weights in 4 bits"
            if four_bit is not None
            else f"sizes that {MULTIPLE} does not divide" * any(size % MULTIPLE for size in linear.weight.shape)
            for linear, four_bit in zip(self.linears, self._four_bit, strict=True)
        ]

    def _scaled(
        self, ctx: OperatorContext, gemm: _Gemm, recipe: str, dtype: torch.dtype, is_backward: bool = False
    ) -> Scaled:
        """The matrix in fp8, rounded to `dtype` before, as in every layout: [features_out, features_in]; for backward
        [features_in, features_out]."""
        weights = ctx.precision.weights

        def make() -> Scaled:
            matrix = weights.cast(gemm.weights, dtype)
            return quantize((matrix.t() if is_backward is not self.transposed else matrix).contiguous(), recipe)

        scaled: Scaled = weights.once((recipe, is_backward, dtype, *map(id, gemm.weights)), make)
        return scaled

    def _with_rows(self, ctx: OperatorContext, gradients: Sequence[Tensor]) -> Iterator[tuple[_Gemm, list[Tensor]]]:
        """Yields every product with the gradients of its outputs [tokens, features]: joined, or linear by linear."""
        place = 0
        for gemm in self._gemms(ctx, gradients[0].dtype):
            count = len(gemm.sizes)
            parts = [_rows(gradient) for gradient in gradients[place : place + count]]
            place += count
            yield gemm, parts if count == 1 else _joined_if_faster(parts, gemm.weights[0].shape[1])

    def _all_adapters(self) -> list[LowRank]:
        return [adapter for adapters in self._adapters for adapter in adapters.all_adapters()]

    def _of_adapters(self) -> list[Tensor]:
        return [parameter for adapter in self._all_adapters() for parameter in adapter.parameters]

    def _magnitudes(self) -> list[Tensor]:
        return [adapter.magnitude for adapter in self._all_adapters() if adapter.magnitude is not None]

    def _without_norms(self, values: Tensors) -> tuple[Tensors, Tensor | None]:
        """Returns values without the squared norms at their end, and the norms; None without any."""
        return (values[:-1], row_norms(values[-1])) if self._takes_norms else (values, None)

    def _below(self, ctx: OperatorContext, gradients: Sequence[Tensor], norms: Tensor | None) -> Sequence[Tensor]:
        """Returns the gradients of the linears' own products, from the gradients of their outputs."""
        if norms is None:
            return gradients
        below = list(gradients)
        for place, _, adapter in self._active(ctx, gradients, norms):
            below[place] = adapter.below(below[place])
        return below

    def _each(
        self, ctx: OperatorContext, values: Sequence[Tensor], norms: Tensor | None
    ) -> Iterator[tuple[Tensor, LowRank | Dora, Tensor | None]]:
        """Yields every active adapter with the rows of its linear's value, and with its dropout mask."""
        active = list(self._active(ctx, values, norms))
        tokens = values[0].numel() // values[0].shape[-1]
        drawn = dropout_masks(ctx, [low_rank for _, low_rank, _ in active], tokens, values[0].device)
        yield from ((_rows(values[place]), each, mask) for (place, _, each), mask in zip(active, drawn, strict=True))

    def _active(
        self, ctx: OperatorContext, values: Sequence[Tensor], norms: Tensor | None
    ) -> Iterator[tuple[int, LowRank, LowRank | Dora]]:
        """Yields every active adapter after the place of its linear, and then what adds it to the linear."""
        parts = () if norms is None else norms.split([value.shape[-1] for value in values])
        for place, (linear, adapters) in enumerate(zip(self.linears, self._adapters, strict=True)):
            for adapter in adapters.adapters():
                if adapter.magnitude is None:
                    yield place, adapter, adapter
                    continue
                matrix = partial(self._matrix_of, ctx, place, values[place].dtype)
                dora = Dora(adapter, parts[place], linear.weight, matrix, self.transposed, linear.bias)
                yield place, adapter, dora

    def _matrix_of(self, ctx: OperatorContext, place: int, dtype: torch.dtype) -> Tensor:
        """Returns the matrix of a linear [features_out, features_in] for a value in a type."""
        gemms = self._gemms(ctx, dtype)
        gemm = gemms[place] if len(gemms) == len(self.linears) else gemms[0]
        matrix = self._matrix(ctx, gemm, gemm.dtype(ctx, dtype))
        return matrix if len(gemm.sizes) == 1 else matrix.split(gemm.sizes)[place]

    def _matrix(self, ctx: OperatorContext, gemm: _Gemm, dtype: torch.dtype, is_backward: bool = False) -> Tensor:
        """[features_out, features_in]."""
        if gemm.four_bit is not None:
            return gemm.four_bit.matrix(dtype, rounds=is_backward)
        if gemm.matrix is None:
            weight = ctx.precision.weights.of(gemm.weights, dtype)
            gemm.matrix = weight.t() if self.transposed else weight
        return gemm.matrix


@dataclass(slots=True)
class _Gemm:
    """A product of forward: of a linear, or of several linears with the same input.

    Attributes:
        weights, biases: of each linear; biases may be empty.
        sizes: the output features of each linear.
        four_bit: the weight, if it is in 4 bits.
        float8: the recipe of the product in fp8; None for others.
        matrix: the joined weights, after the first use.
    """

    weights: list[Tensor]
    biases: list[Tensor]
    sizes: list[int]
    trains_weights: bool
    trains_biases: bool
    four_bit: FourBit | None = None
    float8: str | None = None
    matrix: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, transposed: bool, four_bit: FourBit | None) -> _Gemm:
        """Returns the product of a linear."""
        biases = [] if bias is None else [bias]
        trains = weight.requires_grad, bias is not None and bias.requires_grad
        return cls([weight], biases, [weight.shape[1 if transposed else 0]], *trains, four_bit)

    @classmethod
    def joined(cls, gemms: Sequence[_Gemm]) -> _Gemm:
        """Returns the joint product of several linears of equal kind with the same input."""
        weights, biases = [w for gemm in gemms for w in gemm.weights], [b for gemm in gemms for b in gemm.biases]
        first, sizes = gemms[0], [size for gemm in gemms for size in gemm.sizes]
        return cls(weights, biases, sizes, first.trains_weights, first.trains_biases, float8=first.float8)

    def dtype(self, ctx: OperatorContext, given: torch.dtype) -> torch.dtype:
        """Returns the type of the product of a value in a given type."""
        own = None if self.four_bit is None else ctx.precision.autocast_dtype or self.four_bit.compute_dtype
        return own or given

    @property
    def kind(self) -> tuple[object, ...]:
        """The common properties of linears in a joint product."""
        return self.float8, self.trains_weights, self.trains_biases, *(p.dtype for p in (*self.weights, *self.biases))


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])


def _joined_if_faster(gradients: list[Tensor], width: int) -> list[Tensor]:
    """Returns the gradients of outputs [tokens, features] joined for a single product; unchanged if several products
    are faster.

    Every product but the first reads and writes the input gradient again, and the input for the weight gradients, each
    `width` wide; joining reads and writes the gradients.
    """
    features = sum(gradient.shape[-1] for gradient in gradients)
    if 2 * features <= (len(gradients) - 1) * width:
        return [join_columns(gradients)]
    joined = contiguous_columns(gradients)
    return gradients if joined is None else [joined]
