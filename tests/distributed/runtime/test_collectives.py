"""Collectives, meshes and gradient sums on real process groups give the mathematical result, the same on every run."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.models import arguments
from support.units import unit_of
from torch import Tensor, nn

from hf_helix.operators.base import Call
from hf_helix.operators.communication.collectives import (
    AllGather,
    AllGatherReplicated,
    ReduceScatter,
    prepare_all_gather,
    prepare_reduce_scatter,
)
from hf_helix.operators.communication.transport import GlooTransport
from hf_helix.operators.param_shard import COPIED, COPIED_ON_SHARDS, CUT_COLUMNS, CUT_ROWS, cut_bounds
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.schedule.placement import FOLD, stage_ranks
from hf_helix.runtime.distributed.mesh import Mesh, build_mesh
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.gradients import buckets
from hf_helix.runtime.gradients import reduce as gradients
from hf_helix.runtime.streams import make_streams

# What the ranks run


@functools.cache
def world() -> int:
    """The number of ranks, once training arguments have made the process group."""
    return arguments("unused").world_size


@functools.cache
def mesh_of(tp_size: int, pp_size: int = 1) -> Mesh:
    """One mesh for many tests, since every new one opens connections."""
    assert world() % (tp_size * pp_size) == 0
    return build_mesh(tp_size, "cpu", pp_size)


def contribution(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a rank brings; the test knows it, too."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


def move(shape: tuple[int, ...], dtype: str, seed: int) -> dict[str, Any]:
    """One collective of each sort over shards of `shape`, as lists of numbers (bf16 has no numpy type)."""
    axis = mesh_of(world()).tp
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


def inner_products(operator: str, seed: int) -> tuple[float, float]:
    """This rank's part of <G x, y> and of <x, G^T y> in float64; y of `AllGatherReplicated` is the same everywhere."""
    axis = mesh_of(world()).tp
    shard, whole = (3, 2, 5), (3 * axis.size, 2, 5)
    made = {"AllGather": AllGather, "ReduceScatter": ReduceScatter, "AllGatherReplicated": AllGatherReplicated}[
        operator
    ](axis)
    sizes = (whole, shard) if operator == "ReduceScatter" else (shard, whole)
    x = contribution(axis.rank, sizes[0], torch.float64, seed)
    y = contribution(0 if operator == "AllGatherReplicated" else axis.rank, sizes[1], torch.float64, seed + 1)
    call = Call({}, 0, True)
    (forward,), work = made.prepare(call, Part.F, x)
    work()
    if isinstance(made, AllGatherReplicated):
        (backward,), _ = made.prepare(call, Part.B, y)
        return (forward * y).sum().item() / axis.size, (x * backward).sum().item()
    (backward,), work = made.prepare(call, Part.B, y)
    work()
    return (forward * y).sum().item(), (x * backward).sum().item()


def group_ranks(tp_size: int, pp_size: int = 1, ep_size: int = 1) -> dict[str, Any]:
    """Who shares what with this rank."""
    mesh = build_mesh(tp_size, "cpu", pp_size, ep_size=ep_size)

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


