"""Attention of some queries over some keys, with the log-sum-exp by which parts of it can be put together.

In:   q [batch, heads, queries, head_dim], k and v [batch, kv heads, keys, head_dim]; what may see what.
Out:  o [batch, heads, queries, head_dim] and lse [batch, heads, queries] in fp32; backward the gradients of q, k, v.
Must hold: backward takes the output and the lse of the whole row of keys, so that the parts' gradients add up to those
of the whole. A query that may see nothing gets zeros, and an lse of minus infinity, unless the kernel averages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.base import Tensors


@dataclass(frozen=True)
class Seen:
    """What may see what.

    Attributes:
        causal: query i sees the keys up to i (as many queries as keys).
        window: how many tokens a query looks back on, itself included; None for all.
        apart: how many tokens query 0 stands behind key 0, where there is a window.
        mask: [batch, queries, keys], True where a query sees a key; None for everything. With it goes no window.
        blank: [batch, queries], True where a query takes the mean of all keys, whatever they are; with a mask.
    """

    causal: bool = False
    window: int | None = None
    apart: int = 0
    mask: Tensor | None = None
    blank: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True for what every kernel can do: everything, or all up to a token."""
        return self.mask is None and self.window is None

    def hides(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """True where a query does not see a key; None where all see all."""
        if self.mask is not None:
            return ~self.mask[:, None, None]
        if not self.causal and self.window is None:
            return None
        back = self.apart + torch.arange(queries, device=device).unsqueeze(1) - torch.arange(keys, device=device)
        hidden = back < 0 if self.causal else torch.zeros_like(back, dtype=torch.bool)
        return hidden if self.window is None else hidden | (back >= self.window)


EVERYTHING, CAUSAL = Seen(), Seen(causal=True)


class Kernel(ABC):
    """A way to compute attention. `scale` multiplies the products of queries and keys.

    Attributes:
        averages: see `Exact`.
    """

    averages = False

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
        """o and lse."""

    @abstractmethod
    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seen: Seen, scale: float
    ) -> Tensors:
        """Gradients of q, k and v, given the output and lse over all keys."""


class Exact(Kernel):
    """Written out, in fp32: the reference, and what serves where nothing else does. Needs room for all products.

    Args:
        averages: as `eager` of Transformers does, let a query that may see nothing take the mean of all keys.
    """

    def __init__(self, averages: bool = False) -> None:
        self.averages = averages

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, seen, scale)
        lse = scores.logsumexp(-1)
        o = self._weights(scores, lse) @ v.float().unsqueeze(2)
        return o.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seen: Seen, scale: float
    ) -> Tensors:
        groups = k.shape[1]
        weights = self._weights(self._scores(q, k, seen, scale), lse.unflatten(1, (groups, -1)))
        do, qs, whole = (value.float().unflatten(1, (groups, -1)) for value in (gradient, q, o))
        delta = (do * whole).sum(-1, keepdim=True)
        products = weights * (do @ v.float().unsqueeze(2).mT - delta) * scale
        dq = (products @ k.float().unsqueeze(2)).flatten(1, 2)
        dk, dv = (products.mT @ qs).sum(2), (weights.mT @ do).sum(2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, seen: Seen, scale: float) -> Tensor:
        """[batch, kv heads, heads of each, queries, keys]."""
        scores = (q.float().unflatten(1, (k.shape[1], -1)) @ k.float().unsqueeze(2).mT) * scale
        if seen.blank is not None:
            scores = scores.masked_fill(seen.blank[:, None, None, :, None], 0.0)
        hidden = seen.hides(q.shape[2], k.shape[2], q.device)
        return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)

    def _weights(self, scores: Tensor, lse: Tensor) -> Tensor:
        # Where nothing is seen, minus infinity less minus infinity would be no number.
        return (scores - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()


class TorchCpu(Kernel):
    """The kernel behind `scaled_dot_product_attention` on CPU; masks and windows go to `Exact`."""

    def __init__(self) -> None:
        self._exact = Exact()
        aten = torch.ops.aten
        self._forward = aten._scaled_dot_product_flash_attention_for_cpu
        self._backward = aten._scaled_dot_product_flash_attention_for_cpu_backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
        if not seen.is_plain:
            return self._exact.forward(q, k, v, seen, scale)
        k, v = (_for_every_head(value, q) for value in (k, v))
        o, lse = self._forward(q, k, v, 0.0, seen.causal, scale=scale)
        return o, lse

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seen: Seen, scale: float
    ) -> Tensors:
        if not seen.is_plain:
            return self._exact.backward(gradient, q, k, v, o, lse, seen, scale)
        groups = k.shape[1]
        k, v = (_for_every_head(value, q) for value in (k, v))
        dq, dk, dv = self._backward(gradient, q, k, v, o, lse, 0.0, seen.causal, scale=scale)
        return dq, *(_sum_by_group(value, groups) for value in (dk, dv))


