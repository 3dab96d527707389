"""DoRA (arXiv 2402.09353): a weight with a low-rank addition, whose rows are scaled to trained lengths.

In:   linears, or a table of embeddings, with their adapters; rows [tokens, features] as in `LowRank`.
Out:  the squared norms of the rows of W + BA, over all ranks that hold parts of a row; outputs and gradients of a
      linear with the scaled addition.
Must hold: norms are constants of backward, as in the paper's section 4.3. They are exchanged once in a window, and
computed once in a window, or after each gather of sharded weights. Nothing is kept for the gradient of the lengths: W
computes the output again. BA is made for `TILE` rows at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_helix.operators.base import Computation, OperatorContext, Tensors, TransferFn
from hf_helix.operators.communication.collectives import OverAxis, prepare_all_gather
from hf_helix.operators.linears.accumulate import add_to_bias_gradients, add_to_gradients, started_gradient
from hf_helix.operators.linears.four_bit import FourBit
from hf_helix.operators.linears.low_rank import Adapters, LowRank, masked
from hf_helix.planning.graph.operator import Part

TILE = 1024
"""The rows of W + BA that exist at the same time."""


class Adapted(Adapters, Protocol):
    """A linear or a table with adapters."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def four_bit(self) -> FourBit | None: ...


class RowNorms(Computation):
    """The squared norms of the rows of W + scaling * BA, over this rank's features in: [1, features out of all
    linears]; zeros for a linear whose active adapter has no magnitude.

    Args:
        linears: with adapters.
        transposed: the weights are [features in, features out].
        is_cast: whether the weights are read in the type of matrix products.
    """

    has_saved_state = False

    def __init__(self, linears: Sequence[Adapted], transposed: bool, is_cast: bool = True) -> None:
        self._linears = tuple(linears)
        self._transposed = transposed
        self._is_cast = is_cast

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        packed = [linear.four_bit for linear in self._linears if linear.four_bit is not None]
        return *(part for each in packed for part in (each.codes, each.absmax)), *self._unpacked

    @property
    def cast_parameters(self) -> tuple[Tensor, ...]:
        return self._unpacked if self._is_cast else ()

    @property
    def _unpacked(self) -> tuple[Tensor, ...]:
        weights = [linear.weight for linear in self._linears if linear.four_bit is None]
        adapters = [adapter for linear in self._linears for adapter in linear.all_adapters()]
        return *weights, *(part for adapter in adapters for part in (adapter.down, adapter.up))

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        def make() -> Tensor:
            return torch.cat([self._of(linear, ctx) for linear in self._linears]).unsqueeze(0)

        return (ctx.precision.weights.once((self,), make),)

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        raise AssertionError("norms have no gradient")

    def _of(self, linear: Adapted, ctx: OperatorContext) -> Tensor:
        """Returns the squared norms of a linear's rows [features out]."""
        weight, adapter = linear.weight, scaling_adapter(linear)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        norms = torch.zeros(weight.shape[1 if self._transposed else 0], dtype=dtype, device=weight.device)
        if adapter is not None:
            matrix = self._matrix(linear, ctx)
            up, down = (ctx.precision.weights.of((each,), adapter.dtype(ctx)) for each in (adapter.up, adapter.down))
            for total, rows, part in zip(norms.split(TILE), matrix.split(TILE), up.split(TILE), strict=True):
                whole = torch.addmm(rows.to(dtype), part.to(dtype), down.to(dtype), alpha=adapter.scaling)
                torch.sum(whole.square_(), 1, out=total)
        return norms

    def _matrix(self, linear: Adapted, ctx: OperatorContext) -> Tensor:
        """Returns W as its products read it [features out, features in]."""
        if linear.four_bit is not None:
            return linear.four_bit.matrix(torch.float32, rounds=True)
        weight = linear.weight
        if self._is_cast:
            weight = ctx.precision.weights.cast((weight,), ctx.precision.autocast_dtype or weight.dtype)
        return weight.t() if self._transposed else weight


class ShareNorms(OverAxis):
    """The all-gather of squared norms [1, features] to [ranks, features], once in a window."""

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        transfers: list[TransferFn] = []

        def make() -> Tensor:
            out, transfer = prepare_all_gather(self.axis, inputs[0])
            transfers.append(transfer)
            return out

        out = ctx.precision.weights.once((self,), make)
        return (out,), transfers[0] if transfers else lambda: None


