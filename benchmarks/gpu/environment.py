"""What a run was made with: the machine, the versions, the commit."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from hf_helix.cli.env import version_of

PACKAGES = ("torch", "transformers", "accelerate", "triton", "flash-attn", "liger-kernel")


def describe(root: Path) -> dict[str, str]:
    """By name. Nothing here starts CUDA in this process.

    Args:
        root: of the repository.
    """
    facts = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")}
    facts |= _gpu()
    facts |= {"cpu": f"{_processor()}, {os.cpu_count()} cores", "python": platform.python_version()}
    facts |= {name: version_of(name) for name in PACKAGES}
    facts |= {"cuda": str(torch.version.cuda), "nccl": _nccl(), "commit": _commit(root)}
    return facts


def _gpu() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    rows = _said(query).splitlines() if shutil.which("nvidia-smi") else []
    parts = [row.split(", ") for row in rows if row.count(", ") == 2]
    if not parts:
        return {"gpu": "none", "driver": "none"}
    name, driver, memory = parts[0]
    return {"gpu": f"{len(parts)} x {name}, {memory}", "driver": driver}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _nccl() -> str:
    if not torch.cuda.is_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _commit(root: Path) -> str:
    commit = _said(["git", "-C", str(root), "rev-parse", "--short", "HEAD"]) if shutil.which("git") else ""
    changed = " with changes" if commit and _said(["git", "-C", str(root), "status", "--porcelain", "-uno"]) else ""
    return commit + changed or "unknown"


def _said(command: list[str]) -> str:
    """What a command prints; nothing where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
