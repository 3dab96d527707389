"""How much of the possible each plan reaches, on an emulated link: no root, no TCP that takes the cores.

Cuts a Llama over two ranks (`tp_size=2`), joined by a link that is emulated (docs/emulated_link.md): a transfer really
takes place, and then waits, asleep, until a link of that speed would have carried it. The operators are measured on it
and plans are made with these times, as `plan="auto"` does. Then windows under every plan, computation alone and
communication alone are timed in one run, in turn; medians, the slower rank counts. The bound is the larger of the two
alone, and `of bound` is the part of it that a plan reaches: what scheduling is worth, apart from what TCP costs the
cores. A step is forward, backward and gradient sums of a window, without the optimizer. With `--dp_size 2`, two such
pairs train on micro-batches of their own, and sum their gradients over their links; on two cores, each has two ranks.
With `--tp_size 1 --dp_size 2`, two ranks have copies of the model, whole or sharded (`--shard`). Stock DDP and FSDP
cannot be timed on this link, since only collectives of hf_helix wait for it; see `sharded_parameters.py` for these.

    python benchmarks/emulated_link.py --links even 150mbit --microbatches 16
    python benchmarks/emulated_link.py --links even --microbatches 8 --dp_size 2
    python benchmarks/emulated_link.py --links 500mbit --tp_size 1 --dp_size 2 --shard parameters
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import shaped_link

from hf_helix.config import RULES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=["even"], help="as of HelixConfig(link=...)")
    parser.add_argument("--plans", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--tp_size", type=int, default=2, help="ranks that share every layer")
    parser.add_argument("--dp_size", type=int, default=1, help="copies of these ranks")
    shards = "what copies spread over each other, as shard_optimizer or shard_parameters do"
    parser.add_argument("--shard", choices=("optimizer", "parameters"), help=shards)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--markdown", type=Path, help="also write the tables there, with hardware and versions")
    parser.add_argument("--profile", help="also save profiles, such as link-{link}.json")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        shaped_link.launch_here(options.tp_size * options.dp_size)
    options.rank = int(os.environ["RANK"])
    work(options)


def work(options: argparse.Namespace) -> None:
    """One rank: every link in turn."""
    import torch.distributed as dist

    shaped_link.join(options.rank)
    results = []
    for link in options.links:
        results.append(measure(link, options))
        if options.rank == 0:
            print("\n" + describe(results[-1]), flush=True)
            shaped_link.save(options, results, "An emulated link", __doc__ or "", describe, sys.argv[1:])
    dist.destroy_process_group()


def measure(link: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the operators on a link, make the plans, time everything in turn."""
    import torch

    from hf_helix.config import HelixConfig
    from hf_helix.engine.synthetic import Workload
    from hf_helix.measure.operators import measure_profile
    from hf_helix.planning.profile_file import save_profile
    from hf_helix.tuning.candidates import compare, predict_window
    from hf_helix.tuning.even_link import even_out

    shards = {f"shard_{options.shard}": True} if options.shard else {}
    config = HelixConfig(tp_size=options.tp_size, link=link, **shards)
    made = Workload(shaped_link.llama(options), config, torch.device("cpu"))
    window = made.window(options.microbatches, options.batch, options.sequence)
    assert made.mesh.link is not None
    if made.mesh.link.rate is None:
        even_out(made.runner, window[:4])
    profile = measure_profile(made.runner, window[:4], made.about)
    if options.profile and options.rank == 0:
        save_profile(profile, options.profile.format(link=link))
    comparison = compare(made.runner, window, options.plans, profile, options.repeats)
    predicted = {
        rule: predict_window(made.runner.with_plan(plan), profile, options.microbatches)
        for rule, plan in comparison.plans.items()
    }
    rows = {
        rule: {
            "step": overlap.step,
            "predicted": predicted[rule],
            "of_bound": overlap.bound / overlap.step,
            "hidden": overlap.hidden_fraction,
            "overlapped": overlap.overlapped_fraction,
            "bare": comparison.bare[rule],
        }
        for rule, overlap in comparison.overlaps.items()
    }
    one = comparison.overlaps["sequential"]
    return {
        "link": str(made.mesh.link),
        "microbatches": options.microbatches,
        "computation": one.computation,
        "communication": one.communication,
        "bound": one.bound,
        "plans": {rule: rows[rule] for rule in RULES if rule in rows},
    }


def describe(result: dict[str, Any]) -> str:
    """The table of a link."""
    plans = result["plans"]
    base = plans["sequential"]
    lines = [
        f"emulated link of {result['link']}, M={result['microbatches']}: computation {result['computation']:.2f} s, "
        f"communication {result['communication']:.2f} s, bound {result['bound']:.2f} s",
        f"  {'':<12} {'step s':>8} {'predicted':>10} {'gain':>7} {'of bound':>9} {'hidden':>7} {'overlapped':>11} "
        f"{'no link s':>10} {'gain':>7}",
    ]
    for rule, row in plans.items():
        lines.append(
            f"  {rule:<12} {row['step']:8.3f} {row['predicted']:10.3f} {base['step'] / row['step']:6.2f}x "
            f"{row['of_bound']:9.2f} {row['hidden']:7.0%} {row['overlapped']:11.0%} {row['bare']:10.3f} "
            f"{base['bare'] / row['bare']:6.2f}x"
        )
    lines.append("`no link`: the same windows without the emulated link, whose transfers then take the cores at once.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
