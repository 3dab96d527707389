"""What recompute costs and what it saves: step time and peak memory of none, selective and full, under each plan.

Cuts a Llama over two ranks (`tp_size=2`) and trains windows of it without recompute, with `selective` and with `full`,
every time under the same plans. The operators are measured under each mode, those that run again included, and plans
are made with these times. Steps of all modes and plans are timed in one run, in turn; medians, the slower rank counts.
A step is forward, backward and gradient sums of a window, without the optimizer. Memory is what activations and buffers
of a window take at most on a rank, counted while it runs (`measure.memory`). With `--rate`, two hosts are
joined by a link of that speed (see shaped_link.py; needs root); without it, two processes talk over this machine.

    sudo python benchmarks/recompute.py --rate 500
    python benchmarks/recompute.py --layers 2 --hidden 128 --microbatches 2 --repeats 1
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import shaped_link

MODES = ("none", "selective", "full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, help="Mbit/s each way between two hosts; without it there is one host")
    parser.add_argument("--plans", nargs="+", default=["sequential", "dhelix", "search"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--markdown", type=Path, help="also write the table there, with hardware and versions")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None and options.rate:
        shaped_link.run_ranks("network namespaces", 2, shaped_link.start_rank, 2 * 3600, shaped_link.hosts())
    elif options.rank is None and "RANK" not in os.environ:
        shaped_link.launch_here()
    else:
        options.rank = int(os.environ["RANK"])
        work(options)


def work(options: argparse.Namespace) -> None:
    """One rank."""
    import torch.distributed as dist

    shaped_link.join(options.rank)
    if options.rate:
        shaped_link.shape(options.rank, options.rate)
        dist.barrier()
    result = measure(options)
    if options.rank == 0:
        text = describe(result, options)
        print("\n" + text, flush=True)
        about = {**shaped_link.versions(), "flags": shlex.join(sys.argv[1:])}
        if options.json:
            options.json.write_text(json.dumps({"about": about, **result}, indent=1) + "\n")
        if options.markdown:
            facts = "\n".join(f"- {key}: {value}" for key, value in about.items())
            options.markdown.write_text(f"# Recompute, {about['date']}\n\n{facts}\n\n```\n{text}\n```\n")
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the operators of every mode, make the plans, time everything in turn, count bytes."""
    import torch

    from hf_helix.config import HelixConfig
    from hf_helix.engine.synthetic import Workload
    from hf_helix.measure.memory import peak_bytes
    from hf_helix.measure.operators import measure_profile
    from hf_helix.measure.overlap import measure_overlap, time_steps
    from hf_helix.runtime.distributed.agreement import all_gather_object
    from hf_helix.tuning.candidates import plan_runners

    work = Workload(shaped_link.llama(options), HelixConfig(tp_size=2), torch.device("cpu"))
    window = work.window(options.microbatches, options.batch, options.sequence)
    runners: dict[str, dict[str, Any]] = {}
    overlaps, peaks = {}, {}
    for mode in MODES:
        runner = recomputed(work.runner, mode)
        runners[mode] = plan_runners(runner, options.plans, measure_profile(runner, window), options.microbatches)
        overlaps[mode] = measure_overlap(runners[mode], window, max(1, options.repeats // 2))
        peaks[mode] = {plan: max(all_gather_object(peak_bytes(made, window))) for plan, made in runners[mode].items()}
    every = {f"{mode} {plan}": runner for mode, by_plan in runners.items() for plan, runner in by_plan.items()}
    steps = time_steps(every, window, options.repeats)
    return {
        mode: {
            plan: {
                **dataclasses.asdict(overlaps[mode][plan]),
                "step": statistics.median(steps[f"{mode} {plan}"]),
                "steps": steps[f"{mode} {plan}"],
                "peak": peaks[mode][plan],
            }
            for plan in options.plans
        }
        for mode in MODES
    }


def recomputed(runner: Any, mode: str) -> Any:
    """A runner of the same weights whose layers are recomputed."""
    from hf_helix.planning.plans.registry import make_plan
    from hf_helix.planning.profile import rough_profile
    from hf_helix.runtime.runner import Runner

    whole = runner.stage
    model = {
        index: unit.recomputed(mode) if unit.graphs.forward.repeats else unit for index, unit in whole.model.items()
    }
    graphs = {unit.name: unit.graphs for unit in model.values()}
    stage = dataclasses.replace(whole, model=model, layout=dataclasses.replace(whole.layout, graphs=graphs))
    plan = make_plan("sequential", rough_profile(stage.layout), model=runner.plan.model, mesh=runner.plan.mesh)
    return Runner(stage, plan, runner.mesh, runner.executor.streams, runner.scheduler, 0)


def describe(result: dict[str, Any], options: argparse.Namespace) -> str:
    """The table."""
    link = f"{options.rate} Mbit/s between two hosts" if options.rate else "two processes on one host"
    lines = [
        f"tp=2 over {link}, {options.layers} layers, hidden {options.hidden}, M={options.microbatches} "
        f"micro-batches of {options.batch} x {options.sequence}",
        f"{'recompute':<10} {'plan':<12} {'step s':>8} {'of none':>8} {'speed-up':>9} {'peak MB':>8} {'of none':>8} "
        f"{'compute s':>10} {'moved s':>8} {'hidden':>7} {'overlapped':>11}",
    ]
    for mode, plans in result.items():
        base = plans[options.plans[0]]["step"]
        for plan, row in plans.items():
            none = result[MODES[0]][plan]
            hidden = 1 - (row["step"] - row["computation"]) / row["communication"]
            lines.append(
                f"{mode:<10} {plan:<12} {row['step']:8.2f} {row['step'] / none['step']:7.2f}x "
                f"{base / row['step']:8.2f}x {row['peak'] / 1e6:8.1f} {row['peak'] / none['peak']:8.0%} "
                f"{row['computation']:10.2f} {row['communication']:8.2f} {hidden:7.0%} "
                f"{row['overlapped_fraction']:11.0%}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
