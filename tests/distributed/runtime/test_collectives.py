"""Collectives on real process groups give the mathematical result, the same on every run."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.config import HelixConfig
from hf_helix.operators.communication.collectives import prepare_all_gather, prepare_reduce_scatter
from hf_helix.operators.communication.transport import GlooTransport
from hf_helix.runtime.distributed.mesh import mesh_of

# What the ranks run


def contribution(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a rank brings; the test knows it, too."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


def move(shapes: list[tuple[int, ...]], dtype: str) -> list[dict[str, Any]]:
    """By shape of a shard, one collective of each sort, as lists of numbers (bf16 has no numpy type)."""
    axis = mesh_of(HelixConfig(tp_size=dist.get_world_size()), "cpu").tp
    assert isinstance(axis.transport, GlooTransport)
    found = []
    for seed, shape in enumerate(shapes):
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
        found.append({name: value.float().numpy().copy() for name, value in result.items()})
    return found


# Tests


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_collectives(ranks: int, dtype: str, cluster_of: Any) -> None:
    shapes, kind = [(7,), (3, 8), (5, 1, 4)], getattr(torch, dtype)
    for rank, results in enumerate(cluster_of(ranks).run(move, shapes=shapes, dtype=dtype)):
        for seed, (shape, result) in enumerate(zip(shapes, results, strict=True)):
            shards = [contribution(each, shape, kind, seed).float() for each in range(ranks)]
            whole = (ranks * shape[0], *shape[1:])
            blocks = [contribution(each, whole, kind, seed).float().chunk(ranks)[rank] for each in range(ranks)]
            assert np.array_equal(result["gathered"], torch.cat(shards))
            assert np.array_equal(result["exchanged"], torch.cat(blocks))
            in_rank_order = sum(blocks[1:], start=blocks[0])  # in fp32 for both, bf16 is rounded once
            assert np.array_equal(result["reduced"], in_rank_order.to(kind).float())
            assert np.array_equal(result["again"], result["reduced"])
