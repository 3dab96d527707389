"""What the links between ranks carry: collectives by size, and the latency and bandwidth that they fit.

In:   the axis of the ranks of a node, or of ranks on different nodes.
Out:  seconds by method and size; a latency, a bandwidth, and the share of it that is reached by size.
Must hold: several run in a row, on the streams that training uses, since a single one can look faster than the link is;
the fastest rank counts, as the others only wait for the last to arrive.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_helix.measure.device import decoder_work
from hf_helix.measure.timing import ISSUING_SLOWEST, hold
from hf_helix.operators.communication.transport import Axis, bytes_moved
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.profile import slowdown_of
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.streams import Streams
from hf_helix.simulation.cluster import MOST_EFFICIENT, contention_key

METHODS = ("all_gather", "exchange", "shift")

SIZES = tuple(4**power for power in range(4, 14))
"""Bytes of what a rank has, from 256 to 64 Mi."""

TRAIN, ROUNDS = 4, 6
"""How many run in a row, of which the first warms up; how often that is repeated."""

LONGEST = 0.1
"""Seconds of one of them after which no larger one is tried."""


@dataclass(frozen=True)
class TimedCollective:
    """A collective that was timed.

    Attributes:
        method: of the transport.
        bytes: that a rank sends in it.
        messages: that a rank sends, one after the other.
        seconds: that it takes.
    """

    method: str
    bytes: int
    messages: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A link as a cluster file describes it.

    Attributes:
        bandwidth: bytes a second.
        latency: seconds of a message.
        efficiency: (bytes of a message, share of the bandwidth).
    """

    bandwidth: float
    latency: float
    efficiency: Sequence[tuple[float, float]]


def measure_link(axis: Axis, streams: Streams, device: torch.device) -> list[TimedCollective]:
    """Returns what collectives over an axis take, by method and size. Collective.

    Args:
        axis: whose ranks all take part.
        streams: that they run on.
        device: that the values are on.
    """
    rows = []
    for method in METHODS:
        for size in SIZES:
            work, sent = collective(axis, method, size, device)
            seconds = train_seconds(streams, axis.kind, work)
            messages = 1 if method == "shift" else axis.size - 1
            rows.append(TimedCollective(method, sent, messages, seconds))
            if seconds > LONGEST:
                break
    return rows


def collective(axis: Axis, method: str, size: int, device: torch.device) -> tuple[Callable[[], None], int]:
    """Returns a collective, and the bytes that this rank sends in it.

    Args:
        axis: over whose ranks it goes.
        method: of its transport.
        size: bytes of what a rank has.
        device: that the values are on.
    """
    elements = max(axis.size, size // 4 // axis.size * axis.size)
    value = torch.zeros(elements, device=device)
    out = torch.zeros(elements * axis.size if method == "all_gather" else elements, device=device)
    run = getattr(axis.transport, method)
    return (lambda: run(out, value)), bytes_moved(method, out, value, axis.size, axis.rank)[0]


def train_seconds(streams: Streams, kind: Kind, work: Callable[[], object]) -> float:
    """Returns the seconds of one of several collectives in a row: the median of the fastest rank. Collective.

    Args:
        streams: that it runs on.
        kind: the stream.
        work: the collective.
    """
    seconds: list[float] = []
    for _ in range(ROUNDS):
        all_gather_object(None)  # so that all ranks start together
        with streams.tracing() as trace:
            hold(streams, TRAIN * ISSUING_SLOWEST)
            for event in [streams.issue(kind, work, (), "collective") for _ in range(TRAIN)]:
                streams.wait(event)
        seconds += [span.seconds for span in sorted(trace.spans, key=lambda span: span.start)[1:]]
    return min(all_gather_object(statistics.median(seconds)))


def fit(timed: Sequence[TimedCollective], sharing: int = 1) -> Fit:
    """Returns the latency and the bandwidth that times of collectives fit.

    Args:
        timed: of several methods and sizes.
        sharing: how many groups of ranks send the same over the link at once.
    """
    smallest = [min((each for each in timed if each.method == name), key=lambda each: each.bytes) for name in METHODS]
    latency = statistics.median(each.seconds / each.messages for each in smallest)
    most = max(each.bytes // each.messages for each in timed)
    rates: dict[int, list[float]] = {}
    for each in timed:
        size, carrying = each.bytes // each.messages, each.seconds - each.messages * latency
        if carrying > 0.3 * each.seconds or size == most:  # else nearly all of it is latency, and noise
            carrying = max(carrying, 0.3 * each.seconds)
            rates.setdefault(sharing * size, []).append(sharing * each.bytes / carrying)
    points = sorted((size, statistics.fmean(values)) for size, values in rates.items())
    # The largest messages tell most of the bandwidth; the latency hardly counts in them.
    bandwidth = max(points[-1][1], max(rate for _, rate in points) / MOST_EFFICIENT)
    return Fit(bandwidth, latency, [(size, rate / bandwidth) for size, rate in points])


# -- together ------------------------------------------------------------------------------------------------------
# What computation and communication cost each other: how many times longer each takes beside the other, and what
# ranks
# wait for each other where they meet.
#
# In:   the axes of a machine and what computes.
# Out:  slowdowns by kinds and by what is sent, as a cluster file names them; how long ranks wait at a collective.
# Must hold: both run on the streams that training uses, for about the same time, alone and together in turn; of
# computation the mean over ranks counts, of communication the fastest, as the others wait for the last to arrive.


Work = Callable[[], object]
Pair = tuple[Kind, Kind]

BYTES = {"cpu": (1 << 16, 1 << 18, 1 << 20, 1 << 22), "cuda": (1 << 20, 1 << 24, 1 << 27)}
"""What a rank has in a collective, by the type of device: small ones cost what is beside them more of their time."""

SECONDS = {"cpu": 0.1, "cuda": 0.02}
"""That each of two kinds runs beside the other."""

SKEW_ROUNDS, MOST = 12, 200

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
        rows = [[_chain(streams, chain, count) for chain in chains] for _ in range(SKEW_ROUNDS)]
        alone, meeting, turns = (sum(column) / (SKEW_ROUNDS * count) for column in zip(*rows, strict=True))
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
    for _ in range(SKEW_ROUNDS):
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
