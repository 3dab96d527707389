"""A pipeline on one machine: step time, bubbles and memory under every schedule.

Ranks that share cores would lend each other the time in which they wait, and no bubble would show. So every rank gets
an equal share of the machine by a CPU quota (a control group; needs root): a slow machine of its own. `1f1b` runs one
strand on a linear placement, the others two on the fold. With `--rate`, the ranks stand on two hosts joined by a link
of so many Mbit/s (see shaped_link.py), and `--across` says which of their neighbours are on the other one.

All times of a layout come from one run, in turn; medians, the slowest rank counts. A step here is forward, backward and
gradient sums of a window, without the optimizer. Predicted times come from operators measured in the same run.

    sudo python benchmarks/pipeline.py --processes 4 --pp 2 4 --microbatches 4 8 16
    sudo python benchmarks/pipeline.py --processes 2 --pp 2 --rate 300 --microbatches 8
    sudo python benchmarks/pipeline.py --processes 4 --pp 2 --tp 2 --rate 300 --across tp --microbatches 8
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shaped_link

GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = 2_000  # microseconds; short, or a rank would run at full speed for as long as an operator takes
SCHEDULES = ("1f1b", "folded_1f1b", "dualpipe_v", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument(
        "--pp", type=int, nargs="+", default=[2, 4], help="ranks of the pipeline; dp takes what is left"
    )
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=int, help="Mbit/s each way of a link between two hosts")
    parser.add_argument("--across", choices=("pp", "tp"), default="pp", help="what the link is between")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        launch(options)
    else:
        work(options)


def launch(options: argparse.Namespace) -> None:
    """Run the ranks, each with its quota; leave nothing behind."""
    link = shaped_link.hosts() if options.rate else contextlib.nullcontext()
    start = functools.partial(start_rank, options=options)
    shaped_link.run_ranks("CPU quotas", options.processes, start, 3600, link, quotas(options.processes))


@contextlib.contextmanager
def quotas(count: int) -> Iterator[None]:
    """A control group for each rank, all with the same share of the machine."""
    share = len(os.sched_getaffinity(0)) / count
    groups = [group_of(rank) for rank in range(count)]
    try:
        for group in groups:
            group.mkdir(exist_ok=True)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(int(min(1.0, share) * PERIOD)))
        yield
    finally:
        for group in groups:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    group.rmdir()
                if not group.exists():
                    break
                time.sleep(0.1)


def group_of(rank: int) -> Path:
    """The control group of a rank."""
    return GROUPS / f"helix-{rank}"


def host_of(rank: int, options: argparse.Namespace) -> int:
    """Which of the two hosts a rank is on: tensor-parallel ranks are neighbours, pipeline ranks further apart."""
    return rank % options.tp % 2 if options.across == "tp" else rank // options.tp % options.pp[0] % 2


def start_rank(rank: int, folder: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    def prepare() -> None:
        (group_of(rank) / "cgroup.procs").write_text(str(os.getpid()))

    host = host_of(rank, options) if options.rate else -1
    return shaped_link.start_rank(rank, folder, options.processes, host, prepare)


def work(options: argparse.Namespace) -> None:
    """One rank: every layout, every number of micro-batches, every schedule."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    if options.rate:
        host = host_of(options.rank, options)
        if all(host_of(rank, options) != host for rank in range(options.rank)):  # the first of its host
            shaped_link.shape(host, options.rate)
    results = []
    for pp in options.pp:
        for count in options.microbatches:
            results.append(compare(options, pp, count))
            if options.rank == 0:
                print("\n" + describe(results[-1]), flush=True)
                if options.json:
                    options.json.write_text(json.dumps({"about": about(), "results": results}, indent=1) + "\n")
    dist.destroy_process_group()


