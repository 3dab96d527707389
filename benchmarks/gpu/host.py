"""What issuing work costs the host: single calls, and where the time of a window goes.

The host must issue the operators of a window faster than the device runs them, or plans have nothing to order.
"""

import cProfile
import pstats
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.gpu.overlap import DRY as DRY_MODEL
from benchmarks.gpu.overlap import Case, Sizes, lone_workload
from benchmarks.gpu.timing import Bench, Work, issue_and_run, us

CALLS = 100


def calls(bench: Bench) -> None:
    """Single calls on small tensors, many in a row."""
    a, b = bench.random(64, 64), bench.random(64, 64)
    wide, weight = a.float(), torch.ones(64, device=bench.device)
    kinds: dict[str, tuple[Work, str]] = {
        "empty": (lambda: torch.empty_like(a), "3 us"),
        "add": (lambda: a + b, "8 us"),
        "cast to bf16": (lambda: wide.to(torch.bfloat16), "8 us"),
        "view": (lambda: a.view(-1), "1 us"),
        "mm": (lambda: a @ b, "15 us"),
        "linear": (lambda: functional.linear(a, b), "15 us"),
        "addmm into fp32": (lambda: _addmm(bench, wide, a), "15 us"),
        "rms_norm": (lambda: functional.rms_norm(wide, (64,), weight, 1e-6), "15 us"),
        "cat": (lambda: torch.cat((a, b)), "12 us"),
    }
    if not bench.dry:
        event, stream = torch.cuda.Event(), torch.cuda.Stream()
        kinds |= {
            "event made and recorded": (lambda: torch.cuda.Event().record(), "4 us"),
            "stream waits for event": (lambda: stream.wait_event(event), "2 us"),
            "stream waits for stream": (lambda: stream.wait_stream(torch.cuda.current_stream()), "6 us"),
            "stream entered and left": (lambda: _enter(stream), "5 us"),
        }
        event.record()
    times = [f"{name} {us(host_each(bench, work))} ({expected})" for name, (work, expected) in kinds.items()]
    bench.report.note("host time of single calls (and what was expected)", ", ".join(times))


def autograd(bench: Bench) -> None:
    """A small graph's forward and backward, with and without autograd's thread for the device."""
    value = bench.random(16, 32, dtype=torch.float32).requires_grad_()
    gradient = torch.ones_like(value)

    def backward() -> None:
        output = value * 2
        torch.autograd.backward(output, gradient, inputs=[value])

    def inline() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            backward()

    kinds = {"with its thread": backward, "without its thread": inline, "again with it": backward}
    for name, work in kinds.items():
        bench.report.note(f"host time of a graph, {name}", us(host_each(bench, work)))


def window(bench: Bench) -> None:
    """Which functions the host spends a window in; the device has next to nothing to do."""
    sizes = replace(DRY_MODEL if bench.dry else Sizes(hidden=512, intermediate=1024), layers=4, microbatches=4)
    case = Case(lone_workload(replace(sizes, heads=8, kv_heads=8), bench.device), sizes, 32 if bench.dry else 256)

    def work() -> None:
        case.runner.train_window(case.window)

    issued = statistics.median(issue_and_run(work, bench.device)[0] for _ in range(7))
    count = len(case.runner.program(4))
    bench.report.note(
        "host time of a window", f"{issued * 1e3:.2f} ms, {us(issued / count)} for each of {count} operators"
    )
    profiler = cProfile.Profile()
    profiler.runcall(lambda: [work() for _ in range(3)])
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    total = sum(row[2] for row in stats.values())
    for function, row in sorted(stats.items(), key=lambda item: -item[1][2])[: 3 if bench.dry else 25]:
        file, line, name = function
        where = f"{Path(file).name}:{line} {name}" if line else name
        figure = f"{row[2] / total:.1%}, {row[0] / 3 / count:.2f} calls an operator of {us(row[2] / row[0])} in itself"
        bench.report.note(f"host time of a window, {where[:90]}", figure)


def host_each(bench: Bench, work: Work) -> float:
    """Seconds of the host for one of many calls in a row."""
    work()

    def many() -> None:
        for _ in range(CALLS):
            work()

    return statistics.median(issue_and_run(many, bench.device)[0] for _ in range(5)) / CALLS


def _addmm(bench: Bench, total: torch.Tensor, left: torch.Tensor) -> None:
    if not bench.dry:  # there is no such kernel for CPUs
        torch.addmm(total, left, left, out_dtype=torch.float32, out=total)


def _enter(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        pass
