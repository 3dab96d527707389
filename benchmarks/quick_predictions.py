"""The doctor's quick prediction of a step against the one that is made operator by operator, layout by layout.

`hf-helix doctor` finds the fastest of many layouts by what one more layer and one more micro-batch take, and sums of
gradients beside the last backward by a rule, as the gathers of weights beside the first forward with `--optimizer`.
`hf-helix simulate` orders and simulates all operators of a window, sums included. No device is needed.

    python -m benchmarks.quick_predictions --model recipes/models/llama-8b --clusters h100x8 l40sx8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from hf_helix.engine.on_paper import OnPaper
from hf_helix.simulation.cluster import load_cluster
from hf_helix.simulation.sizes import Sizes, size_text
from hf_helix.simulation.step.step import Case, simulate_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="recipes/models/llama-8b")
    parser.add_argument("--clusters", nargs="+", default=["h100x8", "l40sx8"], help="of eight devices")
    parser.add_argument("--plans", nargs="+", default=["sequential", "greedy"])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--sequence_length", type=int, default=4096)
    parser.add_argument("--optimizer", action="store_true", help="where weights are whole, the optimizer is in shards")
    parser.add_argument(
        "--sharded", type=int, nargs="+", default=[0, 1], choices=(0, 1), help="with whole, with spread weights"
    )
    options = parser.parse_args()
    titles = ("cluster", "layout", "plan", "quick s", "whole s", "difference", "quick sums", "whole sums", "took s")
    print("| " + " | ".join(titles) + " |\n|---|---|---" + "|---:" * 6 + "|")
    for name in options.clusters:
        cluster = load_cluster(name)
        paper = OnPaper(options.model, cluster)
        for case in cases(options):
            steps, took = [], []
            for whole in (False, True):
                begin = time.process_time()
                steps.append(simulate_step(paper.amounts(case), case, cluster, whole))
                took.append(time.process_time() - begin)
            quick, exact = steps
            sharded = " sharded" if case.shard_parameters else " shard_optimizer" if case.shard_optimizer else ""
            print(
                f"| {name} | {size_text(case.sizes)}{sharded}, {case.microbatches} micro-batches | {case.plan} "
                f"| {quick.seconds:.3f} | {exact.seconds:.3f} | {quick.seconds / exact.seconds - 1:+.2%} "
                f"| {quick.sums / exact.seconds:.2%} | {exact.sums / exact.seconds:.2%} "
                f"| {took[0]:.1f}, {took[1]:.1f} |",
                flush=True,
            )


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yields every layout with every plan."""
    layouts = [Sizes(dp=8), Sizes(tp=2, dp=4), Sizes(pp=2, dp=4), Sizes(tp=2, pp=2, dp=2)]
    for sizes in layouts:
        for microbatches in options.microbatches:
            for plan in options.plans:
                for sharded in options.sharded:
                    yield Case(
                        sizes,
                        1,
                        options.sequence_length,
                        microbatches,
                        plan,
                        schedule="folded_1f1b" if sizes.pp > 1 else "auto",
                        shard_optimizer=options.optimizer and not sharded,
                        shard_parameters=bool(sharded),
                    )


if __name__ == "__main__":
    main()
