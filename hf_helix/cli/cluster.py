"""hf-helix cluster: measure what this machine computes and sends, and write it as a cluster file.

In:   the processes that a launcher started, or how many to start here.
Out:  a YAML file that estimates are made from.
Must hold: the file is read back before it is written, so that what is written can be used.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hf_helix.cli.options import add_parser
from hf_helix.cli.processes import join, start

if TYPE_CHECKING:
    from hf_helix.cli.options import Commands

EXAMPLES = """\
examples:
  hf-helix cluster --output here.yaml                        all GPUs of this host, or two processes on its CPU
  hf-helix cluster --output here.yaml --processes 4
  hf-helix cluster --show h100x8                             the file of a machine that hf_helix brings
  hf-helix cluster --output slow.yaml --link 300mbit         as if processes were joined by a slow link (CPU)

It takes less than two minutes, in which nothing else should run: products, attention and memory by size, what calls
cost, collectives by size, and what computation and communication cost each other. On several hosts, start it with
torchrun on each:
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 --rdzv-backend c10d \\
      -m hf_helix cluster --output here.yaml
"""

HEADER = """\
# What one device computes and what links carry, measured by `hf-helix cluster`; see `sources` below.
"""

CPU_PROCESSES = 2


def add_command(commands: Commands) -> None:
    """Declare the command and its options."""
    summary = "measure what this machine computes and sends, for estimates"
    parser = add_parser(commands, "cluster", run, summary, EXAMPLES)
    parser.add_argument("--output", type=Path, default=Path("cluster.yaml"), help="where the file is written")
    count = "processes to start here; left out, one for each GPU, or two on a CPU. With torchrun, leave it out"
    parser.add_argument("--processes", type=int, help=count)
    show = "print a file that hf_helix brings, to copy and change; without a name, list them"
    parser.add_argument("--show", metavar="NAME", nargs="?", const="", help=show)
    link = "emulate a link of this speed between processes on a CPU, such as 300mbit or 10gbit,50us"
    parser.add_argument("--link", help=link)


def run(options: argparse.Namespace) -> None:
    """Measure, in processes started by a launcher, or here by torchrun."""
    if options.show is not None:
        from hf_helix.simulation.cluster import cluster_file, shipped_clusters

        print(cluster_file(options.show).read_text() if options.show else "\n".join(shipped_clusters()))
    elif "WORLD_SIZE" not in os.environ:
        _launch(options)
    elif options.processes is not None:
        raise ValueError("--processes starts processes, and a launcher has started them already; leave it out")
    else:
        _measure(options)


def _launch(options: argparse.Namespace) -> None:
    import torch

    count = options.processes or torch.cuda.device_count() or CPU_PROCESSES
    if count < 1:
        raise ValueError(f"--processes {count}: at least one must run, such as --processes 2")
    words = [f"--output={options.output}", *([f"--link={options.link}"] if options.link else [])]
    start(["cluster", *words], count)


def _measure(options: argparse.Namespace) -> None:
    """One process of the measurement."""
    import torch.distributed as dist

    from hf_helix.measure.cluster_file import measure_cluster
    from hf_helix.measure.progress import progress_bar
    from hf_helix.simulation.cluster import parse_cluster

    device = join()
    with progress_bar(dist.get_rank() == 0) as progress:
        data = measure_cluster(device, options.link, progress)
    if dist.get_rank() == 0:
        text = written(data)
        parse_cluster(yaml.safe_load(text), str(options.output))
        options.output.write_text(text)
        print(f"{data['name']}: {options.output}")
    dist.barrier()  # no rank ends before the file is written
    dist.destroy_process_group()


def written(data: dict[str, Any]) -> str:
    """Returns the text of a cluster file."""
    return HEADER + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)
