"""hf-helix simulate: what a layout would do on a cluster, without the cluster.

In:   a model's configuration, a cluster file, the sizes of the mesh and of a micro-batch.
Out:  seconds of a step and of its parts, tokens a second, TFLOP/s, MFU, memory by part; a picture if asked for.
Must hold: nothing is measured, and no process is started.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import inf, isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_helix.cli.files import configuration_file
from hf_helix.cli.options import SIZES, add_parser
from hf_helix.config import AUTO, RECOMPUTE, RULES, HelixConfig
from hf_helix.link_speed import LinkSpeed, parse_link
from hf_helix.planning.collection import without_collection

if TYPE_CHECKING:
    from hf_helix.cli.options import Commands
    from hf_helix.engine.on_paper import OnPaper
    from hf_helix.simulation.cluster import Cluster
    from hf_helix.simulation.step.step import Case

ALL = "all"
NETWORK = (
    "the links between nodes, faster or slower, such as x2 or x0.5, or one of a node, such as 10gbit or 10gbit,50us"
)

EXAMPLES = """\
examples:
  hf-helix simulate --model Qwen/Qwen3-8B --cluster h100x8 --tp_size 8 --sequence_length 8192
  hf-helix simulate --model path/to/folder --cluster a40x64 --tp_size 8 --pp_size 2 --microbatches 64 --plan all
  hf-helix simulate --model path/to/folder --cluster h100x16384 --tp_size 8 --pp_size 16 --network x2

