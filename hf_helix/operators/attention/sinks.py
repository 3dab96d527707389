"""Attention sinks: one more logit for each head, after the logits of the keys, with a value of zero.

In:   attention of some queries and its log-sum-exp, from a kernel of `hf_helix.operators.attention.partial`; the sinks.
Out:  the same attention with the sinks, and their gradient.
Must hold: a kernel's backward, given the output and the log-sum-exp with the sinks, is the backward of attention with
sinks: nothing but the log-sum-exp is kept of the products of queries and keys.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.attention.partial import Attended, AttentionKernel, AttentionMask
from hf_helix.operators.autograd_operator import cast_for_matmul
from hf_helix.operators.base import autocast_device


def with_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output [batch, heads, queries, head_dim] and the log-sum-exp [batch, heads, queries] with sinks
    [heads], in fp32."""
    both = torch.logaddexp(lse, sinks.float().unsqueeze(-1))
    return o * (lse - both).exp().unsqueeze(-1), both


def gradient_of_sinks(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns the gradient of sinks [heads]: a sink takes its weight from all keys equally.

    Args:
        delta: the product of each output with its gradient, summed over a head [batch, heads, queries].
        lse: with the sinks [batch, heads, queries].
        sinks: [heads].
    """
    return -((sinks.float().unsqueeze(-1) - lse).exp() * delta).sum((0, 2))


def attend(
    kernel: AttentionKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: AttentionMask,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention [batch, queries, heads, size of values], differentiable in queries, keys, values and sinks.

    Args:
        kernel: computes attention and its log-sum-exp.
        q: [batch, heads, queries, head_dim].
        k: [batch, kv heads, keys, head_dim].
        v: [batch, kv heads, keys, size of values], of which the size is at most `head_dim`.
        seen: the keys that each query attends to.
        scale: the factor of the products of queries and keys.
        sinks: [heads], or None.
    """
    if kernel.averages and seen.mask is not None:
        blank = ~seen.mask.any(-1)
        seen = replace(seen, mask=seen.mask | blank.unsqueeze(-1), blank=blank)
    size, v = v.shape[-1], cast_for_matmul(v)
    filled = functional.pad(v, (0, q.shape[-1] - size)) if size < q.shape[-1] else v
    with torch.autocast(autocast_device(v.device.type), enabled=False):
        out: Tensor = _Attend.apply(kernel, seen, scale, q.to(v.dtype), k.to(v.dtype), filled, sinks)
    return out[..., :size]


class _Attend(torch.autograd.Function):
    """Attention by a kernel, with what its backward reads: queries, keys, values, output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: AttentionKernel,
        seen: AttentionMask,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        o, lse = kernel.forward(q, k, v, seen, scale)
        if sinks is not None:
            o, lse = with_sinks(o, lse, sinks)
        o = o.to(q.dtype).transpose(1, 2).contiguous()
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        ctx.kernel, ctx.seen, ctx.scale = kernel, seen, scale
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        q, k, v, o, lse, sinks = ctx.saved_tensors
        gradient, o = gradients[0].transpose(1, 2), o.transpose(1, 2)
        dq, dk, dv = ctx.kernel.backward(gradient, Attended(q, k, v, o, lse), ctx.seen, ctx.scale)
        of_sinks = None
        if ctx.needs_input_grad[-1]:
            delta = (gradient.float() * o.float()).sum(-1)
            of_sinks = gradient_of_sinks(delta, lse, sinks).to(sinks.dtype)
        return None, None, None, dq, dk, dv, of_sinks
