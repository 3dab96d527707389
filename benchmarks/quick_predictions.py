"""The doctor's predictions of a step with few layers against those with all of them, layout by layout.

`hf-helix doctor` searches layouts with few layers on every stage (`Fidelity.QUICK`), and predicts those that it shows
with all layers (`Fidelity.WHOLE`). Both ask the same clock. No device is needed.

    python -m benchmarks.quick_predictions --model recipes/models/llama-8b --clusters h100x8 l40sx8
"""

import argparse
import time
from collections.abc import Iterator

from hf_helix.doctor.case import Case
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import simulate_step
from hf_helix.doctor.window import Fidelity
from hf_helix.planning.timing.cluster import load_cluster
from hf_helix.planning.timing.sizes import Sizes, size_text


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
    titles = ("cluster", "layout", "plan", "whole s", "quick", "reductions", "whole", "took s")
    print("| " + " | ".join(titles) + " |\n|---|---|---" + "|---:" * 5 + "|")
    for name in options.clusters:
        cluster = load_cluster(name)
        paper = SimulatedModel(options.model, cluster)
        for case in cases(options):
            steps, took = [], []
            amounts = paper.amounts(case)
            for fidelity in (Fidelity.QUICK, Fidelity.WHOLE):
                begin = time.process_time()
                steps.append(simulate_step(amounts, case, cluster, fidelity))
                took.append(time.process_time() - begin)
            quick, whole = steps
            sharded = " sharded" if case.shard_parameters else " shard_optimizer" if case.shard_optimizer else ""
            print(
                f"| {name} | {size_text(case.sizes)}{sharded}, {case.microbatches} micro-batches | {case.plan} "
                f"| {whole.seconds:.3f} | {quick.seconds / whole.seconds - 1:+.2%} "
                f"| {quick.sums / whole.seconds:.2%} | {whole.sums / whole.seconds:.2%} "
                f"| {', '.join(f'{each:.1f}' for each in took)} |",
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
