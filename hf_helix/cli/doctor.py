"""hf-helix doctor: which layout trains a model fastest on a cluster, and does it fit?

In:   a model's configuration, a cluster file, the tokens of a step.
Out:  the best layouts beside plain data parallelism, why the best is as fast as it is, and the YAML that launches it.
Must hold: nothing is measured; what cannot be cut or does not fit is never proposed, and its reason can be asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hf_helix.cli.options import add_parser
from hf_helix.cli.simulate import (
    NETWORK,
    add_model_and_cluster,
    check_count,
    check_experts,
    cluster_of,
    paper_of,
    scaled,
)
from hf_helix.config import AUTO
from hf_helix.link_speed import format_rate
from hf_helix.planning.collection import without_collection

if TYPE_CHECKING:
    from hf_helix.cli.options import Commands
    from hf_helix.engine.on_paper import OnPaper
    from hf_helix.simulation.cluster import Cluster
    from hf_helix.simulation.step.step import Step

EXAMPLES = """\
examples:
  hf-helix doctor --model Qwen/Qwen3-8B --cluster h100x8 --batch_tokens 4M
  hf-helix doctor --model path/to/folder --cluster a40x64 --batch_tokens 4M --top 5 --write helix.yaml
  hf-helix doctor --model path/to/folder --cluster a40x64 --batch_tokens 4M --why
  hf-helix doctor --model path/to/folder --cluster l40sx8 --batch_tokens 512k --lora_r 16

