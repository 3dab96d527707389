"""What the links between ranks carry: collectives by size, and the latency and bandwidth that they fit.

In:   the axis of the ranks of a node, or of ranks on different nodes.
Out:  seconds by method and size; a latency, a bandwidth, and the share of it that is reached by size.
Must hold: several run in a row, on the streams that training uses, since a single one can look faster than the link is;
the fastest rank counts, as the others only wait for the last to arrive.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hf_helix.measure.timing import ISSUING_SLOWEST, hold
from hf_helix.operators.communication.transport import Axis, bytes_moved
from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.streams import Streams
from hf_helix.simulation.section import MOST_EFFICIENT

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
