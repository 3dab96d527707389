"""Two hosts that share the experts of a mixture of experts: what each plan makes of the way there and back.

Builds two hosts joined by a slow link (see shaped_link.py; needs root), one rank in each, with sequences of its own and
half of the experts of a Phi-MoE (`ep_size=2`): tokens cross the link to their experts and back. With `--capacity`,
experts take no more than so many tokens, in parts of the mean, and shapes do not depend on the router. The operators
are measured on the link and plans are made with those times. The alternative is data parallelism alone (`dp`), where
every host holds all experts and only sums of gradients cross the link. All times come from one run, in turn; medians,
the slower rank counts. A step is forward, backward and gradient sums of a window, without the optimizer.

    sudo python benchmarks/expert_parallel.py --rates 200 300 400
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import shaped_link

from hf_helix.config import RULES

PLANS = tuple(rule for rule in RULES if rule != "intra_batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[300], help="Mbit/s each way between the hosts")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=800)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--capacity", type=float, help="expert_capacity_factor; without it no token is dropped")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        shaped_link.run_ranks("network namespaces", 2, shaped_link.start_rank, 3600, shaped_link.hosts())
    else:
        work(options)


def work(options: argparse.Namespace) -> None:
    """One rank: every rate, every plan."""
    import torch
    import torch.distributed as dist
    from transformers import PhimoeConfig

    from hf_helix.config import HelixConfig
    from hf_helix.engine.synthetic import Workload

    shaped_link.join(options.rank)
    config = PhimoeConfig(
        vocab_size=2048,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=options.experts,
        max_position_embeddings=options.length,
        pad_token_id=0,
    )
    device = torch.device("cpu")
    capacity = options.capacity
    shared = Workload(config, HelixConfig(ep_size=2, expert_capacity_factor=capacity, inter_node_axes=("ep",)), device)
    whole = Workload(config, HelixConfig(expert_capacity_factor=capacity), device)
    results = []
    for rate in options.rates:
        shaped_link.shape(options.rank, rate)
        dist.barrier()
        results.append({"rate": rate, **measure(shared, whole, options, rate)})
        if options.rank == 0:
            print("\n" + describe(results[-1], options), flush=True)
            if options.json:
                about = {**shaped_link.versions(), "flags": shlex.join(sys.argv[1:-2])}  # without --rank
                options.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    dist.destroy_process_group()


def measure(shared: Any, whole: Any, options: argparse.Namespace, rate: int) -> dict[str, Any]:
    """Measure the operators, make the plans, time everything in turn."""
    from hf_helix.measure.operators import measure_profile
    from hf_helix.measure.overlap import measure_overlap
    from hf_helix.tuning.candidates import plan_runners, predict_window

    window = shared.window(options.microbatches, 1, options.length)
    profile = measure_profile(shared.runner, window, {"link": f"{rate} Mbit/s"})
    runners = plan_runners(shared.runner, list(PLANS), profile, options.microbatches)
    predicted = {rule: predict_window(runner, profile, len(window)) for rule, runner in runners.items()}
    overlaps = measure_overlap({**runners, "dp": whole.runner}, window, options.repeats)
    return {"plans": {name: dataclasses.asdict(overlap) for name, overlap in overlaps.items()}, "predicted": predicted}


def describe(result: dict[str, Any], options: argparse.Namespace) -> str:
    """The table of a rate."""
    plans, predicted = result["plans"], result["predicted"]
    base = plans["sequential"]
    compute, moved = base["computation"], base["communication"]
    bound = max(compute, base["busiest"])
    rows = options.microbatches * options.length
    lines = [
        f"{result['rate']} Mbit/s: computation {compute:.2f} s, communication {moved:.2f} s, bound {bound:.2f} s",
        f"  {'':<14} {'step s':>8} {'predicted':>9} {'speed-up':>9} {'of bound':>9} {'hidden':>7} "
        f"{'overlapped':>11} {'tokens/s':>9}",
    ]
    for name, plan in plans.items():
        step = plan["step"]
        line = f"  {name:<14} {step:8.2f}"
        if name == "dp":
            line += f" {'':>9} {base['step'] / step:8.2f}x {'':>9} {'':>7} {'':>11}"
        else:
            hidden = 1 - (step - compute) / moved
            line += f" {predicted[name]:9.2f} {base['step'] / step:8.2f}x {bound / step:9.2f} {hidden:7.0%}"
            line += f" {plan['overlapped_fraction']:11.0%}"
        lines.append(f"{line} {2 * rows / step:9.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
