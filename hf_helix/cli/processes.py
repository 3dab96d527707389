"""Commands that run in several processes: how they are started, and how they join.

In:   the words of a command line.
Out:  processes with a process group, each on its device.
Must hold: nothing here imports torch before it is needed; a command ends with the status of its processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def start(words: Sequence[str], processes: int) -> None:
    """Runs a command of hf-helix in several processes of this host, by torchrun.

    Args:
        words: the command and its options.
        processes: how many.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    code = subprocess.call([*launcher, "-m", "hf_helix", *words], env={"OMP_NUM_THREADS": "1", **os.environ})
    if code:
        sys.exit(code)


def join(pp_size: int = 1) -> torch.device:
    """Joins the processes of a launcher and returns this one's device: its GPU, or the CPU.

    Args:
        pp_size: ranks of the pipeline that will run.
    """
    import torch
    import torch.distributed as dist

    from hf_helix.runtime.environment import check_environment, load_eagerly

    if pp_size > 1:
        load_eagerly()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        for notice in check_environment(pp_size):
            print(notice, file=sys.stderr)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device
