"""Attention of some queries over some keys, with the log-sum-exp for merging parts of the keys.

In:   q [batch, heads, queries, head_dim], k and v [batch, kv heads, keys, head_dim]; a mask.
Out:  o [batch, heads, queries, head_dim] and lse [batch, heads, queries] in fp32; backward the gradients of q, k, v.
Must hold: backward takes the output and the lse over all keys of a query, so that the gradients of the parts add up to
the full gradient. A query that may see nothing gets zeros, and an lse of minus infinity, unless the kernel averages.
"""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.base import Tensors

logger = logging.getLogger(__name__)
aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionMask:
    """The keys that each query attends to.

    Attributes:
        causal: whether query i attends to the keys up to i only (there are as many queries as keys).
        window: how many tokens a query attends to, itself and earlier tokens; None for all.
        apart: the distance of query 0 from key 0 in the sequence, where there is a window.
        mask: [batch, queries, keys], True where a query attends to a key; None for full attention. Mutually exclusive
            with `window`.
        blank: [batch, queries], True where a query takes the mean of all values, as a query that may see nothing does
            in `eager` attention; only beside a mask.
    """

    causal: bool = False
    window: int | None = None
    apart: int = 0
    mask: Tensor | None = None
    blank: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the mask is full or causal attention, which every kernel computes."""
        return self.mask is None and self.window is None

    def hides(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Returns True where a query does not attend to a key; None for full attention.

        Args:
            queries: how many there are.
            keys: how many there are.
            device: of the result.
        """
        if self.mask is not None:
            return ~self.mask[:, None, None]
        if not self.causal and self.window is None:
            return None
        back = self.apart + torch.arange(queries, device=device).unsqueeze(1) - torch.arange(keys, device=device)
        hidden = back < 0 if self.causal else torch.zeros_like(back, dtype=torch.bool)
        return hidden if self.window is None else hidden | (back >= self.window)


EVERYTHING, CAUSAL = AttentionMask(), AttentionMask(causal=True)


