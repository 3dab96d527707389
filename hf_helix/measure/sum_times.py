"""Times of sums of gradients.

In:   a runner without gradients.
Out:  seconds and bytes of the sums of this rank, by the names of a profile.
Must hold: they are issued by the reduction that training uses, on its stream, with gradients of the types of training.
Of all sums the smallest and the largest are timed, and the others lie between by their bytes: a sum takes a latency
and so much a byte.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_helix.measure.overlap import forget_gradients
from hf_helix.measure.timing import ISSUING, ISSUING_SLOWEST, time_repeats
from hf_helix.planning.profile import Name, named_sums
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.gradients.buckets import Bucket
from hf_helix.runtime.gradients.reduce import Reduction
from hf_helix.runtime.runner import Runner

LEAST = 1e-7
"""Seconds of a sum of nothing; times are positive."""


def time_sums(runner: Runner, repeats: int) -> tuple[dict[Name, list[float]], dict[Name, int]]:
    """Returns the seconds of every sum of this rank, repeat by repeat, and the bytes that it sends. Collective.

    Args:
        runner: a runner; its parameters have no gradients.
        repeats: how often a sum runs in a row; the first run warms up.
    """
    layout, names = runner.layout, [name for name, _ in named_sums(runner.layout)]
    held = {names[number]: layout.sums[number].bytes for number in layout.sums_of(runner.stage.rank)}
    planned = [bucket for bucket in runner.buckets if bucket.is_planned]
    if not held or not planned:  # the user may have frozen everything here since the layout was made
        return {name: [LEAST] * (repeats - 1) for name in held}, dict.fromkeys(held, 0)
    small, large = (pick(planned, key=lambda bucket: bucket.bytes) for pick in (min, max))
    least, most = (_time(runner, bucket, repeats) for bucket in (small, large))
    times = {}
    for name, count in held.items():
        share = (count - small.bytes) / max(1, large.bytes - small.bytes)
        seconds = ((1 - share) * first + share * second for first, second in zip(least, most, strict=True))
        times[name] = [max(LEAST, each) for each in seconds]
    size = max(_most_copies(bucket, runner.mesh) for bucket in planned)  # of a ring
    ways = 1 if all(bucket.flat is not None for bucket in planned) else 2  # spread gradients do not come back
    return times, {name: ways * count * (size - 1) // size for name, count in held.items()}


def _time(runner: Runner, bucket: Bucket, repeats: int) -> list[float]:
    """The seconds of a sum on its stream, without the first."""
    streams = runner.executor.streams

    def repeat() -> None:
        for parameter in bucket.placements:
            if parameter.grad is None:  # the first time, or again where the sum leaves parts of it
                parameter.grad = torch.zeros_like(parameter)
        Reduction([bucket], runner.mesh, streams).finish()

    issuing = ISSUING_SLOWEST + ISSUING * len(bucket.placements)  # their gradients are made, and moved
    try:
        return time_repeats(streams, repeat, repeats, issuing)
    finally:
        forget_gradients(runner)


def _most_copies(bucket: Bucket, mesh: Mesh) -> int:
    """How many ranks add to a gradient of the bucket at most."""
    groups = [mesh.copies_of(placement) for placement in bucket.placements.values()]
    return max(dist.get_world_size(group) for group in groups if group is not None)
