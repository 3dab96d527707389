"""Attention over a sequence that several ranks share (context parallelism), as operators.

In:   this rank's queries, keys and values; further keys and values come round the ring, step by step.
Out:  the attention of its queries over the full sequence.
Must hold: the sequence is cut in 2c parts, and rank r holds the parts r and 2c-1-r, so that every rank has as much of
the causal triangle. Keys and values of another rank never outlive the block that reads them; backward fetches them
anew. Softmax statistics are merged in fp32. Values shorter than keys are padded with zeros.

Forward, block i attends to the keys of rank r-i while step i+1 of the ring brings the keys of rank r-i-1. Backward runs
through the blocks from the last to the first, and the gradients of keys and values take the way of the keys back, each
step concurrently with the next block: 2(c-1) steps against the 2c-1 of rings that carry gradients onward (paper,
section 3.1).
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.attention.partial import CAUSAL, EVERYTHING, Attended, AttentionKernel, AttentionMask, merge
from hf_helix.operators.attention.sinks import gradient_of_sinks, with_sinks
from hf_helix.operators.base import Computation, OperatorContext, Tensors, TransferFn
from hf_helix.operators.communication.collectives import OverAxis
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.linears.accumulate import add_to_bias_gradients
from hf_helix.planning.graph.operator import Part

DOCUMENTS, MASKED = "documents", "masked"
"""Side inputs: the document of every token [batch, full sequence], or one of the marks below, None for a single
document; and whether a mask marks tokens as padding."""

PADDING, ABSENT = -1, -2
"""A padding token, and a token added to make the sequence divide."""

MaskTile = tuple[slice, slice, AttentionMask]
"""Some of a rank's queries, some of another's keys, and the mask between them."""


class RingStep(OverAxis):
    """Keys and values to the next rank of the ring, from the previous rank; gradients in the other direction."""

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        value = inputs[0].contiguous()
        out = torch.empty_like(value)
        transport = self.axis.transport
        move = transport.shift_back if part is Part.B else transport.shift
        return (out,), lambda: move(out, value)


class RingBlock(Computation):
    """Attention of this rank's queries to the keys of one rank, merged with earlier blocks.

    Values: q [batch, heads, n, head_dim]; kv [2, batch, kv heads, n, head_dim]; the result of earlier blocks as [batch,
    heads, n, head_dim + 1] in fp32, its last column the log-sum-exp. Backward also reads q, kv, and the final output
    and lse, see `JoinBlocks`.

    Args:
        kernel: of the block.
        axis: the context-parallel axis.
        distance: how many ring steps the keys have come.
        scale: of the products of queries and keys.
        window: how many tokens a query looks back on, itself included; None for all.
    """

    has_saved_state = False

    def __init__(
        self, kernel: AttentionKernel, axis: Axis, distance: int, scale: float, window: int | None = None
    ) -> None:
        self.kernel = kernel
        self.axis = axis
        self.distance = distance
        self.scale = scale
        self.window = window

    @property
    def source(self) -> int:
        """The rank of these keys."""
        return (self.axis.rank - self.distance) % self.axis.size

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        q, kv, *before = inputs
        so_far = before[0].clone() if before else None
        for rows, columns, seen in self._tiles(ctx, q):
            k, v = kv[:, :, :, columns].unbind()
            o, lse = self.kernel.forward(q[:, :, rows], k, v, seen, self.scale)
            so_far = _with_keys(so_far, o, lse, rows, q.shape[2])
        assert so_far is not None, "a token sees itself"
        return (so_far,)

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        gradient, q, kv, out, lse = gradients
        out = _padded(out.unflatten(-1, (q.shape[1], -1)).permute(1, 2, 0, 3), q.shape[-1])
        values: Tensors = (q, *kv)
        totals: list[Tensor | None] = [None] * 3
        for rows, columns, seen in self._tiles(ctx, q):
            k, v = kv[:, :, :, columns].unbind()
            do, queries, o, stats = (value[:, :, rows] for value in (gradient, q, out, lse))
            parts = self.kernel.backward(do, Attended(queries, k, v, o, stats), seen, self.scale)
            places = rows, columns, columns
            totals = [_added(*each) for each in zip(totals, parts, places, values, strict=True)]
        of_values = zip(totals, values, strict=True)
        dq, dk, dv = (torch.zeros_like(value) if total is None else total for total, value in of_values)
        # The gradient of the queries is summed over the blocks, in fp32; the gradient of keys and values travels.
        own = (dq.float(), torch.stack((dk, dv)))
        # The gradient of earlier blocks is the gradient of the result: the kernel has the statistics of all keys.
        return own if self.distance == 0 else (*own, gradient)

    def _tiles(self, ctx: OperatorContext, q: Tensor) -> list[MaskTile]:
        return mask_tiles(q.shape[2], self.axis, self.source, ctx.side, self.window, self.kernel)


class JoinBlocks(Computation):
    """The end of the blocks: output [n, batch, heads * value_dim] and its log-sum-exp [batch, heads, n].

    With sinks (`hf_helix.operators.attention.sinks`) in the output and in the log-sum-exp, the blocks' backward is the
    backward of attention with sinks, and the backward of this operator also reads both.

    Args:
        dtype: of queries, keys and values without autocast.
        value_dim: the length of values; None for the length of keys.
        sinks: [heads], or None.
    """

    has_saved_state = False

    def __init__(
        self, dtype: torch.dtype = torch.float32, value_dim: int | None = None, sinks: Tensor | None = None
    ) -> None:
        self.dtype = dtype
        self.value_dim = value_dim
        self.sinks = sinks

    @property
    def parameters(self) -> Tensors:
        return () if self.sinks is None else (self.sinks,)

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        (so_far,) = inputs
        ctx.saved = so_far.shape[1], so_far.shape[3] - 1
        out, lse = so_far[..., :-1][..., : self.value_dim], so_far[..., -1]
        if self.sinks is not None:
            out, lse = with_sinks(out, lse, self.sinks)
        out = ctx.precision.cast_for_matmul(out.to(self.dtype))
        return out.permute(2, 0, 1, 3).flatten(2), lse.contiguous()

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        gradient, *results = gradients
        (heads, size), ctx.saved = ctx.saved, None
        if self.sinks is not None and self.sinks.requires_grad:
            self._add_to_sinks(self.sinks, gradient, *results)
        return (_padded(gradient.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3), size).contiguous(),)

    def _add_to_sinks(self, sinks: Tensor, gradient: Tensor, out: Tensor, lse: Tensor) -> None:
        """Adds to the gradients of sinks."""
        delta = (gradient.float() * out.float()).unflatten(-1, (len(sinks), -1)).sum(-1).permute(1, 2, 0)
        add_to_bias_gradients((sinks,), gradient_of_sinks(delta, lse, sinks).unsqueeze(0))


class GatheredBlocks(Computation):
    """All blocks in one operator, over keys and values [c * 2, ...] of an `AllGather`.

    For the values see `RingBlock`; backward also reads q, the gathered keys and values, output and lse.
    """

    has_saved_state = False

    def __init__(self, kernel: AttentionKernel, axis: Axis, scale: float, window: int | None = None) -> None:
        self.axis = axis
        self._blocks = [RingBlock(kernel, axis, distance, scale, window) for distance in range(axis.size)]

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        q, gathered = inputs
        parts = gathered.chunk(self.axis.size)
        so_far: Tensors = ()
        for block in self._blocks:
            so_far = block.forward(ctx, q, parts[block.source], *so_far)
        return so_far

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        gradient, q, gathered, out, lse = gradients
        parts = gathered.chunk(self.axis.size)
        dkvs = torch.empty_like(gathered)
        of_blocks = dkvs.chunk(self.axis.size)
        total: Tensor | None = None
        for block in reversed(self._blocks):
            dq, dkv, *_ = block.backward(ctx, gradient, q, parts[block.source], out, lse)
            of_blocks[block.source].copy_(dkv)
            total = dq if total is None else total + dq
        assert total is not None
        return total, dkvs


def mask_tiles(
    n: int, axis: Axis, source: int, side: Mapping[str, Any], window: int | None, kernel: AttentionKernel
) -> list[MaskTile]:
    """Returns tiles of a rank's `n` queries and another rank's `n` keys; each pair of a query and a visible key is in
    one tile.

    Args:
        side: the side inputs of the micro-batch.
        window: how many tokens a query looks back on, itself included; None for all.
        kernel: decides the result of a query that may see nothing, and whether a window counts hidden tokens.
    """
    documents = side.get(DOCUMENTS)
    is_masked = documents is not None and side.get(MASKED, False)
    if is_masked and kernel.averages:
        met = [(slice(0, n), slice(0, n), EVERYTHING)]
    elif window is None or window >= n * axis.size or (is_masked and kernel.unpads):
        met = [_before(n, axis, source)]
    else:
        met = _within(window, n, axis, source)
    if documents is None:
        return met
    places = [positions_of(n, axis.size, rank, documents.device) for rank in (axis.rank, source)]
    return [
        (rows, columns, _seen_within(documents, places[0][rows], places[1][columns], window, kernel))
        for rows, columns, _ in met
    ]


def _before(n: int, axis: Axis, source: int) -> MaskTile:
    """Returns the single tile of a rank's queries and another's keys without a window."""
    everything = slice(0, n)
    if source == axis.rank:
        return everything, everything, CAUSAL
    if source < axis.rank:
        return everything, slice(0, n // 2), EVERYTHING
    return slice(n // 2, n), everything, EVERYTHING


def _within(window: int, n: int, axis: Axis, source: int) -> list[MaskTile]:
    """Returns a tile for each part of the queries and each part of the keys within their window."""
    half = n // 2
    met = []
    for (i, mine), (j, theirs) in product(*(enumerate(parts_of(axis.size, rank)) for rank in (axis.rank, source))):
        apart = (mine - theirs) * half
        if apart == 0:
            met.append((_part(i, half), _part(j, half), AttentionMask(True, window) if window < half else CAUSAL))
        elif 0 < apart < window + half - 1:
            last, first = min(half, window + half - 1 - apart), max(0, apart - window + 1)
            seen = AttentionMask(False, window, apart - first) if apart - first + last > window else EVERYTHING
            met.append((_part(i, half, last=last), _part(j, half, first=first), seen))
    return met


def _part(which: int, half: int, first: int = 0, last: int | None = None) -> slice:
    """From the first to before the last token of a part."""
    return slice(which * half + first, which * half + (half if last is None else last))


def _seen_within(
    documents: Tensor, queries: Tensor, keys: Tensor, window: int | None, kernel: AttentionKernel
) -> AttentionMask:
    """Returns the mask by which queries see the keys of their own document, by positions in the sequence."""
    seen = visible_pairs(documents, queries, keys, window, kernel.unpads)
    if not kernel.averages:
        return AttentionMask(mask=seen)
    everywhere = torch.arange(documents.shape[1], device=documents.device)
    blank = ~visible_pairs(documents, queries, everywhere, window, kernel.unpads).any(-1)
    return AttentionMask(mask=seen | (blank[:, :, None] & (documents[:, None, keys] != ABSENT)), blank=blank)


def visible_pairs(documents: Tensor, queries: Tensor, keys: Tensor, window: int | None, unpads: bool) -> Tensor:
    """Returns True if a query sees a key [batch, queries, keys]. A mask hides only keys: unless left out, hidden
    queries belong to the row's only document.

    Args:
        documents: the document of every token, or one of the marks above [batch, full sequence].
        queries: the positions of the queries.
        keys: the positions of the keys.
        window: how many tokens a query looks back on, itself included; None for all.
        unpads: whether hidden tokens are left out.
    """
    real = documents >= 0
    own = documents if unpads else documents.clamp(min=0)
    places = real.cumsum(1) if unpads else torch.arange(documents.shape[1], device=documents.device).unsqueeze(0)
    back = places[:, queries, None] - places[:, None, keys]
    seen = (own[:, queries, None] == documents[:, None, keys]) & real[:, None, keys] & (back >= 0)
    return seen if window is None else seen & (back < window)


def positions_of(n: int, size: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Returns the positions in the full sequence of a rank's `n` tokens."""
    half = n // 2
    places = torch.arange(half, device=device)
    return torch.cat([places + part * half for part in parts_of(size, rank)])