def scaling_adapter(adapters: Adapters) -> LowRank | None:
    """Returns the active adapter of a linear that has a magnitude; None without one."""
    return next((adapter for adapter in adapters.adapters() if adapter.magnitude is not None), None)


def row_norms(squares: Tensor) -> Tensor:
    """Returns the norms of rows [features out] from the squared norms of their parts [ranks, features out]."""
    return squares.sum(0).sqrt_()


@dataclass(frozen=True)
class Dora:
    """A linear whose active adapter has a magnitude: `gain * (W + scaling * BA)`, with a gain for each feature out. Has
    the methods of `LowRank`.

    As in PEFT, dropout stands in front of what is added to W: the output is `W rows - W dropped + gain * (W + scaling
    * BA) dropped + bias`. Without dropout the first two terms cancel.

    Attributes:
        adapter: with the magnitude.
        norms: of the rows of W + scaling * BA [features out].
        weight: W, the parameter.
        matrix: returns W in the type of products [features out, features in].
        transposed: `weight` is [features in, features out].
        bias: of the linear.
    """

    adapter: LowRank
    norms: Tensor
    weight: Tensor
    matrix: Callable[[], Tensor]
    transposed: bool
    bias: Tensor | None

    def add(self, total: Tensor, rows: Tensor, ctx: OperatorContext, mask: Tensor | None, adds_bias: bool) -> None:
        """Turns the linear's output into the scaled one; see `LowRank.add` for the arguments."""
        gain = self._gain()
        value = total.to(gain.dtype)
        if mask is None:
            self.adapter.add(value, rows, ctx, None, adds_bias)
            value.mul_(gain)
            if self.bias is not None and adds_bias:
                value.add_(self.bias * (1 - gain))
        else:
            part = self._product(masked(rows, mask), gain.dtype)
            value.sub_(part)
            self.adapter.add(part, rows, ctx, mask, adds_bias)
            value.add_(part.mul_(gain))
        if value is not total:
            total.copy_(value)

    def below(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of `W rows`, from the gradient of the output."""
        return gradient if self.adapter.dropout else self._scaled(gradient)

    def add_input_gradient(self, total: Tensor, gradient: Tensor, ctx: OperatorContext, mask: Tensor | None) -> None:
        """Adds to the gradient of the linear's input all but the part of `W rows`; see `LowRank`."""
        scaled = self._scaled(gradient)
        if mask is not None:
            matrix = self.matrix()
            total += ((scaled - gradient).to(matrix.dtype) @ matrix) * mask
        self.adapter.add_input_gradient(total, scaled, ctx, mask)

    def add_weight_gradients(self, rows: Tensor, gradient: Tensor, ctx: OperatorContext, mask: Tensor | None) -> None:
        """Adds to the gradients of the adapter, and to the linear's own all but the part of `W rows`; see
        `LowRank`."""
        scaled, dropped, magnitude = self._scaled(gradient), masked(rows, mask), self.adapter.magnitude
        self.adapter.add_weight_gradients(rows, scaled, ctx, mask)
        if magnitude is not None and magnitude.requires_grad:
            output = self._product(dropped, gradient.dtype)
            self.adapter.add(output, rows, ctx, mask, adds_bias=False)
            started_gradient(magnitude).add_((output * gradient).sum(0, dtype=magnitude.dtype) / self.norms)
        if self.weight.requires_grad and mask is not None:
            more, dropped = scaled - gradient, dropped.to(gradient.dtype)
            left, right = (dropped, more) if self.transposed else (more, dropped)
            add_to_gradients((self.weight,), left.t(), right)
        if self.bias is not None and self.bias.requires_grad and mask is None:
            add_to_bias_gradients((self.bias,), gradient - scaled)

    def _product(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns `W rows` in a type [tokens, features out]."""
        matrix = self.matrix()
        return (rows.to(matrix.dtype) @ matrix.t()).to(dtype)

    def _gain(self) -> Tensor:
        assert self.adapter.magnitude is not None
        return self.adapter.magnitude / self.norms

    def _scaled(self, gradient: Tensor) -> Tensor:
        return (gradient * self._gain()).to(gradient.dtype)
