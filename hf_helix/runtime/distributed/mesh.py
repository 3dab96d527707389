"""The mesh: the axes of the parallel dimensions, and checks of their sizes against the number of processes.

In:   the sizes of the parallel dimensions, and the process group that the launcher made.
Out:  the axes and the pipeline that operators communicate over, and the groups for gradient reduction; or an error with
      values that work, the same on every rank.
Must hold: data parallelism is the outermost dimension (Accelerate hands out batches by it), then come the pipeline,
context parallelism and, innermost, tensor parallelism, so that it stays inside a host. Every rank builds the same
groups in the same order; with NCCL, all communicators are made with the mesh; process groups are destroyed when the
interpreter exits.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_helix.config import HelixConfig, parse_link
from hf_helix.operators.communication.emulated_link import EmulatedLink, LinkedTransport
from hf_helix.operators.communication.transport import (
    Axis,
    GlooTransport,
    GroupTransport,
    ReplicaAxes,
    SilentTransport,
    Transport,
)
from hf_helix.operators.parameters.host_shard import HostLink
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.parameters import EXPERTS, TP, VOCABULARY, Cut, Place, Ranks, Sharers
from hf_helix.runtime.distributed import groups
from hf_helix.runtime.distributed.pipe import Pipe, make_pipe
from hf_helix.runtime.distributed.random_state import share_random


def check_joined(world: int) -> None:
    """Raises ValueError if the launcher started several processes and this process counts a world of one."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and world == 1:
        by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ  # `accelerate launch` sets it
        needed = "both `distributed_type: MULTI_GPU` with `use_cpu: true` in the YAML and " if by_accelerate else ""
        raise ValueError(
            f"the launcher started {launched} processes, but this one runs alone. On CPU, Accelerate needs {needed}"
            "TrainingArguments(use_cpu=True), or Accelerator(cpu=True), in the script"
        )


def check_link(link: str, device: torch.device, world: int) -> None:
    """Raises ValueError if there is no link to emulate."""
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
    dp_replicate_size: int = 1,
) -> None:
    """Raises ValueError if the sizes do not divide the world, see `mesh_of`.

    Args:
        fits: whether the model can be cut over a number of tensor-parallel ranks; None if there is no model yet.
    """
    left = world
    taken: list[str] = []
    sizes = {"tp_size": tp_size, "pp_size": pp_size, "cp_size": cp_size, "ep_size": ep_size}
    sizes["dp_replicate_size"] = dp_replicate_size
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
            else f"; or start a multiple of {world // left * size} processes (num_processes)"
        )
        if name == "ep_size":
            what += ", since experts are shared by data-parallel ranks"
        if name == "dp_replicate_size":
            what += ", since copies of the shards are divided among data-parallel ranks"
        raise ValueError(f"{name}={size} must divide {what}; values that work: {', '.join(map(str, works))}{hint}")


