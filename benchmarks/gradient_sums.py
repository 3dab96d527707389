"""How much of the sums of gradients is exposed at the end of a window, at dp2 and cp2 on an emulated link.

Cuts a Llama over two ranks, measures its operators, and times in turn, in one process group: windows without sums, with
all sums behind the last computation, and with sums beside the last backward, under `greedy` whose last backward is
ordered like all others, and under `greedy` that holds weight gradients back. What a window takes longer than without
sums is their price: what is exposed, and what computation loses to them where gloo takes part of its cores. What is
exposed alone is taken from traces of further windows: the time of sums in which nothing is computed. Medians; the
slower rank counts.

    python -m benchmarks.gradient_sums --layouts dp2 cp2 --microbatches 4 8 16
"""

from __future__ import annotations

import argparse
import functools
import statistics
from dataclasses import replace
from typing import Any

from benchmarks.common import facts, llama, options_of
from benchmarks.ranks import Ranks


def main() -> None:
    parser = options_of(
        __doc__, link="150mbit", microbatches=[4, 8, 16], batch=2, sequence=256, hidden=256, layers=8, repeats=5
    )
    parser.add_argument("--layouts", nargs="+", choices=("dp2", "cp2"), default=["dp2", "cp2"])
    Ranks().run(work, parser.parse_args())


def work(options: argparse.Namespace) -> None:
    """One rank: every layout and window in turn."""
    if options.rank == 0:
        print(facts())
    for layout in options.layouts:
        for line in measure(layout, options):
            if options.rank == 0:
                print(line, flush=True)


def measure(layout: str, options: argparse.Namespace) -> list[str]:
    """The lines of a layout."""
    import torch

    from hf_helix.config import HelixConfig
    from hf_helix.engine.synthetic import Workload
    from hf_helix.measure.operators import measure_profile
    from hf_helix.planning.plan.list_scheduler import PriorityPlan
    from hf_helix.tuning.candidates import baseline_runner, plan_runners

    config = HelixConfig(tp_size=1, cp_size=2 if layout == "cp2" else 1, link=options.link)
    made = Workload(llama(options.hidden, options.layers, heads=16), config, torch.device("cpu"))
    profile = measure_profile(baseline_runner(made.runner, 4), made.window(4, options.batch, options.sequence), {})
    lines = []
    for count in options.microbatches:
        window = made.window(count, options.batch, options.sequence)
        holding = plan_runners(made.runner, ["greedy"], profile, count)["greedy"]
        assert isinstance(holding.plan, PriorityPlan)
        held = holding.plan.priorities.num_units_with_deferred_wgrad
        plain = holding.with_plan(
            replace(holding.plan, priorities=replace(holding.plan.priorities, num_units_with_deferred_wgrad=None))
        )
        times = timed(holding, plain, window, options.repeats)
        bare_time = {"beside": exposed_time(plain, window, options.repeats)}
        bare_time["held back"] = exposed_time(holding, window, options.repeats)
        lines.append(f"{layout}, {options.link}, {count} micro-batches, {held} units hold weight gradients back:")
        bare = {"behind": times["none"], "beside": times["none"], "held back": times["none, held back"]}
        for name, seconds in bare.items():
            more = times[name] - seconds
            line = f"  {name:<10} {times[name]:8.3f} s, {more:7.3f} s more than without sums ({more / times[name]:.1%})"
            if name in bare_time:
                line += f", {bare_time[name]:.3f} s of sums beside nothing ({bare_time[name] / times[name]:.1%})"
            lines.append(line)
    return lines


def exposed_time(runner: Any, window: Any, repeats: int) -> float:
    """The median seconds of a window in which gradients are summed and nothing is computed. Collective."""
    from hf_helix.measure.overlap import trace_window
    from hf_helix.planning.graph.operator import Kind
    from hf_helix.runtime.distributed.agreement import all_gather_object

    seconds, sums = [], Kind.GRADIENTS.value
    for _ in range(repeats):
        trace = trace_window(runner, window, complete=True)
        seconds.append(max(all_gather_object(trace.busy(False, sums) - trace.overlapped(sums))))
    return statistics.median(seconds)


def timed(holding: Any, plain: Any, window: Any, repeats: int) -> dict[str, float]:
    """The median seconds of each way, all in turn."""
    from hf_helix.measure.overlap import time_in_turn
    from hf_helix.runtime.gradients.reduce import reduce_all_gradients

    def behind() -> None:
        plain.train_window(window, complete=False)
        reduce_all_gradients(plain.stage.units, plain.mesh, plain.executor.streams)

    works = {
        "none": functools.partial(plain.train_window, window, complete=False),
        "none, held back": functools.partial(holding.train_window, window, complete=False),
        "behind": behind,
        "beside": functools.partial(plain.train_window, window),
        "held back": functools.partial(holding.train_window, window),
    }
    times = time_in_turn(list(works.values()), plain, repeats)
    return {name: statistics.median(seconds) for name, seconds in zip(works, times, strict=True)}


if __name__ == "__main__":
    main()
