"""Jobs over the groups that a mesh has on NCCL, with gloo behind them: lanes of two ranks, plain collectives."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.models import arguments
from torch import Tensor

from hf_helix.checkpoint.shard import whole_parameter
from hf_helix.operators.communication.group_transports import GlooTransport
from hf_helix.operators.communication.pipeline_p2p import LanePassage
from hf_helix.operators.unit import Placement
from hf_helix.runtime import sharded_optimizer as sharding
from hf_helix.runtime.distributed import groups, mesh

POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


@contextmanager
def as_on_nccl() -> Iterator[list[tuple[str, Any, str]]]:
    """Meshes made within it are those of NCCL; what goes point to point is noted: how, over what group, from where."""
    noted: list[tuple[str, Any, str]] = []

    def noting(name: str) -> Any:
        stock = getattr(dist, name)

        def call(value: Tensor, *args: Any, **options: Any) -> Any:
            noted.append((name, options.get("group"), value.device.type))
            return stock(value, *args, **options)

        return call

    patches = [patch.object(dist, name, noting(name)) for name in POINT_TO_POINT]
    patches.append(patch.object(groups, "backend_of", lambda device: groups.NCCL))
    patches.append(patch.object(groups, "order_launches", lambda pp_size: None))  # of NCCL, once in a process
    join()
    mesh.forget_meshes()
    for each in patches:
        each.start()
    try:
        yield noted
    finally:
        for each in patches:
            each.stop()
        mesh.forget_meshes()


def join() -> None:
    """Into the process group, as a Trainer does."""
    assert arguments("unused").world_size == 2


def over_lanes(what: str, **given: Any) -> Any:
    """What the job `what` finds on such a mesh, and how many operations went point to point over groups of the mesh."""
    module, _, function = what.partition(":")
    with as_on_nccl() as noted:
        found = getattr(importlib.import_module(module), function)(**given)
    return found, sum(group is not groups.control_group() for _, group, _ in noted)


def kinds_of_mesh(sizes: dict[str, int]) -> dict[str, Any]:
    """What a mesh of NCCL is made of."""
    with as_on_nccl():
        made = mesh.build_mesh(device="cpu", **sizes)
        passage = made.pipe.passage(0, 1 - made.pipe.rank, made.pipe.rank == 0)
    return {
        "lanes": isinstance(passage, LanePassage),
        "plain": not isinstance(made.tp.transport, GlooTransport),
        "members": [dist.get_process_group_ranks(group) for group in made.pipe._lanes.values()],
    }


def whole_over_host(shape: tuple[int, ...], blocks: int) -> Any:
    """A parameter cut over two ranks and one of the other pipeline rank, whole again; what was sent, and how."""
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape).bfloat16()
    placement = Placement(0, shape[0], num_fused=blocks)
    with as_on_nccl() as noted:
        tp = mesh.build_mesh(2, "cpu")
        joined = whole_parameter(placement.cut(whole, 2, tp.tp.rank), placement, tp)
        pipe = mesh.build_mesh(1, "cpu", pp_size=2)
        moved = whole_parameter(whole if pipe.pipe.rank == 1 else None, Placement(), pipe, owner=1)
    same = [None if value is None else bool(torch.equal(value, whole)) for value in (joined, moved)]
    return same, [(group is groups.control_group(), device) for _, group, device in noted]


def refused(device: str) -> None:
    """A mesh for a device whose tensors the launcher's group cannot carry."""
    join()
    mesh.build_mesh(2, device)


def sharded_steps() -> tuple[bool, int]:
    """Whether an optimizer that is spread over the ranks steps as one that is not, and how many broadcasts it takes."""
    join()
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (40, 50), (1,), (7, 7), (0,), (64, 64), (2, 2), (5,)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    alone = torch.optim.AdamW(theirs, lr=0.1)
    with patch.object(sharding, "PIECE_BYTES", 10_000), patch.object(dist, "broadcast", wraps=dist.broadcast) as single:
        spread = sharding.ShardedOptimizer(ours, torch.optim.AdamW, process_group=dist.group.WORLD, lr=0.1)
        for _ in range(3):
            for mine, other in zip(ours, theirs, strict=True):
                mine.grad = torch.randn(mine.shape, generator=generator)
                other.grad = mine.grad.clone()
            spread.step()
            alone.step()
    return all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True)), single.call_count