# -- mesh ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mesh:
    """The position of this rank.

    Attributes:
        device: of tensors that are communicated.
        device_mesh: dimensions ("dp_replicate", "tp"), as Accelerate reads them; its "tp" are all ranks with the same
            batch. None for a single process.
        tp: the tensor-parallel axis.
        cp: the context-parallel axis: ranks with the same shards and other parts of the same sequences.
        experts: the ranks that together hold every expert once: the ranks of tensor parallelism (and of expert
            parallelism, taken from data parallelism). Tokens go to their experts over this axis.
        pipe: the ranks of the pipeline.
        vocabulary: the ranks of tensor parallelism and of the pipeline together.
        dp_group: ranks with the same shards and other batches; None for a single rank.
        replica_group: ranks with the same shards and other tokens, dp and cp together; None for a single rank.
        expert_replica_group: ranks with the same experts and other tokens; None for a single rank.
        batch_group: ranks with the same batch; None for a single rank.
        link: the emulated link of this rank; None without emulation.
        replica_axes: the axes over `replica_group` if ZeRO shards over it, or the host holds the states of every
            replica; None otherwise.
        expert_replica_axes: the same for `expert_replica_group`.
        reduction_kind: the kind of communication whose links gradient reductions use.
        host_link: the link to the memory of the host.
    """

    sizes: dict[str, int]
    device: torch.device
    device_mesh: DeviceMesh | None
    tp: Axis
    cp: Axis
    experts: Axis
    pipe: Pipe
    dp_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    expert_replica_group: dist.ProcessGroup | None = None
    batch_group: dist.ProcessGroup | None = None
    link: EmulatedLink | None = None
    replica_axes: ReplicaAxes | None = None
    expert_replica_axes: ReplicaAxes | None = None
    reduction_kind: Kind = Kind.INTRA_NODE
    host_link: HostLink = field(default_factory=lambda: HostLink(None))
    vocabulary: Axis = field(default_factory=Axis.single)

    def over(self, link: EmulatedLink) -> Mesh:
        """Returns a mesh of the same ranks and groups, whose operators and gradient reductions use an emulated link.
        Copies between host and device use a second of the same speed."""

        def linked(axis: Axis) -> Axis:
            return axis if axis.size == 1 else Axis(LinkedTransport(axis.transport, link), axis.kind)

        axes = {axis: linked(axis) for axis in (self.tp, self.cp, self.experts)}  # experts may share tp's
        tp, cp, experts = (axes[axis] for axis in (self.tp, self.cp, self.experts))
        linked_axes = {each: each and each.map(linked) for each in self._shard_axes}
        return replace(
            self,
            tp=tp,
            cp=cp,
            experts=experts,
            pipe=self.pipe.over(link),
            link=link,
            replica_axes=linked_axes[self.replica_axes],
            expert_replica_axes=linked_axes[self.expert_replica_axes],
            host_link=HostLink(self.host_link.holds, EmulatedLink(link.speed).carry),
        )

    def share_random_state(self) -> None:
        """Gives the ranks with the same batch the random state of the first of them. Collective over these ranks."""
        if self.batch_group is not None:
            share_random(self.device, dist.get_process_group_ranks(self.batch_group))

    @functools.cached_property
    def all_ranks(self) -> Axis:
        """All ranks, for exchanges outside of windows. Collective at the first call."""
        if world_size() == 1:
            return Axis.single()
        assert dist.group.WORLD is not None
        transport = _transport(dist.group.WORLD, torch.arange(world_size()), groups.backend_of(self.device))
        return Axis(transport if self.link is None else LinkedTransport(transport, self.link), Kind.GRADIENTS)

    @property
    def ranks_per_batch(self) -> int:
        """The number of ranks with the same batch, which follow each other in the launcher's group."""
        return 1 if self.batch_group is None else dist.get_world_size(self.batch_group)

    @property
    def dp_size(self) -> int:
        return self.sizes["dp"]

    @property
    def axes(self) -> list[Axis]:
        """The axes of operators."""
        gathers = [each.gather for each in self._shard_axes if each is not None]
        axes = dict.fromkeys((self.tp, self.cp, self.experts, *gathers))
        return [axis for axis in axes if axis.size > 1]

    @property
    def _shard_axes(self) -> tuple[ReplicaAxes | None, ReplicaAxes | None]:
        return self.replica_axes, self.expert_replica_axes

    @functools.cached_property
    def place(self) -> Place:
        """This rank's place, as parameters know it."""
        sharers = {
            TP: _sharers(self.tp, self.replica_group, self.replica_axes),
            VOCABULARY: _sharers(self.vocabulary, self.replica_group, self.replica_axes),
            EXPERTS: _sharers(self.experts, self.expert_replica_group, self.expert_replica_axes),
        }
        return Place(sharers, self.pipe.rank, num_sequence_parts=self.cp.size, num_batches=self.dp_size)

    def axis_of(self, cut: Cut) -> Axis:
        """Returns the ranks that a parameter is cut over."""
        return {EXPERTS: self.experts, VOCABULARY: self.vocabulary}.get(cut.mesh_axis, self.tp)

    def replica_group_of(self, cut: Cut) -> dist.ProcessGroup | None:
        """Returns the replicas of a parameter: ranks with the same part of it and other tokens."""
        return self.expert_replica_group if cut.mesh_axis == EXPERTS else self.replica_group

    def shard_axes(self, cut: Cut) -> ReplicaAxes | None:
        """Returns the axes that shard a parameter (ZeRO); axes of a single rank if the parameter is only offloaded;
        None if it is neither sharded nor offloaded."""
        return self.expert_replica_axes if cut.mesh_axis == EXPERTS else self.replica_axes


