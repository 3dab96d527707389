"""Whether a mesh can be made of the processes that there are.

In:   the number of processes that have joined, and the sizes of the mesh or the link that are asked for.
Out:  nothing, or an error that says which values work.
Must hold: every rank finds the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


def check_joined(world: int) -> None:
    """Raises ValueError if the launcher started several processes and this one counts a world of one."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and world == 1:
        by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ  # `accelerate launch` sets it
        needed = "both `distributed_type: MULTI_GPU` with `use_cpu: true` in the YAML and " if by_accelerate else ""
        raise ValueError(
            f"the launcher started {launched} processes, but this one runs alone. On CPU, Accelerate needs {needed}"
            "TrainingArguments(use_cpu=True), or Accelerator(cpu=True), in the script"
        )


def check_link(link: str, device: torch.device, world: int) -> None:
    """Raises ValueError where there is nothing that a link could be emulated for.

    Args:
        link: as the option was given.
        device: that the run is on.
        world: processes of the run.
    """
    if device.type == "cuda":
        raise ValueError(
            f"link={link!r} emulates a link for runs on CPU, whose transfers wait in threads of their own; this run is "
            "on CUDA, whose transfers run on the device: use link=None, or TrainingArguments(use_cpu=True)"
        )
    if world == 1:
        raise ValueError(
            f"link={link!r} emulates a link between processes, and only one runs; start several, such as `accelerate "
            "launch --num_processes 2`, or use link=None"
        )


def check_world(
    world: int,
    tp_size: int,
    pp_size: int = 1,
    cp_size: int = 1,
    ep_size: int = 1,
    fits: Callable[[int], bool] | None = None,
) -> None:
    """See `build_mesh`.

    Args:
        fits: whether the model can be cut over so many tensor-parallel ranks; None where there is no model yet.
    """
    left = world
    taken: list[str] = []
    sizes = {"tp_size": tp_size, "pp_size": pp_size, "cp_size": cp_size, "ep_size": ep_size}
    for name, size in sizes.items():
        if left % size == 0:
            taken += [f"{name}={size}"] * (size > 1)
            left //= size
            continue
        works = [number for number in range(1, left + 1) if left % number == 0]
        if name == "tp_size" and fits is not None:
            works = [number for number in works if fits(number)]
        if taken:
            what = f"the {left} process{'es' * (left > 1)} that {' and '.join(taken)} leaves of {world}"
        else:
            what = f"the world size, {world} process{'es' * (world > 1)}"
        hint = (
            ". Only one process runs: start the script with `accelerate launch --num_processes N`; on CPU with "
            "`distributed_type: MULTI_GPU` and `use_cpu: true` in the YAML (`MULTI_CPU` starts a single process)"
            if world == 1
            else ""
        )
        if name == "ep_size":
            what += ", since experts are shared by data-parallel ranks"
        raise ValueError(f"{name}={size} must divide {what}; values that work: {', '.join(map(str, works))}{hint}")
