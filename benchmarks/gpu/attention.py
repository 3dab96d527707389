"""The attention kernels of context parallelism against attention written out: outputs, log-sum-exps, gradients.

As in a ring: queries see a part of the keys that came before, all of it, and their own part, causally or in a window;
the parts are put together, and each part's gradient is computed from the output and the log-sum-exp of both. In fp32,
of the same inputs, `Exact` computes the same over all keys at once. Then milliseconds and memory of a layer whose
ring has two ranks, forward and backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.timing import device_seconds, release
from hf_helix.operators.attention.kernels import cuda_kernels
from hf_helix.operators.attention.partial import (
    CAUSAL,
    EVERYTHING,
    Attended,
    AttentionKernel,
    AttentionMask,
    Exact,
    FirstOf,
    TorchCpu,
    merge,
)
from hf_helix.operators.attention.ring_attention import DOCUMENTS, JoinBlocks, RingBlock
from hf_helix.operators.base import OperatorContext
from hf_helix.operators.communication.transport import Axis, SilentTransport

BARS = {torch.float32: 5e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""The error that a type may have, in parts of the norm."""

SHAPES = ((128, 4, 4, 64), (200, 8, 2, 128), (77, 4, 2, 80), (64, 4, 1, 36))
"""Queries (and keys of each part), heads, heads of keys and values, head size."""


@dataclass(frozen=True)
class Layer:
    """A rank's part of a layer. Heads are as many as a rank has of Llama-3 8B at tp4."""

    tokens: int = 16384
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    repeats: int = 3


DRY = Layer(128, 4, 2, 16, 1)


def run(report: Report, options: Options) -> None:
    torch.set_float32_matmul_precision("highest")
    for kernel in kernels(options.device):
        for dtype, bar in BARS.items():
            with report.attempt(f"{type(kernel).__name__} {dtype}"):
                check(report, kernel, dtype, bar, options.device)
        with report.attempt(f"costs of {type(kernel).__name__}"):
            tell_costs(report, kernel, DRY if options.dry else Layer(), options.device)


def kernels(device: torch.device) -> tuple[AttentionKernel, ...]:
    """Those of the device, the newest last: if it crashes, the others have been checked."""
    return cuda_kernels(torch.cuda.get_device_capability(device))[::-1] if device.type == "cuda" else (TorchCpu(),)


def check(report: Report, kernel: AttentionKernel, dtype: torch.dtype, bar: float, device: torch.device) -> None:
    """All shapes that a kernel takes in a type."""
    worst, where, count = 0.0, "", 0
    for shape in SHAPES:
        for own in (CAUSAL, AttentionMask(causal=True, window=24)):
            q = torch.randn(2, shape[1], shape[0], shape[3], device=device, dtype=dtype)
            if not (kernel.supports(q, q, own) and kernel.supports(q, q, EVERYTHING)):  # there are as many keys
                continue
            count += 1
            for name, error in errors(kernel, q, shape, own):
                if not error <= worst:
                    worst, where = error, f" at {name} of {shape}, window {own.window}"
    name = f"{type(kernel).__name__} {str(dtype).removeprefix('torch.')}"
    if not count:
        report.note(name, "takes none of the cases here")
    else:
        report.check(name, worst <= bar, f"{count} cases, at most {worst:.1e} off{where} (at most {bar:.0e})")


def errors(
    kernel: AttentionKernel, q: Tensor, shape: tuple[int, ...], own: AttentionMask
) -> Iterator[tuple[str, float]]:
    """How far each result is off, in parts of its norm."""
    length, _, groups, size = shape
    draws = torch.Generator(q.device).manual_seed(sum(shape))
    before, mine = (
        torch.randn(2, 2, groups, length, size, device=q.device, dtype=q.dtype, generator=draws) for _ in range(2)
    )
    gradient = torch.randn(q.shape, device=q.device, dtype=q.dtype, generator=draws)
    parts = ((before, EVERYTHING), (mine, own))
    scale = size**-0.5
    of_parts = [kernel.forward(q, *kv, seen, scale) for kv, seen in parts]
    o, lse = merge(of_parts[0][0].float(), of_parts[0][1], of_parts[1][0].float(), of_parts[1][1])
    halves = [kernel.backward(gradient, Attended(q, *kv, o.to(q.dtype), lse), seen, scale) for kv, seen in parts]

    hidden = own.hides(length, length, q.device)
    assert hidden is not None
    mask = torch.cat([torch.ones_like(hidden), ~hidden], 1).expand(2, -1, -1)
    whole, exact, values = AttentionMask(mask=mask), Exact(), [value.float() for value in torch.cat([before, mine], 3)]
    wanted_o, wanted_lse = exact.forward(q.float(), *values, whole, scale)
    wanted = exact.backward(gradient.float(), Attended(q.float(), *values, wanted_o, wanted_lse), whole, scale)
    yield "o", _off(o, wanted_o)
    yield "lse", _off(lse, wanted_lse)
    yield "dq", _off(halves[0][0].float() + halves[1][0].float(), wanted[0])
    for place, name in ((1, "dk"), (2, "dv")):
        yield name, _off(torch.cat([half[place].float() for half in halves], 2), wanted[place])


def _off(value: Tensor, wanted: Tensor) -> float:
    return float((value.float() - wanted).norm() / wanted.norm()) if bool(value.isfinite().all()) else float("inf")


def tell_costs(report: Report, kernel: AttentionKernel, sizes: Layer, device: torch.device) -> None:
    """A layer over one document, and over packed ones where the kernel knows them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.empty(1, sizes.heads, sizes.tokens, sizes.head_dim, device="meta", dtype=dtype)
    packed = AttentionMask(mask=torch.empty(0, device="meta"))
    for seen, what in ((CAUSAL, "one document"), (packed, "packed documents")):
        if kernel.supports(q, q, seen):
            release()
            figure = _layer(kernel, sizes, dtype, seen.mask is not None, device)
            report.note(f"{type(kernel).__name__}: a ring of 2 ranks, {2 * sizes.tokens} tokens, {what}", figure)


def _layer(kernel: AttentionKernel, sizes: Layer, dtype: torch.dtype, is_packed: bool, device: torch.device) -> str:
    """As the second of two ranks has it, all of whose blocks see something."""
    n, heads, axis = sizes.tokens, sizes.heads, Axis(SilentTransport(2, 1))
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

    seconds = device_seconds(work, device, sizes.repeats)
    figure = f"forward and backward {seconds * 1e3:.1f} ms"
    if device.type != "cuda":
        return figure
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    peak = torch.cuda.max_memory_allocated(device) - before
    return f"{figure}, {peak / 2**30:.2f} GiB at most besides {before / 2**30:.2f} GiB of inputs"
