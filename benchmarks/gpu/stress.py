"""Plans and races: under every plan, with links and computation at random paces and new memory full of nan, no bit may
change.

Each layout runs once under `sequential` without any delay, and then under every plan with other delays in each window;
deterministic kernels, no other ranks. A sleep lies on the stream (on a CPU, in the thread) whose work it delays.
"""

import functools
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.models import batches, tiny
from benchmarks.gpu.parity import LAYOUTS, named
from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.windows import Local, deterministic, engine_on, same_bits, silent_mesh, train, under_plan
from hf_helix.operators.base import TransferFn
from hf_helix.operators.communication.transport import TransportWrapper
from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.streams.streams import CpuStreams, CudaStreams, Event

PLANS = ("sequential", "greedy", "round_robin", "dhelix")
ROUNDS = 2  # windows under each
CASES = (*LAYOUTS, ("llama", {"tp": 2}, {"recompute": "full"}))
WINDOW = batches(4, lengths=(48, 33))
MOST = 2e-3  # seconds that a transfer is delayed
CYCLES = 1.7e9
"""Of a second of `torch.cuda._sleep`, about."""

Pace = Callable[[], None]
"""Lets the current stream wait, each time as long as is drawn anew; on a CPU, the current thread."""


def random_pace(seed: int, most: float, device: torch.device) -> Pace:
    """Mostly short, at times long, often nothing."""
    draws = random.Random(seed)

    def pace() -> None:
        seconds = draws.choice((0.0, 0.0, 0.02, 0.1, 0.3, 1.0)) * most
        if device.type == "cuda":
            torch.cuda._sleep(int(seconds * CYCLES))
        else:
            time.sleep(seconds)

    return pace


class Paced(TransportWrapper):
    """A link that takes its time, and then fills the buffer with what it would have without."""

    def __init__(self, size: int, rank: int, pace: Pace) -> None:
        super().__init__(Local(size, rank))
        self._pace = pace

    def move(self, name: str, out: Tensor, value: Tensor, *rows: Sequence[int]) -> None:
        self._pace()
        getattr(self.inner, name)(out, value, *rows)


class PacedStreams(CudaStreams):
    """CUDA streams whose compute stream takes its time, too: it sleeps after each operator that communication reads."""

    def __init__(self, device: torch.device, pace: Pace) -> None:
        super().__init__(device)
        self._pace = pace

    def issue(self, kind: Kind, transfer: TransferFn, after: Sequence[Any], label: str, lane: str = "") -> Event:
        event = super().issue(kind, transfer, after, label, lane)
        self._pace()
        return event


def run(report: Report, options: Options) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic GEMMs; read when CUDA starts
    torch.set_float32_matmul_precision("highest")
    for family, sizes, changes in CASES:
        for kind, autocast_dtype in (("fp32", None), ("bf16", torch.bfloat16)):
            name = f"{named(family, sizes, changes)} {kind}"
            with report.attempt(name), deterministic():
                check_layout(report, name, family, sizes, changes, autocast_dtype, options)


def check_layout(
    report: Report,
    name: str,
    family: str,
    sizes: Mapping[str, int],
    changes: Mapping[str, Any],
    autocast_dtype: torch.dtype | None,
    options: Options,
) -> None:
    """Windows at random paces against one without delays."""
    device, made = options.device, functools.partial(tiny, family)
    with engine_on(made, silent_mesh(device, **sizes), len(WINDOW), autocast_dtype, **changes) as engine:
        wanted = train(engine, WINDOW)
    if any(value != value for value in wanted.losses):
        report.check(name, False, f"the losses without delays are {wanted.losses}")
        return
    differing, count = "", 0
    mesh = silent_mesh(device, **sizes, made=functools.partial(Paced, pace=random_pace(7, MOST, device)))
    with engine_on(made, mesh, len(WINDOW), autocast_dtype, **changes) as engine:
        engine.runner.executor.streams.close()
        on_gpu, pace = device.type == "cuda", random_pace(8, MOST / 10, device)
        engine.runner.executor.streams = PacedStreams(device, pace) if on_gpu else CpuStreams()
        for plan in PLANS:
            under_plan(engine, plan)
            for _ in range(1 if options.dry else ROUNDS):
                count += 1
                where = same_bits(train(engine, WINDOW), wanted)
                differing = differing or (where and f"window {count} under {plan} differs in {where}")
    report.check(name, not differing, differing or f"{count} windows at random paces, every bit the same")
