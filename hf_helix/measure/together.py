"""What computation and communication cost each other: how many times longer each takes beside the other, and what ranks
wait for each other where they meet.

In:   the axes of a machine and what computes.
Out:  slowdowns by kinds and by what is sent, as a cluster file names them; how long ranks wait at a collective.
Must hold: both run on the streams that training uses, for about the same time, alone and together in turn; of
computation the mean over ranks counts, of communication the fastest, as the others wait for the last to arrive.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from hf_helix.measure.device import decoder_work
from hf_helix.measure.links import collective
from hf_helix.measure.timing import ISSUING_SLOWEST, hold
from hf_helix.operators.communication.transport import Axis
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.profile import slowdown_of
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.streams import Streams
from hf_helix.simulation.cluster import contention_key

Work = Callable[[], object]
Pair = tuple[Kind, Kind]

BYTES = {"cpu": (1 << 16, 1 << 18, 1 << 20, 1 << 22), "cuda": (1 << 20, 1 << 24, 1 << 27)}
"""What a rank has in a collective, by the type of device: small ones cost what is beside them more of their time."""

SECONDS = {"cpu": 0.1, "cuda": 0.02}
"""That each of two kinds runs beside the other."""

ROUNDS, MOST = 12, 200

MEETINGS = {"cpu": 1 << 16, "cuda": 1 << 20}
"""Bytes of what a rank sends where ranks meet."""

APART = (0.5, 1.0, 2.0)
"""Sides of the products that ranks compute before they meet, in parts of the usual: eight times the work each."""


def measure_contention(
    axes: Mapping[Kind, Axis], streams: Streams, device: torch.device
) -> dict[str, list[tuple[int, float]]]:
    """Returns how many times longer the first kind takes beside the second, by the keys of a cluster file, and by the
    bytes that a rank sends in a collective. Collective.

    Args:
        axes: of the ranks of a node, and of ranks on different nodes, as far as there are any.
        streams: that all of it runs on.
        device: that the values are on.
    """
    factors: dict[str, list[tuple[int, float]]] = {}
    compute = decoder_work(device)
    for size in BYTES[device.type]:
        works: dict[Kind, Work] = {Kind.COMPUTE: compute}
        sent: dict[Kind, int] = {}
        for kind, axis in axes.items():
            works[kind], sent[kind] = collective(axis, "all_gather", size, device)
        counts = {kind: _count(streams, kind, work, device) for kind, work in works.items()}
        for first, second in itertools.combinations(works, 2):
            slow = _slowdowns(streams, {kind: works[kind] for kind in (first, second)}, counts)
            for (kind, other), factor in zip(((first, second), (second, first)), slow, strict=True):
                points = factors.setdefault(contention_key(kind, other), [])
                points.append((sent.get(kind) or sent[other], factor))
    return factors


def measure_waiting(axis: Axis, streams: Streams, device: torch.device) -> float:
    """Returns the seconds that ranks wait for each other at a collective behind a second of computation. Collective.

    The same computation does not take the same time on every rank, nor every time, and a collective begins when the
    last rank arrives. So a chain in which they take turns takes longer than both of them alone; by as much more as the
    root of the computation, where what disturbs a rank comes by chance.

    Args:
        axis: whose ranks all take part.
        streams: that all of it runs on.
        device: that the values are on.
    """
    meet, _ = collective(axis, "all_gather", MEETINGS[device.type], device)
    waits = []
    for apart in APART:
        compute = decoder_work(device, apart)
        chains: list[list[tuple[Kind, Work]]] = [[(Kind.COMPUTE, compute)], [(axis.kind, meet)]]
        chains.append([*chains[0], *chains[1]])
        once = max(all_gather_object(_chain(streams, chains[0], 2) / 2))
        count = max(2, min(MOST, round(SECONDS[device.type] / once)))
        rows = [[_chain(streams, chain, count) for chain in chains] for _ in range(ROUNDS)]
        alone, meeting, turns = (sum(column) / (ROUNDS * count) for column in zip(*rows, strict=True))
        waits.append(max(all_gather_object((turns - meeting - alone) / math.sqrt(alone))))
    return max(0.0, statistics.fmean(waits))


def _chain(streams: Streams, chain: Sequence[tuple[Kind, Work]], count: int) -> float:
    """Seconds of works that wait for one another, so many times in a row. Collective."""
    all_gather_object(None)
    hold(streams, len(chain) * count * ISSUING_SLOWEST)
    with streams.tracing() as trace:
        for _ in range(count):
            for kind, work in chain:
                if kind.communicates:
                    streams.wait(streams.issue(kind, work, (), kind.value))
                else:
                    streams.compute(work, kind.value)
    return max(span.end for span in trace.spans) - min(span.start for span in trace.spans)


def _count(streams: Streams, kind: Kind, work: Work, device: torch.device) -> int:
    """How often a work is repeated so that it takes `SECONDS`. Collective."""
    _run(streams, {kind: work}, {kind: 2})
    (seconds,) = _run(streams, {kind: work}, {kind: 4})
    return max(1, min(MOST, round(SECONDS[device.type] / (max(all_gather_object(seconds)) / 4))))


def _slowdowns(streams: Streams, works: Mapping[Kind, Work], counts: Mapping[Kind, int]) -> tuple[float, float]:
    """How many times longer each of two works takes beside the other: alone and together in turn, as a machine that
    others share is not as fast in every second. Collective."""
    rows = []
    for _ in range(ROUNDS):
        alone = [seconds for kind, work in works.items() for seconds in _run(streams, {kind: work}, counts)]
        rows.append([*alone, *_run(streams, works, counts)])
    kinds = [*works, *works]
    first, second, a, b = (
        _agreed(kind, statistics.fmean(column)) for kind, column in zip(kinds, zip(*rows, strict=True), strict=True)
    )
    return slowdown_of(first, a, b), slowdown_of(second, b, a)


def _agreed(kind: Kind, mine: float) -> float:
    values = all_gather_object(mine)
    return min(values) if kind.communicates else statistics.fmean(values)


def _run(streams: Streams, works: Mapping[Kind, Work], counts: Mapping[Kind, int]) -> list[float]:
    """The seconds that each kind of work runs in all, all of them started together. Collective."""
    all_gather_object(None)
    with streams.tracing() as trace:
        hold(streams, sum(counts[kind] for kind in works) * ISSUING_SLOWEST)
        events = [
            streams.issue(kind, work, (), kind.value)
            for kind, work in works.items()
            if kind.communicates
            for _ in range(counts[kind])
        ]
        for kind, work in works.items():
            for _ in range(0 if kind.communicates else counts[kind]):
                streams.compute(work, kind.value)
        for event in events:
            streams.wait(event)
    return [sum(span.seconds for span in trace.spans if span.label == kind.value) for kind in works]
