"""Times of sums of gradients.

In:   a runner without gradients.
Out:  seconds and bytes of the sums of this rank, by the names of a profile.
Must hold: they are issued by the reduction that training uses, on its stream, with gradients of the types of training.
Of all sums the smallest and the largest are timed, and the others lie between by their bytes: a sum takes a latency
and so much a byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from hf_helix.measure.overlap import forget_gradients
from hf_helix.measure.timing import ISSUING, ISSUING_SLOWEST, hold, time_repeats
from hf_helix.operators.zero.zero1 import Zero1FlatParameter
from hf_helix.planning.graph.backward import SEND
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.window.layout import Name, named_gathers, named_reductions
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.gradients.buckets import Bucket
from hf_helix.runtime.gradients.reduce import GradientReduction
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner

LEAST = 1e-7
"""Seconds of a sum of nothing; times are positive."""


def time_reductions(runner: Runner, repeats: int) -> tuple[dict[Name, list[float]], dict[Name, int]]:
    """Returns the seconds of every sum of this rank, repeat by repeat, and the bytes that it sends. Collective.

    Args:
        runner: a runner; its parameters have no gradients.
        repeats: how often a sum runs in a row; the first run warms up.
    """
    layout, names = runner.layout, [name for name, _ in named_reductions(runner.layout)]
    held = {names[number]: layout.reductions[number].bytes for number in layout.reductions_of(runner.stage.rank)}
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
        GradientReduction([bucket], runner.mesh, streams).finish()

    issuing = ISSUING_SLOWEST + ISSUING * len(bucket.placements)  # their gradients are made, and moved
    try:
        return time_repeats(streams, repeat, repeats, issuing)
    finally:
        forget_gradients(runner)


def _most_copies(bucket: Bucket, mesh: Mesh) -> int:
    """How many ranks add to a gradient of the bucket at most."""
    groups = [mesh.replica_group_of(placement) for placement in bucket.placements.values()]
    return max(dist.get_world_size(group) for group in groups if group is not None)


# -- transfer times ------------------------------------------------------------------------------------------------
# Times of the transfers of a pipeline.
#
# In:   a runner on a rank of a pipeline, and a micro-batch.
# Out:  seconds and bytes of what this rank sends; what arrives takes no time of its own.
# Must hold: ranks go through the ways of the pipeline in the same order, so that both ends of each are there.


ARRIVAL = 1e-6  # seconds: what another rank sends takes the time of the sender


def time_transfers(runner: Runner, batch: MicroBatch, repeats: int) -> tuple[dict[Name, list[float]], dict[Name, int]]:
    """Returns the seconds and the bytes of the transfers of this rank. Collective.

    The boundaries of the pipeline take turns; each is crossed `repeats` times forward, then `repeats` times back.

    Args:
        runner: a runner of the pipeline.
        batch: the micro-batch whose shapes the values have.
        repeats: how often each transfer runs in a row; the first run warms up.
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
            times = time_train(runner, move, operator.lane(Part.F if forward else Part.B), repeats)
            name = runner.layout.units[index], f"{'F' if forward else 'B'}.transfer"
            seconds.setdefault(name, []).extend(times[1:] if sends else [ARRIVAL])
            if sends:
                sent[name] = sum(value.nbytes for value in values)
    return seconds, sent


def time_train(runner: Runner, move: Callable[[], object], lane: str, repeats: int) -> list[float]:
    """Returns the seconds of a transfer that runs several times in a row on its stream.

    Args:
        runner: whose streams are used.
        move: this rank's end of the transfer.
        lane: the queue of the transfer on that stream.
        repeats: how often it runs.
    """
    streams = runner.executor.streams
    streams.synchronize()
    with streams.tracing() as trace:
        hold(streams, repeats * ISSUING_SLOWEST)
        for event in [streams.issue(Kind.PIPELINE, move, (), "transfer", lane) for _ in range(repeats)]:
            streams.wait(event)
    return [span.seconds for span in sorted(trace.spans, key=lambda span: span.start)]


# -- gather times --------------------------------------------------------------------------------------------------
# Times of gathers of weights, of which a window has each once.
#
# In:   a runner.
# Out:  seconds and bytes of the gathers of this rank, by the names of a profile.
# Must hold: what is timed is the work that windows issue, on its stream. Of gathers of one length one is timed.


def time_gathers(runner: Runner, repeats: int) -> tuple[dict[Name, list[float]], dict[Name, int]]:
    """Returns the seconds of every gather of this rank, repeat by repeat, and the bytes that it sends. Collective.

    Args:
        runner: a runner.
        repeats: how often a gather runs in a row; the first run warms up.
    """
    layout, names = runner.layout, [name for name, _ in named_gathers(runner.layout)]
    known: dict[tuple[object, int], list[float]] = {}
    seconds: dict[Name, list[float]] = {}
    sent: dict[Name, int] = {}
    for number in layout.gathers_of(runner.stage.rank):
        gather = layout.gathers[number]
        flat = runner.stage.model[gather.units[0]].flat_parameters[gather.name]
        assert isinstance(flat, Zero1FlatParameter)
        length = flat.gather_axis, flat.buffer.nbytes
        if length not in known:
            known[length] = _time_gather(runner, flat, repeats)
        seconds[names[number]] = known[length]
        sent[names[number]] = flat.buffer.nbytes // flat.gather_axis.size * (flat.gather_axis.size - 1)
    return seconds, sent


def _time_gather(runner: Runner, flat: Zero1FlatParameter, repeats: int) -> list[float]:
    """The seconds of a gather on its stream, without the first."""
    streams = runner.executor.streams

    def repeat() -> None:
        streams.wait(streams.issue(flat.reduce_axis.kind, flat.refresh(), (), flat.name))

    return time_repeats(streams, repeat, repeats, ISSUING_SLOWEST)
