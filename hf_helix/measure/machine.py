"""The identity of a machine: the hardware, the versions and the settings that times depend on.

In:   a runner, whose mesh has the device and the ranks.
Out:  names and values as text, rank 0's on every rank.
Must hold: a change of times changes a value, so that times of a machine are not used on another machine.
"""

import os
import platform
from pathlib import Path

import torch
import torch.distributed as dist

from hf_helix.planning.timing.profile import EMULATED_LINK, REDUCTIONS_OVER
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.distributed.environment import CONNECTIONS
from hf_helix.runtime.distributed.groups import backends, host_name
from hf_helix.runtime.runner import Runner

CPU_PROCESS = "CPU process"  # the name of a process on any CPU, as a device of a cluster file


def machine(runner: Runner) -> dict[str, str]:
    """Returns the identity of the machine that a runner runs on. Collective."""
    device = runner.mesh.device
    known = {
        "device": describe_device(device),
        **(describe_gpus() if device.type == "cuda" else {"threads": str(torch.get_num_threads())}),
        "backend": backends().get(device.type, "none") if dist.is_initialized() else "none",
        "hosts": str(len(set(all_gather_object(host_name())))),
        "torch": torch.__version__,
        REDUCTIONS_OVER: runner.mesh.reduction_kind.value if runner.layout.reductions else "",
        EMULATED_LINK: runner.mesh.link.speed_now.text if runner.mesh.link is not None else "",
    }
    return all_gather_object({key: value for key, value in known.items() if value})[0]


def device_in_clusters(device: torch.device) -> str:
    """Returns the name of a device in cluster files."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CPU_PROCESS


def describe_device(device: torch.device) -> str:
    """Returns the name of a GPU, or the model and the number of cores of a CPU, if the system has them."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def describe_gpus() -> dict[str, str]:
    """Returns the number of GPUs of this host, and the settings of NCCL between them."""
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    quiet = {name: value for name, value in settings.items() if not name.startswith("NCCL_DEBUG")}
    return {
        "devices_per_host": str(torch.cuda.device_count()),
        "cuda": str(torch.version.cuda or torch.version.hip),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "",
        "nccl_settings": " ".join(f"{name}={value}" for name, value in quiet.items()),
        "max_connections": os.environ.get(CONNECTIONS, ""),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.machine())} CPU, {os.cpu_count()} cores"
