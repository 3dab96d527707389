"""hf-helix profile: measure every operator, and operators beside each other.

In:   a model's configuration, sizes of the mesh and of a micro-batch.
Out:  a profile, as JSON; a Perfetto trace if asked for.
Must hold: it starts as many processes as the mesh needs, unless a launcher did.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_helix.cli.files import configuration_file
from hf_helix.cli.options import SIZES, add_parser
from hf_helix.cli.processes import join, start
from hf_helix.config import AUTO, AXES, RECOMPUTE
from hf_helix.planning.profile_file import save_profile

if TYPE_CHECKING:
    from hf_helix.cli.options import Commands
    from hf_helix.planning.profile import Profile


EXAMPLES = """\
examples:
  hf-helix profile --model Qwen/Qwen3-0.6B --tp_size 2 --sequence_length 256
  hf-helix profile --model path/to/folder --pp_size 2 --tp_size 1 --output pipeline.json --trace trace.json

Weights and tokens are random: of the model only the configuration is read. The profile is for the model, the
layout, the machine and the shapes that it was measured with. On several hosts, start it with torchrun:
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --rdzv-backend c10d \\
      -m hf_helix profile --model Qwen/Qwen3-0.6B --tp_size 2
"""

OF_CONFIG = (
    *("tp_size", "pp_size", "cp_size", "ep_size", "expert_capacity_factor", "inter_node_axes", "schedule", "recompute"),
)
"""The options that are those of `HelixConfig`."""

HANDED_ON = (
    *("model", "tp_size", "pp_size", "cp_size", "ep_size", "expert_capacity_factor", "schedule", "recompute"),
    *("batch_size", "sequence_length", "microbatches", "output", "trace"),
)
"""The options that the processes of the measurement are started with."""


def add_command(commands: Commands) -> None:
    """Declare the command and its options."""
    summary = "measure every operator of a model on this machine, alone and beside others"
    parser = add_parser(commands, "profile", run, summary, EXAMPLES)
    model = "a folder with a config.json, such a file, or a name on the Hugging Face Hub"
    parser.add_argument("--model", required=True, help=model)
    for name, meaning in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=2 if name == "tp_size" else 1, help=meaning)
    capacity = "the most tokens an expert takes, in parts of an even share, such as 1.25; left out, none is dropped"
    parser.add_argument("--expert_capacity_factor", type=float, help=capacity)
    hosts = "axes whose ranks are on different hosts; left out, the names of the hosts decide"
    parser.add_argument("--inter_node_axes", nargs="+", choices=AXES, help=hosts)
    order = (
        "the order of micro-batches in a pipeline: auto, folded_1f1b, dualpipe_v, 1f1b, or the path of an action file"
    )
    parser.add_argument("--schedule", default=AUTO, help=order)
    parser.add_argument("--batch_size", type=int, default=1, help="sequences in a micro-batch")
    parser.add_argument("--sequence_length", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--microbatches", type=int, default=4, help="micro-batches in the window that is timed")
    parser.add_argument("--bf16", action="store_true", help="matrix products in bf16, as TrainingArguments(bf16=True)")
    parser.add_argument(
        "--recompute", choices=RECOMPUTE, default="none", help="what backward computes again (activation checkpointing)"
    )
    parser.add_argument("--output", type=Path, default=Path("profile.json"), help="where the profile is written")
    parser.add_argument("--trace", type=Path, help="also write a Perfetto trace of a window, under the plan `greedy`")


def run(options: argparse.Namespace) -> None:
    """Measure, in as many processes as the mesh needs: started by a launcher, or here by torchrun."""
    from hf_helix.planning.pipeline.scheduler import Scheduler

    Scheduler(options.schedule, options.pp_size)  # refused once, not by every process
    options.model = configuration_file(options.model)
    if "WORLD_SIZE" in os.environ:
        _measure(options)
    else:
        _launch(options)


def _launch(options: argparse.Namespace) -> None:
    words = [f"--{name}={getattr(options, name)}" for name in HANDED_ON if getattr(options, name) is not None]
    if options.bf16:
        words.append("--bf16")
    if options.inter_node_axes:
        words += ["--inter_node_axes", *options.inter_node_axes]
    processes = options.tp_size * options.pp_size * options.cp_size * options.ep_size
    start(["profile", *words], processes)


def _measure(options: argparse.Namespace) -> None:
    """One process of the measurement."""
    import torch
    import torch.distributed as dist

    from hf_helix.config import HelixConfig
    from hf_helix.engine.synthetic import Workload
    from hf_helix.measure.operators import measure_profile
    from hf_helix.measure.progress import progress_bar

    device = join(options.pp_size)
    config = HelixConfig(**{name: getattr(options, name) for name in OF_CONFIG})
    work = Workload(options.model, config, device, autocast_dtype=torch.bfloat16 if options.bf16 else None)
    window = work.window(options.microbatches, options.batch_size, options.sequence_length)
    about = {**work.about, "shapes": ", ".join(batch.shape for batch in window)}
    with progress_bar(dist.get_rank() == 0) as progress:
        profile = measure_profile(
            work.runner, window, about, progress=lambda share: progress("measuring operators", share)
        )
    if dist.get_rank() == 0:
        save_profile(profile, options.output)
        print(f"{len(profile.times)} operators and {len(profile.pairs)} pairs: {options.output}")
    if options.trace:
        _write_trace(options.trace, work, window, profile)
    dist.destroy_process_group()


def _write_trace(path: Path, work: Any, window: Any, profile: Profile) -> None:
    from hf_helix.measure.overlap import trace_window
    from hf_helix.report.perfetto import write_perfetto
    from hf_helix.runtime.distributed.agreement import all_gather_object
    from hf_helix.runtime.distributed.mesh import rank
    from hf_helix.tuning.candidates import plan_runners

    runner = plan_runners(work.runner, ["greedy"], profile, len(window))["greedy"]
    trace_window(runner, window)  # warms up
    spans = all_gather_object(trace_window(runner, window).spans)
    if rank() == 0:
        write_perfetto(path, spans)
        print(f"a trace for https://ui.perfetto.dev: {path}")
