"""Races: with links and computation at random paces, and new memory full of nan, no bit may change.

Each layout runs once without any delay, and then under several plans with other delays in every window; deterministic
kernels, no other ranks. Streams with a mistake must show it (`mistakes.py`): a check that cannot fail proves nothing.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.mistakes import check_mistakes, let
from benchmarks.gpu.models import batches, tiny
from benchmarks.gpu.paces import Paced, paced_streams, random_pace
from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.windows import deterministic, engine_on, same_bits, silent_mesh, train, under_plan

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
    with report.attempt("mistakes"):
        check_mistakes(report, options.device)


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
    made, autocast_dtype = functools.partial(tiny, family), torch.bfloat16 if bf16 else None
    with engine_on(made, silent_mesh(device, **sizes), len(WINDOW), autocast_dtype, **changes) as engine:
        wanted = train(engine, WINDOW)
    if any(value != value for value in wanted.losses):
        report.check(name, False, f"the losses without delays are {wanted.losses}")
        return
    pace, differing, count = random_pace(7, most), "", 0
    mesh = silent_mesh(device, **sizes, made=functools.partial(Paced, pace=pace, device=device))
    with engine_on(made, mesh, len(WINDOW), autocast_dtype, **changes) as engine:
        let(engine, paced_streams(device, random_pace(8, most / 10)))
        for plan in PLANS:
            under_plan(engine, plan)
            for _ in range(rounds):
                count += 1
                where = same_bits(train(engine, WINDOW), wanted)
                differing = differing or (where and f"window {count} under {plan} differs in {where}")
    report.check(name, not differing, differing or f"{count} windows at random paces, every bit the same")
