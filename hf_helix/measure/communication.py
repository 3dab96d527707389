"""Times of the communication of a window that belongs to no layer: gradient reductions, weight gathers, transfers.

In:   a runner without gradients; for transfers a micro-batch, whose shapes the values have.
Out:  by the names of a profile, the seconds of every repeat on this rank, and the bytes that this rank sends.
Must hold: communication is issued by the code that training uses, on its stream. Gradients have the types of training.
Ranks cross the boundaries of the pipeline in the same order, so that both ends of a transfer are there.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from hf_helix.measure.overlap import forget_gradients
from hf_helix.measure.timing import ISSUING, ISSUING_SLOWEST, time_gradient_stream, time_in_a_row
from hf_helix.operators.zero.zero1 import Zero1FlatParameter
from hf_helix.planning.graph.backward import SEND
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.window.layout import Name, named_gathers, named_reductions
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.gradients.buckets import Bucket
from hf_helix.runtime.gradients.reduce import GradientReducer
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner

SHORTEST = 1e-7
"""Seconds of a reduction of nothing; times are positive."""

ARRIVAL = 1e-6
"""Seconds of a receive: a transfer takes the time of its sender."""

Times = tuple[dict[Name, list[float]], dict[Name, int]]
"""By name, the seconds of every repeat, and the bytes that this rank sends."""


def time_reductions(runner: Runner, repeats: int) -> Times:
    """Returns the times of every gradient reduction of this rank. Collective.

    The smallest and the largest are timed. The others lie between by their bytes: a reduction takes a latency and a
    time per byte.
    """
    layout, names = runner.layout, [name for name, _ in named_reductions(runner.layout)]
    held = {names[number]: layout.reductions[number].bytes for number in layout.reductions_of(runner.stage.rank)}
    planned = [bucket for bucket in runner.buckets if bucket.is_planned]
    if not held or not planned:  # the user may have frozen everything here since the layout was made
        return {name: [SHORTEST] * (repeats - 1) for name in held}, dict.fromkeys(held, 0)
    small, large = (pick(planned, key=lambda bucket: bucket.bytes) for pick in (min, max))
    shortest, longest = (_time_reduction(runner, bucket, repeats) for bucket in (small, large))
    times = {}
    for name, count in held.items():
        share = (count - small.bytes) / max(1, large.bytes - small.bytes)
        seconds = ((1 - share) * first + share * second for first, second in zip(shortest, longest, strict=True))
        times[name] = [max(SHORTEST, each) for each in seconds]
    size = max(_num_replicas(bucket, runner.mesh) for bucket in planned)  # of a ring
    ways = 1 if all(bucket.flat is not None for bucket in planned) else 2  # sharded gradients do not come back
    return times, {name: ways * count * (size - 1) // size for name, count in held.items()}


def _time_reduction(runner: Runner, bucket: Bucket, repeats: int) -> list[float]:
    streams = runner.executor.streams

    def reduce() -> None:
        for parameter in bucket.placements:
            if parameter.grad is None:  # the first time, or again where the reduction leaves parts of it
                parameter.grad = torch.zeros_like(parameter)
        GradientReducer([bucket], runner.mesh, streams).finish()

    issuing = ISSUING_SLOWEST + ISSUING * len(bucket.placements)  # their gradients are made, and moved
    try:
        return time_gradient_stream(streams, reduce, repeats, issuing)
    finally:
        forget_gradients(runner)


def _num_replicas(bucket: Bucket, mesh: Mesh) -> int:
    """The largest number of ranks that add to a gradient of the bucket."""
    groups = [mesh.replica_group_of(placement) for placement in bucket.placements.values()]
    return max(dist.get_world_size(group) for group in groups if group is not None)


def time_gathers(runner: Runner, repeats: int) -> Times:
    """Returns the times of every weight gather of this rank. Collective.

    Of gathers of equal length the first is timed.
    """
    layout, names = runner.layout, [name for name, _ in named_gathers(runner.layout)]
    streams = runner.executor.streams
    known: dict[tuple[object, int], list[float]] = {}
    seconds: dict[Name, list[float]] = {}
    sent: dict[Name, int] = {}
    for number in layout.gathers_of(runner.stage.rank):
        gather = layout.gathers[number]
        flat = runner.stage.model[gather.units[0]].flat_parameters[gather.name]
        assert isinstance(flat, Zero1FlatParameter)

        def refresh(flat: Zero1FlatParameter = flat) -> None:
            streams.wait(streams.issue(flat.reduce_axis.kind, flat.refresh(), (), flat.name))

        length = flat.gather_axis, flat.buffer.nbytes
        if length not in known:
            known[length] = time_gradient_stream(streams, refresh, repeats, ISSUING_SLOWEST)
        seconds[names[number]] = known[length]
        sent[names[number]] = flat.buffer.nbytes // flat.gather_axis.size * (flat.gather_axis.size - 1)
    return seconds, sent


def time_transfers(runner: Runner, batch: MicroBatch, repeats: int) -> Times:
    """Returns the times of the pipeline transfers of this rank. Collective.

    The boundaries of the pipeline take turns; each is crossed `repeats` times forward, then `repeats` times back.
    """
    seconds: dict[Name, list[float]] = {}
    sent: dict[Name, int] = {}
    ends = {operator.boundary: (index, operator) for index, operator in runner.stage.transfers()}
    side = batch.prepare() if ends else {}
    for boundary in range(len(runner.layout.chunks) - 1):
        if boundary not in ends:
            continue
        index, operator = ends[boundary]
        outward = runner.layout.units[index] == SEND
        values = [value.zero_() for value in operator.make_buffers(side)]
        for forward in (True, False):
            sends = outward is forward
            move = functools.partial(operator.send if sends else operator.receive, values, forward)
            lane = operator.lane(Part.F if forward else Part.B)
            times = time_in_a_row(runner.executor.streams, Kind.PIPELINE, move, repeats, lane)
            name = runner.layout.units[index], f"{'F' if forward else 'B'}.transfer"
            seconds.setdefault(name, []).extend(times[1:] if sends else [ARRIVAL])
            if sends:
                sent[name] = sum(value.nbytes for value in values)
    return seconds, sent
