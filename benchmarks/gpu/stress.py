"""Races: with links and computation at random paces, and new memory full of nan, no bit may change.

Each layout runs once without any delay, and then under several plans with other delays in every window; deterministic
kernels, no other ranks. Streams with a mistake must give something else: a check that cannot fail proves nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.models import batches, tiny
from benchmarks.gpu.paces import Pace, Paced, mutants, paced_streams, random_pace
from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.windows import Window, deterministic, engine_on, same_bits, silent_mesh, train, under_plan
from hf_helix.runtime.streams import Streams

PLANS = ("greedy", "round_robin", "dhelix")
LAYOUTS: tuple[tuple[str, str, dict[str, int], dict[str, Any], bool], ...] = (
    ("llama tp2", "llama", {"tp": 2}, {}, False),
    ("llama cp2", "llama", {"cp": 2}, {}, False),
    ("qwen3 tp2 cp2 bf16", "qwen3", {"tp": 2, "cp": 2}, {}, True),
    ("mixtral ep2", "mixtral", {"ep": 2}, {}, False),
    ("llama tp2 recompute bf16", "llama", {"tp": 2}, {"recompute": "full"}, True),
)
"""What it is called, family, sizes of the axes, options of `HelixConfig`, whether in bf16."""

WINDOW = batches(4, lengths=(48, 33))


def run(report: Report, options: Options) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic GEMMs; read when CUDA starts
    rounds, most = (1, 2e-3) if options.dry else (6, 2e-3)
    for name, family, sizes, changes, bf16 in LAYOUTS:
        with report.attempt(name), deterministic():
            check_layout(report, name, family, sizes, changes, bf16, options.device, rounds, most)
    with report.attempt("mistakes"), deterministic():
        check_mutants(report, options.device)


def check_layout(
    report: Report,
    name: str,
    family: str,
    sizes: Mapping[str, int],
    changes: Mapping[str, Any],
    bf16: bool,
    device: torch.device,
    rounds: int,
    most: float,
) -> None:
    """Windows at random paces against one without delays.

    Args:
        report, name: where the outcome goes, and as what.
        family, sizes, changes, bf16: see `LAYOUTS`.
        device: that it runs on.
        rounds: windows under each plan.
        most: seconds that a transfer is delayed at most.
    """
    made, products = functools.partial(tiny, family), torch.bfloat16 if bf16 else None
    with engine_on(made, silent_mesh(device, **sizes), len(WINDOW), products, **changes) as engine:
        wanted = train(engine, WINDOW)
    if any(value != value for value in wanted.losses):
        report.check(name, False, f"the losses without delays are {wanted.losses}")
        return
    pace, differing, count = random_pace(7, most), "", 0
    mesh = silent_mesh(device, **sizes, made=functools.partial(Paced, pace=pace, device=device))
    with engine_on(made, mesh, len(WINDOW), products, **changes) as engine:
        _let(engine, paced_streams(device, random_pace(8, most / 10)))
        for plan in PLANS:
            under_plan(engine, plan)
            for _ in range(rounds):
                count += 1
                where = same_bits(train(engine, WINDOW), wanted)
                differing = differing or (where and f"window {count} under {plan} differs in {where}")
    report.check(name, not differing, differing or f"{count} windows at random paces, every bit the same")


def check_mutants(report: Report, device: torch.device) -> None:
    """Streams with a mistake, with delays that are long enough for it to show each time."""
    slow: Pace = lambda: 5e-3  # noqa: E731
    made, window = functools.partial(tiny, "llama"), WINDOW[:2]
    with engine_on(made, silent_mesh(device, tp=2), len(window), plan="greedy") as engine:
        wanted = train(engine, window)
    cases = {"no mistake": (paced_streams(device, slow), slow), **mutants(device, slow)}
    for mistake, (streams, pace) in cases.items():
        transport = functools.partial(Paced, pace=pace, device=device)
        with engine_on(made, silent_mesh(device, tp=2, made=transport), len(window), plan="greedy") as engine:
            _let(engine, streams)
            where = same_bits(_finite_or_not(engine, window), wanted)
        is_caught = bool(where) == (mistake != "no mistake")
        report.check(f"mistake: {mistake}", is_caught, f"differs in {where}" if where else "every bit the same")


def _finite_or_not(engine: Any, window: Any) -> Window:
    """A window; one that raises has shown its mistake, too."""
    try:
        return train(engine, window)
    except (RuntimeError, ValueError) as error:
        return Window([float("nan")], {f"{type(error).__name__}": torch.zeros(())})


def _let(engine: Any, streams: Streams) -> None:
    """Let an engine run on other streams."""
    engine.runner.executor.streams.close()
    engine.runner.executor.streams = streams
