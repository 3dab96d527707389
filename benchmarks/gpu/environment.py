"""What a run was made with: the machine, the versions, the commit."""

import datetime
import os
import platform
import shutil

import torch

from benchmarks.common import commit, output_of, processor
from hf_helix.cli.env import version_of

PACKAGES = ("torch", "transformers", "accelerate", "triton", "flash-attn", "liger-kernel")


def describe() -> dict[str, str]:
    """Returns facts by name. Nothing here starts CUDA in this process."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **_gpu(),
        "cpu": f"{processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: version_of(name) for name in PACKAGES},
        "cuda": str(torch.version.cuda),
        "nccl": nccl,
        "commit": commit(),
    }


def _gpu() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    rows = output_of(query).splitlines() if shutil.which("nvidia-smi") else []
    parts = [row.split(", ") for row in rows if row.count(", ") == 2]
    if not parts:
        return {"gpu": "none", "driver": "none"}
    name, driver, memory = parts[0]
    return {"gpu": f"{len(parts)} x {name}, {memory}", "driver": driver}