The rates of a cluster stand in a file; those that hf_helix brings go by their names, and `hf-helix cluster` measures
the machine it is started on. What operators compute, move and keep is counted by running them on torch's meta device.
"""


def add_command(commands: Commands) -> None:
    """Declare the command and its options."""
    summary = "predict a step of a layout on a cluster: time, throughput, memory"
    parser = add_parser(commands, "simulate", run, summary, EXAMPLES)
    add_model_and_cluster(parser)
    for name, meaning in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=1, help=meaning)
    parser.add_argument("--batch_size", type=int, default=1, help="sequences in a micro-batch")
    parser.add_argument(
        "--microbatches", type=int, default=16, help="micro-batches of a step, on each data-parallel rank"
    )
    rules = "the rule that makes the plan, or all of them beside each other"
    parser.add_argument("--plan", choices=(ALL, *RULES), default="greedy", help=rules)
    parser.add_argument("--schedule", default=AUTO, help="the order of micro-batches in a pipeline, as in HelixConfig")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none", help="what backward computes again")
    parser.add_argument("--shard_optimizer", action="store_true", help="spread the optimizer's states (ZeRO-1)")
    spread = "spread parameters, gradients and the optimizer's states over data-parallel ranks (ZeRO-3)"
    parser.add_argument("--shard_parameters", action="store_true", help=spread)
    parser.add_argument("--network", help=NETWORK)
    parser.add_argument("--gpus", type=int, help="as many devices, in nodes like those of the cluster")
    parser.add_argument("--output", type=Path, help="a picture of a window: .svg, .png or .pdf")


def add_model_and_cluster(parser: argparse.ArgumentParser) -> None:
    """Declare what both `simulate` and `doctor` need."""
    model = "a folder with a config.json, such a file, or a name on the Hugging Face Hub"
    parser.add_argument("--model", required=True, help=model)
    cluster = "a YAML file, or the name of a cluster that hf_helix brings"
    parser.add_argument("--cluster", required=True, help=cluster)
    parser.add_argument("--sequence_length", type=int, default=4096, help="tokens in a sequence")
    rows = "rows of the busiest rank's experts in parts of the mean, such as 1.3; 1 spreads them evenly"
    parser.add_argument("--imbalance", type=float, default=1.0, help=rows)
    most = "the most tokens an expert takes, in parts of an even share, as in HelixConfig; left out, none is dropped"
    parser.add_argument("--expert_capacity_factor", type=float, help=most)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="the type of matrix products")
    adapters = "the rank of LoRA adapters, which are trained instead of the model, itself loaded in --dtype; 0 for none"
    parser.add_argument("--lora_r", type=int, default=0, help=adapters)
    targets = "modules that get adapters, with commas between their names, such as q_proj,v_proj"
    parser.add_argument("--target_modules", default="all-linear", help=targets)


@without_collection
def run(options: argparse.Namespace) -> None:
    """Prints what a step of the layout takes."""
    from hf_helix.report.step import step_lines
    from hf_helix.simulation.step.step import simulate_step

    cluster = scaled(cluster_of(options), options.network, options.gpus)
    case = _case(options, cluster)
    amounts = paper_of(options, cluster).amounts(case)
    rules = RULES if options.plan == ALL else (options.plan,)
    steps = {rule: simulate_step(amounts, replace(case, plan=rule), cluster, whole=True) for rule in rules}
    shown = steps[min(steps, key=lambda rule: steps[rule].seconds)]
    print("\n".join(step_lines(shown, cluster)))
    if len(steps) > 1:
        print(f"\n{'plan':<14}{'step':>12}{'tokens/s':>14}{'speed-up':>10}")
        for rule, step in steps.items():
            gain = steps["sequential"].seconds / step.seconds
            print(f"{rule:<14}{step.seconds:>10.3f} s{step.tokens_per_second:>14,.0f}{gain:>9.2f}x")
    if options.output:
        _draw(options.output, shown)


def paper_of(options: argparse.Namespace, cluster: Cluster) -> OnPaper:
    """Returns the model that is asked for, with adapters if these are.

    Raises:
        ValueError: it gets no such adapters, or has no experts for what is said of them.
    """
    import torch

    from hf_helix.engine.on_paper import TYPES, OnPaper
    from hf_helix.engine.synthetic import adapted_on_meta

    path, rank = configuration_file(options.model), options.lora_r
    if rank < 0:
        raise ValueError(f"--lora_r {rank}: give the rank of the adapters, such as 16, or 0 to train the model itself")
    dtype = TYPES[options.dtype] or torch.float32
    paper = OnPaper(adapted_on_meta(path, rank, options.target_modules, dtype) if rank else path, cluster)
    capacity = options.expert_capacity_factor
    if capacity is not None and paper.experts == 1:
        raise ValueError(f"--expert_capacity_factor {capacity:g}: {paper.name} has no experts; leave it out")
    return paper


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Returns the cluster that is asked for."""
    from hf_helix.simulation.cluster import load_cluster

    return load_cluster(options.cluster)


def scaled(cluster: Cluster, network: str | None, devices: int | None) -> Cluster:
    """Returns a cluster with another network, or another number of devices.

    Args:
        cluster: as its file says.
        network: such as "x2" or "10gbit"; None for the same.
        devices: in all; None for the same.

    Raises:
        ValueError: no factor, no network, or devices that fill no whole nodes.
    """
    if devices is not None:
        cluster = _resized(cluster, devices)
    if network is None:
        return cluster
    try:
        speed, factor = None, float(network.removeprefix("x"))
    except ValueError:
        speed, factor = _speed(network), 1.0
    if not 0 < factor < inf:
        raise ValueError(f"--network {network}: give a factor above 0, such as x2 for twice the bandwidth")
    if cluster.nodes == 1:
        raise ValueError(f"--network {network}: one node has no network; leave it out, or ask for more with --gpus")
    link = replace(cluster.network, bandwidth=factor * cluster.network.bandwidth)
    if speed is not None and speed.rate:  # of a link that the devices of a node share
        link = replace(
            link, bandwidth=speed.rate / 8, latency=speed.latency or link.latency, devices=cluster.devices_per_node
        )
    return replace(cluster, network=link, name=f"{cluster.name}, network {speed or f'x{factor:g}'}")


