"""Estimated times of operators against measured ones, on this machine.

Two processes measure the machine as `hf-helix cluster` does (or read a cluster file), then every operator of a small
Llama under several lengths of the sequence and layouts, as `hf-helix profile` does, and estimate them from their
amounts and the cluster. Printed are milliseconds measured, estimated, and how far the estimate is off: of the sum over
a layer and over the ends, and of large operators. Nothing else should run on the machine.

    python -m benchmarks.estimate_error --lengths 256 512 1024 --tp_sizes 1 2
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.common import ROOT, options_of
from benchmarks.ranks import Ranks

RANKS = 2
LARGE = 0.05
"""The share of a layer above which an operator is called large."""


def main() -> None:
    model = str(ROOT / "recipes" / "models" / "llama-5m")
    parser = options_of(__doc__, model=model, lengths=[256, 512, 1024], tp_sizes=[1, 2], repeats=3)
    parser.add_argument("--hidden", type=int, help="another size of hidden states, with the rest in proportion")
    parser.add_argument("--bf16", action="store_true", help="matrix products in bf16")
    parser.add_argument("--cluster", help="a cluster file; left out, the machine is measured")
    parser.add_argument("--output", type=Path, help="where to write what was measured")
    parser.add_argument("--link", help="an emulated link, such as 300mbit")
    parser.add_argument("--all", action="store_true", help="print every operator of a layer")
    Ranks(RANKS, pins=False).run(work, parser.parse_args())


def work(options: argparse.Namespace) -> None:
    """One rank."""
    from hf_helix.measure.cluster_file import measure_cluster
    from hf_helix.planning.timing.cluster import load_cluster, parse_cluster

    if options.cluster:
        cluster = load_cluster(options.cluster)
    else:
        data = measure_cluster(torch.device("cpu"), options.link)
        cluster = parse_cluster(data, "this machine")
        if options.rank == 0 and options.output:
            options.output.write_text(yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120))
    for tp_size in options.tp_sizes:
        for length in options.lengths:
            measured, estimated = compare(options, tp_size, length, cluster)
            if options.rank == 0:
                print(f"\ntp_size={tp_size}, {length} tokens, {'bf16' if options.bf16 else 'fp32'}")
                describe(measured, estimated, options.all)


def compare(options: argparse.Namespace, tp_size: int, length: int, cluster: Any) -> tuple[dict[Any, float], Any]:
    """Seconds of every operator, measured and estimated."""
    from hf_helix.config import HelixConfig
    from hf_helix.doctor.estimate import estimate_profile
    from hf_helix.doctor.simulated import amounts_of
    from hf_helix.engine.synthetic import Workload, model_on_meta
    from hf_helix.measure.operators import measure_profile
    from hf_helix.planning.timing.sizes import Sizes

    config, shape = HelixConfig(tp_size=tp_size, link=options.link), model_config(options)
    dtype = torch.bfloat16 if options.bf16 else None
    workload = Workload(shape, config, torch.device("cpu"), autocast_dtype=dtype)
    window = workload.window(4, 1, length)
    profiles = [measure_profile(workload.runner, window, pairs=False) for _ in range(options.repeats)]
    measured = {name: statistics.median(profile.times[name] for profile in profiles) for name in profiles[0].times}
    amounts = amounts_of(model_on_meta(shape), config, 1, length, dtype, backend="gloo")
    sizes = Sizes(tp=tp_size, dp=RANKS // tp_size)
    profile = estimate_profile(amounts, amounts.layout, sizes, cluster, "bf16" if options.bf16 else "fp32")
    return measured, profile


def model_config(options: argparse.Namespace) -> Any:
    """The configuration of the model, perhaps of another size."""
    from transformers import AutoConfig

    shape = AutoConfig.from_pretrained(options.model)
    if options.hidden:
        factor = options.hidden / shape.hidden_size
        shape.intermediate_size = int(shape.intermediate_size * factor)
        shape.num_attention_heads = max(1, int(shape.num_attention_heads * factor))
        shape.num_key_value_heads = max(1, int(shape.num_key_value_heads * factor))
        shape.hidden_size = options.hidden
    return shape


def describe(measured: Mapping[Any, float], profile: Any, everything: bool) -> None:
    """Prints a layer and the ends."""
    for unit in ("layer", "embedding", "head"):
        names = [name for name in measured if name[0] == unit]
        for communicates in (False, True):
            part = [name for name in names if profile.kind(name).communicates is communicates]
            first, second = (sum(times[name] for name in part) for times in (measured, profile.times))
            if part:
                what = f"{unit}, {'communication' if communicates else 'computation'}"
                print(f"  {what:<28} {first * 1e3:9.3f} {second * 1e3:9.3f} {_off(first, second)}")
        if unit == "layer":
            whole = sum(measured[name] for name in names)
            part = names if everything else [name for name in names if measured[name] > LARGE * whole]
            for name in sorted(part, key=lambda name: -abs(measured[name] - profile.times[name])):
                first, second = measured[name], profile.times[name]
                print(f"    {name[1]:<26} {first * 1e3:9.3f} {second * 1e3:9.3f} {_off(first, second)}")


def _off(measured: float, estimated: float) -> str:
    return f"{estimated / measured - 1:+7.1%}"


if __name__ == "__main__":
    main()