def compare(options: argparse.Namespace, pp: int, count: int) -> dict[str, Any]:
    """Every schedule on one layout, for windows of `count` micro-batches."""
    from hf_helix.measure.memory import peak_bytes
    from hf_helix.planning.pipeline.scheduler import candidates
    from hf_helix.planning.plans.registry import predict_plan
    from hf_helix.runtime.distributed.agreement import all_gather_object
    from hf_helix.tuning.candidates import plan_runners
    from hf_helix.tuning.tuner import tune

    linear = workload(options, pp, "1f1b")
    folded = workload(options, pp, "folded_1f1b", linear.mesh)
    batches = {id(made.runner.stage): made.window(count, options.batch, options.sequence) for made in (linear, folded)}
    window = batches[id(folded.runner.stage)]
    chosen, tuning = tune(folded.runner, window, schedules=functools.partial(candidates, "auto"))
    profile = tuning.profile
    assert profile is not None
    runners = {"1f1b": linear.runner}  # under `sequential`: one strand
    flow = plan_runners(folded.runner, ["search"], profile, count)["search"]
    for scheduler in candidates("auto", profile)[:2]:
        runners[scheduler.name] = flow.with_plan(flow.plan, scheduler)
    runners["auto"] = chosen
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(options.repeats + 1):
        for name, runner in runners.items():
            times[name].append(timed(runner, batches[id(runner.stage)]))
    steps = {
        name: statistics.median(map(max, zip(*all_gather_object(seconds[1:]), strict=True)))
        for name, seconds in times.items()
    }
    rows = {}
    for name, runner in runners.items():
        mine = batches[id(runner.stage)]
        rows[name] = {
            "plan": f"{runner.plan.rule} on {runner.scheduler.name}",
            "step": steps[name],
            "bubble": bubble(runner, mine),
            "peak": all_gather_object(peak_bytes(runner, mine)),
        }
        if name != "1f1b":
            rows[name]["predicted"] = predict_plan(runner.plan, profile, runner.scheduler(count))[1].seconds
    for made in (linear, folded):
        made.runner.executor.streams.close()
    sizes = {"pp": pp, "tp": options.tp, "dp": options.processes // (pp * options.tp)}
    return {**sizes, "microbatches": count, "rate": options.rate, "across": options.across, "rows": rows}


def workload(options: argparse.Namespace, pp: int, schedule: str, mesh: Any = None) -> Any:
    import torch

    from hf_helix.config import HelixConfig
    from hf_helix.engine.synthetic import Workload

    config = shaped_link.llama(options, options.vocabulary, heads=8)
    helix = HelixConfig(tp_size=options.tp, pp_size=pp, schedule=schedule)
    return Workload(config, helix, torch.device("cpu"), mesh)


def timed(runner: Any, window: Any) -> float:
    """Seconds of a window on this rank, from the moment at which all ranks have met."""
    import torch.distributed as dist

    from hf_helix.measure.overlap import forget_gradients

    dist.barrier()
    start = time.perf_counter()
    runner.train_window(window)
    seconds = time.perf_counter() - start
    forget_gradients(runner)
    return seconds


def bubble(runner: Any, window: Any) -> float:
    """The part of a step in which a rank does not compute; mean over the ranks."""
    from hf_helix.measure.overlap import trace_window
    from hf_helix.runtime.distributed.agreement import all_gather_object

    trace = trace_window(runner, window)
    spans = [(span.start, span.end) for span in trace.spans]
    ranks = all_gather_object((trace.busy(compute=True), min(spans)[0], max(end for _, end in spans)))
    whole = max(end for _, _, end in ranks) - min(start for _, start, _ in ranks)  # one machine, one clock
    return 1 - statistics.fmean(busy for busy, _, _ in ranks) / whole


def describe(comparison: dict[str, Any]) -> str:
    """A table for people."""
    place = f", {comparison['rate']} Mbit/s between {comparison['across']} neighbours" if comparison["rate"] else ""
    base = comparison["rows"]["1f1b"]["step"]
    lines = [
        f"pp={comparison['pp']} tp={comparison['tp']} dp={comparison['dp']}, M={comparison['microbatches']}{place}"
    ]
    lines.append(f"  {'schedule':<12}{'step s':>9}{'predicted':>11}{'speed-up':>10}{'idle':>7}  peak MB by rank, plan")
    for name, row in comparison["rows"].items():
        predicted = f"{row['predicted']:.2f}" if "predicted" in row else "-"
        peak = " ".join(f"{size / 1e6:.1f}" for size in row["peak"])
        lines.append(
            f"  {name:<12}{row['step']:9.2f}{predicted:>11}{base / row['step']:9.2f}x{row['bubble']:7.0%}  {peak}, "
            f"{row['plan']}"
        )
    return "\n".join(lines)


def about() -> dict[str, str]:
    import torch
    import transformers

    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": " ".join(sys.argv),
    }


if __name__ == "__main__":
    main()
