"""Memory parity (paper, section 6.5): two strands on the fold against the one strand of 1F1B, in counted bytes.

In:   the number of pipeline ranks, the shape of a model and of its micro-batches.
Out:  a table of peak bytes for every rank and way of running, and what each needs beyond 1F1B's first rank.
Must hold: activations and buffers are counted while a window runs (`measure.memory`), states by the parameters
that a rank really holds; what is computed instead is labelled so; the run ends within `--timeout`.

States are the parameter, its gradient and AdamW's two moments, all in fp32: four times the bytes of the parameters. The
paper finds over 30 % of the memory to be states (section 3, figure 5), and the default shapes come near that. `beyond`
is the peak of the fullest rank minus that of 1F1B's first rank, in percent of that rank's whole memory, states and
activations: what two strands cost. `total` is the same with each rank's states: on the fold, the first rank also has
the head, which on the linear placement is on the last one. The replicated bidirectional pipeline (figure 6b) is
computed: two stages and so two copies of states on each rank, and the activations of 1F1B's first rank, the least that
it could do with. `sequential` on the fold runs one strand at a time, layer by layer of a slot.

    OMP_NUM_THREADS=1 python benchmarks/pipeline_memory.py --pp 2
    OMP_NUM_THREADS=1 python benchmarks/pipeline_memory.py --pp 4 --sequence 256
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import datetime
import functools
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASE = "1f1b, sequential"
PLANS = ("sequential", "round_robin", "dhelix", "greedy")
COPIES = 4
"""Of every parameter: itself, its gradient, and the two moments of AdamW."""


@dataclass(frozen=True)
class Row:
    """Bytes of every rank."""

    name: str
    states: list[int]
    peaks: list[int]

    @property
    def totals(self) -> list[int]:
        """States and activations."""
        return [states + peak for states, peak in zip(self.states, self.peaks, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2, help="ranks of the pipeline, and processes")
    parser.add_argument("--microbatches", type=int, help="default: three for each rank")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--without-auto", action="store_true", help="leave out the row that takes longest")
    parser.add_argument("--timeout", type=int, default=1200, help="seconds after which the run is ended")
    parser.add_argument("--markdown", type=Path, help="also write the table there")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.microbatches = options.microbatches or 3 * options.pp
    if options.rank is None:
        sys.exit(launch(options))
    work(options)


def launch(options: argparse.Namespace) -> int:
    """Run the ranks until all are done, one has failed, or time is up; the exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    end = time.monotonic() + options.timeout
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks += [start_rank(rank, port, folder, options) for rank in range(options.pp)]
            while time.monotonic() < end:
                codes = [process.poll() for process in ranks]
                if any(codes) or None not in codes:
                    return int(any(codes))
                time.sleep(0.2)
            print(f"stopped after {options.timeout} s", file=sys.stderr)
            return 1
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def start_rank(rank: int, port: int, folder: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HELIX_CACHE": folder,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(options.pp),
    }
    command = [sys.executable, *sys.argv, "--rank", str(rank)]
    die = functools.partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    return subprocess.Popen(command, env=environment, preexec_fn=die)


# -- a rank ------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout))
    rows = measure(options)
    if options.rank == 0:
        text = describe(rows, options)
        print(text, flush=True)
        if options.markdown:
            options.markdown.write_text(markdown(text, options))
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> list[Row]:
    """Every way of running; on every rank the same rows."""
    from hf_helix.measure.memory import peak_bytes
    from hf_helix.measure.operators import measure_profile
    from hf_helix.planning.pipeline.scheduler import Scheduler, candidates
    from hf_helix.runtime.distributed.agreement import all_gather_object
    from hf_helix.tuning.candidates import plan_runners
    from hf_helix.tuning.effort import FULL
    from hf_helix.tuning.tuner import tune

    linear = workload(options, "1f1b")
    folded = workload(options, "folded_1f1b", linear.mesh)
    shape = options.microbatches, options.batch, options.sequence
    windows = {id(made.runner.stage): made.window(*shape) for made in (linear, folded)}
    window = windows[id(folded.runner.stage)]
    profile = measure_profile(folded.runner, window)
    planned = plan_runners(folded.runner, PLANS, profile, options.microbatches)
    runners = {BASE: linear.runner, **{f"w, {plan}": runner for plan, runner in planned.items()}}
    dualpipe_v = Scheduler("dualpipe_v", options.pp)
    runners["dualpipe_v, greedy"] = folded.runner.with_plan(planned["greedy"].plan, dualpipe_v)
    if not options.without_auto:
        schedules = functools.partial(candidates, "auto")
        chosen, _ = tune(
            folded.runner, window, dataclasses.replace(FULL, repeats=1), profile=profile, schedules=schedules
        )
        runners[f"auto ({chosen.scheduler.name}, {chosen.plan.rule})"] = chosen
    rows = []
    for name, runner in runners.items():
        states = COPIES * sum(parameter.nbytes for parameter in runner.stage.placements)
        peak = peak_bytes(runner, windows[id(runner.stage)])
        ranks = all_gather_object((states, peak))
        rows.append(Row(name, [states for states, _ in ranks], [peak for _, peak in ranks]))
    for made in (linear, folded):
        made.runner.executor.streams.close()
    return rows


def workload(options: argparse.Namespace, schedule: str, mesh: Any = None) -> Any:
    import torch
    from transformers import LlamaConfig

    from hf_helix.config import HelixConfig
    from hf_helix.engine.synthetic import Workload

    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    return Workload(config, HelixConfig(pp_size=options.pp, schedule=schedule), torch.device("cpu"), mesh)


# -- the table -----------------------------------------------------------------------------------------------------


def replicated(base: Row) -> Row:
    """Computed: the pipeline of 1F1B in both directions at once, each rank with a stage of either."""
    states = [mine + other for mine, other in zip(base.states, reversed(base.states), strict=True)]
    return Row("replicated bidirectional (computed)", states, [base.peaks[0]] * len(states))


def describe(rows: list[Row], options: argparse.Namespace) -> str:
    """The table for people."""
    base = rows[0]
    whole = base.totals[0]
    lines = [
        f"pp={options.pp}, M={options.microbatches}, {options.layers} layers, hidden {options.hidden}, "
        f"micro-batches of {options.batch} x {options.sequence}",
        f"1F1B's first rank: {whole / 1e6:.1f} MB, {base.states[0] / whole:.0%} of it states, one layer's activations "
        f"{base.peaks[0] / options.layers / whole:.1%}",
        f"  {'':<38}{'beyond':>8}{'total':>8}  peak MB by rank | states MB by rank",
    ]
    for row in [*rows, replicated(base)]:
        beyond = (max(row.peaks) - base.peaks[0]) / whole
        total = max(row.totals) / whole - 1
        peaks, states = (" ".join(f"{size / 1e6:.1f}" for size in sizes) for sizes in (row.peaks, row.states))
        lines.append(f"  {row.name:<38}{beyond:+8.1%}{total:+8.1%}  {peaks} | {states}")
    return "\n".join(lines)


def markdown(text: str, options: argparse.Namespace) -> str:
    """The table with what is needed to repeat it."""
    import torch
    import transformers

    command = " ".join(["python", *sys.argv[:-2]])  # without the rank
    return (
        f"# Memory of pipelines, {datetime.date.today().isoformat()}\n\n"
        f"- command: `{command}`\n- torch: {torch.__version__}\n- transformers: {transformers.__version__}\n"
        f"- machine: {platform.machine()}, {os.cpu_count()} cores\n\n```\n{text}\n```\n"
    )


if __name__ == "__main__":
    main()
