"""The mesh: which ranks share what.

In:   the sizes of the parallel dimensions and the process group that the launcher made.
Out:  the tensor-parallel axis and the pipeline that operators communicate over, and the data-parallel group.
Must hold: data parallelism is the outermost dimension (Accelerate hands out batches by it), tensor parallelism the
innermost, so that it stays inside a host; every rank builds the same
groups in the same order; process groups are destroyed when the interpreter exits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_helix.operators.collectives import Axis, GlooTransport, GroupTransport
from hf_helix.operators.transfer import GroupPassage, Passage


class Pipe:
    """The pipeline as one of its ranks sees it.

    Args:
        ranks: of the pipeline, in the launcher's group.
        lanes: groups over these ranks; each way between two of them uses one per direction, so that neither waits for
            the other: gloo carries one direction at a time over a connection, NCCL one operation over a communicator.
    """

    def __init__(self, ranks: Sequence[int], lanes: Sequence[dist.ProcessGroup]) -> None:
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(rank()) if self.size > 1 else 0
        self._lanes = lanes

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks of the pipeline; None for a single one."""
        return self._lanes[0] if self.size > 1 else None

    def passage(self, boundary: int, peer: int, outward: bool) -> Passage:
        """This rank's end of the way between virtual stages `boundary` and `boundary` + 1.

        Args:
            peer: the pipeline rank at the other end.
            outward: whether forward leads from here to there.
        """
        source, target = (self.rank, peer) if outward else (peer, self.rank)
        return GroupPassage(self.ranks[peer], self._lane(source, target, 0), self._lane(target, source, 1), boundary)

    def _lane(self, source: int, target: int, backward: int) -> dist.ProcessGroup:
        # By the sender's parity where two lanes are enough, else by direction along the pipe and of the pass.
        number = source % 2 if len(self._lanes) == 2 else 2 * backward + (source < target)
        return self._lanes[number]


@dataclass(frozen=True)
class Mesh:
    """The place of this rank.

    Attributes:
        device: where tensors must lie to be communicated.
        device_mesh: dimensions ("dp_replicate", "tp"), as Accelerate reads them, whose "tp" are all ranks that share a
            batch; None for a single process.
        tp: the tensor-parallel axis.
        pipe: the ranks of the pipeline.
        dp_group: ranks with the same shards and other batches; None where there is only one.
        batch_group: ranks that share a batch; None where there is only one.
    """

    sizes: dict[str, int]
    device: torch.device
    device_mesh: DeviceMesh | None
    tp: Axis
    pipe: Pipe
    dp_group: dist.ProcessGroup | None
    batch_group: dist.ProcessGroup | None

    @property
    def dp_size(self) -> int:
        return self.sizes["dp"]


def world_size() -> int:
    """Processes of the launcher's group; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process in the launcher's group; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def build_mesh(tp_size: int, device: torch.device | str, pp_size: int = 1) -> Mesh:
    """The mesh over every process of the launcher's group; one of the same sizes that is there already is used again.

    Every group has threads and connections of its own, so a process that makes several trainers must not make groups
    for each of them.

    Raises:
        ValueError: the world does not divide by the sizes, or the launcher started more ranks than have joined.
    """
    device = torch.device(device)
    world = world_size()
    check_joined(world)
    check_world(world, tp_size, pp_size)
    key = tp_size, pp_size, device, dist.group.WORLD if dist.is_initialized() else None
    if key not in _meshes:
        _meshes[key] = _new_mesh(world, tp_size, pp_size, device)
    return _meshes[key]


_meshes: dict[object, Mesh] = {}


def forget_meshes() -> None:
    """After a failure: what was under way on their groups would meet what comes next."""
    _meshes.clear()


def _new_mesh(world: int, tp_size: int, pp_size: int, device: torch.device) -> Mesh:
    shared = tp_size * pp_size
    sizes = {"dp": world // shared, "pp": pp_size, "tp": tp_size}
    if world == 1:
        return Mesh(sizes, device, None, Axis.single(), Pipe([0], ()), None, None)
    device_mesh = init_device_mesh(device.type, (sizes["dp"], shared), mesh_dim_names=("dp_replicate", "tp"))
    batch_group = device_mesh.get_group("tp") if shared > 1 else None
    dp_group = device_mesh.get_group("dp_replicate") if sizes["dp"] > 1 else None
    places = torch.arange(world).view(sizes["dp"], pp_size, tp_size)
    tp_group = batch_group if pp_size == 1 else _group_of(places) if tp_size > 1 else None
    tp = Axis(_transport(tp_group, places)) if tp_group is not None and tp_size > 1 else Axis.single()
    return Mesh(sizes, device, device_mesh, tp, _pipe(places.transpose(1, 2)), dp_group, batch_group)


def _group_of(places: torch.Tensor, backend: str | None = None) -> dist.ProcessGroup:
    """The group of this rank among the rows of `places`. Groups are made by every rank, in the same order."""
    rows = places.reshape(-1, places.shape[-1]).tolist()
    groups = [dist.new_group(row, backend=backend) for row in rows]
    return next(group for row, group in zip(rows, groups, strict=True) if rank() in row)


def _transport(group: dist.ProcessGroup, places: torch.Tensor) -> GroupTransport:
    if "gloo" not in str(dist.get_backend(group)):
        return GroupTransport(group)
    return GlooTransport(group, _group_of(places, "gloo"))


def _pipe(places: torch.Tensor) -> Pipe:
    ranks = next(row for row in places.reshape(-1, places.shape[-1]).tolist() if rank() in row)
    if len(ranks) == 1:
        return Pipe(ranks, ())
    count = 2 if "gloo" in str(dist.get_backend()) else 4
    return Pipe(ranks, [_group_of(places) for _ in range(count)])


def check_joined(world: int) -> None:
    """Raise ValueError if the launcher started several processes and this one counts a world of one."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and world == 1:
        raise ValueError(
            f"the launcher started {launched} processes, but this one runs alone. "
            "On CPU, Accelerate needs both `distributed_type: MULTI_GPU` with `use_cpu: true` in the "
            "YAML and TrainingArguments(use_cpu=True) in the script"
        )


def check_world(world: int, tp_size: int, pp_size: int = 1) -> None:
    """See `build_mesh`."""
    if world % (tp_size * pp_size):
        works = [size for size in range(1, world + 1) if world % size == 0]
        if world % tp_size == 0:
            name, works = f"pp_size={pp_size}", [size for size in works if (world // tp_size) % size == 0]
            what = f"the {world // tp_size} process{'es' * (world > tp_size)} that tp_size={tp_size} leaves of {world}"
        else:
            name, what = f"tp_size={tp_size}", f"the world size, {world} process{'es' * (world > 1)}"
        hint = (
            ". Only one process runs: start the script with `accelerate launch --num_processes N`; on CPU with "
            "`distributed_type: MULTI_GPU` and `use_cpu: true` in the YAML (`MULTI_CPU` starts a single process)"
            if world == 1
            else ""
        )
        raise ValueError(f"{name} must divide {what}; values that work: {', '.join(map(str, works))}{hint}")
