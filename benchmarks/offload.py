"""What the copies of `offload` between host and device cost, on an emulated copy engine of their own.

Cuts a Llama over two ranks, and runs windows under `greedy` with a step of fused AdamW on the host after each: the
seconds of copies up (weights) and down (gradients), and the seconds of them in which the rank waits for a copy, and
neither computes, steps nor issues. Copies and transfers between ranks have a link each, of one speed. Medians; the
slower rank counts. With `--offload parameters`, copies up are those of every use of the weights, in the window.

    python -m benchmarks.offload --layouts pp2 tp2 --links 500mbit 2gbit
    python -m benchmarks.offload --layouts pp2 tp2 --links 2gbit 10gbit --offload parameters
"""

import argparse
import math
import statistics
import time
from typing import Any

from benchmarks.common import facts, llama, options_of
from benchmarks.ranks import Ranks
from hf_helix.config import OFFLOADS

OPTIONS = {
    "pp2": {"pp_size": 2},
    "tp2": {"tp_size": 2},
    "dp2": {},
    "zero1": {"shard_optimizer": True},
    "zero3": {"shard_parameters": True},
}


def main() -> None:
    parser = options_of(
        __doc__, links=["500mbit", "2gbit"], microbatches=8, batch=2, sequence=256, hidden=256, layers=8, repeats=5
    )
    parser.add_argument("--layouts", nargs="+", choices=OPTIONS, default=["pp2", "tp2"])
    parser.add_argument("--offload", choices=OFFLOADS, default=OFFLOADS[0])
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
    from hf_helix.engine.optimizer_shards import step_shards
    from hf_helix.engine.synthetic import Workload
    from hf_helix.planning.rules.registry import make_plan
    from hf_helix.planning.timing.profile import rough_profile
    from hf_helix.runtime.distributed.agreement import all_gather_object
    from hf_helix.runtime.divided import plain_parameters

    config = HelixConfig(**OPTIONS[layout], offload=options.offload, link=link)
    made = Workload(llama(options.hidden, options.layers), config, torch.device("cpu"))
    plan = make_plan("greedy", rough_profile(made.runner.layout), model="m", mesh=config.option_sizes)
    runner, window = made.runner.with_plan(plan), made.window(options.microbatches, options.batch, options.sequence)
    rank_units = runner.rank_units
    for flat in rank_units.flat_parameters:
        flat.shard.normal_(std=0.02)
    with plain_parameters():
        optimizer = torch.optim.AdamW(rank_units.own_rows, lr=1e-4, fused=True)
        step_shards(optimizer, rank_units, runner.executor.streams)
    runner.train_window(window)
    optimizer.step()
    streamed = config.streams_weights
    rounds = [all_gather_object(seconds_of(runner, optimizer, window, streamed)) for _ in range(options.repeats)]
    whole, update, up, bare_up, down, bare_down = (
        statistics.median(max(rank[place] for rank in ranks) for ranks in rounds) for place in range(6)
    )
    hidden = 1 - (bare_up + bare_down) / (up + down)
    return (
        f"{layout}, {link}, {options.offload}: window and step {whole:.3f} s, {update:.3f} s of it the update; "
        f"up {up:.3f} s, {bare_up:.3f} s of it waited for; down {down:.3f} s, {bare_down:.3f} s of it waited for; "
        f"{hidden:.0%} hidden, {(bare_up + bare_down) / whole:.1%} of window and step exposed"
    )


def seconds_of(runner: Any, optimizer: Any, window: Any, streamed: bool) -> list[float]:
    """Returns the seconds of a window with its step on this rank, those of the update, and of each direction: copies,
    and waits for them, in this window, its step and the next window; if `streamed`, copies up in this window alone."""
    from hf_helix.planning.graph.operator import Kind
    from hf_helix.runtime.streams.trace import common, merge

    streams, waits = runner.executor.streams, []

    def noted(wait: Any) -> Any:
        def run(event: Any) -> None:
            start = time.perf_counter()
            wait(event)
            if event.kind.copies or event.kind is Kind.GRADIENTS:  # a gather waits for its copy
                waits.append((start, time.perf_counter()))

        return run

    plain = streams.wait
    streams.wait = streams.wait_on_host = noted(plain)
    with streams.tracing() as trace:
        begin = time.perf_counter()
        runner.train_window(window)
        optimizer.step()
        end = time.perf_counter()
        optimizer.zero_grad()
        runner.train_window(window)
    streams.wait = streams.wait_on_host = plain
    optimizer.step()
    optimizer.zero_grad()
    updates = [span.seconds for span in trace.spans if span.label == "gradients.update"]
    found = [end - begin, sum(updates)]
    for kind in (Kind.UP, Kind.DOWN):
        spans = [span for span in trace.spans if span.stream == kind.value]
        until = math.inf if kind is Kind.UP and not streamed else end
        copying = merge((span.start, span.end) for span in spans if span.start < until)
        found.append(sum(end - start for start, end in copying))
        found.append(sum(end - start for start, end in common(copying, merge(waits))))
    return found


if __name__ == "__main__":
    main()