def _speed(network: str) -> LinkSpeed:
    try:
        return parse_link(network)
    except ValueError as error:
        raise ValueError(
            f"--network {network}: give a factor, such as x2, or a node's speed, such as 10gbit"
        ) from error


def _resized(cluster: Cluster, devices: int) -> Cluster:
    check_count("gpus", devices)
    per_node = min(devices, cluster.devices_per_node)
    if devices % per_node:
        raise ValueError(
            f"--gpus {devices}: nodes have {per_node} devices each; give a multiple, such as {2 * per_node}"
        )
    if devices > per_node and isinf(cluster.network.bandwidth):
        raise ValueError(
            f"--gpus {devices}: {cluster.name} has no `network`, which more than {per_node} devices need; add one to "
            "its file, such as network: {gb_per_s: 50, latency_us: 8, devices_per_link: 1}"
        )
    nodes = devices // per_node
    name = f"{nodes} x {per_node} {cluster.device.name}"
    return replace(cluster, nodes=nodes, devices_per_node=per_node, name=name)


def check_count(name: str, count: int) -> None:
    """Raises ValueError, naming the option, where a count is below 1."""
    if count < 1:
        raise ValueError(f"--{name} {count}: give 1 or more")


def check_experts(options: argparse.Namespace) -> None:
    """Raises ValueError where experts would get less than the mean, or where both options say what they get."""
    imbalance, capacity = options.imbalance, options.expert_capacity_factor
    if not 1 <= imbalance < inf:
        raise ValueError(f"--imbalance {imbalance:g}: give 1 or more, such as 1.3 for 1.3 times the mean")
    if capacity is None:
        return
    if not 1 <= capacity < inf:
        raise ValueError(f"--expert_capacity_factor {capacity:g}: give 1 or more, such as 1.25, or leave it out")
    if imbalance > 1:
        raise ValueError(
            f"--imbalance {imbalance:g}: with --expert_capacity_factor every expert gets the same number of rows, "
            "whatever the router chooses; leave out one of them"
        )


def _case(options: argparse.Namespace, cluster: Cluster) -> Case:
    from hf_helix.simulation.sizes import Sizes
    from hf_helix.simulation.step.step import Case

    given = {name: getattr(options, name) for name in SIZES}
    for name in (*SIZES, "batch_size", "microbatches", "sequence_length"):
        check_count(name, getattr(options, name))
    check_experts(options)
    tp, pp, cp, ep = given.values()
    if cluster.devices % (tp * pp * cp):
        raise ValueError(
            f"{cluster.name} has {cluster.devices} devices, which tp_size x pp_size x cp_size = {tp * pp * cp} does "
            f"not divide; choose sizes that do, or another number with --gpus"
        )
    dp = cluster.devices // (tp * pp * cp)
    if dp % ep:
        raise ValueError(f"--ep_size {ep} does not divide the {dp} data-parallel ranks; values that work divide {dp}")
    case: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("microbatches", "schedule", "recompute", "dtype", "imbalance", "expert_capacity_factor")
    }
    sharding = {name: getattr(options, name) for name in ("shard_optimizer", "shard_parameters")}
    HelixConfig(**sharding)  # refuses both at once
    case |= {**sharding, "plan": RULES[0] if options.plan == ALL else options.plan}
    return Case(Sizes(tp, cp, pp, dp, ep), options.batch_size, options.sequence_length, **case)


def _draw(path: Path, step: Any) -> None:
    from hf_helix.report.bars import bars_of_timeline
    from hf_helix.report.timeline import draw_timeline

    if step.drawn is None:
        raise ValueError(f"--output {path}: the window is too long to be drawn; give fewer --microbatches, such as 4")
    programs, timeline = step.drawn
    draw_timeline(bars_of_timeline(timeline, programs), path, f"{step.case.plan}: a window of the first rank")
    print(f"a picture of the window: {path}")