HelixTrainer reads what the doctor found last for a model and a number of devices, and says at the first step of a run
on such devices, with sequences and steps about as long, if another layout is clearly faster; what is found with
--network, --imbalance or --expert_capacity_factor is not kept. A prediction is as exact as the rates in the cluster's
file: `hf-helix cluster` measures those of the machine it is started on. Layouts that differ by less than a few percent
are best told apart by training a few steps with each.
"""

UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


def add_command(commands: Commands) -> None:
    """Declare the command and its options."""
    summary = "find the fastest layout of a model on a cluster that fits"
    parser = add_parser(commands, "doctor", run, summary, EXAMPLES)
    add_model_and_cluster(parser)
    parser.add_argument("--batch_tokens", default="4M", help="tokens of an optimizer step, such as 512k or 4M")
    parser.add_argument("--top", type=int, default=5, help="how many layouts are shown")
    parser.add_argument("--gpus", type=int, help="as many devices, in nodes like those of the cluster")
    parser.add_argument("--network", help=NETWORK)
    parser.add_argument("--schedule", default=AUTO, help="the order of micro-batches in a pipeline, as in HelixConfig")
    parser.add_argument("--why", action="store_true", help="also say why each other layout was dropped")
    parser.add_argument("--write", type=Path, help="write the YAML that launches the best layout")


@without_collection
def run(options: argparse.Namespace) -> None:
    """Prints the best layouts."""
    from hf_helix.engine.advice import remember
    from hf_helix.measure.progress import progress_bar
    from hf_helix.models.peft import base_of
    from hf_helix.models.registry import family_of
    from hf_helix.report.step import dropped_lines, ranking_lines
    from hf_helix.simulation.layouts import Search
    from hf_helix.simulation.processes import usable_cores
    from hf_helix.simulation.sizes import size_text

    tokens = parse_count(options.batch_tokens)
    for name in ("top", "sequence_length"):
        check_count(name, getattr(options, name))
    check_experts(options)
    cluster = scaled(cluster_of(options), options.network, options.gpus)
    paper = paper_of(options, cluster)
    with progress_bar() as progress:
        ranking = Search(
            paper.amounts,
            cluster,
            tokens,
            options.sequence_length,
            layers=paper.layers,
            experts=paper.experts,
            schedule=options.schedule,
            dtype=options.dtype,
            imbalance=options.imbalance,
            expert_capacity_factor=options.expert_capacity_factor,
            progress=lambda share: progress("simulating layouts", share),
            workers=usable_cores(),
            leading=options.top,
        ).run()
    if not ranking.steps:
        family_of(base_of(paper.model)).digest(base_of(paper.model))  # raises where no layout at all can be made
        reasons = "\n".join(dropped_lines(ranking.dropped))
        raise ValueError(
            f"no layout of {options.model} fits {cluster.name}; more devices (--gpus), shorter sequences "
            f"(--sequence_length) or more tokens in a step (--batch_tokens) may; {reasons.lstrip()}"
        )
    best = ranking.steps[0]
    assumes_rows = options.imbalance > 1 or options.expert_capacity_factor is not None
    if options.network is None and not assumes_rows:  # a run is told nothing that was only supposed
        remember(base_of(paper.model), ranking, cluster, tokens)
    trained = f", LoRA adapters of rank {options.lora_r}" if options.lora_r else ""
    print(f"{paper.name}{trained} on {cluster.name}, {cluster.devices} devices, {tokens:,} tokens a step asked for")
    if cluster.nodes > 1:
        rate, sharing = format_rate(8 * cluster.network.bandwidth), cluster.network.devices
        print(f"Links between nodes of {rate}, each for {sharing} devices; --network 10gbit asks about another one")
    print()
    print("\n".join(ranking_lines(ranking, cluster, options.top)))
    if paper.experts > 1 and not assumes_rows:
        print("Experts get equal rows here; --imbalance 1.3 leaves time and memory for 1.3 times the mean.")
    _print_best(best, paper, cluster)
    if options.why:
        print("\nDropped:")
        print("\n".join(dropped_lines(ranking.dropped)))
    if not options.write:
        print("\n--write helix.yaml writes the file that launches it.")
    else:
        options.write.write_text(launch_file(best, cluster))
        print(f"\n{size_text(best.case.sizes)}: accelerate launch --config_file {options.write} YOUR_SCRIPT.py")


def _print_best(best: Step, paper: OnPaper, cluster: Cluster) -> None:
    """Prints the parts of the best step, and what one strand, or spreading the optimizer, would change."""
    from dataclasses import replace

    from hf_helix.report.step import shards_line, step_lines
    from hf_helix.simulation.layouts import ONE_STRAND
    from hf_helix.simulation.step.step import simulate_step

    print("\nThe best:")
    print("\n".join(step_lines(best, cluster)))
    if best.case.plan != ONE_STRAND:
        single = replace(best.case, plan=ONE_STRAND)
        alone = simulate_step(paper.amounts(single), single, cluster, whole=best.is_whole, drawable=False)
        print(
            f"  one strand    {alone.seconds:10.3f} s     two strands are {alone.seconds / best.seconds:.2f}x as fast"
        )
    if best.case.sizes.spread() and not (best.case.shard_optimizer or best.case.shard_parameters):
        shared = replace(best.case, shard_optimizer=True)
        print(shards_line(best, simulate_step(paper.amounts(shared), shared, cluster, best.is_whole, drawable=False)))


def parse_count(text: str) -> int:
    """Returns the number that a text such as 512k or 4M stands for.

    Raises:
        ValueError: it is none.
    """
    unit = text[-1:] if text[-1:] in UNITS else ""
    try:
        count = int(float(text.removesuffix(unit)) * UNITS[unit])
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ValueError(f"--batch_tokens {text}: give a number of tokens, such as 512k or 4M")
    return count


def launch_file(step: Step, cluster: Cluster) -> str:
    """Returns the text of the configuration that `accelerate launch` starts a layout with."""
    from hf_helix.planning.plans.registry import runs_one_strand

    case = step.case
    on_gpu = cluster.backend == "nccl"
    helix = {"tp_size": case.sizes.tp, "pp_size": case.sizes.pp, "cp_size": case.sizes.cp, "ep_size": case.sizes.ep}
    lines = [f"    {name}: {size}" for name, size in helix.items() if size > 1] or ["    tp_size: 1"]
    lines += [f"    plan: {case.plan}"] if runs_one_strand(case.plan) else []
    lines += [f"    schedule: {case.schedule}"] if case.sizes.pp > 1 and case.schedule != AUTO else []
    lines += [f"    recompute: {case.recompute}"] if case.recompute != "none" else []
    capacity = case.expert_capacity_factor
    lines += [f"    expert_capacity_factor: {capacity}"] if capacity is not None else []
    lines += ["    shard_optimizer: true"] if case.shard_optimizer else []
    lines += ["    shard_parameters: true"] if case.shard_parameters else []
    machine = "accelerate launch --config_file FILE --machine_rank RANK --main_process_ip HOST YOUR_SCRIPT.py"
    return "\n".join(
        [
            f"# Proposed by hf-helix doctor for {cluster.name}: {step.tokens_per_second:,.0f} tokens/s predicted.",
            f"# With per_device_train_batch_size={case.batch}, gradient_accumulation_steps={case.microbatches}, and",
            f"# sequences of {case.length} tokens."
            + (f" On every machine, with its own RANK:\n#   {machine}" if cluster.nodes > 1 else ""),
            "compute_environment: LOCAL_MACHINE",
            f"distributed_type: {'MULTI_GPU' if cluster.devices > 1 else repr('NO')}",
            f"use_cpu: {str(not on_gpu).lower()}",
            f"num_machines: {cluster.nodes}",
            f"num_processes: {cluster.devices}",
            "machine_rank: 0",
            "main_training_function: main",
            f"mixed_precision: {case.dtype if case.dtype == 'bf16' else repr('no')}",
            "parallelism_config:",
            "  helix:",
            *lines,
            "",
        ]
    )
