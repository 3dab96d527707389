"""The times of single kernels, and of calls on the host, that decisions of the design rest on.

Each group prints what was expected before it was first measured, then what was found. Asked for are a fused RMSNorm at
least three times as fast as that of Transformers where ranks hold a shard of the tokens, and a matrix product that adds
into an fp32 gradient faster than a product and a sum, and as exactly.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.gpu import host
from benchmarks.gpu.overlap import DRY as DRY_MODEL
from benchmarks.gpu.overlap import Case, lone_workload
from benchmarks.gpu.overlap import Sizes as ModelSizes
from benchmarks.gpu.products import beside_blocks, fused_products, weight_gradients
from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.timing import DRY, Bench, Budget, Shapes, issue_and_run, release, synchronize, us


def run(report: Report, options: Options) -> None:
    """All groups, the most telling ones first."""
    bench = Bench(report, DRY if options.dry else Shapes(), options.device)
    budget = Budget(0.65 * options.seconds)
    for group in GROUPS:
        if budget.left < 0:
            report.note(group.__name__, "left out: the time for this piece is spent")
            continue
        with report.attempt(group.__name__):
            group(bench)
        release()


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
    """A fused RMSNorm against that of Transformers, as an operator runs it: forward, and backward on its own."""
    shapes = bench.shapes
    for tokens, dtype, what in (
        (shapes.tokens // 8, torch.float32, "tp8 shard, fp32"),
        (shapes.tokens, torch.float32, "all tokens, fp32"),
        (shapes.tokens, torch.bfloat16, "all tokens, bf16"),
    ):
        (f0, b0), (f1, b1) = _norm(bench, tokens, dtype)
        ratio = (f0 + b0) / (f1 + b1)
        figure = f"{us(f0)} + {us(b0)} by Transformers, {us(f1)} + {us(b1)} fused: {ratio:.1f} x as fast"
        least = 3.0 if tokens < shapes.tokens else 2.5
        bench.check(f"RMSNorm, {what}, forward + backward", ratio >= least, f"{figure} (at least {least} x)")


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


def casts(bench: Bench) -> None:
    """Casting the weights of a layer from fp32 to bf16, and of what passes between operators."""
    shapes = bench.shapes
    layer = shapes.hidden * (2 * shapes.heads * shapes.head_dim + 2 * shapes.kv_heads * shapes.head_dim)
    layer += 3 * shapes.hidden * shapes.intermediate
    for tp, expected in ((8, "60 us"), (1, "480 us")):
        weights = torch.randn(layer // tp, device=bench.device)
        seconds = bench.seconds(lambda weights=weights: weights.to(torch.bfloat16))
        rate = 1.5 * weights.nbytes / seconds / 1e12
        bench.report.note(
            f"cast of a layer's weights at tp{tp}", f"{us(seconds)}, {rate:.2f} TB/s ({expected} expected)"
        )


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
        seconds = bench.attempt(f"cross entropy by {name}", both, expected)
        if seconds is not None:
            bench.report.note(f"cross entropy by {name}: memory", f"{_peak(bench) / 2**30:.1f} GiB at most")


def _forget_peak(bench: Bench) -> None:
    if not bench.dry:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(bench: Bench) -> int:
    return 0 if bench.dry else torch.cuda.max_memory_allocated()


def layer_kernels(bench: Bench) -> None:
    """How many kernels a decoder layer launches, forward and backward, and what the device needs for them."""
    base = DRY_MODEL if bench.dry else ModelSizes(tp_size=2, vocabulary=8192)
    length = 32 if bench.dry else 4096
    one, two = (_profiled(bench, replace(base, layers=layers, microbatches=1), length) for layers in (1, 2))
    layer = {
        name: tuple(after - before for before, after in zip(one.kernels.get(name, (0, 0.0)), counted, strict=True))
        for name, counted in two.kernels.items()
    }
    count, busy = (sum(column) for column in zip(*layer.values(), strict=True))
    figure = f"{count} kernels, {us(busy)} on the device, {us(two.issued - one.issued)} to issue"
    bench.report.note("a layer at tp2, forward + backward", f"{figure} (147 kernels expected at the start)")
    for name in sorted(layer, key=lambda name: -layer[name][1])[: 3 if bench.dry else 15]:
        bench.report.note("of a layer", f"{layer[name][0]} x {name[:100]}: {us(layer[name][1])}")


@dataclass(frozen=True)
class _Profiled:
    """A window of one micro-batch: how often each kernel ran, and for how many seconds; seconds to issue everything."""

    kernels: dict[str, tuple[int, float]]
    issued: float


def _profiled(bench: Bench, sizes: ModelSizes, length: int) -> _Profiled:
    case = Case(lone_workload(sizes, bench.device), sizes, length)

    def work() -> None:
        case.runner.train_window(case.window)

    issued = statistics.median(issue_and_run(work, bench.device)[0] for _ in range(7))
    activity = ProfilerActivity.CPU if bench.dry else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiler:
        work()
        synchronize(bench.device)
    kernels: dict[str, tuple[int, float]] = {}
    for event in profiler.events():
        if bench.dry or event.device_type.name == "CUDA":
            count, seconds = kernels.get(event.name, (0, 0.0))
            kernels[event.name] = count + 1, seconds + (0 if bench.dry else event.self_device_time_total / 1e6)
    return _Profiled(kernels, issued)


GROUPS = (
    ceilings,
    weight_gradients,
    norms,
    host.calls,
    host.autograd,
    host.window,
    beside_blocks,
    layer_kernels,
    cross_entropy,
    fused_products,
    casts,
)