def pass_on(pp_size: int) -> list[list[float]]:
    """Every rank of a fold sends down and up the pipe and back, all ways at once; what arrived."""
    mesh = mesh_of(world() // pp_size, pp_size)
    pipe, result, threads = mesh.pipe, {}, []
    ranks = stage_ranks(FOLD, pp_size)

    def both(boundary: int, peer: int, outward: bool) -> None:
        channel = pipe.channel(boundary, peer, outward)
        for number in range(3):
            value, arrived = torch.tensor([100.0 * boundary + 10 * number + outward]), torch.empty(1)
            for sends in (outward, not outward):
                if sends:
                    channel.send(value, forward=outward)
                else:
                    channel.receive(arrived, forward=not outward)
            result.setdefault((boundary, outward), []).append(arrived.item())

    for boundary, (source, target) in enumerate(pairwise(ranks)):
        if source != target and pipe.rank in (source, target):
            outward = pipe.rank == source
            threads.append(threading.Thread(target=both, args=(boundary, target if outward else source, outward)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted([*key, *arrived] for key, arrived in result.items())


PLACED = {
    "rows": ((7, 4), CUT_ROWS),
    "columns": ((3, 5), CUT_COLUMNS),
    "copied": ((6,), COPIED),
    "norm": ((9,), COPIED_ON_SHARDS),
}


def whole_gradient(name: str, dp_rank: int) -> Tensor:
    """What a data-parallel rank's batch gives for the uncut parameter."""
    return contribution(dp_rank, PLACED[name][0], torch.float32, seed=len(name))


@plain_parameters()
def finish_gradients(tp_size: int, bucket_bytes: int) -> dict[str, Any]:
    """Complete gradients of every kind of parameter, and take their norm."""
    mesh, usual = mesh_of(tp_size), buckets.BUCKET_BYTES
    tp, dp_rank = mesh.tp, dist.get_rank() // tp_size
    placements = {nn.Parameter(torch.empty(2, 2), requires_grad=False): COPIED}  # a frozen one, without a gradient
    for name, (_, placement) in PLACED.items():
        gradient = whole_gradient(name, dp_rank)
        if placement.dim is not None:
            gradient = replace(placement, length=gradient.shape[placement.dim]).cut(gradient, tp.size, tp.rank)
        elif placement.sums_gradient:  # parts that sum to the whole
            gradient = gradient * (tp.rank + 1) / (tp.size * (tp.size + 1) / 2)
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        placements[parameter] = placement
    buckets.BUCKET_BYTES = bucket_bytes
    units = {index: unit_of({parameter: placements[parameter]}) for index, parameter in enumerate(placements)}
    streams = make_streams(mesh.device)
    try:
        gradients.reduce_all_gradients(units, mesh, streams)
    finally:
        buckets.BUCKET_BYTES = usual
        streams.close()
    result = [parameter.grad.numpy().copy() for parameter in placements if parameter.grad is not None]
    norm = gradients.gradient_norm(placements, mesh)
    return {**dict(zip(PLACED, result, strict=True)), "norm of all": norm.item()}


# Tests


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
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


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("operator", ["AllGather", "ReduceScatter", "AllGatherReplicated"])
def test_backward_is_the_transpose(ranks: int, operator: str, cluster_of: Any) -> None:
    """<G x, y> == <x, G^T y>, with both sides summed over the ranks."""
    result = cluster_of(ranks).run(inner_products, operator=operator, seed=5)
    forward, backward = (sum(side) for side in zip(*result, strict=True))
    assert abs(forward) > 0.1
    assert forward == pytest.approx(backward, rel=1e-12)


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


@pytest.mark.parametrize(("ranks", "pp_size"), [(2, 2), (3, 3), (4, 2)])
def test_ways_of_a_pipeline_do_not_mix(ranks: int, pp_size: int, cluster_of: Any) -> None:
    """On each way, three values forward and three back, in order, while other ways are under way."""
    place = ranks // pp_size
    for rank, result in enumerate(cluster_of(ranks).run(pass_on, pp_size=pp_size)):
        stages = {rank // place, 2 * pp_size - 1 - rank // place}
        ways = [b for b in range(2 * pp_size - 1) if b != pp_size - 1]
        ends = [(b, outward) for b in ways for outward in (False, True) if (b if outward else b + 1) in stages]
        assert result == [[b, outward, *(100.0 * b + 10 * k + (not outward) for k in range(3))] for b, outward in ends]


@pytest.mark.parametrize(("ranks", "tp_size"), [(2, 1), (2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
@plain_parameters()
def test_gradients_are_completed_and_their_norm_is_that_of_the_whole(
    ranks: int, tp_size: int, bucket_bytes: int, cluster_of: Any
) -> None:
    """Cut, copied, and copied with a part of the sum on every rank: one norm, in which copies count once."""
    results = cluster_of(ranks).run(finish_gradients, tp_size=tp_size, bucket_bytes=bucket_bytes)
    dp_size = ranks // tp_size
    expected = {name: sum(whole_gradient(name, dp) for dp in range(dp_size)) / dp_size for name in PLACED}
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in expected.values()]
    for parameter, gradient in zip(parameters, expected.values(), strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0).item()
    for rank, result in enumerate(results):
        for name, (_, placement) in PLACED.items():
            whole = expected[name]
            if placement.dim is not None:
                first, last = cut_bounds(whole.shape[placement.dim], tp_size, rank % tp_size)
                whole = whole.narrow(placement.dim, first, last - first)
            np.testing.assert_allclose(result[name], whole, rtol=1e-6, atol=1e-7)
        assert result["norm of all"] == pytest.approx(norm, rel=1e-6)
        assert result["norm of all"] == results[0]["norm of all"]
    for name in ("copied", "norm"):  # copies stay copies, bit for bit
        assert all(np.array_equal(result[name], results[0][name]) for result in results)