def parts_of(size: int, rank: int) -> tuple[int, int]:
    """Returns the numbers of a rank's two parts among the 2 * `size` parts of a sequence."""
    return rank, 2 * size - 1 - rank


def _with_keys(so_far: Tensor | None, o: Tensor, lse: Tensor, rows: slice, n: int) -> Tensor:
    """Returns earlier attention merged with attention of some of the `n` queries to further keys. Changes `so_far`."""
    if so_far is None and o.shape[2] == n:
        return torch.cat((o.float(), lse.unsqueeze(-1)), -1)
    if so_far is None:
        so_far = lse.new_zeros(*o.shape[:2], n, o.shape[3] + 1)
        so_far[..., -1] = -torch.inf
    part = so_far[:, :, rows]
    merged, both = merge(part[..., :-1], part[..., -1], o, lse)
    part[..., :-1], part[..., -1] = merged, both
    return so_far


def _padded(value: Tensor, size: int) -> Tensor:
    """The value with its last dimension padded with zeros."""
    extra = size - value.shape[-1]
    return functional.pad(value, (0, extra)) if extra else value


def _added(total: Tensor | None, part: Tensor, where: slice, like: Tensor) -> Tensor:
    """Returns gradients of parts of a value [batch, heads, n, head_dim], added up; `like` is the value."""
    if total is None and part.shape == like.shape:
        return part
    total = torch.zeros_like(like) if total is None else total
    total[:, :, where] += part
    return total
