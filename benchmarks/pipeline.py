"""A pipeline on one machine: step time, bubbles and memory under every schedule.

Ranks that share cores would give each other the time in which they wait, and no bubble would show. So every rank gets
an equal share of the machine by a CPU quota (a control group; needs root): a slow machine of its own. `1f1b` runs one
strand on a linear placement, the others two on the fold. With `--rate`, the ranks stand on two hosts joined by a link
of so many Mbit/s (see ranks.py), and `--across` says which of their neighbours are on the other one.

All times of a layout come from one run, in turn; medians, the slowest rank counts. A step here is forward, backward and
gradient sums of a window, without the optimizer. Predicted times come from operators measured in the same run. Memory
is that of activations and of the states of AdamW in fp32 on the fullest rank, beyond that of 1F1B's first rank.

    sudo env "PATH=$PATH" python -m benchmarks.pipeline --processes 4 --pp 2 4 --microbatches 4 8 16
    sudo env "PATH=$PATH" python -m benchmarks.pipeline --processes 2 --pp 2 --rate 300 --microbatches 8
    sudo env "PATH=$PATH" python -m benchmarks.pipeline --processes 4 --pp 2 --tp 2 --rate 300 --across tp \\
        --microbatches 8
"""

import argparse
import functools
import itertools
import statistics
from typing import Any

from benchmarks.common import add_outputs, columns, llama, options_of, save
from benchmarks.plans import time_all
from benchmarks.ranks import Ranks, shape
from hf_helix.config import RULES

STATES = 4  # of every parameter: itself, its gradient, and the two moments of AdamW


def main() -> None:
    sizes = {"layers": 16, "hidden": 256, "sequence": 128, "batch": 2, "vocabulary": 2048, "repeats": 3}
    parser = options_of(__doc__, processes=4, pp=[2, 4], tp=1, microbatches=[4, 8, 16], **sizes)
    parser.add_argument("--rate", type=int, help="Mbit/s each way of a link between two hosts")
    parser.add_argument("--across", choices=("pp", "tp"), default="pp", help="what the link is between")
    parser.add_argument("--plans", nargs="+", default=["search"], choices=RULES, help="of the schedules on the fold")
    add_outputs(parser)
    options = parser.parse_args()
    hosts = [host_of(rank, options) for rank in range(options.processes)] if options.rate else None
    ranks = Ranks(options.processes, hosts, quotas=True)
    ranks.run(functools.partial(work, ranks), options)


def host_of(rank: int, options: argparse.Namespace) -> int:
    """Returns the host of a rank, 0 or 1: tensor-parallel ranks are neighbours, pipeline ranks further apart."""
    return rank % options.tp % 2 if options.across == "tp" else rank // options.tp % options.pp[0] % 2


def work(ranks: Ranks, options: argparse.Namespace) -> None:
    """One rank: every layout, every number of micro-batches, every schedule."""
    if ranks.is_first_of_host(options.rank):
        shape(host_of(options.rank, options), options.rate)
    results = []
    for pp in options.pp:
        for count in options.microbatches:
            results.append(compare(options, pp, count))
            if options.rank == 0:
                print("\n" + describe(results[-1]), flush=True)
                save(options, "Pipelines", __doc__, "\n\n".join(map(describe, results)), results)


def compare(options: argparse.Namespace, pp: int, count: int) -> dict[str, Any]:
    """Every schedule on one layout, for windows of `count` micro-batches."""
    from hf_helix.measure.memory import peak_bytes
    from hf_helix.planning.choice.scheduler import candidates
    from hf_helix.planning.plan.predict import predict
    from hf_helix.runtime.distributed.agreement import all_gather_object
    from hf_helix.tuning.candidates import plan_runners
    from hf_helix.tuning.tuner import tune

    linear = workload(options, pp, "1f1b")
    folded = workload(options, pp, "folded_1f1b", linear.mesh)
    one_strand, window = (made.window(count, options.batch, options.sequence) for made in (linear, folded))
    chosen, tuning = tune(folded.runner, window, schedules=functools.partial(candidates, "auto"))
    profile = tuning.profile
    assert profile is not None
    runners = {"1f1b": linear.runner}  # under `sequential`: one strand
    planned = plan_runners(folded.runner, options.plans, profile, count)
    for scheduler, (rule, flow) in itertools.product(candidates("auto", profile)[:2], planned.items()):
        runners[f"{scheduler.name}, {rule}"] = flow.with_plan(flow.plan, scheduler)
    runners["auto"] = chosen
    windows = {name: one_strand if name == "1f1b" else window for name in runners}
    steps = {name: statistics.median(times) for name, times in time_all(runners, windows, options.repeats).items()}
    rows = {}
    for name, runner in runners.items():
        mine = windows[name]
        rows[name] = {
            "plan": f"{runner.plan.rule} on {runner.scheduler.name}",
            "step": steps[name],
            "bubble": bubble(runner, mine),
            "peak": all_gather_object(peak_bytes(runner, mine)),
            "states": all_gather_object(STATES * sum(parameter.nbytes for parameter in runner.rank_units.own_rows)),
        }
        if name != "1f1b":
            rows[name]["predicted"] = predict(runner.plan, profile, runner.scheduler(count), timeline=True).seconds
    for made in (linear, folded):
        made.runner.executor.streams.close()
    sizes = {"pp": pp, "tp": options.tp, "dp": options.processes // (pp * options.tp)}
    return {**sizes, "microbatches": count, "rate": options.rate, "across": options.across, "rows": rows}


def workload(options: argparse.Namespace, pp: int, schedule: str, mesh: Any = None) -> Any:
    import torch

    from hf_helix.config import HelixConfig
    from hf_helix.engine.synthetic import Workload

    config = llama(options.hidden, options.layers, options.vocabulary)
    helix = HelixConfig(tp_size=options.tp, pp_size=pp, schedule=schedule)
    return Workload(config, helix, torch.device("cpu"), mesh)


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
    """Returns the table of a layout."""
    place = f", {comparison['rate']} Mbit/s between {comparison['across']} neighbours" if comparison["rate"] else ""
    base = comparison["rows"]["1f1b"]
    whole = base["peak"][0] + base["states"][0]
    title = f"pp={comparison['pp']} tp={comparison['tp']} dp={comparison['dp']}, M={comparison['microbatches']}{place}"
    cells = [
        (
            name,
            f"{row['step']:.2f}",
            f"{row['predicted']:.2f}" if "predicted" in row else "",
            f"{base['step'] / row['step']:.2f}x",
            f"{100 * row['bubble']:.0f}",
            f"{100 * (max(map(sum, zip(row['peak'], row['states'], strict=True))) / whole - 1):+.1f}",
            " ".join(f"{size / 1e6:.1f}" for size in row["peak"]),
            row["plan"],
        )
        for name, row in comparison["rows"].items()
    ]
    header = ("schedule", "step s", "predicted", "gain", "idle %", "memory %", "peak MB by rank", "plan")
    return f"{title}\n{columns(header, cells)}"


if __name__ == "__main__":
    main()
