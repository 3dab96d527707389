"""Links between ranks: collectives by size, slowdowns of computation and communication, skew at collectives.

In:   the axis of the ranks of a node, or of ranks on different nodes; the streams of training.
Out:  seconds by method and size, and the fitted link; slowdowns by kinds and bytes; the seconds of waiting.
Must hold: of collectives the fastest rank counts, since the other ranks only wait for the last to arrive; of
computation the mean over ranks counts. Works are timed alone and together in turn, for about the same time, since the
speed of a shared machine varies from second to second.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_helix.measure.device import decoder_work
from hf_helix.measure.timing import ISSUING_SLOWEST, MOST, Work, record, time_in_a_row
from hf_helix.operators.communication.transport import Axis, bytes_moved
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import MOST_EFFICIENT, contention_key
from hf_helix.planning.timing.profile import slowdown_of
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.streams import Streams

METHODS = ("all_gather", "exchange", "shift")

SIZES = tuple(4**power for power in range(4, 14))  # bytes of a rank's value, from 256 to 64 Mi
IN_A_ROW, ROUNDS = 4, 6  # collectives in a row, of which the first warms up; repeats of the row
LONGEST = 0.1  # seconds of a collective after which no larger collective is tried
BYTES = {"cpu": (1 << 16, 1 << 18, 1 << 20, 1 << 22), "cuda": (1 << 20, 1 << 24, 1 << 27)}
"""Bytes of a rank's value during computation: small collectives cost computation more of their own time."""

SECONDS = {"cpu": 0.1, "cuda": 0.02}  # seconds for which each of two kinds runs concurrently with the other
SKEW_ROUNDS = 12

MEETINGS = {"cpu": 1 << 16, "cuda": 1 << 20}  # bytes of a rank's value where ranks meet
APART = (0.5, 1.0, 2.0)
"""Sides of the products that ranks compute before they meet, as factors: eight times the work from each to the next."""


@dataclass(frozen=True)
class TimedCollective:
    """A timed collective, with the bytes and the messages that a rank sends."""

    method: str
    bytes: int
    messages: int
    seconds: float


def measure_link(axis: Axis, streams: Streams, device: torch.device) -> list[TimedCollective]:
    """Returns the times of the collectives of an axis, by method and size. Collective."""
    rows = []
    for method in METHODS:
        for size in SIZES:
            work, sent = _collective(axis, method, size, device)
            seconds = _collective_seconds(streams, axis.kind, work)
            messages = 1 if method == "shift" else axis.size - 1
            rows.append(TimedCollective(method, sent, messages, seconds))
            if seconds > LONGEST:
                break
    return rows


