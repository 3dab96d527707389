"""What a rank sends in a window: over which links, and in sums of gradients; what it saves by spreading parameters.

In:   a runner, whose parameters may be spread over ranks, and times of its collectives.
Out:  seconds by link; bytes of this rank, by formula.
Must hold: what is counted is what docs/data_parallelism.md says of a window and of the time between windows; padding is
counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hf_helix.operators.zero.flat_parameter import Flat
from hf_helix.operators.zero.zero1 import KeptFlat
from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.gradients.buckets import Bucket
from hf_helix.runtime.runner import Runner

AVERAGES = 8
"""Bytes of AdamW's two averages of an element, in float32."""


def bytes_summed(runner: Runner) -> int:
    """Returns what this rank sends in the sums of a window's gradients over the ranks that see other tokens."""
    return sum(_sent(bucket, runner) for bucket in runner.buckets if bucket.spans_batches)


def _sent(bucket: Bucket, runner: Runner) -> int:
    if bucket.flat is not None:  # a reduce-scatter
        size = torch.promote_types(bucket.flat.shard.dtype, torch.float32).itemsize
        return (bucket.flat.axis.size - 1) * bucket.flat.shard.numel() * size
    total = 0
    for parameter, placement in bucket.placements.items():  # an all-reduce
        group = runner.mesh.copies_of(placement)
        ranks = dist.get_world_size(group) if group is not None else 1
        size = torch.promote_types(parameter.dtype, torch.float32).itemsize
        total += 2 * (ranks - 1) * parameter.numel() * size // ranks
    return total


def bytes_spared(flat: Flat) -> int:
    """Returns what this rank keeps less of between windows because the parameters of a flat are spread: of weights, and
    of AdamW's states where they are trained."""
    weight = flat.shard.element_size()
    states = AVERAGES if any(shard.requires_grad for shard in flat.shards.values()) else 0
    kept = (weight + states) * flat.shard.numel()
    if isinstance(flat, KeptFlat):
        kept = flat.piece.nbytes + (weight if flat.cast_to is not None else 0) * flat.shard.numel()
        kept += states * flat.shard.numel()
    return (weight + states) * flat.length - kept


def link_loads(mesh: Mesh, moved: Sequence[float], summing: float, sent: int) -> Iterator[tuple[str, float]]:
    """Yields what a window communicates, for `busiest_link`: by kinds, each on a link of its own, sums of gradients on
    that of their ranks. All of it shares an emulated link, over which latencies may pass side by side.

    Args:
        mesh: the axes.
        moved: seconds of the collectives of each.
        summing: seconds of the sums.
        sent: bytes that a rank sends over the axes.
    """
    if mesh.link:
        yield from ((f"axis {place}", seconds) for place, seconds in enumerate(moved))
        yield from (("all", seconds) for seconds in (mesh.link.seconds(sent), summing))
        return
    kinds = [*(axis.kind for axis in mesh.axes), Kind.GRADIENTS]
    for kind, seconds in zip(kinds, [*moved, summing], strict=True):
        yield (mesh.sums_kind if kind is Kind.GRADIENTS else kind).value, seconds
