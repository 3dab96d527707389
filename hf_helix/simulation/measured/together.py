"""What computation and communication cost each other: how many times longer each takes beside the other.

In:   the axes of a machine and what computes.
Out:  slowdowns by kinds, as a cluster file names them.
Must hold: both run on the streams that training uses, for about the same time; of computation the slowest rank counts,
of communication the fastest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

from hf_helix.operators.communication.transport import Axis
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.profile import slowdown_of
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.streams import Streams
from hf_helix.runtime.trace import Trace
from hf_helix.simulation.cluster import contention_key
from hf_helix.simulation.measured.device import decoder_work
from hf_helix.simulation.measured.links import collective
from hf_helix.tuning.measure.timing import ISSUING_SLOWEST, hold

Work = Callable[[], object]
Pair = tuple[Kind, Kind]

BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}
"""Of what a rank sends in a collective."""

SECONDS = {"cpu": 0.1, "cuda": 0.02}
"""That each of two kinds runs beside the other."""

ROUNDS, MOST = 5, 64


def measure_contention(axes: Mapping[Kind, Axis], streams: Streams, device: torch.device) -> dict[str, float]:
    """Returns how many times longer the first kind takes beside the second, by the keys of a cluster file. Collective.

    Args:
        axes: of the ranks of a node, and of ranks on different nodes, as far as there are any.
        streams: that all of it runs on.
        device: that the values are on.
    """
    works: dict[Kind, Work] = {Kind.COMPUTE: decoder_work(device)}
    works |= {kind: collective(axis, "all_gather", BYTES[device.type], device)[0] for kind, axis in axes.items()}
    alone = {kind: _alone(streams, kind, work) for kind, work in works.items()}
    kinds = list(works)
    found = {}
    for place, first in enumerate(kinds):
        for second in kinds[place + 1 :]:
            counts = [max(1, min(MOST, round(SECONDS[device.type] / alone[kind]))) for kind in (first, second)]
            slow = _beside(streams, {kind: works[kind] for kind in (first, second)}, counts, alone)
            found[contention_key(first, second)] = slow[0]
            found[contention_key(second, first)] = slow[1]
    return found


def _alone(streams: Streams, kind: Kind, work: Work) -> float:
    _run(streams, {kind: work}, [2])
    found = [_run(streams, {kind: work}, [4])[0] / 4 for _ in range(ROUNDS)]
    return _agreed(kind, statistics.median(found))


def _beside(
    streams: Streams, works: Mapping[Kind, Work], counts: list[int], alone: Mapping[Kind, float]
) -> tuple[float, float]:
    rows = [_run(streams, works, counts) for _ in range(ROUNDS)]
    a, b = (
        _agreed(kind, statistics.median(column)) for kind, column in zip(works, zip(*rows, strict=True), strict=True)
    )
    first, second = (count * alone[kind] for kind, count in zip(works, counts, strict=True))
    return slowdown_of(first, a, b), slowdown_of(second, b, a)


def _agreed(kind: Kind, mine: float) -> float:
    return (max if kind is Kind.COMPUTE else min)(all_gather_object(mine))


def _run(streams: Streams, works: Mapping[Kind, Work], counts: list[int]) -> list[float]:
    """The seconds that each kind of work runs in all, all of them started together. Collective."""
    all_gather_object(None)
    streams.trace = trace = Trace()
    try:
        hold(streams, sum(counts) * ISSUING_SLOWEST)
        pairs = [(kind, work, count) for (kind, work), count in zip(works.items(), counts, strict=True)]
        events = [
            streams.issue(kind, work, (), kind.value)
            for kind, work, count in pairs
            if kind.communicates
            for _ in range(count)
        ]
        for kind, work, count in pairs:
            for _ in range(0 if kind.communicates else count):
                streams.compute(work, kind.value)
        for event in events:
            streams.wait(event)
        streams.synchronize()
    finally:
        streams.trace = None
    return [sum(span.seconds for span in trace.spans if span.label == kind.value) for kind in works]
