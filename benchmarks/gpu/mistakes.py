"""Streams with a mistake must show it: `python -m benchmarks.gpu.mistakes "<mistake>" cuda:0` is one of them.

In:   a mistake by its name, see `paces.mutants`, or `NONE`.
Out:  the line `READY` when a window without the mistake has been computed; then one of JSON: what differs with it.
Must hold: each runs in a process of its own, because what reads freed memory may leave CUDA unusable. A process that
ends by itself after `READY` has shown its mistake, too; one that does before, or hangs, has not.
"""

import argparse
import functools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.gpu.models import batches, tiny
from benchmarks.gpu.paces import Pace, Paced, mutants, paced_streams
from benchmarks.gpu.report import Report
from benchmarks.gpu.windows import deterministic, engine_on, same_bits, silent_mesh, train
from hf_helix.runtime.streams import Streams

NONE = "no mistake"
READY = "ready"
LIMIT = 120.0
"""Seconds that a process may take."""

slow: Pace = lambda: 5e-3  # noqa: E731 - long enough for a mistake to show each time


def check_mistakes(report: Report, device: torch.device) -> None:
    """Every mistake side by side with the others, and a run without one."""
    names = [NONE, *mutants(device, slow)]
    with ThreadPoolExecutor(len(names)) as threads:
        for name, (has_shown, figure) in zip(names, threads.map(functools.partial(_shown, device), names), strict=True):
            report.check(f"mistake: {name}", has_shown == (name != NONE), figure)


def _shown(device: torch.device, name: str) -> tuple[bool, str]:
    """Whether a mistake has shown, and how."""
    command = [sys.executable, "-m", __name__, name, str(device)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return name == NONE, f"no end within {LIMIT:.0f} s"
    said = done.stdout.splitlines()
    if READY in said and done.returncode == 0:
        where = json.loads(said[-1])
        return bool(where), f"differs in {where}" if where else "every bit the same"
    last = next((line for line in reversed(done.stderr.splitlines()) if "Error" in line), "")
    print(done.stderr[-4000:], file=sys.stderr, flush=True)
    moment = "" if READY in said else "before anything was tried, "
    return (READY in said or name == NONE), f"ended {moment}with status {done.returncode}: {last[:200]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mistake")
    parser.add_argument("device", type=torch.device)
    given = parser.parse_args()
    with deterministic():
        print(json.dumps(_difference(given.mistake, given.device)), flush=True)


def _difference(mistake: str, device: torch.device) -> str:
    """What a window gives otherwise with a mistake than without; empty where nothing differs."""
    made, window = functools.partial(tiny, "llama"), batches(2, lengths=(48, 33))
    with engine_on(made, silent_mesh(device, tp=2), len(window), plan="greedy") as engine:
        wanted = train(engine, window)
    print(READY, flush=True)
    cases = {NONE: lambda: (paced_streams(device, slow), slow), **mutants(device, slow)}
    streams, pace = cases[mistake]()
    transport = functools.partial(Paced, pace=pace, device=device)
    with engine_on(made, silent_mesh(device, tp=2, made=transport), len(window), plan="greedy") as engine:
        let(engine, streams)
        return same_bits(train(engine, window), wanted)


def let(engine: Any, streams: Streams) -> None:
    """Let an engine run on other streams."""
    engine.runner.executor.streams.close()
    engine.runner.executor.streams = streams


if __name__ == "__main__":
    main()
