"""compute-sanitizer's memcheck on one tiny window, where it is installed.

Run by itself, `python -m benchmarks.gpu.sanitizer`, this module is that window: every allocation is one of CUDA's own
then (`PYTORCH_NO_CUDA_MEMORY_CACHING`), so that what reaches over the end of a tensor is seen.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.gpu.models import batches, tiny
from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.windows import engine_on, silent_mesh, train

USUAL = "/usr/local/cuda/bin/compute-sanitizer"
FOUND = 9  # the exit status for errors that memcheck has found
CASES = (("llama", {"tp": 2}), ("llama", {"cp": 2}))


def run(report: Report, options: Options) -> None:
    tool = shutil.which("compute-sanitizer") or (USUAL if Path(USUAL).exists() else "")
    if options.dry:
        windows(options.device)
        report.check("the window that memcheck would watch", True, "runs on the CPU")
        return
    if not tool:
        report.note("memcheck", "not run: compute-sanitizer is not installed")
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND), sys.executable, "-m", __name__]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=options.seconds - 5)
    lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    said = lines[-1] if lines else done.stderr.strip().splitlines()[-1:]
    if done.returncode:
        print(done.stdout[-8000:], done.stderr[-4000:], file=sys.stderr, flush=True)
    report.check("memcheck", done.returncode == 0, f"exit status {done.returncode}: {said}")


def windows(device: torch.device) -> None:
    """A window of each case."""
    for family, sizes in CASES:
        made = functools.partial(tiny, family, num_hidden_layers=1)
        with engine_on(made, silent_mesh(device, **sizes), 2, torch.bfloat16, plan="greedy") as engine:
            train(engine, batches(2, rows=1, lengths=(32,)))


if __name__ == "__main__":
    windows(torch.device("cuda:0"))
    torch.cuda.synchronize()
