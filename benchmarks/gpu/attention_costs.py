"""What an attention kernel of context parallelism costs: time, and memory of a layer with a long sequence.

In:   a kernel, and a device.
Out:  notes: milliseconds and TFLOP/s of one call; milliseconds and memory of a ring of two ranks, forward and backward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.report import Report
from benchmarks.gpu.timing import device_seconds, release
from hf_helix.operators.attention.partial import CAUSAL, EVERYTHING, Attended, AttentionKernel, AttentionMask, FirstOf
from hf_helix.operators.attention.ring_attention import DOCUMENTS, JoinBlocks, RingBlock
from hf_helix.operators.base import OperatorContext
from hf_helix.operators.communication.transport import Axis, SilentTransport


@dataclass(frozen=True)
class Sizes:
    """Of one call, and of a rank's part of a layer. Heads are as many as a rank has of Llama-3 8B at tp4."""

    tokens: int = 8192
    layer_tokens: int = 16384
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    repeats: int = 10


DRY = Sizes(64, 128, 4, 2, 16, 1)
BACKWARD = 2.5
"""Products of a backward pass for one of the forward pass: five against two."""


def tell_costs(report: Report, kernel: AttentionKernel, sizes: Sizes, device: torch.device) -> None:
    """Times of single calls, then a layer, then the same with packed documents where the kernel knows them.

    Args:
        report: takes the notes.
        kernel: to call.
        sizes: how much.
        device: that the kernel is for.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, gradient = (
        torch.randn(1, sizes.heads, sizes.tokens, sizes.head_dim, device=device, dtype=dtype) for _ in range(4)
    )
    name = type(kernel).__name__
    for seen, share, what in ((CAUSAL, 0.5, "causal"), (EVERYTHING, 1.0, "everything")):
        if kernel.supports(q, k, seen):
            flops = share * 4 * sizes.heads * sizes.tokens**2 * sizes.head_dim
            figure = _call(kernel, (q, k, v, gradient), seen, flops, sizes.repeats)
            report.note(f"{name}: {sizes.heads} heads x {sizes.tokens} x {sizes.head_dim}, {what}", figure)
    del q, k, v, gradient
    layer = torch.empty(1, sizes.heads, sizes.layer_tokens, sizes.head_dim, device="meta", dtype=dtype)
    packed = AttentionMask(mask=torch.empty(0, device="meta"))
    for seen, what in ((CAUSAL, "one document"), (packed, "packed documents")):
        if kernel.supports(layer, layer, seen):
            release()
            figure = _layer(kernel, sizes, dtype, seen.mask is not None, device)
            report.note(f"{name}: a ring of 2 ranks, {2 * sizes.layer_tokens} tokens, {what}", figure)


def _call(kernel: AttentionKernel, values: tuple[Tensor, ...], seen: AttentionMask, flops: float, repeats: int) -> str:
    q, k, v, gradient = values
    scale = q.shape[-1] ** -0.5
    attended = Attended(q, k, v, *kernel.forward(q, k, v, seen, scale))
    ahead = device_seconds(lambda: kernel.forward(q, k, v, seen, scale), q.device, repeats)
    back = device_seconds(lambda: kernel.backward(gradient, attended, seen, scale), q.device, repeats)
    parts = (("forward", ahead, flops), ("backward", back, BACKWARD * flops))
    return ", ".join(f"{name} {each * 1e3:.2f} ms ({work / each / 1e12:.0f} TFLOP/s)" for name, each, work in parts)


def _layer(kernel: AttentionKernel, sizes: Sizes, dtype: torch.dtype, is_packed: bool, device: torch.device) -> str:
    """As the second of two ranks has it, all of whose blocks see something."""
    n, heads, axis = sizes.layer_tokens, sizes.heads, Axis(SilentTransport(2, 1))
    first_of, scale = FirstOf(kernel), sizes.head_dim**-0.5
    blocks, join = [RingBlock(first_of, axis, distance, scale) for distance in range(2)], JoinBlocks(dtype)
    q = torch.randn(1, heads, n, sizes.head_dim, device=device, dtype=dtype)
    kvs = [torch.randn(2, 1, sizes.kv_heads, n, sizes.head_dim, device=device, dtype=dtype) for _ in range(2)]
    documents = (torch.arange(2 * n, device=device) // (n // 3))[None] if is_packed else None

    def work() -> None:
        ctx = OperatorContext({DOCUMENTS: documents}, 0, True)
        so_far: tuple[Tensor, ...] = ()
        for block in blocks:
            so_far = block.forward(ctx, q, kvs[block.source], *so_far)
        out, lse = join.forward(ctx, *so_far)
        (gradient,) = join.backward(ctx, torch.ones_like(out))
        for block in reversed(blocks):
            block.backward(ctx, gradient, q, kvs[block.source], out, lse)

    seconds = device_seconds(work, device, min(3, sizes.repeats))
    figure = f"forward and backward {seconds * 1e3:.1f} ms"
    if device.type != "cuda":
        return figure
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    peak = torch.cuda.max_memory_allocated(device) - before
    return f"{figure}, {peak / 2**30:.2f} GiB at most besides {before / 2**30:.2f} GiB of inputs"
