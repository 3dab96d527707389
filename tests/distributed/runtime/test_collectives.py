"""Collectives, meshes and gradient sums on real process groups give the mathematical result, the same on every run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.more_jobs import PLACED, contribution, whole_gradient

from hf_helix.operators.unit import cut_bounds

JOB = "support.more_jobs:"


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
    found = cluster_of(ranks).run(f"{JOB}move", shape=shape, dtype=dtype, seed=seed)
    for rank, result in enumerate(found):
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
    found = cluster_of(ranks).run(f"{JOB}inner_products", operator=operator, seed=5)
    forward, backward = (sum(side) for side in zip(*found, strict=True))
    assert abs(forward) > 0.1
    assert forward == pytest.approx(backward, rel=1e-12)


def test_groups_of_a_mesh(cluster_of: Any) -> None:
    """Data parallelism is the outermost dimension."""
    found = cluster_of(4).run(f"{JOB}group_ranks", tp_size=2)
    assert [result["tp"] for result in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [result["dp"] for result in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [result["places"] for result in found] == [(0, 2, 2), (1, 2, 2), (0, 2, 2), (1, 2, 2)]


def test_groups_of_a_mesh_with_a_pipeline(cluster_of: Any) -> None:
    """Tensor parallelism is innermost; whoever shares a pipeline or a tensor-parallel group shares every batch."""
    found = cluster_of(4).run(f"{JOB}group_ranks", tp_size=1, pp_size=2)
    assert [result["pp"] for result in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [result["dp"] for result in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [result["batch"] for result in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [result["tp"] for result in found] == [None] * 4
    found = cluster_of(4).run(f"{JOB}group_ranks", tp_size=2, pp_size=2)
    assert [result["tp"] for result in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [result["pp"] for result in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [result["batch"] for result in found] == [[0, 1, 2, 3]] * 4
    assert [result["dp"] for result in found] == [None] * 4


def test_groups_that_share_experts(cluster_of: Any) -> None:
    """Tensor-parallel ranks hold experts, too; the rest of data parallelism has copies."""
    found = cluster_of(4).run(f"{JOB}group_ranks", tp_size=1, ep_size=2)
    assert [result["experts"] for result in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [result["expert copies"] for result in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [result["dp"] for result in found] == [[0, 1, 2, 3]] * 4
    found = cluster_of(4).run(f"{JOB}group_ranks", tp_size=2, ep_size=2)
    assert [result["experts"] for result in found] == [[0, 1, 2, 3]] * 4
    assert [result["expert copies"] for result in found] == [None] * 4
    found = cluster_of(4).run(f"{JOB}group_ranks", tp_size=2)
    assert [result["experts"] for result in found] == [result["tp"] for result in found]
    assert [result["expert copies"] for result in found] == [result["dp"] for result in found]


@pytest.mark.parametrize(("ranks", "pp_size"), [(2, 2), (3, 3), (4, 2)])
def test_ways_of_a_pipeline_do_not_mix(ranks: int, pp_size: int, cluster_of: Any) -> None:
    """On each way, three values forward and three back, in order, while other ways are under way."""
    place = ranks // pp_size
    for rank, result in enumerate(cluster_of(ranks).run(f"{JOB}pass_on", pp_size=pp_size)):
        stages = {rank // place, 2 * pp_size - 1 - rank // place}
        ways = [b for b in range(2 * pp_size - 1) if b != pp_size - 1]
        ends = [(b, outward) for b in ways for outward in (False, True) if (b if outward else b + 1) in stages]
        assert result == [[b, outward, *(100.0 * b + 10 * k + (not outward) for k in range(3))] for b, outward in ends]


@pytest.mark.parametrize(("tp_size", "dp"), [(4, None), (1, [0, 1, 2, 3])])
def test_groups_of_one_dimension(tp_size: int, dp: Any, cluster_of: Any) -> None:
    for result in cluster_of(4).run(f"{JOB}group_ranks", tp_size=tp_size):
        assert result["dp"] == dp
        assert result["tp"] == ([0, 1, 2, 3] if tp_size == 4 else None)


@pytest.mark.parametrize(("ranks", "tp_size"), [(2, 1), (2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_gradients_are_completed_and_their_norm_is_that_of_the_whole(
    ranks: int, tp_size: int, bucket_bytes: int, cluster_of: Any
) -> None:
    """Cut, copied, and copied with a part of the sum on every rank: one norm, in which copies count once."""
    found = cluster_of(ranks).run(f"{JOB}finish_gradients", tp_size=tp_size, bucket_bytes=bucket_bytes)
    dp_size = ranks // tp_size
    expected = {name: sum(whole_gradient(name, dp) for dp in range(dp_size)) / dp_size for name in PLACED}
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in expected.values()]
    for parameter, gradient in zip(parameters, expected.values(), strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0).item()
    for rank, result in enumerate(found):
        for name, (_, placement) in PLACED.items():
            whole = expected[name]
            if placement.dim is not None:
                first, last = cut_bounds(whole.shape[placement.dim], tp_size, rank % tp_size)
                whole = whole.narrow(placement.dim, first, last - first)
            np.testing.assert_allclose(result[name], whole, rtol=1e-6, atol=1e-7)
        assert result["norm of all"] == pytest.approx(norm, rel=1e-6)
        assert result["norm of all"] == found[0]["norm of all"]
    for name in ("copied", "norm"):  # copies stay copies, bit for bit
        assert all(np.array_equal(result[name], found[0][name]) for result in found)