def _collective(axis: Axis, method: str, size: int, device: torch.device) -> tuple[Callable[[], None], int]:
    """A collective of a rank's `size` bytes, and the bytes sent by this rank."""
    elements = max(axis.size, size // 4 // axis.size * axis.size)
    value = torch.zeros(elements, device=device)
    out = torch.zeros(elements * axis.size if method == "all_gather" else elements, device=device)
    run = getattr(axis.transport, method)
    return (lambda: run(out, value)), bytes_moved(method, out, value, axis.size, axis.rank)[0]


def _collective_seconds(streams: Streams, kind: Kind, work: Work) -> float:
    """The median of the fastest rank, several collectives in a row. Collective."""
    seconds: list[float] = []
    for _ in range(ROUNDS):
        all_gather_object(None)  # so that all ranks start together
        seconds += time_in_a_row(streams, kind, work, IN_A_ROW)[1:]
    return min(all_gather_object(statistics.median(seconds)))


def link_entry(timed: Sequence[TimedCollective], sharing: int = 1) -> dict[str, Any]:
    """Returns the entry of a cluster file for a link, fitted to times of collectives."""
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
    return {
        "gb_per_s": short(bandwidth / 1e9),
        "latency_us": short(latency * 1e6),
        "efficiency": [[short(size), short(rate / bandwidth)] for size, rate in points],
    }


def short(number: float) -> float:
    """Returns a number with the four digits of cluster files."""
    return float(f"{number:.4g}")


# -- computation concurrently with communication ---------------------------------------------------------------------


def measure_contention(
    axes: Mapping[Kind, Axis], streams: Streams, device: torch.device
) -> dict[str, list[tuple[int, float]]]:
    """Returns slowdowns, by the keys of a cluster file and by the bytes sent by a rank, for the axes of a node and of
    the network. Collective."""
    factors: dict[str, list[tuple[int, float]]] = {}
    compute = decoder_work(device)
    for size in BYTES[device.type]:
        works: dict[Kind, Work] = {Kind.COMPUTE: compute}
        sent: dict[Kind, int] = {}
        for kind, axis in axes.items():
            works[kind], sent[kind] = _collective(axis, "all_gather", size, device)
        counts = {kind: _count(streams, kind, work, device) for kind, work in works.items()}
        for first, second in itertools.combinations(works, 2):
            slow = _slowdowns(streams, {kind: works[kind] for kind in (first, second)}, counts)
            for (kind, other), factor in zip(((first, second), (second, first)), slow, strict=True):
                points = factors.setdefault(contention_key(kind, other), [])
                points.append((sent.get(kind) or sent[other], factor))
    return factors


def _count(streams: Streams, kind: Kind, work: Work, device: torch.device) -> int:
    """The repeats of a work that take `SECONDS`. Collective."""
    _run(streams, {kind: work}, {kind: 2})
    (seconds,) = _run(streams, {kind: work}, {kind: 4})
    return max(1, min(MOST, round(SECONDS[device.type] / (max(all_gather_object(seconds)) / 4))))


def _slowdowns(streams: Streams, works: Mapping[Kind, Work], counts: Mapping[Kind, int]) -> tuple[float, float]:
    """The slowdowns of two concurrent works. Collective."""
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
    """The seconds of each kind, all repeats of all works started together. Collective."""

    def issue() -> None:
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

    all_gather_object(None)
    spans = record(streams, issue, sum(counts[kind] for kind in works) * ISSUING_SLOWEST)
    return [sum(span.seconds for span in spans if span.label == kind.value) for kind in works]


# -- skew at collectives ---------------------------------------------------------------------------------------------


def measure_waiting(axis: Axis, streams: Streams, device: torch.device) -> float:
    """Returns the seconds that ranks wait for each other at a collective after a second of computation. Collective.

    The same computation takes another time on every rank, and a collective begins when the last rank arrives. So

        computation, collective, computation, collective, ...

    takes longer than all computations in a row and all collectives in a row: longer by a time that grows as the root
    of the computation, where disturbances of a rank come by chance.
    """
    meet, _ = _collective(axis, "all_gather", MEETINGS[device.type], device)
    waits = []
    for apart in APART:
        compute = decoder_work(device, apart)
        chains: list[list[tuple[Kind, Work]]] = [[(Kind.COMPUTE, compute)], [(axis.kind, meet)]]
        chains.append([*chains[0], *chains[1]])
        once = max(all_gather_object(_chain_seconds(streams, chains[0], 2) / 2))
        count = max(2, min(MOST, round(SECONDS[device.type] / once)))
        rows = [[_chain_seconds(streams, chain, count) for chain in chains] for _ in range(SKEW_ROUNDS)]
        alone, meeting, turns = (sum(column) / (SKEW_ROUNDS * count) for column in zip(*rows, strict=True))
        waits.append(max(all_gather_object((turns - meeting - alone) / math.sqrt(alone))))
    return max(0.0, statistics.fmean(waits))


def _chain_seconds(streams: Streams, chain: Sequence[tuple[Kind, Work]], count: int) -> float:
    """The seconds of `count` repeats of a chain, in which every work waits for the work before. Collective."""

    def issue() -> None:
        for _ in range(count):
            for kind, work in chain:
                if kind.communicates:
                    streams.wait(streams.issue(kind, work, (), kind.value))
                else:
                    streams.compute(work, kind.value)

    all_gather_object(None)
    spans = record(streams, issue, len(chain) * count * ISSUING_SLOWEST)
    return max(span.end for span in spans) - min(span.start for span in spans)
