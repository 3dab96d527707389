"""Blocks of attention over a cut sequence against torch's attention over the whole, without any communication."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_helix.models.stock.batch_inputs import documents_of
from hf_helix.operators.attention.kernels import kernel_for
from hf_helix.operators.attention.partial import AttentionKernel, Exact, FirstOf, TorchCpu
from hf_helix.operators.attention.ring_attention import (
    DOCUMENTS,
    MASKED,
    PADDING,
    GatheredBlocks,
    JoinBlocks,
    RingBlock,
    mask_tiles,
    positions_of,
)
from hf_helix.operators.base import OperatorContext
from hf_helix.operators.communication.transport import Axis, SilentTransport

SCALE = 0.3
KERNELS = {"exact": Exact, "torch": lambda: FirstOf(TorchCpu())}


def make(heads: int, groups: int, length: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(length + heads)
    q, do = (torch.randn(batch, heads, length, 8, generator=dice) for _ in range(2))
    k, v = (torch.randn(batch, groups, length, 8, generator=dice) for _ in range(2))
    return q, k, v, do


def whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    hidden: Tensor | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """Output and gradients by autograd, in double precision."""
    leaves = [value.double().requires_grad_() for value in (q, k, v, *([] if sinks is None else [sinks.detach()]))]
    keys, values = (value.repeat_interleave(q.shape[1] // k.shape[1], 1) for value in leaves[1:3])
    scores = leaves[0] @ keys.mT * SCALE
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    length = q.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    mask = mask if hidden is None else (mask | hidden[:, None])
    scores = scores.masked_fill(mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, leaves[3].reshape(-1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1).nan_to_num()[..., :length]
    out = weights @ values
    (out * do.double()).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def by_blocks(
    kernel: AttentionKernel,
    size: int,
    tensors: tuple[Tensor, ...],
    documents: Tensor | None,
    gathered: bool,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """The same as every rank in turn would do it, with what the others would send at hand."""
    q, k, v, do = tensors
    length = q.shape[2]
    n = length // size
    places = [positions_of(n, size, rank) for rank in range(size)]
    result = [torch.zeros_like(value) for value in (do, q, k, v)]
    out, dq, dk, dv = result
    size_of_values = v.shape[-1]
    padded = torch.nn.functional.pad(v, (0, k.shape[-1] - size_of_values))
    kv = [torch.stack((k, padded))[:, :, :, place] for place in places]
    for rank, mine in enumerate(places):
        axis = Axis(SilentTransport(size, rank))
        side = {DOCUMENTS: documents, MASKED: documents is not None and bool((documents == PADDING).any())}
        join = JoinBlocks(value_dim=size_of_values if size_of_values < k.shape[-1] else None, sinks=sinks)
        ctx = OperatorContext(side, 0, True)
        if gathered:
            blocks = GatheredBlocks(kernel, axis, SCALE, window)
            so_far = blocks.forward(ctx, q[:, :, mine], torch.cat(kv))
        else:
            ring = [RingBlock(kernel, axis, distance, SCALE, window) for distance in range(size)]
            so_far = ()
            for block in ring:
                so_far = block.forward(ctx, q[:, :, mine], kv[block.source], *so_far)
        joined, lse = join.forward(ctx, *so_far)
        out[:, :, mine] = joined.unflatten(-1, (q.shape[1], -1)).permute(1, 2, 0, 3)
        kept = () if sinks is None else (joined, lse)
        (gradient,) = join.backward(ctx, do[:, :, mine].permute(2, 0, 1, 3).flatten(2), *kept)
        if gathered:
            mine_dq, all_dkv = blocks.backward(ctx, gradient, q[:, :, mine], torch.cat(kv), joined, lse)
            dq[:, :, mine] = mine_dq
            for place, dkv in zip(places, all_dkv.chunk(size), strict=True):
                dk[:, :, place] += dkv[0]
                dv[:, :, place] += dkv[1][..., :size_of_values]
            continue
        for block in reversed(ring):
            part, dkv, *rest = block.backward(ctx, gradient, q[:, :, mine], kv[block.source], joined, lse)
            assert bool(rest) is (block.distance > 0)
            dq[:, :, mine] += part
            dk[:, :, places[block.source]] += dkv[0]
            dv[:, :, places[block.source]] += dkv[1][..., :size_of_values]
    return result if sinks is None or sinks.grad is None else [*result, sinks.grad]


ways = pytest.mark.parametrize(("kernel", "gathered"), [("exact", False), ("torch", False), ("torch", True)])


@ways
@pytest.mark.parametrize(("size", "heads"), [(2, 2), (3, 4), (4, 4)])
@pytest.mark.parametrize("documents", ["one", "packed", "left"])
def test_blocks_equal_the_whole(size: int, heads: int, kernel: str, documents: str, gathered: bool) -> None:
    length = 4 * size
    tensors = make(heads, 2, length)
    ids = torch.zeros(2, length, dtype=torch.long)
    mask, positions = None, None
    if documents == "packed":
        positions = torch.cat((torch.arange(3), torch.arange(length - 3))).expand(2, -1)
    elif documents == "left":
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, :5] = 0
    result = documents_of(ids, mask, positions)
    assert (result is None) is (documents == "one")
    hidden = None
    if result is not None:
        hidden = result.clamp(min=0)[:, :, None] != result[:, None, :]
    expected = whole(*tensors, hidden)
    for mine, theirs in zip(by_blocks(KERNELS[kernel](), size, tensors, result, gathered), expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-5, rtol=1e-4)


@ways
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("window", [1, 3, 5, 9])  # parts have four tokens
@pytest.mark.parametrize("packed", [False, True])
def test_windows_equal_the_whole(packed: bool, window: int, size: int, kernel: str, gathered: bool) -> None:
    length = 8 * size
    tensors = make(4, 2, length)
    places = torch.arange(length)
    hidden = (places[:, None] - places >= window).expand(2, -1, -1)
    documents = None
    if packed:
        documents = (places >= 6).long().expand(2, -1)
        hidden = hidden | (documents[:, :, None] != documents[:, None, :])
    result = by_blocks(KERNELS[kernel](), size, tensors, documents, gathered, window)
    for mine, theirs in zip(result, whole(*tensors, hidden), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-5, rtol=1e-4)


class Unpadding(Exact):
    unpads = True


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("unpads", [False, True])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("hidden", [slice(0, 7), slice(4, 10), slice(9, None), slice(None)], ids=str)
def test_a_mask_hides_keys(hidden: slice, window: int | None, unpads: bool, gathered: bool) -> None:
    """Queries that are hidden see what stands before them; where tokens are taken out, they get zeros."""
    size, length = 3, 24
    tensors = make(4, 2, length, batch=1)
    mask = torch.ones(1, length, dtype=torch.long)
    mask[:, hidden] = 0
    documents = documents_of(torch.zeros_like(mask), mask, None)
    result = by_blocks(Unpadding() if unpads else Exact(), size, tensors, documents, gathered, window)
    kept = mask[0].nonzero().flatten() if unpads else torch.arange(length)
    back = torch.arange(len(kept))[:, None] - torch.arange(len(kept))
    unseen = torch.zeros_like(back, dtype=torch.bool) if window is None else back >= window
    unseen = (unseen | (mask[0, kept] == 0)).unsqueeze(0)
    parts = whole(*(value[:, :, kept] for value in tensors), unseen)
    expected = [torch.zeros_like(value, dtype=torch.double) for value in result]
    for value, part in zip(expected, parts, strict=True):
        value[:, :, kept] = part
    for mine, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("documents", ["one", "packed"])
@pytest.mark.parametrize("what", ["cap", "sinks", "frozen sinks", "short values", "all"])
def test_what_models_add_to_attention(what: str, documents: str, gathered: bool) -> None:
    """A cap of the products, a logit of its own for each head, and values that are shorter than keys."""
    q, k, v, do = make(4, 2, 16)
    if what in ("short values", "all"):
        v, do = v[..., :5].contiguous(), do[..., :5].contiguous()
    cap = 0.5 if what in ("cap", "all") else None
    sinks = None
    if "sinks" in what or what == "all":
        sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]), requires_grad=what != "frozen sinks")
    apart = (torch.arange(16) >= 6).long().expand(2, -1) if documents == "packed" else None
    hidden = None if apart is None else apart[:, :, None] != apart[:, None, :]
    kernel = FirstOf(TorchCpu()) if cap is None else Exact(cap=cap)
    with torch.no_grad():
        result = by_blocks(kernel, 2, (q, k, v, do), apart, gathered, sinks=sinks)
    expected = whole(q, k, v, do, hidden, cap, sinks)
    expected = expected[: 4 if what == "frozen sinks" else None]
    for mine, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("n", [2, 6, 8])
def test_meetings_are_the_pairs_that_see_each_other(n: int, size: int) -> None:
    """Each pair in one meeting, and no query or key in one that it has no part in."""
    for window in (None, *range(1, n * size + 2)):
        for rank, source in product(range(size), repeat=2):
            queries, keys = (positions_of(n, size, place) for place in (rank, source))
            back = queries[:, None] - keys
            expected = (back >= 0) if window is None else (back >= 0) & (back < window)
            result = torch.zeros(n, n, dtype=torch.int)
            for rows, columns, seen in mask_tiles(n, Axis(SilentTransport(size, rank)), source, {}, window, Exact()):
                hidden = seen.hides(rows.stop - rows.start, columns.stop - columns.start, torch.device("cpu"))
                part = torch.ones_like(result[rows, columns]) if hidden is None else (~hidden).int()
                assert window is None or bool(part.any(0).all() and part.any(1).all())
                result[rows, columns] += part
            assert torch.equal(result, expected.int())


def test_what_a_window_hides_is_not_computed() -> None:
    class Counting(Exact):
        calls = 0

        def forward(self, *inputs: Any) -> tuple[Tensor, Tensor]:
            self.calls += 1
            return super().forward(*inputs)

    kernel = Counting()
    q, k, v, _ = make(2, 2, 8)
    block = RingBlock(kernel, Axis(SilentTransport(4, 3)), 3, SCALE, window=5)  # parts 3 and 4 of 8, with parts 0 and 7
    before = torch.randn(2, 2, 8, 9)
    (after,) = block.forward(OperatorContext({}, 0, True), q, torch.stack((k, v)), before)
    assert kernel.calls == 0
    assert torch.equal(after, before)


def test_every_rank_has_as_much_of_the_triangle() -> None:
    places = [positions_of(8, 4, rank) for rank in range(4)]
    assert torch.equal(torch.cat(places).sort().values, torch.arange(32))
    assert len({int(place.sum()) for place in places}) == 1


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_mask has 4 dimensions"):
        documents_of(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 1, 4, 4), None)
    # Implementations without log sum exp are refused.
    with pytest.raises(ValueError, match=r"'flex_attention' gives no log-sum-exp.*eager, sdpa, flash_attention_2"):
        kernel_for("flex_attention", torch.device("cpu"))