def _sharers(cut: Axis, group: dist.ProcessGroup | None, axes: ReplicaAxes | None) -> Sharers:
    """Returns the ranks that share parameters.

    Args:
        cut: the axis that cuts the parameters.
        group: their replicas; None for a single one.
        axes: see `Mesh.shard_axes`.
    """
    replicas = Ranks() if group is None else Ranks(group.size(), group.rank())
    shards, copies = (None, None) if axes is None else (axes.gather, axes.copies)
    return Sharers(_ranks(cut), replicas, _ranks(shards), _ranks(copies))


def _ranks(axis: Axis | None) -> Ranks:
    return Ranks() if axis is None else Ranks(axis.size, axis.rank)


def world_size() -> int:
    """Returns the processes of the launcher's group; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def ranks_of_host() -> int:
    """Returns the number of ranks on this host; if the launcher does not give it, the number of all ranks.

    Accelerate sets LOCAL_WORLD_SIZE to 1 for ranks on CPUs whose launcher has set none.
    """
    given = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    is_known = given > 1 or "TORCHELASTIC_RUN_ID" in os.environ or torch.cuda.is_available()
    return given if given and is_known else world_size()


def rank() -> int:
    """Returns the number of this process in the launcher's group; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def mesh_of(config: HelixConfig, device: torch.device | str) -> Mesh:
    """Returns the mesh of a configuration over every process of the launcher's group; an existing mesh of the same
    layout is used again.

    Every group has threads and connections of its own, so several trainers of a process share groups. An emulated link
    is made anew.

    Raises:
        ValueError: the world does not divide by the sizes, the launcher started more ranks than have joined, or a link
            cannot be emulated here.
    """
    device, world = torch.device(device), world_size()
    sizes = config.tp_size, config.pp_size, config.cp_size, config.ep_size
    check_joined(world)
    check_world(world, *sizes, dp_replicate_size=config.dp_replicate_size)
    cross = None if config.inter_node_axes is None else tuple(sorted(config.inter_node_axes))
    group = dist.group.WORLD if dist.is_initialized() else None
    states = config.zero_stage, config.dp_replicate_size, config.offload, config.spread_vocabulary
    key = sizes, cross, device, states, group
    if key not in _meshes:
        _meshes[key] = _new_mesh(config, world // config.ranks_per_batch, device)
    if config.link is None:
        return _meshes[key]
    check_link(config.link, device, world)
    return _meshes[key].over(EmulatedLink(parse_link(config.link)))


_meshes: dict[object, Mesh] = {}


def forget_meshes() -> None:
    """Drops the meshes after a failure: their process groups may still carry collectives of the failed step, and the
    next step must not meet these."""
    _meshes.clear()


def _new_mesh(config: HelixConfig, dp_size: int, device: torch.device) -> Mesh:
    tp_size, pp_size, cp_size, ep_size = config.tp_size, config.pp_size, config.cp_size, config.ep_size
    sizes = {"dp": dp_size, "pp": pp_size, "cp": cp_size, "tp": tp_size, "ep": ep_size}
    inter_node_axes: Collection[str] | None = config.inter_node_axes
    shared, single = config.ranks_per_batch, Axis.single()
    if dp_size * shared == 1:
        alone = _stepped_whole(None) if config.offload else None
        axes = single, single, single, Pipe([0])
        host_link = HostLink(config.offload)
        return Mesh(sizes, device, None, *axes, replica_axes=alone, expert_replica_axes=alone, host_link=host_link)
    backend = groups.backend_of(device)
    groups.control_group()  # later, not all ranks may come to need it at the same time
    rows = _rows_of(sizes, config.dp_replicate_size)
    if inter_node_axes is None:
        inter_node_axes = _axes_between_hosts(rows)
    device_mesh = _device_mesh(device, dp_size, shared)
    batch_group = device_mesh.get_group("tp") if shared > 1 else None
    dp_group = device_mesh.get_group("dp_replicate") if dp_size > 1 else None

    crosses = "dp" in inter_node_axes or (cp_size > 1 and "cp" in inter_node_axes)
    reduction_kind = Kind.INTER_NODE if crosses else Kind.INTRA_NODE

    def axis_over(name: str, kinds: Collection[str]) -> Axis:
        size = rows[name].shape[-1]
        if size == 1:
            return single
        if name == "vocabulary" and size == pp_size:
            group = pipe.group
        else:
            group = batch_group if size == shared and name != "experts" else groups.group_of(rows[name])
        assert group is not None
        kind = Kind.INTER_NODE if set(kinds) & set(inter_node_axes) else Kind.INTRA_NODE
        return Axis(_transport(group, rows[name], backend), kind)

    copies = None
    if config.dp_replicate_size > 1:
        copies = Axis(GroupTransport(groups.group_of(rows["copies"], use=groups.GRADIENTS)), Kind.GRADIENTS)

    def axes_over(name: str, group: dist.ProcessGroup | None) -> ReplicaAxes | None:
        if config.zero_stage == 0 or group is None or rows[name].shape[-1] == 1:
            return _stepped_whole(group) if config.offload else None
        kind = reduction_kind
        if copies is not None:
            group = groups.group_of(rows[name], use=groups.GRADIENTS)
            kind = Kind.INTER_NODE if {name, *["cp"] * (cp_size > 1)} & set(inter_node_axes) else Kind.INTRA_NODE
        reduce = Axis(_transport(group, rows[name], backend), Kind.GRADIENTS)
        if config.zero_stage == 1:  # gathers use the stream of the reductions, which is idle at that time
            return ReplicaAxes(reduce, reduce, copies)
        gather = Axis(_transport(groups.group_of(rows[name]), rows[name], backend), kind)
        return ReplicaAxes(gather, reduce, copies)

    pipe = make_pipe(rows["pp"], backend, 1 + config.spread_vocabulary)
    tp, cp = axis_over("tp", ["tp"]), axis_over("cp", ["cp"])
    vocabulary = axis_over("vocabulary", []) if config.spread_vocabulary else tp
    experts = tp if ep_size == 1 else axis_over("experts", ["ep", "tp"] if tp_size > 1 else ["ep"])
    replica_group = dp_group if cp_size == 1 else groups.group_of(rows["replicas"], use=groups.GRADIENTS)
    replica_axes = axes_over("shards", replica_group)
    expert_replica_group, expert_replica_axes = replica_group, replica_axes
    if ep_size > 1:
        expert_replica_group = None
        if rows["expert_replicas"].shape[-1] > 1:
            expert_replica_group = groups.group_of(rows["expert_replicas"], use=groups.GRADIENTS)
        expert_replica_axes = axes_over("expert_shards", expert_replica_group)
    mesh = Mesh(
        sizes,
        device,
        device_mesh,
        tp,
        cp,
        experts,
        pipe,
        dp_group,
        replica_group,
        expert_replica_group,
        batch_group,
        replica_axes=replica_axes,
        expert_replica_axes=expert_replica_axes,
        reduction_kind=reduction_kind,
        host_link=HostLink(config.offload),
        vocabulary=vocabulary,
    )
    if backend == groups.NCCL:
        kinds = {axis.kind for axis in mesh.axes} | ({Kind.GRADIENTS} if replica_group else set())
        # Of the rank with the most neighbours, so that all ranks find the same.
        lanes = 4 * (1 + config.spread_vocabulary) * min(2, pp_size - 1)
        groups.check_launches(len(kinds) + lanes, pp_size > 1)
        connect(mesh)
    return mesh


def _stepped_whole(group: dist.ProcessGroup | None) -> ReplicaAxes:
    """Returns the axes of parameters that every replica, the ranks of a group, steps whole."""
    alone = Axis(SilentTransport(1, 0), Kind.GRADIENTS)
    return ReplicaAxes(alone, alone, None if group is None else Axis(GroupTransport(group), Kind.GRADIENTS))


def _rows_of(sizes: Mapping[str, int], dp_replicate_size: int = 1) -> dict[str, torch.Tensor]:
    """Returns the ranks that each axis connects: a row is the last dimension."""
    dp_size, pp_size, cp_size, tp_size, ep_size = sizes.values()
    world = dp_size * pp_size * cp_size * tp_size
    # Dimensions: replicas of the experts, ep, pp, cp, tp.
    grid = torch.arange(world).view(dp_size // ep_size, ep_size, pp_size, cp_size, tp_size)
    copies = grid.unflatten(0, (dp_replicate_size, -1))
    return {
        "tp": grid,
        "cp": grid.movedim(3, -1),
        "ep": grid.movedim(1, -1),
        "dp": grid.permute(2, 3, 4, 0, 1).flatten(3),
        "pp": grid.movedim(2, -1),
        "vocabulary": grid.movedim(2, 3).flatten(3),
        "experts": grid.movedim(1, 3).flatten(3),
        "replicas": grid.permute(2, 4, 0, 1, 3).flatten(2),
        "expert_replicas": grid.permute(1, 2, 4, 0, 3).flatten(3),
        "shards": copies.permute(0, 3, 5, 1, 2, 4).flatten(3),
        "expert_shards": copies.permute(0, 2, 3, 5, 1, 4).flatten(4),
        "copies": copies.movedim(0, -1),
    }


def _device_mesh(device: torch.device, dp_size: int, shared: int) -> DeviceMesh:
    sizes = {"dp_replicate": (dp_size, groups.GRADIENTS), "tp": (shared, groups.COLLECTIVE)}
    options = {name: groups.options_of(use) for name, (size, use) in sizes.items() if size > 1}
    mesh = init_device_mesh(
        device.type,
        (dp_size, shared),
        mesh_dim_names=tuple(sizes),
        backend_override={name: each for name, each in options.items() if each is not None} or None,
    )
    for group in mesh.get_all_groups():
        groups.keep_timeout(group)
    return mesh


WARM_UP = 1, 2**23
"""Elements of float32 that each group carries before the first step. NCCL connects each of its algorithms at the first
message of a size for it, which blocks the host; one element and 32 MiB take all that a window takes."""


def connect(mesh: Mesh) -> None:
    """Makes the communicators of all groups, by small and large operations of every sort that each group serves.

    All ranks go through the groups in one order, and wait for the device once, at the end. No tensor's memory stays.
    """
    for elements in WARM_UP:
        _carry(mesh, torch.ones(elements, device=mesh.device))
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
        torch.cuda.empty_cache()


def _carry(mesh: Mesh, value: torch.Tensor) -> None:
    """Carries a value over each group, in every way of a window."""
    reducing = [axis.group for each in mesh._shard_axes if each for axis in (each.reduce, each.copies) if axis]
    others = mesh.replica_group, mesh.expert_replica_group, mesh.dp_group, mesh.batch_group
    for group in dict.fromkeys((*others, *reducing)):
        for op in (dist.ReduceOp.SUM, *[dist.ReduceOp.AVG] * value.is_cuda):  # as gradients are summed, see `reduce.py`
            if group is not None:
                dist.all_reduce(value, op, group=group)
    dist.all_reduce(value)
    for axis in mesh.axes:
        dist.all_reduce(value, group=axis.group)
        part = value[: max(1, len(value) // axis.size)]
        several = part.repeat(axis.size)
        axis.transport.all_gather(several, part)
        axis.transport.reduce_scatter(part, several)
        axis.transport.exchange(several.clone(), several)  # also the connections of a ring step
    mesh.pipe.connect(value)


def _axes_between_hosts(axes: Mapping[str, torch.Tensor]) -> set[str]:
    """Returns the axes with ranks on different hosts."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, groups.host_name(), group=groups.control_group())
    names = set()
    for name, grid in axes.items():
        rows = grid.reshape(-1, grid.shape[-1]).tolist()
        if any(len({hosts[member] for member in row}) > 1 for row in rows):
            names.add(name)
    return names


def _transport(group: dist.ProcessGroup, grid: torch.Tensor, backend: str) -> Transport:
    if backend != groups.GLOO:
        return GroupTransport(group)
    return GlooTransport(group, groups.group_of(grid, groups.GLOO))