class FlashAttention(Kernel):
    """The flash-attn package, for half precision on CUDA; masks, and windows between parts, go to `Exact`."""

    def __init__(self) -> None:
        interface: Any = import_module("flash_attn.flash_attn_interface")
        self._exact = Exact()
        self._forward = interface._flash_attn_forward
        self._backward = interface._flash_attn_backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
        if not self._takes(q, seen):
            return self._exact.forward(q, k, v, seen, scale)
        q, k, v = (value.transpose(1, 2) for value in (q, k, v))
        o, lse, *_ = self._forward(
            q, k, v, 0.0, scale, causal=seen.causal, window_size_left=_reach(seen), window_size_right=-1,
            softcap=0.0, alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        return o.transpose(1, 2), lse

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seen: Seen, scale: float
    ) -> Tensors:
        if not self._takes(q, seen):
            return self._exact.backward(gradient, q, k, v, o, lse, seen, scale)
        gradient, q, k, v, o = (value.transpose(1, 2).contiguous() for value in (gradient, q, k, v, o))
        dq, dk, dv = (torch.empty_like(value) for value in (q, k, v))
        self._backward(
            gradient, q, k, v, o, lse.contiguous(), dq, dk, dv, 0.0, scale, causal=seen.causal,
            window_size_left=_reach(seen), window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
        )  # fmt: skip
        return tuple(value.transpose(1, 2) for value in (dq, dk, dv))

    def _takes(self, q: Tensor, seen: Seen) -> bool:
        return _is_half(q) and (seen.is_plain or (seen.causal and seen.mask is None))


KERNELS = ("eager", "sdpa", "flash_attention_2")
"""The attention implementations of Transformers that have a kernel here."""


def kernel_for(implementation: str, device: torch.device) -> Kernel:
    """The kernel that stands for an attention implementation of Transformers.

    Raises:
        ValueError: it gives no log-sum-exp; names those that do.
    """
    if implementation not in KERNELS:
        raise ValueError(
            f"attn_implementation={implementation!r} gives no log-sum-exp, by which attention over a cut sequence is "
            f"put together; with cp_size above 1 use one of {', '.join(KERNELS)}"
        )
    if implementation == "flash_attention_2":
        if find_spec("flash_attn") is None:
            raise ValueError("attn_implementation='flash_attention_2' needs the package flash-attn; use 'sdpa'")
        return FlashAttention()
    return TorchCpu() if implementation == "sdpa" and device.type == "cpu" else Exact(implementation == "eager")


def merge(o: Tensor, lse: Tensor, further: Tensor, further_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each; o in fp32."""
    both = torch.logaddexp(lse, further_lse)
    floor = both.clamp(min=torch.finfo(both.dtype).min)  # a query that has seen nothing yet
    return (lse - floor).exp().unsqueeze(-1) * o + (further_lse - floor).exp().unsqueeze(-1) * further, both


def _for_every_head(value: Tensor, q: Tensor) -> Tensor:
    repeats = q.shape[1] // value.shape[1]
    return value if repeats == 1 else value.repeat_interleave(repeats, 1)


def _sum_by_group(gradient: Tensor, groups: int) -> Tensor:
    return gradient if gradient.shape[1] == groups else gradient.unflatten(1, (groups, -1)).sum(2)


def _reach(seen: Seen) -> int:
    """How many tokens before itself a query sees, as flash-attn counts."""
    return -1 if seen.window is None else seen.window - 1


def _is_half(value: Tensor) -> bool:
    return value.dtype in (torch.float16, torch.bfloat16)
