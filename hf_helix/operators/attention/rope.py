"""Rotary position embedding of queries and keys together, with explicit backward.

In:   queries and keys [batch, heads, tokens, head_dim], cosines and sines [batch, tokens, head_dim].
Out:  both rotated, in the type of their products with the cosines; from the fused kernel in their own type, as products
      of attention under autocast would have them.
Must hold: the bits of `apply_rotary_pos_emb` of Transformers, forward and backward; half as many kernels, if queries
and keys are adjacent in memory.
"""

from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.fused import kernels
from hf_helix.operators.side_by_side import contiguous_heads

Pair = tuple[Tensor, Tensor]


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Returns `apply_rotary_pos_emb(q, k, cos, sin)`, for queries and keys [batch, heads, tokens, head_dim], and
    cosines and sines [batch, tokens, head_dim] without gradient."""
    result: Pair = _Rotation.apply(q, k, cos, sin)
    return result


class _Rotation(torch.autograd.Function):
    """Computes in [tokens, batch, heads, head_dim], the layout of the projections."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        cos, sin = _over_heads(cos), _over_heads(sin)
        ctx.save_for_backward(cos, sin)
        ctx.dtype = q.dtype
        q, k = _tokens_first(q), _tokens_first(k)
        joined = contiguous_heads((q, k))
        parts = (q, k) if joined is None else (joined,)
        if kernels.is_on(q) and q.dtype is k.dtype:
            return _apart(kernels.rotate(parts, cos.squeeze(2), sin.squeeze(2), q.dtype, False), q.shape[2])
        if joined is None:
            return _heads_first(_rotate(q, cos, sin)), _heads_first(_rotate(k, cos, sin))
        return _apart(_rotate(joined, cos, sin), q.shape[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        of_q, of_k = parts = [_tokens_first(gradient) for gradient in gradients]
        if kernels.is_on(of_q) and of_q.dtype is of_k.dtype:
            gradient = kernels.rotate(parts, cos.squeeze(2), sin.squeeze(2), ctx.dtype, True)
        else:
            gradient = _rotate_back(torch.cat(parts, 2), cos, sin, ctx.dtype)
        return *_apart(gradient, of_q.shape[2]), None, None


def _rotate(value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = value.shape[-1] // 2
    turned = torch.cat((-value[..., half:], value[..., :half]), -1)
    return (value * cos).add_(turned * sin)


def _rotate_back(gradient: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of `_rotate`; as autograd does, each product is rounded to the type of the value first."""
    turned = (gradient * sin).to(dtype)
    half = turned.shape[-1] // 2
    return (gradient * cos).to(dtype).add_(torch.cat((turned[..., half:], -turned[..., :half]), -1))


def _apart(joined: Tensor, heads: int) -> Pair:
    """Returns the first heads, and the others, of a value [tokens, batch, heads, head_dim]."""
    return _heads_first(joined[:, :, :heads]), _heads_first(joined[:, :, heads:])


def _tokens_first(value: Tensor) -> Tensor:
    return value.permute(2, 0, 1, 3)


def _heads_first(value: Tensor) -> Tensor:
    return value.permute(1, 2, 0, 3)


def _over_heads(value: Tensor) -> Tensor:
    """Cosines or sines [batch, tokens, head_dim] for [tokens, batch, heads, head_dim]."""
    return value.transpose(0, 1).unsqueeze(2)
