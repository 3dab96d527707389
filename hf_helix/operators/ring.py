"""Attention over a sequence that several ranks share (context parallelism), as operators.

In:   this rank's queries, keys and values; further keys and values come round the ring, step by step.
Out:  the attention of its queries over the whole sequence.
Must hold: the sequence is cut in 2c parts, and rank r holds the parts r and 2c-1-r, so that every rank has as much of
the causal triangle; keys and values of another rank never outlive the block that reads them, backward fetches them
anew; softmax statistics are merged in fp32.

Forward, block i attends to the keys of rank r-i while step i+1 of the ring brings those of rank r-i-1. Backward runs
through the blocks from the last to the first, and the gradients of keys and values go back the way these came, each
step beside the next block: 2(c-1) steps against the 2c-1 of rings that carry gradients onward (paper, section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.attention import CAUSAL, EVERYTHING, Kernel, Seen, merge
from hf_helix.operators.base import Call, Communication, Computation, Tensors, Work
from hf_helix.operators.collectives import Axis
from hf_helix.planning.graph import Part

DOCUMENTS = "documents"
"""Side input: the document of every token [batch, whole sequence], -1 for padding; None where there is but one."""


class Step(Communication):
    """Keys and values to the next rank of the ring, from the one before; gradients the other way."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, Work]:
        value = inputs[0].contiguous()
        out = torch.empty_like(value)
        transport = self.axis.transport
        move = transport.shift_back if part is Part.B else transport.shift
        return (out,), lambda: move(out, value)


class Block(Computation):
    """Attention of this rank's queries to the keys of one rank, put together with that of the blocks before.

    Values: q [batch, heads, n, head_dim]; kv [2, batch, kv heads, n, head_dim]; the attention so far as [batch, heads,
    n, head_dim + 1] in fp32, its last column the log-sum-exp. Backward also reads q, kv, and output and lse of the
    whole, see `Join`.

    Args:
        distance: how many steps the keys have come.
        scale: of the products of queries and keys.
    """

    def __init__(self, kernel: Kernel, axis: Axis, distance: int, scale: float) -> None:
        self.kernel = kernel
        self.axis = axis
        self.distance = distance
        self.scale = scale

    @property
    def source(self) -> int:
        """The rank whose keys these are."""
        return (self.axis.rank - self.distance) % self.axis.size

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        q, kv, *before = inputs
        rows, columns, seen = visible(q.shape[2], self.axis, self.source, call.side)
        k, v = kv[:, :, :, columns].unbind()
        o, lse = self.kernel.forward(q[:, :, rows], k, v, seen, self.scale)
        if not before:  # a rank's own keys are seen by all its queries
            return (torch.cat((o.float(), lse.unsqueeze(-1)), -1),)
        (so_far,) = before
        so_far = so_far.clone()
        part = so_far[:, :, rows]
        merged, both = merge(part[..., :-1], part[..., -1], o, lse)
        part[..., :-1], part[..., -1] = merged, both
        return (so_far,)

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        gradient, q, kv, out, lse = gradients
        n = q.shape[2]
        rows, columns, seen = visible(n, self.axis, self.source, call.side)
        o = out.unflatten(-1, (q.shape[1], -1)).permute(1, 2, 0, 3)
        k, v = kv[:, :, :, columns].unbind()
        do, q, o, lse = (value[:, :, rows] for value in (gradient, q, o, lse))
        dq, dk, dv = self.kernel.backward(do, q, k, v, o, lse, seen, self.scale)
        if dq.shape[2] < n:
            dq = _widen(dq, rows, n)
        if dk.shape[2] < n:
            dk, dv = (_widen(value, columns, n) for value in (dk, dv))
        own = (dq, torch.stack((dk, dv)))
        # The gradient of what was so far is that of the whole: the kernel has the statistics of the whole.
        return own if self.distance == 0 else (*own, gradient)


class Join(Computation):
    """The end of the blocks: output [n, batch, heads * head_dim] and its log-sum-exp [batch, heads, n]."""

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        (so_far,) = inputs
        call.saved = so_far.shape[1]
        return so_far[..., :-1].permute(2, 0, 1, 3).flatten(2), so_far[..., -1].contiguous()

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        heads, call.saved = call.saved, None
        return (gradients[0].unflatten(-1, (heads, -1)).permute(1, 2, 0, 3).contiguous(),)


class Blocks(Computation):
    """All blocks in one operator, over keys and values [c * 2, ...] that a `Gather` has brought.

    Values as of `Block`; backward also reads q, the gathered keys and values, output and lse.
    """

    def __init__(self, kernel: Kernel, axis: Axis, scale: float) -> None:
        self.axis = axis
        self._blocks = [Block(kernel, axis, distance, scale) for distance in range(axis.size)]

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        q, gathered = inputs
        parts = gathered.chunk(self.axis.size)
        so_far: Tensors = ()
        for block in self._blocks:
            so_far = block.forward(call, q, parts[block.source], *so_far)
        return so_far

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        gradient, q, gathered, out, lse = gradients
        parts = gathered.chunk(self.axis.size)
        whole = torch.empty_like(gathered)
        found = whole.chunk(self.axis.size)
        total: Tensor | None = None
        for block in reversed(self._blocks):
            dq, dkv, *_ = block.backward(call, gradient, q, parts[block.source], out, lse)
            found[block.source].copy_(dkv)
            total = dq if total is None else total + dq
        assert total is not None
        return total, whole


def visible(n: int, axis: Axis, source: int, side: Mapping[str, Any]) -> tuple[slice, slice, Seen]:
    """Which of a rank's `n` queries see which of the `n` keys of another rank.

    Returns:
        The queries and the keys that meet at all, and what of them is hidden.
    """
    documents = side.get(DOCUMENTS)
    everything = slice(0, n)
    if source == axis.rank:
        rows, columns, seen = everything, everything, CAUSAL
    elif source < axis.rank:
        rows, columns, seen = everything, slice(0, n // 2), EVERYTHING
    else:
        rows, columns, seen = slice(n // 2, n), everything, EVERYTHING
    if documents is None:
        return rows, columns, seen
    queries, keys = (positions_of(n, axis.size, r, documents.device) for r in (axis.rank, source))
    queries, keys = queries[rows], keys[columns]
    same = documents[:, queries, None] == documents[:, None, keys]
    same &= documents[:, None, keys] >= 0
    return rows, columns, Seen(mask=same & (keys <= queries[:, None]))


def positions_of(n: int, size: int, rank: int, device: torch.device | None = None) -> Tensor:
    """The places in the whole sequence of the `n` tokens that a rank holds."""
    half = n // 2
    places = torch.arange(half, device=device)
    return torch.cat((places + rank * half, places + (2 * size - 1 - rank) * half))


def _widen(value: Tensor, where: slice, n: int) -> Tensor:
    wide = value.new_zeros((*value.shape[:2], n, value.shape[3]))
    wide[:, :, where] = value
    return wide
