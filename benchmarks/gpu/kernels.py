"""The times of single kernels that decisions of the design rest on.

Each group prints what was expected before it was first measured, then what was found. Two are asked for: a fused
RMSNorm at least three times as fast as that of Transformers, and a matrix product that adds into an fp32 gradient at
least 1.5 times as fast as a product and a sum.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.gpu.links import Kernel
from benchmarks.gpu.overlap import DRY as DRY_MODEL
from benchmarks.gpu.overlap import Case
from benchmarks.gpu.overlap import Sizes as ModelSizes
from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.timing import CYCLES_PER_SECOND, Budget, Work, device_seconds, guarded, issue_and_run, synchronize


@dataclass(frozen=True)
class Shapes:
    """Sizes of Llama-3 8B, and how many tokens."""

    tokens: int = 8192
    hidden: int = 4096
    intermediate: int = 14336
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    square: int = 8192


DRY = Shapes(64, 32, 64, 8, 8, 2, 128, 64)


class Bench:
    """Times work and tells what was found.

    Args:
        shapes: sizes.
        device: to run on.
    """

    def __init__(self, report: Report, shapes: Shapes, device: torch.device) -> None:
        self.report = report
        self.shapes = shapes
        self.device = device
        self.dry = device.type != "cuda"

    def seconds(self, work: Work, repeats: int = 15) -> float:
        """Of the device, for one call."""
        return device_seconds(work, self.device, repeats)

    def random(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal values."""
        return torch.randn(size, device=self.device).to(dtype)

    def attempt(self, name: str, work: Work, expected: str = "") -> float | None:
        """Tell the time of a variant that may not exist; None if it does not."""
        try:
            found = self.seconds(work)
        except Exception as error:
            self.report.note(name, f"does not work: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
            return None
        self.report.note(name, us(found) + (f" ({expected} expected)" if expected else ""))
        return found

    def check(self, name: str, passed: bool, figure: str) -> None:
        """A dry run asks for nothing."""
        self.report.check(name, self.dry or passed, figure)


def run(report: Report, options: Options) -> None:
    """All groups, the most telling ones first."""
    bench = Bench(report, DRY if options.dry else Shapes(), options.device)
    budget = Budget(0.65 * options.seconds)
    for group in GROUPS:
        if budget.left < 0:
            report.note(group.__name__, "left out: the time for this piece is spent")
            continue
        with guarded(report, group.__name__):
            group(bench)


def ceilings(bench: Bench) -> None:
    """What the card can do at best."""
    n = bench.shapes.square
    source, target = (bench.random(n * n * 4) for _ in range(2))
    copied = bench.seconds(lambda: target.copy_(source))
    rate = 2 * source.nbytes / copied
    bench.report.note("ceiling of copies", f"{rate / 1e12:.2f} TB/s, read and written (3.0 expected)")
    a, b = bench.random(n, n), bench.random(n, n)
    product = bench.seconds(lambda: a @ b)
    bench.report.note("ceiling of bf16 products", f"{2 * n**3 / product / 1e12:.0f} TFLOP/s (700-800 expected)")


def norms(bench: Bench) -> None:
    """A fused RMSNorm against that of Transformers, as a segment runs it: forward, and backward on its own."""
    shapes = bench.shapes
    for tokens, dtype, what in (
        (shapes.tokens // 8, torch.float32, "tp8 shard, fp32"),
        (shapes.tokens, torch.float32, "all tokens, fp32"),
        (shapes.tokens, torch.bfloat16, "all tokens, bf16"),
    ):
        (f0, b0), (f1, b1) = _norm(bench, tokens, dtype)
        ratio = (f0 + b0) / (f1 + b1)
        figure = f"{us(f0)} + {us(b0)} by Transformers, {us(f1)} + {us(b1)} fused: {ratio:.1f} x as fast"
        bench.check(f"RMSNorm, {what}, forward + backward", ratio >= 3, f"{figure} (at least 3 x; 4 x expected)")


def _norm(bench: Bench, tokens: int, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Seconds forward and backward, by Transformers and fused."""
    hidden = bench.shapes.hidden
    module = LlamaRMSNorm(hidden).to(bench.device)
    value = bench.random(tokens, 1, hidden, dtype=dtype).requires_grad_()
    gradient = bench.random(tokens, 1, hidden, dtype=torch.float32)

    def fused(value: Tensor) -> Tensor:
        weight = module.weight.to(value.dtype)
        return functional.rms_norm(value, weight.shape, weight, module.variance_epsilon)

    return [_forward_and_backward(bench, forward, value, gradient, module.weight) for forward in (module, fused)]


def _forward_and_backward(
    bench: Bench, forward: Callable[[Tensor], Tensor], value: Tensor, gradient: Tensor, weight: Tensor
) -> tuple[float, float]:
    given = gradient.to(forward(value).dtype)
    both = bench.seconds(lambda: torch.autograd.backward(forward(value), given, inputs=[value, weight]))
    ahead = bench.seconds(lambda: forward(value))
    value.grad = weight.grad = None
    return ahead, both - ahead


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
    bench.attempt(f"W, {what}: a @ b in bf16 alone", lambda: left @ value)
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
    found = {name: bench.attempt(f"W, {what}: {name}", work) for name, work in variants.items()}
    best = min((seconds for seconds in found.values() if seconds is not None), default=None)
    if now is not None and best is not None:
        figure = f"{now / best:.2f} x as fast as a product and a sum (at least 1.5 x; 1.2 x expected)"
        bench.check(f"W into fp32, {what}", now / best >= 1.5, figure)


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
    errors = [((found - wanted).norm() / wanted.norm()).item() for found in (total, start + left @ value)]
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


def casts(bench: Bench) -> None:
    """Casting the weights of a layer from fp32 to bf16, and of what passes between operators."""
    shapes = bench.shapes
    layer = shapes.hidden * (2 * shapes.heads * shapes.head_dim + 2 * shapes.kv_heads * shapes.head_dim)
    layer += 3 * shapes.hidden * shapes.intermediate
    for tp, expected in ((8, "60 us"), (1, "480 us")):
        weights = torch.randn(layer // tp, device=bench.device)
        found = bench.seconds(lambda weights=weights: weights.to(torch.bfloat16))
        rate = 1.5 * weights.nbytes / found / 1e12
        bench.report.note(f"cast of a layer's weights at tp{tp}", f"{us(found)}, {rate:.2f} TB/s ({expected} expected)")


def autograd(bench: Bench) -> None:
    """What a small segment's backward costs the host, with and without autograd's thread for the device."""
    value = bench.random(16, 32, dtype=torch.float32).requires_grad_()
    gradient = torch.ones_like(value)

    def backward() -> None:
        output = value * 2
        torch.autograd.backward(output, gradient, inputs=[value])

    def inline() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            backward()

    for name, work in (
        ("with its thread (as it is)", backward),
        ("without its thread", inline),
        ("again with", backward),
    ):
        bench.report.note(f"host time of a segment, {name}", us(_host_each(bench, work)))


def _host_each(bench: Bench, work: Work, count: int = 200) -> float:
    """Seconds of the host for one of many calls in a row."""
    work()

    def many() -> None:
        for _ in range(count):
            work()

    return statistics.median(issue_and_run(many, bench.device)[0] for _ in range(5)) / count


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
            found = _beside(work, Kernel(blocks), 0.002 + 30 * alone, side, carveout)
            said = "with carve-out" if carveout else "plain"
            figures.append(f"{blocks} held, {said} {found / alone:.2f} x")
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


def cross_entropy(bench: Bench) -> None:
    """Kinds of cross entropy over a whole vocabulary, forward and backward from bf16 logits."""
    shapes = bench.shapes
    logits = bench.random(shapes.tokens, shapes.vocabulary).requires_grad_()
    labels = torch.randint(shapes.vocabulary, (shapes.tokens,), device=bench.device)

    def by_log_softmax(logits: Tensor = logits) -> Tensor:
        return -functional.log_softmax(logits.float(), -1).gather(1, labels[:, None]).sum()

    def plain(logits: Tensor = logits) -> Tensor:
        return functional.cross_entropy(logits.float(), labels, reduction="sum")

    def by_lse(logits: Tensor = logits) -> Tensor:
        wide = logits.float()
        return (wide.logsumexp(-1) - wide.gather(1, labels[:, None])[:, 0]).sum()

    def chunked() -> Tensor:
        pairs = zip(logits.chunk(16), labels.chunk(16), strict=True)
        return torch.stack(
            [functional.cross_entropy(part.float(), wanted, reduction="sum") for part, wanted in pairs]
        ).sum()

    kinds: dict[str, tuple[Callable[[], Tensor], str]] = {
        "log_softmax": (by_log_softmax, "14 ms"),
        "F.cross_entropy": (plain, "14 ms"),
        "logsumexp": (by_lse, "18 ms"),
        "F.cross_entropy in 16 chunks": (chunked, "12 ms"),
    }
    if not bench.dry:
        kinds["F.cross_entropy, compiled"] = (torch.compile(plain), "3 ms")
        kinds["logsumexp, compiled"] = (torch.compile(by_lse), "3 ms")
    for name, (loss, expected) in kinds.items():

        def both(loss: Callable[[], Tensor] = loss) -> None:
            torch.autograd.backward(loss(), inputs=[logits])
            logits.grad = None

        _forget_peak(bench)
        found = bench.attempt(f"cross entropy by {name}", both, expected)
        if found is not None:
            bench.report.note(f"cross entropy by {name}: memory", f"{_peak(bench) / 2**30:.1f} GiB at most")


def _forget_peak(bench: Bench) -> None:
    if not bench.dry:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(bench: Bench) -> int:
    return 0 if bench.dry else torch.cuda.max_memory_allocated()


def layer_kernels(bench: Bench) -> None:
    """How many kernels a decoder layer launches, forward and backward, and what the device needs for them."""
    base = DRY_MODEL if bench.dry else ModelSizes(tp_size=2)
    length = 32 if bench.dry else 4096
    one, two = (_profiled(bench, replace(base, layers=layers, microbatches=1), length) for layers in (1, 2))
    layer = {name: (count - one.kernels.get(name, (0, 0.0))[0]) for name, (count, _) in two.kernels.items()}
    busy = two.busy - one.busy
    figure = f"{sum(layer.values())} kernels, {us(busy)} on the device, {us(two.issued - one.issued)} to issue"
    bench.report.note("a layer at tp2, forward + backward", f"{figure} (147 kernels expected at the start)")
    longest = sorted(two.kernels, key=lambda name: -two.kernels[name][1])[:12]
    for name in longest:
        seconds = two.kernels[name][1] - one.kernels.get(name, (0, 0.0))[1]
        bench.report.note("of a layer", f"{layer[name]} x {name[:100]}: {us(seconds)}")


@dataclass(frozen=True)
class _Profiled:
    """A window of one micro-batch: how often each kernel ran, and for how many seconds; seconds to issue everything."""

    kernels: dict[str, tuple[int, float]]
    issued: float

    @property
    def busy(self) -> float:
        return sum(seconds for _, seconds in self.kernels.values())


def _profiled(bench: Bench, sizes: ModelSizes, length: int) -> _Profiled:
    case = Case(sizes, length, bench.device)

    def work() -> None:
        case.runner.train_window(case.window)

    issued = statistics.median(issue_and_run(work, bench.device)[0] for _ in range(7))
    activity = ProfilerActivity.CPU if bench.dry else ProfilerActivity.CUDA
    with profile(activities=[activity]) as found:
        work()
        synchronize(bench.device)
    kernels: dict[str, tuple[int, float]] = {}
    for event in found.events():
        if bench.dry or event.device_type.name == "CUDA":
            count, seconds = kernels.get(event.name, (0, 0.0))
            kernels[event.name] = count + 1, seconds + (0 if bench.dry else event.self_device_time_total / 1e6)
    return _Profiled(kernels, issued)


def us(seconds: float) -> str:
    """Microseconds as text."""
    return f"{seconds * 1e6:.1f} us"


GROUPS = (
    ceilings,
    weight_gradients,
    norms,
    autograd,
    beside_blocks,
    layer_kernels,
    cross_entropy,
    fused_products,
    casts,
)
