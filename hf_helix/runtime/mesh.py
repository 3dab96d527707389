"""The mesh: which ranks share what.

In:   the sizes of the parallel dimensions and the process group that the launcher made.
Out:  the tensor-parallel axis that operators communicate over, and the data-parallel group.
Must hold: data parallelism is the outermost dimension (Accelerate hands out batches by it); every rank builds the same
groups in the same order; process groups are destroyed when the interpreter exits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_helix.operators.collectives import Axis, GlooTransport, GroupTransport


@dataclass(frozen=True)
class Mesh:
    """The place of this rank.

    Attributes:
        device: where tensors must lie to be communicated.
        device_mesh: dimensions ("dp_replicate", "tp"), as Accelerate reads them; None for a single process.
        tp: the tensor-parallel axis.
        dp_group: ranks with the same shards and other batches; None where there is only one.
    """

    sizes: dict[str, int]
    device: torch.device
    device_mesh: DeviceMesh | None
    tp: Axis
    dp_group: dist.ProcessGroup | None

    @property
    def dp_size(self) -> int:
        return self.sizes["dp"]


def world_size() -> int:
    """Processes of the launcher's group; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process in the launcher's group; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def build_mesh(tp_size: int, device: torch.device | str) -> Mesh:
    """The mesh over every process of the launcher's group.

    Raises:
        ValueError: the world does not divide by `tp_size`, or the launcher started more ranks than have joined.
    """
    device = torch.device(device)
    world = world_size()
    check_joined(world)
    check_world(world, tp_size)
    sizes = {"dp": world // tp_size, "tp": tp_size}
    if world == 1:
        return Mesh(sizes, device, None, Axis.single(), None)
    device_mesh = init_device_mesh(device.type, (sizes["dp"], tp_size), mesh_dim_names=("dp_replicate", "tp"))
    tp = Axis(_transport(device_mesh, "tp")) if tp_size > 1 else Axis.single()
    return Mesh(sizes, device, device_mesh, tp, device_mesh.get_group("dp_replicate") if sizes["dp"] > 1 else None)


def _transport(device_mesh: DeviceMesh, name: str) -> GroupTransport:
    group = device_mesh.get_group(name)
    if "gloo" not in str(dist.get_backend(group)):
        return GroupTransport(group)
    # Groups are made by every rank, in the same order, its own among them.
    place = device_mesh.mesh_dim_names.index(name)  # type: ignore[union-attr]
    rows = device_mesh.mesh.movedim(place, -1).reshape(-1, device_mesh.size(place)).tolist()
    others = [dist.new_group(row, backend="gloo") for row in rows]
    return GlooTransport(group, next(other for row, other in zip(rows, others, strict=True) if rank() in row))


def check_joined(world: int) -> None:
    """Raise ValueError if the launcher started several processes and this one counts a world of one."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and world == 1:
        raise ValueError(
            f"the launcher started {launched} processes, but this one runs alone. "
            "On CPU, Accelerate needs both `distributed_type: MULTI_GPU` with `use_cpu: true` in the "
            "YAML and TrainingArguments(use_cpu=True) in the script"
        )


def check_world(world: int, tp_size: int) -> None:
    """See `build_mesh`."""
    if world % tp_size:
        works = [size for size in range(1, world + 1) if world % size == 0]
        hint = (
            ". Only one process runs: start the script with `accelerate launch --num_processes N`; on CPU with "
            "`distributed_type: MULTI_GPU` and `use_cpu: true` in the YAML (`MULTI_CPU` starts a single process)"
            if world == 1
            else ""
        )
        raise ValueError(
            f"tp_size={tp_size} must divide the world size, {world} process{'es' * (world > 1)}; "
            f"values that work: {', '.join(map(str, works))}{hint}"
        )
