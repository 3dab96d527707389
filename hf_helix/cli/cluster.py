"""hf-helix cluster: measure the computation and the links of this machine, and write a cluster file.

In:   the processes of a launcher, or their number to be started here.
Out:  a YAML file, for estimates.
Must hold: the text is parsed before the file is written, so that the file can be used.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hf_helix.cli.options import Command, config_option, join, option, start
from hf_helix.measure.progress import progress_bar
from hf_helix.planning.timing.cluster import cluster_file, load_cluster, parse_cluster, shipped_clusters

HEADER = """\
# What one device computes and what links carry, measured by `hf-helix cluster`; see `sources` below.
"""

CPU_PROCESSES = 2


@dataclass(kw_only=True)
class ClusterCommand(Command):
    """Measure the computation and the links of this machine, for estimates.

    examples:
      hf-helix cluster --output here.yaml                        all GPUs of this host, or two processes on its CPU
      hf-helix cluster --output here.yaml --processes 4
      hf-helix cluster --list                                    the files of known machines
      hf-helix cluster --show h100x8                             one of them, to copy and change
      hf-helix cluster --output slow.yaml --link 300mbit         as if processes were joined by a slow link (CPU)

    It takes less than two minutes, in which nothing else should run: products, attention and memory by size, the cost
    of calls, collectives by size, and how computation and communication slow each other down. On several hosts, start
    it with torchrun on each:
      torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 --rdzv-backend c10d \\
          -m hf_helix cluster --output here.yaml
    """

    output: Path = option(Path("cluster.yaml"), "where the file is written")
    processes: int | None = option(
        None, "how many to start here; left out, one a GPU, or two on a CPU; not with torchrun"
    )
    list: bool = option(False, "list the files that hf_helix brings")
    show: str | None = option(None, "print a file that hf_helix brings, such as h100x8")
    link: str | None = config_option("link")

    def check_values(self) -> None:
        if not self.list and self.show is None:  # nothing is written then
            super().check_values()

    def run(self) -> None:
        """Measure, in processes started by a launcher, or here by torchrun."""
        if self.list:
            print("\n".join(f"{name:<15}{load_cluster(name).name}" for name in shipped_clusters()))
        elif self.show is not None:
            print(cluster_file(self.show).read_text(), end="")
        elif "WORLD_SIZE" not in os.environ:
            self._launch()
        elif self.processes is not None:
            raise ValueError("--processes starts processes, and a launcher has started them already; leave it out")
        else:
            self._measure()

    def _launch(self) -> None:
        import torch

        count = self.processes or torch.cuda.device_count() or CPU_PROCESSES
        start(replace(self, processes=None).words(), count)

    def _measure(self) -> None:
        """The measurement, in each of the processes."""
        import torch.distributed as dist

        from hf_helix.measure.cluster_file import measure_cluster

        device = join()
        with progress_bar(dist.get_rank() == 0) as progress:
            data = measure_cluster(device, self.link, progress)
        if dist.get_rank() == 0:
            text = written(data)
            parse_cluster(yaml.safe_load(text), str(self.output))
            self.output.write_text(text)
            print(f"{data['name']}: {self.output}")
        dist.barrier()  # no rank ends before the file is written
        dist.destroy_process_group()


def written(data: dict[str, Any]) -> str:
    """Returns the text of a cluster file."""
    return HEADER + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)
