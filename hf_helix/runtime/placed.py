"""Divided parameters in code that a caller runs: linears and lookups over this rank's part, and full parameters.

In:   a parameter with its cut and its pipeline rank, and the arguments of a function of torch.
Out:  the result of the function with the full parameter, equal on every rank of a batch. Under autograd, of parameters
      above the decoder, the logits of a head stay divided over the vocabulary.
Must hold: every rank of a batch runs the caller's code on equal values, also the pipeline ranks without the parameter.
A gradient on a rank is that of the full loss; where the gradients of several ranks are summed, this rank's share of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.param_shard import Placement
from hf_helix.operators.vocab_logits import divided_logits
from hf_helix.operators.vocab_parallel import lookup
from hf_helix.operators.vocab_slices import changed_gradient, sliced_linear, start_sum
from hf_helix.runtime.distributed.mesh import Mesh


@dataclass(frozen=True)
class Placed:
    """The position of a parameter on the mesh.

    Attributes:
        mesh: the mesh of ranks.
        placement: the cut of the parameter.
        owner: the pipeline rank with the parameter.
        shape: of the full parameter.
        is_above: whether the parameter is above the decoder.
        refusal: the reason why a loss cannot read the parameter; empty if a loss can.
    """

    mesh: Mesh
    placement: Placement
    owner: int
    shape: tuple[int, ...]
    is_above: bool
    refusal: str = ""

    @property
    def is_here(self) -> bool:
        """Whether this rank holds the parameter, or its part of it."""
        return self.mesh.pipe.rank == self.owner

    @property
    def is_cut(self) -> bool:
        """Whether several ranks hold parts of the parameter."""
        return self.placement.dim is not None and self.mesh.axis_of(self.placement).size > 1

    @property
    def num_summed(self) -> int:
        """The number of ranks with the same batch whose gradients of the parameter are summed."""
        return self.mesh.cp.size * (self.mesh.tp.size if self.placement.sums_gradient else 1)

    def linear(self, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns `functional.linear` under autograd; weight and bias as this rank holds them.

        Args:
            value: [..., features], equal on every rank of a batch.
            weight: above the decoder; empty on other pipeline ranks.
            bias: likewise; None without.
        """
        if not self.is_here:
            part = self.placement.shape(self.shape, self.mesh.tp.size, self.mesh.tp.rank) if self.is_cut else self.shape
            result = self.received(value, (*value.shape[:-1], part[0]), _type_of_products(value))
        else:
            bias = None if bias is None else self.recorded(bias)
            operands = value, self.recorded(weight), bias
            result = sliced_linear(*operands, self.mesh.tp) if self.is_cut else functional.linear(*operands)
            self.share(result.detach())
        return divided_logits(result, self.mesh.tp, self.placement.length) if self.is_cut else result

    @torch.no_grad()
    def full_linear(self, value: Tensor, weight: Tensor, bias: Tensor | None, features: int = 0) -> Tensor:
        """Returns `functional.linear` with the full weight, without gradients.

        Args:
            value, weight, bias: see `linear`; any parameter of the model.
            features: the dimension of the output features; 1 for a weight [in, out].
        """
        shape = (*value.shape[:-1], self.shape[features])
        if not self.is_here:
            return self.share(value.new_empty(shape, dtype=_type_of_products(value)))
        matrix = weight.t() if features else weight
        if not self.is_cut:
            return self.share(functional.linear(value, matrix, bias))
        if self.placement.dim == features:
            outputs = replace(self.placement, dim=value.dim() - 1)
            return self.share(self._joined(functional.linear(value, matrix, bias), shape, outputs))
        tp = self.mesh.tp
        parts = [value[..., first:last] for first, last in self.placement.bounds(tp.size, tp.rank)]
        total = functional.linear(torch.cat(parts, -1), matrix)
        start_sum(total, tp)()
        return self.share(total if bias is None else total + bias.to(total.dtype))

    @torch.no_grad()
    def full_lookup(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Returns the rows of a full table [..., features] for ids [...], without gradients."""
        shape = (*ids.shape, self.shape[1])
        if not self.is_here:
            return self.share(weight.new_empty(shape))  # autocast leaves lookups in the type of the table
        if not self.is_cut or self.placement.dim != 0:
            return self.share(functional.embedding(ids, self._gathered(weight)))
        tp = self.mesh.tp
        ((first, _),) = self.placement.bounds(tp.size, tp.rank)
        found = lookup(ids, weight, first, self.shape[0], None)
        start_sum(found, tp)()
        return self.share(found)

    def full(self, held: Tensor) -> Tensor:
        """Returns the full parameter from the part that this rank holds, under autograd."""
        full: Tensor = _Full.apply(self.recorded(held), self)
        return full

    def recorded(self, held: Tensor) -> Tensor:
        """Returns a plain tensor in the memory of a parameter, whose gradient is this rank's share."""
        return changed_gradient(held, lambda gradient: gradient / self.num_summed)

    def received(self, value: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns what the owner computes from a value and shares, under autograd; called on other ranks.

        Args:
            value: equal on every rank of a batch.
            shape: of the result.
            dtype: of the result.
        """
        result: Tensor = _Received.apply(value, self, shape, dtype)
        return result

    def share(self, value: Tensor) -> Tensor:
        """Returns the owner's value on every rank of the pipeline; other ranks give an empty one of its shape."""
        pipe = self.mesh.pipe
        if pipe.group is not None:
            value = value.contiguous()
            dist.broadcast(value, pipe.ranks[self.owner], group=pipe.group)
        return value

    def _gathered(self, held: Tensor) -> Tensor:
        """Returns the full parameter on the ranks of the cut."""
        if not self.is_cut:
            return held.view_as(held)
        return self._joined(held, self.shape, self.placement)

    def _joined(self, part: Tensor, shape: Sequence[int], placement: Placement) -> Tensor:
        """Returns a full tensor from each rank's part of it."""
        axis, full = self.mesh.axis_of(placement), part.new_zeros(shape)
        placement.paste(full, part, axis.size, axis.rank)
        start_sum(full, axis)()
        return full


def _type_of_products(value: Tensor) -> torch.dtype:
    """The type of a product with a value, also under autocast."""
    kind = value.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype


class _Received(torch.autograd.Function):
    """The result of another pipeline rank. The gradient of what it was computed from is zero: the owner's counts."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, placed: Placed, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        ctx.like = value.new_zeros(()), value.shape
        return placed.share(value.new_empty(shape, dtype=dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        zero, shape = ctx.like
        return zero.expand(shape), None, None, None


class _Full(torch.autograd.Function):
    """A full parameter, of parts on the ranks of its cut on one pipeline rank."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, placed: Placed) -> Tensor:
        ctx.placed, ctx.held_shape = placed, held.shape
        full = placed._gathered(held) if placed.is_here else held.new_empty(placed.shape)
        return full if placed.mesh.pipe.group is None else placed.share(full.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        placed, (gradient,) = ctx.placed, gradients
        if not placed.is_here:
            return gradient.new_zeros(ctx.held_shape), None
        axis = placed.mesh.axis_of(placed.placement)
        return placed.placement.cut(gradient, axis.size, axis.rank), None
