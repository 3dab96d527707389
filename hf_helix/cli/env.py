"""hf-helix env: facts for an issue.

In:   the installed packages, the machine, the environment.
Out:  a list in Markdown.
Must hold: any package may be missing, torch included; no token, key or password is printed.
"""

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from hf_helix.cli.options import Command
from hf_helix.runtime.distributed.host import usable_cores
from hf_helix.version import __version__

PACKAGES = (
    *("torch", "transformers", "accelerate", "safetensors", "huggingface_hub"),
    *("peft", "trl", "datasets", "flash-attn", "bokeh", "matplotlib"),
)
LAUNCHER = re.compile(
    r"(HELIX|ACCELERATE|FSDP|PARALLELISM_CONFIG|NCCL|GLOO|TORCH|CUDA|OMP|MKL|SLURM)_\w+"
    r"|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE"
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


class EnvCommand(Command):
    """Print versions, devices and the launcher's environment, for an issue.

    Paste the output into an issue, together with the failed command and its output.
    """

    def run(self) -> None:
        """A line for each fact."""
        print("\n".join(f"- {name}: {value}" for name, value in _facts()))


def _facts() -> Iterator[tuple[str, str]]:
    yield "hf_helix", f"{__version__} ({Path(__file__).parents[1]})"
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    for package in PACKAGES:
        yield package, version_of(package)
    yield "cores", f"{usable_cores()} of {os.cpu_count()}"
    yield from _devices()
    yield from _folders()
    for name, value in sorted(os.environ.items()):
        if LAUNCHER.fullmatch(name):
            yield name, "(not shown)" if SECRET.search(name) else value


def version_of(package: str) -> str:
    """Returns the version of a package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    """Backends and devices of torch."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield "torch", f"cannot be imported: {error}"
        return
    names = [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
    yield "torch backends", ", ".join(names) or "none"
    yield "torch threads", str(torch.get_num_threads())
    if not torch.cuda.is_available():
        yield "devices", "CPU only"
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if "nccl" in names else "none"
    yield "CUDA", f"{torch.version.cuda}, NCCL {nccl}"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"GPU {index}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB"


def _folders() -> Iterator[tuple[str, str]]:
    """The cache of measurements, and the default file of `accelerate launch`."""
    try:
        from huggingface_hub.constants import HF_HOME

        from hf_helix.measure.cache_folder import cache_root
    except ImportError:
        return
    cases = sum(1 for _ in cache_root().glob("*/tuning.json"))
    yield "cache", f"{cache_root()} ({cases} measured cases)"
    default = Path(HF_HOME, "accelerate", "default_config.yaml")
    yield "accelerate config", str(default) if default.exists() else f"none at {default}"
