"""Parameters above the decoder, used by code of the caller's: the head, cut by vocabulary, and modules of a user's own.

In:   a parameter of the last unit that no operator reads, as the caller's code passes it to a function of torch.
Out:  the result of a linear, divided over the vocabulary where the weight is; or the full parameter under autograd.
Must hold: every rank of a batch runs the caller's code on equal values, also the pipeline ranks without the parameter.
The gradient on a rank is that of the full loss; with context parallelism, whose ranks' gradients are summed, its share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.param_shard import Placement
from hf_helix.operators.vocab_logits import divided_logits, summed_gradient
from hf_helix.runtime.distributed.groups import broadcast_object
from hf_helix.runtime.distributed.mesh import Mesh


@dataclass(frozen=True)
class AboveDecoder:
    """The position of a parameter above the decoder.

    Attributes:
        mesh: the mesh of ranks.
        placement: the cut of the parameter.
        owner: the pipeline rank with the parameter.
    """

    mesh: Mesh
    placement: Placement
    owner: int

    @property
    def is_here(self) -> bool:
        """Whether this rank holds the parameter, or its part of it."""
        return self.mesh.pipe.rank == self.owner

    @property
    def is_cut(self) -> bool:
        """Whether tensor-parallel ranks hold parts of the parameter."""
        return self.placement.dim is not None and self.mesh.tp.size > 1

    def linear(self, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns `functional.linear` with this weight, and this bias if any; both as this rank holds them.

        Args:
            value: [..., features], equal on every rank of a batch.
            weight: empty on other pipeline ranks.
            bias: likewise.
        """
        if not self.is_here:
            result: Tensor = _Received.apply(value, self)  # type: ignore[no-untyped-call]
        else:
            value = summed_gradient(value, self.mesh.tp) if self.is_cut else value
            scale = 1 / self.mesh.cp.size
            bias = None if bias is None else _scaled(bias, scale)
            result = functional.linear(value, _scaled(weight, scale), bias)
            _send(result.detach(), self)
        return divided_logits(result, self.mesh.tp, self.placement.length) if self.is_cut else result

    def full(self, held: Tensor) -> Tensor:
        """Returns the full parameter from the part that this rank holds, under autograd."""
        full: Tensor = _Full.apply(_scaled(held, 1 / self.mesh.cp.size), self)  # type: ignore[no-untyped-call]
        return full


def _scaled(held: Tensor, scale: float) -> Tensor:
    """Returns a plain tensor in the memory of a parameter, whose gradient is scaled."""
    scaled: Tensor = _ScaledGradient.apply(held, scale)  # type: ignore[no-untyped-call]
    return scaled


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return held.view_as(held)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.scale, None


def _send(result: Tensor, above: AboveDecoder) -> None:
    """Gives a result to the other pipeline ranks."""
    pipe = above.mesh.pipe
    if pipe.group is not None:
        result = result.contiguous()
        broadcast_object((tuple(result.shape), result.dtype), pipe.ranks[above.owner], pipe.ranks)
        dist.broadcast(result, pipe.ranks[above.owner], group=pipe.group)


class _Received(torch.autograd.Function):
    """The result of a linear on another pipeline rank. The gradient of its input is zero: the owner's counts."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, above: AboveDecoder) -> Tensor:
        pipe = above.mesh.pipe
        ctx.like = value.new_zeros(()), value.shape
        shape, dtype = broadcast_object(None, pipe.ranks[above.owner], pipe.ranks)
        result = torch.empty(shape, dtype=dtype, device=value.device)
        dist.broadcast(result, pipe.ranks[above.owner], group=pipe.group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        zero, shape = ctx.like
        return zero.expand(shape), None


class _Full(torch.autograd.Function):
    """A full parameter, of parts on the tensor-parallel ranks of one pipeline rank."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, above: AboveDecoder) -> Tensor:
        ctx.above, ctx.held_shape = above, held.shape
        mesh, placement = above.mesh, above.placement
        full = held
        if above.is_here and above.is_cut:
            full = held.new_zeros(placement.full_shape(held.shape))
            placement.paste(full, held, mesh.tp.size, mesh.tp.rank)
            dist.all_reduce(full, group=mesh.tp.group)
        pipe = mesh.pipe
        if pipe.group is None:
            return full if full is not held else held.view_as(held)
        root = pipe.ranks[above.owner]
        shape, dtype = broadcast_object((tuple(full.shape), full.dtype) if above.is_here else None, root, pipe.ranks)
        result = full.contiguous().clone() if above.is_here else torch.empty(shape, dtype=dtype, device=mesh.device)
        dist.broadcast(result, root, group=pipe.group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        above, (gradient,) = ctx.above, gradients
        if not above.is_here:
            return gradient.new_zeros(ctx.held_shape), None
        if above.is_cut:
            gradient = above.placement.cut(gradient, above.mesh.tp.size, above.mesh.tp.rank)
        return gradient, None
