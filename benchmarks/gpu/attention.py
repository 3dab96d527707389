"""The attention kernels of context parallelism against attention written out: outputs, log-sum-exps, gradients.

As in a ring: queries see a part of the keys that came before, all of it, and their own part, causally or in a window;
the parts are put together, and each part's gradient is computed from the output and the log-sum-exp of both. In fp32,
of the same inputs, `Exact` computes the same over all keys at once. Then what each kernel costs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.attention_costs import DRY, Sizes, tell_costs
from benchmarks.gpu.report import Options, Report
from hf_helix.operators.attention.kernels import cuda_kernels
from hf_helix.operators.attention.partial import (
    CAUSAL,
    EVERYTHING,
    Attended,
    AttentionKernel,
    AttentionMask,
    Exact,
    TorchCpu,
    merge,
)

BARS = {torch.float32: 5e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""The error that a type may have, in parts of the norm."""

SHAPES = ((128, 4, 4, 64), (200, 8, 2, 128), (77, 4, 2, 80), (64, 4, 1, 36))
"""Queries (and keys of each part), heads, heads of keys and values, head size."""


def run(report: Report, options: Options) -> None:
    torch.set_float32_matmul_precision("highest")
    for kernel in kernels(options.device):
        for dtype, bar in BARS.items():
            with report.attempt(f"{type(kernel).__name__} {dtype}"):
                check(report, kernel, dtype, bar, options.device)
        with report.attempt(f"costs of {type(kernel).__name__}"):
            tell_costs(report, kernel, DRY if options.dry else Sizes(), options.device)


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
