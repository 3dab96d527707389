"""Collectives, meshes and gradient sums on real process groups give the mathematical result, the same on every run."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.marks import slow
from torch import Tensor

from hf_helix.config import HelixConfig
from hf_helix.operators.communication.collectives import (
    prepare_all_gather,
    prepare_reduce_scatter,
)
from hf_helix.operators.communication.transport import GlooTransport
from hf_helix.runtime.distributed.mesh import Mesh, mesh_of

# What the ranks run


@functools.cache
def shared_mesh(tp_size: int, pp_size: int = 1) -> Mesh:
    """One mesh for many tests, since every new one opens connections."""
    return mesh_of(HelixConfig(tp_size=tp_size, pp_size=pp_size), "cpu")


def contribution(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a rank brings; the test knows it, too."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


def move(shape: tuple[int, ...], dtype: str, seed: int) -> dict[str, Any]:
    """One collective of each sort over shards of `shape`, as lists of numbers (bf16 has no numpy type)."""
    axis = shared_mesh(dist.get_world_size()).tp
    assert isinstance(axis.transport, GlooTransport)
    shard = contribution(axis.rank, shape, getattr(torch, dtype), seed)
    whole = contribution(axis.rank, (axis.size * shape[0], *shape[1:]), getattr(torch, dtype), seed)
    gathered, gather = prepare_all_gather(axis, shard)
    gather()
    exchanged = torch.empty_like(whole)
    axis.transport.exchange(exchanged, whole)
    sums = []
    for _ in range(2):
        reduced, work = prepare_reduce_scatter(axis, whole)
        work()
        sums.append(reduced)
    assert {t.dtype for t in (gathered, exchanged, *sums)} == {shard.dtype}
    result = {"gathered": gathered, "exchanged": exchanged, "reduced": sums[0], "again": sums[1]}
    return {name: value.float().numpy().copy() for name, value in result.items()}


def group_ranks(tp_size: int, pp_size: int = 1, ep_size: int = 1) -> dict[str, Any]:
    """Who shares what with this rank."""
    mesh = mesh_of(HelixConfig(tp_size=tp_size, pp_size=pp_size, ep_size=ep_size), "cpu")

    def members(group: dist.ProcessGroup | None) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    return {
        "tp": members(mesh.tp.group),
        "dp": members(mesh.dp_group),
        "pp": mesh.pipe.ranks,
        "batch": members(mesh.batch_group),
        "experts": members(mesh.experts.group),
        "expert copies": members(mesh.expert_replica_group),
        "places": (mesh.tp.rank, mesh.tp.size, mesh.dp_size),
    }


# Tests


@pytest.mark.parametrize("ranks", [2, slow(3), 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_collectives(ranks: int, dtype: str, seed: int, cluster_of: Any) -> None:
    random = np.random.default_rng(seed)
    shape = tuple(int(n) for n in random.integers(1, 9, size=random.integers(1, 4)))
    whole = (ranks * shape[0], *shape[1:])
    kind = getattr(torch, dtype)
    shards = [contribution(rank, shape, kind, seed).float() for rank in range(ranks)]
    brought = [contribution(rank, whole, kind, seed).float() for rank in range(ranks)]
    results = cluster_of(ranks).run(move, shape=shape, dtype=dtype, seed=seed)
    for rank, result in enumerate(results):
        blocks = [value.chunk(ranks)[rank] for value in brought]
        assert np.array_equal(result["gathered"], torch.cat(shards))
        assert np.array_equal(result["exchanged"], torch.cat(blocks))
        in_rank_order = sum(blocks[1:], start=blocks[0])  # in fp32 for both, bf16 is rounded once
        assert np.array_equal(result["reduced"], in_rank_order.to(kind).float())
        assert np.array_equal(result["again"], result["reduced"])
        exact = torch.stack(blocks).double().sum(0)
        scale = torch.stack(blocks).double().abs().sum(0)
        assert ((torch.from_numpy(result["reduced"]) - exact).abs() <= torch.finfo(kind).eps * scale).all()


ALL, PAIRS, ACROSS = [[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]
GROUPS: list[tuple[dict[str, int], dict[str, list[list[int]]]]] = [
    # Data parallelism is the outermost dimension, tensor parallelism the innermost.
    ({"tp_size": 2}, {"tp": PAIRS, "dp": ACROSS, "experts": PAIRS, "expert copies": ACROSS}),
    ({"tp_size": 4}, {"tp": ALL, "dp": []}),
    ({"tp_size": 1}, {"tp": [], "dp": ALL}),
    # Whoever shares a pipeline or a tensor-parallel group shares every batch.
    ({"tp_size": 1, "pp_size": 2}, {"tp": [], "pp": PAIRS, "dp": ACROSS, "batch": PAIRS}),
    ({"tp_size": 2, "pp_size": 2}, {"tp": PAIRS, "pp": ACROSS, "dp": [], "batch": ALL}),
    # Tensor-parallel ranks hold experts, too; the rest of data parallelism has copies.
    ({"tp_size": 1, "ep_size": 2}, {"dp": ALL, "experts": PAIRS, "expert copies": ACROSS}),
    ({"tp_size": 2, "ep_size": 2}, {"experts": ALL, "expert copies": []}),
]


@pytest.mark.parametrize(("sizes", "groups"), GROUPS, ids=str)
def test_groups_of_a_mesh(sizes: dict[str, int], groups: dict[str, list[list[int]]], cluster_of: Any) -> None:
    tp_size, dp_size = sizes["tp_size"], 4 // (sizes["tp_size"] * sizes.get("pp_size", 1))
    for rank, result in enumerate(cluster_of(4).run(group_ranks, **sizes)):
        assert result["places"] == (rank % tp_size, tp_size, dp_size)
        for name, rows in groups.items():
            assert result[name] == next((row for row in rows if rank in row), None), name
