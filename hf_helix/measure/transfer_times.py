"""Times of the transfers of a pipeline.

In:   a runner on a rank of a pipeline, and a micro-batch.
Out:  seconds and bytes of what this rank sends; what arrives takes no time of its own.
Must hold: ranks go through the ways of the pipeline in the same order, so that both ends of each are there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from hf_helix.measure.timing import ISSUING_SLOWEST, hold
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.graph.pair import SEND
from hf_helix.planning.profile import Name
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner

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
