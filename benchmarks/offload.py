"""What the copies of `offload="optimizer"` between host and device cost, on an emulated link of their own.

Cuts a Llama over two ranks, and traces windows under `greedy`: the seconds of copies up (weights, for the first forward
passes) and down (gradients, beside the last backward passes), and the seconds of them beside no computation. Copies and
transfers between ranks have a link each, of one speed. Medians; the slower rank counts.

    python -m benchmarks.offload --layouts pp2 tp2 --links 500mbit 2gbit
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.common import facts, llama, options_of
from benchmarks.ranks import Ranks

OPTIONS = {"pp2": {"pp_size": 2}, "tp2": {"tp_size": 2}, "dp2": {}, "zero1": {"shard_optimizer": True}}


def main() -> None:
    parser = options_of(
        __doc__, links=["500mbit", "2gbit"], microbatches=8, batch=2, sequence=256, hidden=256, layers=8, repeats=5
    )
    parser.add_argument("--layouts", nargs="+", choices=OPTIONS, default=["pp2", "tp2"])
    Ranks().run(work, parser.parse_args())


def work(options: argparse.Namespace) -> None:
    """One rank: every layout on every link in turn."""
    if options.rank == 0:
        print(facts())
    for layout in options.layouts:
        for link in options.links:
            line = measure(layout, link, options)
            if options.rank == 0:
                print(line, flush=True)


def measure(layout: str, link: str, options: argparse.Namespace) -> str:
    """Returns the line of a layout on a link."""
    import torch

    from hf_helix.config import HelixConfig
    from hf_helix.engine.synthetic import Workload
    from hf_helix.planning.plan.registry import make_plan
    from hf_helix.planning.timing.profile import rough_profile
    from hf_helix.runtime.distributed.agreement import all_gather_object

    config = HelixConfig(**OPTIONS[layout], offload="optimizer", link=link)
    made = Workload(llama(options.hidden, options.layers), config, torch.device("cpu"))
    plan = make_plan("greedy", rough_profile(made.runner.layout), model="m", mesh=config.option_sizes)
    runner, window = made.runner.with_plan(plan), made.window(options.microbatches, options.batch, options.sequence)
    for flat in runner.stage.flat_parameters:
        flat.shard.normal_(std=0.02)
    runner.train_window(window)
    rounds = [all_gather_object(seconds_of(runner, window)) for _ in range(options.repeats)]
    whole, up, bare_up, down, bare_down = (
        statistics.median(max(rank[place] for rank in ranks) for ranks in rounds) for place in range(5)
    )
    hidden = 1 - (bare_up + bare_down) / (up + down)
    return (
        f"{layout}, {link}: window {whole:.3f} s; up {up:.3f} s, {bare_up:.3f} s of it beside nothing; "
        f"down {down:.3f} s, {bare_down:.3f} s of it beside nothing; {hidden:.0%} hidden, "
        f"{(bare_up + bare_down) / whole:.1%} of the window exposed"
    )


def seconds_of(runner: Any, window: Any) -> list[float]:
    """Returns the seconds of a window on this rank, and of each direction: copies, and copies beside no computation."""
    from hf_helix.measure.overlap import trace_window
    from hf_helix.planning.graph.operator import Kind
    from hf_helix.runtime.streams import DOWN, UP, stream_name
    from hf_helix.runtime.trace import common, merge

    spans = trace_window(runner, window, complete=True).spans
    computing = merge((span.start, span.end) for span in spans if span.stream == "compute")
    found = [max(span.end for span in spans) - min(span.start for span in spans)]
    for lane in (UP, DOWN):
        name = stream_name(Kind.GRADIENTS, lane)
        copying = merge((span.start, span.end) for span in spans if span.stream == name)
        total = sum(end - start for start, end in copying)
        found += [total, total - sum(end - start for start, end in common(copying, computing))]
    return found


if __name__ == "__main__":
    main()