class Attended(NamedTuple):
    """What backward reads of an attention.

    Attributes:
        q: as of `AttentionKernel.forward`.
        k, v: as of `AttentionKernel.forward`, of some of the keys or of all.
        o: the output over all keys [batch, heads, queries, head_dim].
        lse: the log-sum-exp over all keys [batch, heads, queries].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor


class AttentionKernel(ABC):
    """An attention kernel. `scale` multiplies the products of queries and keys.

    Attributes:
        averages: see `Exact`.
        unpads: whether hidden tokens are left out, as in flash attention of Transformers; windows then do not count
            them.
    """

    averages = unpads = False

    def supports(self, q: Tensor, k: Tensor, seen: AttentionMask) -> bool:
        """Returns whether the kernel can compute attention of queries like `q` over keys like `k` with a mask.

        Args:
            q: queries, [batch, heads, queries, head_dim].
            k: keys, [batch, groups, keys, head_dim].
            seen: which keys queries attend to.
        """
        return True

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: AttentionMask, scale: float) -> tuple[Tensor, Tensor]:
        """Returns o [batch, heads, queries, head_dim] and lse [batch, heads, queries] in fp32.

        Args:
            q: [batch, heads, queries, head_dim].
            k: [batch, kv heads, keys, head_dim].
            v: [batch, kv heads, keys, head_dim of values].
            seen: which keys each query attends to.
            scale: the factor of the products of queries and keys.
        """

    @abstractmethod
    def backward(self, gradient: Tensor, of: Attended, seen: AttentionMask, scale: float) -> Tensors:
        """Returns the gradients of q, k and v, in their shapes.

        Args:
            gradient: of the output over all keys, in the shape of `of.o`.
            of: what was attended.
            seen: as of `forward`, for the keys of `of`.
            scale: as of `forward`.
        """


class Exact(AttentionKernel):
    """Attention written out in fp32: the reference, and the last resort. Needs memory for all products.

    Args:
        averages: a query that may see nothing takes the mean of all keys, as in `eager` of Transformers.
        cap: bounds the products of queries and keys, x becomes cap * tanh(x / cap); None for no bound.
    """

    def __init__(self, averages: bool = False, cap: float | None = None) -> None:
        self.averages = averages
        self.cap = cap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: AttentionMask, scale: float) -> tuple[Tensor, Tensor]:
        scores = self._masked(self._products(q, k, scale), seen)
        lse = scores.logsumexp(-1)
        o = self._weights(scores, lse) @ v.float().unsqueeze(2)
        return o.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    def backward(self, gradient: Tensor, of: Attended, seen: AttentionMask, scale: float) -> Tensors:
        (q, k, v, o, lse), groups = of, of.k.shape[1]
        products = self._products(q, k, scale)
        weights = self._weights(self._masked(products, seen), lse.unflatten(1, (groups, -1)))
        do, qs, out = (value.float().unflatten(1, (groups, -1)) for value in (gradient, q, o))
        delta = (do * out).sum(-1, keepdim=True)
        ds = weights * (do @ v.float().unsqueeze(2).mT - delta) * scale
        if self.cap is not None:
            ds = ds * (1 - (products / self.cap).square())
        dq = (ds @ k.float().unsqueeze(2)).flatten(1, 2)
        dk, dv = (ds.mT @ qs).sum(2), (weights.mT @ do).sum(2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _products(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """[batch, kv heads, heads of each, queries, keys]."""
        products = (q.float().unflatten(1, (k.shape[1], -1)) @ k.float().unsqueeze(2).mT) * scale
        return products if self.cap is None else self.cap * torch.tanh(products / self.cap)

    def _masked(self, scores: Tensor, seen: AttentionMask) -> Tensor:
        if seen.blank is not None:
            scores = scores.masked_fill(seen.blank[:, None, None, :, None], 0.0)
        hidden = seen.hides(scores.shape[-2], scores.shape[-1], scores.device)
        return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)

    def _weights(self, scores: Tensor, lse: Tensor) -> Tensor:
        # For a query that sees nothing, minus infinity less minus infinity would be NaN.
        return (scores - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()


class Fused(AttentionKernel):
    """A kernel of torch that stores no products, behind a common interface: sizes and heads as the kernel wants them,
    and back.

    Attributes:
        multiple: the head size is padded to a multiple of this number; zeros add nothing to the products.
        grouped: whether the kernel takes fewer heads of keys and values than of queries; they are repeated otherwise.
    """

    multiple = 1
    grouped = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: AttentionMask, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v, size = *self._fitted(q, k, v), q.shape[-1]
        o, lse = self._attend(q, k, v, seen, scale)
        return o[..., :size], lse

    def backward(self, gradient: Tensor, of: Attended, seen: AttentionMask, scale: float) -> Tensors:
        groups, size = of.k.shape[1], of.q.shape[-1]
        gradient, o = (_padded(value, self.multiple) for value in (gradient, of.o))
        fitted = Attended(*self._fitted(of.q, of.k, of.v), o, of.lse)
        parts = [part[..., :size] for part in self._differentiate(gradient, fitted, seen, scale)]
        return parts[0], *(_sum_by_group(part, groups) for part in parts[1:])

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: AttentionMask, scale: float) -> tuple[Tensor, Tensor]:
        """Returns o and lse, of arguments that fit the kernel."""

    @abstractmethod
    def _differentiate(self, gradient: Tensor, of: Attended, seen: AttentionMask, scale: float) -> Tensors:
        """Returns gradients of q, k and v, of arguments that fit the kernel."""

    def _fitted(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (_padded(value, self.multiple) for value in (q, k, v))
        return (q, k, v) if self.grouped else (q, _for_every_head(k, q), _for_every_head(v, q))


Tile = tuple[slice, slice, AttentionMask]
"""Some of the queries, the keys within their window, and the mask between them."""


class TorchCpu(Fused):
    """The kernel of `scaled_dot_product_attention` on CPU. A mask is an additive bias; under a window the queries are
    taken in parts, each with the keys within its window."""

    part = 128  # the least queries of a part

    def supports(self, q: Tensor, k: Tensor, seen: AttentionMask) -> bool:
        return seen.blank is None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: AttentionMask, scale: float) -> tuple[Tensor, Tensor]:
        if seen.is_plain:
            o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, seen.causal, scale=scale)
            return o, lse
        outputs = []
        for rows, columns, mask in self._tiles(q, k, seen):
            queries, bias = q[:, :, rows], _bias(q, mask, rows, columns)
            o, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                queries, k[:, :, columns], v[:, :, columns], 0.0, False, attn_mask=bias, scale=scale
            )
            nothing = lse < HIDDEN / 2
            outputs.append((o.masked_fill(nothing.unsqueeze(-1), 0.0), lse.masked_fill(nothing, -torch.inf)))
        o, lse = (values[0] if len(values) == 1 else torch.cat(values, 2) for values in zip(*outputs, strict=True))
        return o, lse

    def _differentiate(self, gradient: Tensor, of: Attended, seen: AttentionMask, scale: float) -> Tensors:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        if seen.is_plain:
            dq, dk, dv = backward(gradient, *of, 0.0, seen.causal, scale=scale)
            return dq, dk, dv
        q, k, v, o, lse = of
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # so that a query that sees nothing has the weights zero
        queries, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
        for rows, columns, mask in self._tiles(q, k, seen):
            given = [value[:, :, rows] for value in (gradient, q)]
            given += [value[:, :, columns] for value in (k, v)] + [value[:, :, rows] for value in (o, lse)]
            bias = _bias(q, mask, rows, columns)
            dq, *of_keys = backward(*given, 0.0, False, attn_mask=bias, scale=scale)
            queries.append(dq)
            for total, part in zip((dk, dv), of_keys, strict=True):
                total[:, :, columns] += part
        return queries[0] if len(queries) == 1 else torch.cat(queries, 2), dk, dv

    def _tiles(self, q: Tensor, k: Tensor, seen: AttentionMask) -> list[Tile]:
        queries, keys = q.shape[2], k.shape[2]
        if seen.window is None:
            return [(slice(0, queries), slice(0, keys), seen)]
        size, tiles = max(self.part, seen.window), []
        for start in range(0, queries, size):
            end = min(queries, start + size)
            last = min(keys, seen.apart + end) if seen.causal else keys
            first = max(0, min(last - 1, seen.apart + start - seen.window + 1))
            mask = AttentionMask(seen.causal, seen.window, seen.apart + start - first)
            tiles.append((slice(start, end), slice(first, last), mask))
        return tiles


HIDDEN = -1e30
"""The bias of a hidden key: with minus infinity, rows that see nothing would give no numbers."""


def _bias(q: Tensor, seen: AttentionMask, rows: slice, columns: slice) -> Tensor:
    """Returns the bias that hides keys from queries [batch or 1, 1, queries, keys]."""
    hidden = seen.hides(rows.stop - rows.start, columns.stop - columns.start, q.device)
    assert hidden is not None, "a mask, or a window"
    hidden = hidden.reshape(-1, 1, *hidden.shape[-2:])
    dtype = torch.float32 if q.dtype is torch.float16 else q.dtype  # fp16 ends before
    return torch.zeros(hidden.shape, dtype=dtype, device=q.device).masked_fill_(hidden, HIDDEN)


class FirstOf(AttentionKernel):
    """The first of some kernels that supports the arguments; `Exact`, the last, supports all."""

    def __init__(self, *kernels: AttentionKernel) -> None:
        self.kernels = (*kernels, Exact())
        self.unpads = any(kernel.unpads for kernel in kernels)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: AttentionMask, scale: float) -> tuple[Tensor, Tensor]:
        return self._chosen(q, k, seen).forward(q, k, v, seen, scale)

    def backward(self, gradient: Tensor, of: Attended, seen: AttentionMask, scale: float) -> Tensors:
        return self._chosen(of.q, of.k, seen).backward(gradient, of, seen, scale)

    def _chosen(self, q: Tensor, k: Tensor, seen: AttentionMask) -> AttentionKernel:
        chosen = next(kernel for kernel in self.kernels if kernel.supports(q, k, seen))
        if isinstance(chosen, Exact) and q.device.type != "cpu":
            _warn_of_exact(q.dtype, q.shape[-1], q.device.type)
        return chosen


def merge(o: Tensor, lse: Tensor, further: Tensor, further_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Returns attention over two sets of keys [batch, heads, queries, head_dim] and its log-sum-exp [batch, heads,
    queries], from attention over each; in fp32."""
    both = torch.logaddexp(lse, further_lse)
    floor = both.clamp(min=torch.finfo(both.dtype).min)  # a query that has seen nothing yet
    return (lse - floor).exp().unsqueeze(-1) * o + (further_lse - floor).exp().unsqueeze(-1) * further, both


def _for_every_head(value: Tensor, q: Tensor) -> Tensor:
    repeats = q.shape[1] // value.shape[1]
    return value if repeats == 1 else value.repeat_interleave(repeats, 1)


def _sum_by_group(gradient: Tensor, groups: int) -> Tensor:
    return gradient if gradient.shape[1] == groups else gradient.unflatten(1, (groups, -1)).sum(2)


def _padded(value: Tensor, multiple: int) -> Tensor:
    """The value with its last dimension padded with zeros to a multiple."""
    extra = -value.shape[-1] % multiple
    return functional.pad(value, (0, extra)) if extra else value


@cache
def _warn_of_exact(dtype: torch.dtype, head_dim: int, device: str) -> None:
    logger.warning(
        f"attention over a cut sequence is written out for {dtype} and heads of {head_dim} on this {device} device: no "
        "kernel takes them, and all products of queries and keys need memory; bf16=True in the training arguments "
        "needs less on devices of compute capability 8.0 and more"
    )
