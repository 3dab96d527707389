"""Matrix products: adding to gradients in fp32, one product in place of several, and products beside a busy kernel."""

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.links import Kernel
from benchmarks.gpu.timing import CYCLES_PER_SECOND, Bench, Work, us


def weight_gradients(bench: Bench) -> None:
    """Adding a product of bf16 matrices to a gradient in fp32: which calls can, and what each takes."""
    shapes = bench.shapes
    for outputs, what in ((shapes.intermediate // 8, "gate at tp8"), (shapes.intermediate, "gate at tp1")):
        rows, value = bench.random(shapes.tokens, outputs), bench.random(shapes.tokens, shapes.hidden)
        grad = torch.zeros(outputs, shapes.hidden, device=bench.device)
        _weight_gradient(bench, what, grad, rows.t(), value)
        _check_sum(bench, what, grad, rows.t(), value)


def _weight_gradient(bench: Bench, what: str, grad: Tensor, left: Tensor, value: Tensor) -> None:
    now = bench.attempt(f"W, {what}: grad += a @ b", lambda: grad.add_(left @ value))
    alone = bench.attempt(f"W, {what}: a @ b in bf16 alone", lambda: left @ value)
    wide = torch.float32
    variants: dict[str, Work] = {
        "addmm(grad, a, b, out_dtype=fp32, out=grad)": lambda: torch.addmm(grad, left, value, out_dtype=wide, out=grad),
        "aten.addmm.dtype_out(grad, a, b, fp32, out=grad)": lambda: torch.ops.aten.addmm.dtype_out(
            grad, left, value, wide, out=grad
        ),
        "addmm(grad, a, b, out_dtype=fp32)": lambda: torch.addmm(grad, left, value, out_dtype=wide),
        "grad += mm(a, b, out_dtype=fp32)": lambda: grad.add_(torch.mm(left, value, out_dtype=wide)),
        "grad.addmm_(a, b)": lambda: grad.addmm_(left, value),
    }
    times = {name: bench.attempt(f"W, {what}: {name}", work) for name, work in variants.items()}
    best = min((seconds for seconds in times.values() if seconds is not None), default=None)
    if now is not None and best is not None and alone is not None:
        possible = f"{now / alone:.2f} x is what the product alone leaves to gain"
        bench.check(f"W into fp32, {what}", now / best >= 1.05, f"{now / best:.2f} x (at least 1.05 x; {possible})")


def _check_sum(bench: Bench, what: str, grad: Tensor, left: Tensor, value: Tensor) -> None:
    """That the fused sum is right, and in fp32: against a product in fp32."""
    start = torch.randn_like(grad)
    wanted = start + left.float() @ value.float()
    total = start.clone()
    try:
        torch.addmm(total, left, value, out_dtype=torch.float32, out=total)
    except Exception as error:
        bench.report.note(f"W, {what}: error of the fused sum", f"not known: {type(error).__name__}")
        return
    errors = [((value_now - wanted).norm() / wanted.norm()).item() for value_now in (total, start + left @ value)]
    figure = f"{errors[0]:.1e} fused, {errors[1]:.1e} by a product and a sum (fused is to be at most as large)"
    bench.check(f"W, {what}: error against fp32", errors[0] <= errors[1] * 1.01, figure)


def fused_products(bench: Bench) -> None:
    """One product for q, k and v, and for gate and up, against one for each."""
    shapes = bench.shapes
    for tp in (8, 2, 1):
        q, kv = shapes.heads * shapes.head_dim // tp, max(1, shapes.kv_heads * shapes.head_dim // tp)
        _fused_product(bench, f"q, k, v at tp{tp}", (q, kv, kv))
        _fused_product(bench, f"gate, up at tp{tp}", (shapes.intermediate // tp,) * 2)


def _fused_product(bench: Bench, what: str, parts: Sequence[int]) -> None:
    tokens, hidden = bench.shapes.tokens, bench.shapes.hidden
    value = bench.random(tokens, hidden)
    weights = [bench.random(part, hidden) for part in parts]
    gradients = [bench.random(tokens, part) for part in parts]
    whole, joined = torch.cat(weights), torch.cat(gradients, 1)
    apart = [
        bench.seconds(lambda: [functional.linear(value, weight) for weight in weights]),
        bench.seconds(lambda: _summed(gradients, weights)),
        bench.seconds(lambda: [gradient.t() @ value for gradient in gradients]),
    ]
    together = [
        bench.seconds(lambda: functional.linear(value, whole)),
        bench.seconds(lambda: joined @ whole),
        bench.seconds(lambda: joined.t() @ value),
    ]
    figures = [f"{letter} {us(a)} -> {us(b)}" for letter, a, b in zip("FIW", apart, together, strict=True)]
    expected = "1.3 x" if what == "q, k, v at tp8" else "1.05-1.1 x"
    gain = sum(apart) / sum(together)
    bench.report.note(f"one product for {what}", f"{', '.join(figures)}: {gain:.2f} x ({expected} expected)")


def _summed(gradients: list[Tensor], weights: list[Tensor]) -> Tensor:
    total = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        total.addmm_(gradient, weight)
    return total


def beside_blocks(bench: Bench) -> None:
    """A product beside a kernel that holds 16 or 32 multiprocessors, with and without leaving them out."""
    if bench.dry:
        bench.report.note("products beside held multiprocessors", "need a GPU")
        return
    shapes = bench.shapes
    side = torch.cuda.Stream(priority=-1)
    for rows, inner, columns, what in (
        (shapes.tokens, shapes.hidden, shapes.intermediate // 8, "gate at tp8"),
        (shapes.tokens, shapes.hidden, shapes.intermediate, "gate at tp1"),
    ):
        a, b = bench.random(rows, inner), bench.random(inner, columns)
        for library in ("cublas", "cublaslt"):
            with _library(library):
                figures = _held(bench, lambda a=a, b=b: a @ b, side)
            bench.report.note(f"product beside held multiprocessors, {what}, {library}", "; ".join(figures))


def _held(bench: Bench, work: Work, side: torch.cuda.Stream) -> list[str]:
    alone = bench.seconds(work)
    figures = [f"alone {us(alone)}"]
    for blocks in (1, 16, 32):
        ideal = 132 / (132 - blocks)
        for carveout in (None, blocks):
            seconds = _beside(work, Kernel(blocks), 0.002 + 30 * alone, side, carveout)
            said = "with carve-out" if carveout else "plain"
            figures.append(f"{blocks} held, {said} {seconds / alone:.2f} x")
        figures[-1] += f" (ideal {ideal:.2f} x)"
    return figures


def _beside(work: Work, hold: Kernel, seconds: float, side: torch.cuda.Stream, carveout: int | None) -> float:
    """Median seconds of a call while `hold` runs on another stream."""
    nothing = torch.empty(16, device="cuda")
    torch._C._set_sm_carveout_experimental(carveout)
    try:
        work()
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
        started = torch.cuda.Event()
        torch.cuda._sleep(int(CYCLES_PER_SECOND * 0.005))
        started.record()
        side.wait_event(started)
        with torch.cuda.stream(side):
            hold(nothing, nothing, seconds)
        torch.cuda._sleep(int(CYCLES_PER_SECOND * 0.0005))  # until the other kernel is resident
        for event in events:
            event.record()
            work()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events[1:])) / 1e3
    finally:
        torch._C._set_sm_carveout_experimental(None)


@contextlib.contextmanager
def _library(name: str) -> Iterator[None]:
    """Matrix products by one of NVIDIA's two libraries."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
