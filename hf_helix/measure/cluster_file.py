"""The cluster file of this machine, measured.

In:   the ranks that a launcher started, or a single process; perhaps an emulated link.
Out:  the content of a cluster file, the same on every rank.
Must hold: ranks with the same host name share a node; the file has the date and the machine of the measurement. Of
collectives the fastest rank counts, since the other ranks only wait for the last to arrive; of computation the mean
over ranks counts. Works are timed by themselves and together in turn, for about the same time, since the speed of a
shared machine varies from second to second.
"""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hf_helix.config import HelixConfig, parse_link
from hf_helix.measure.device import (
    CPU_BLOCK,
    GPU_BLOCK,
    Points,
    attention_work,
    decoder_work,
    measure_attention,
    measure_calls,
    measure_exponentials,
    measure_memory,
    measure_products,
)
from hf_helix.measure.machine import describe_device, device_in_clusters
from hf_helix.measure.progress import StageProgress
from hf_helix.measure.timing import ISSUING_SLOWEST, MOST, Stopwatch, Work, issue_together, record, time_in_a_row
from hf_helix.operators.communication.transport import Axis, bytes_moved
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import MOST_EFFICIENT, contention_key, load_cluster, shipped_clusters
from hf_helix.planning.timing.profile import slowdown_of
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.distributed.groups import backend_of, host_name
from hf_helix.runtime.distributed.mesh import Mesh, mesh_of, world_size
from hf_helix.runtime.streams.streams import Streams, make_streams
from hf_helix.version import __version__

# -- links -----------------------------------------------------------------------------------------------------------

METHODS = ("all_gather", "exchange", "shift")

SIZES = tuple(4**power for power in range(4, 14))  # bytes of a rank's value, from 256 to 64 Mi
IN_A_ROW, ROUNDS = 4, 6  # collectives in a row, of which the first warms up; repeats of the row
LONGEST = 0.1  # seconds of a collective after which no larger collective is tried
BYTES = {"cpu": (1 << 16, 1 << 18, 1 << 20, 1 << 22), "cuda": (1 << 20, 1 << 24, 1 << 27)}
"""Bytes of a rank's value during computation: small collectives cost computation more of their own time."""

SECONDS = {"cpu": 0.1, "cuda": 0.02}  # seconds for which each of two kinds runs concurrently with the other
SKEW_ROUNDS = 12

MEETINGS = {"cpu": 1 << 16, "cuda": 1 << 20}  # bytes of a rank's value in a meeting of ranks
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
    together = [(kind, work, kind.value) for kind, work in works.items() for _ in range(counts[kind])]
    all_gather_object(None)
    spans = record(streams, lambda: issue_together(streams, together), len(together) * ISSUING_SLOWEST)
    return [sum(span.seconds for span in spans if span.label == kind.value) for kind in works]


# -- skew at collectives ---------------------------------------------------------------------------------------------


def measure_waiting(axis: Axis, streams: Streams, device: torch.device) -> float:
    """Returns the seconds that ranks wait for each other at a collective after a second of computation. Collective.

    The same computation takes another time on every rank, and a collective begins when the last rank arrives. So

        computation, collective, computation, collective, ...

    takes longer than all computations in a row and all collectives in a row: longer by a time that grows as the root
    of the computation, since disturbances of a rank come by chance.
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
                issue_together(streams, [(kind, work, kind.value)])

    all_gather_object(None)
    spans = record(streams, issue, len(chain) * count * ISSUING_SLOWEST)
    return max(span.end for span in spans) - min(span.start for span in spans)


# -- the file --------------------------------------------------------------------------------------------------------

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

BUDGET = {"cpu": 0.1, "cuda": 0.05}  # seconds for the repeats of each work
FRAGMENTS = 1e9  # bytes of a GPU that stay free, since its allocator leaves gaps


def measure_cluster(
    device: torch.device, link: str | None = None, progress: StageProgress | None = None
) -> dict[str, Any]:
    """Returns the content of a cluster file of this machine, or of an emulated link. Collective. Raises ValueError if
    nodes have different numbers of ranks, or the ranks of a node do not follow each other."""
    if link is not None and parse_link(link).rate is None:
        raise ValueError(f"link={link!r} has no rate to describe; give one, such as '300mbit' or '10gbit,50us'")
    started = time.perf_counter()
    nodes, per_node = count_nodes(all_gather_object(host_name()))
    show = progress or (lambda stage, share: None)
    data: dict[str, Any] = {"name": "", "nodes": nodes, "devices_per_node": per_node}
    data["backend"] = backend_of(device) if dist.is_initialized() else ("nccl" if device.type == "cuda" else "gloo")
    data["device"] = measure_device(device, per_node, show)
    notes = {}
    if world_size() > 1:
        mesh = mesh_of(HelixConfig(tp_size=per_node, cp_size=nodes, link=link), device)
        notes = measure_links(data, mesh, show)
    data["name"] = f"{nodes * per_node} x {data['device']['name']}, measured"
    about = f"on {datetime.date.today()} with `hf-helix cluster`, hf_helix {__version__}, torch {torch.__version__}, "
    about += f"{torch.get_num_threads()} threads a rank, in {time.perf_counter() - started:.0f} s"
    data["sources"] = {"measured": about, "device": describe_device(device), **notes}
    if link is not None:
        data["sources"]["node"] = f"an emulated link of {link}"
    return all_gather_object(data)[0]


def count_nodes(hosts: Sequence[str]) -> tuple[int, int]:
    """Returns the number of nodes, and of ranks on each, from the host name of every rank; else ValueError."""
    names = list(dict.fromkeys(hosts))
    per_node = len(hosts) // len(names)
    if list(hosts) != [name for name in names for _ in range(per_node)]:
        counts = ", ".join(f"{hosts.count(name)} on {name.split()[0]}" for name in names)
        raise ValueError(
            f"a cluster file describes nodes with equally many ranks that follow each other; here are {counts}. Start "
            "equally many on each, such as torchrun --nnodes 2 --nproc-per-node 8"
        )
    return len(names), per_node


def measure_device(device: torch.device, per_node: int, show: StageProgress) -> dict[str, Any]:
    """Returns the section `device` of a cluster file. Collective. `per_node` ranks share the memory of a node."""
    reserved = _reserved(device)
    streams = make_streams(device)
    watch = Stopwatch(streams, device, BUDGET[device.type])
    show("calls", 0.0)
    kernel, operator = measure_calls(watch)
    show("memory", 0.05)
    memory = measure_memory(watch)
    exponentials = measure_exponentials(watch) if device.type == "cpu" else None
    products, attention = {}, {}
    for place, (name, dtype) in enumerate(TYPES.items()):
        show(f"products in {name}", 0.15 + 0.3 * place)
        products[name] = measure_products(watch, dtype)
        show(f"attention in {name}", 0.35 + 0.3 * place)
        attention[name] = measure_attention(watch, dtype)
    streams.close()
    name = device_in_clusters(device)
    peaks = _peaks(name, products)
    bandwidth = max(rate for _, rate in memory)
    block = GPU_BLOCK if device.type == "cuda" else CPU_BLOCK
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    data: dict[str, Any] = {
        "name": name,
        "memory_gb": short((total or psutil.virtual_memory().total / per_node) / 1e9),
        "reserved_gb": short(reserved / 1e9),
        "peak_tflops": {key: short(peak / 1e12) for key, peak in peaks.items()},
        "matmul": {key: efficiency_curve(points, peaks[key]) for key, points in products.items()},
        "attention": {
            key: attention_curve(points, peaks[key], block, exponentials) for key, points in attention.items()
        },
        "attention_block": block,
        "memory_gb_per_s": short(bandwidth / 1e9),
        "memory_efficiency": efficiency_curve(memory, bandwidth),
        "kernel_us": short(kernel * 1e6),
        "issue_us": short(operator * 1e6),
        "host_runs_ahead": device.type == "cuda",
    }
    if exponentials is not None:
        data["exponentials_per_ns"] = short(exponentials / 1e9)
    return data


def measure_links(data: dict[str, Any], mesh: Mesh, show: StageProgress) -> dict[str, str]:
    """Adds links (of the ranks of a node on `tp`, of nodes on `cp`) and slowdowns to a cluster file; returns the rates
    of the largest collectives, as text by link. Collective."""
    streams, device = make_streams(mesh.device), mesh.device
    axes: dict[Kind, Axis] = {}
    notes = {}
    for name, axis, sharing in (("node", mesh.tp, 1), ("network", mesh.cp, mesh.tp.size)):
        if axis.size > 1:
            show(f"links ({name})", 0.75)
            timed = measure_link(axis, streams, device)
            data[name] = link_entry(timed, sharing)
            largest = {each.method: each.bytes / each.seconds / 1e9 for each in timed}
            rates = ", ".join(f"{method} {rate:.3g} GB/s" for method, rate in largest.items())
            notes[f"{name}.gb_per_s"] = f"measured; {rates}"
            axes[Kind.INTRA_NODE if name == "node" else Kind.INTER_NODE] = axis
    if "network" in data:
        data["network"]["devices_per_link"] = mesh.tp.size
    show("computation beside communication", 0.9)
    slow = measure_contention(axes, streams, device)
    data["contention"] = {
        key: [[sent, short(max(1.0, factor))] for sent, factor in points] for key, points in slow.items()
    }
    data["waiting_us"] = waiting_entry(measure_waiting(next(iter(axes.values())), streams, device))
    streams.close()
    return notes


def _reserved(device: torch.device) -> float:
    """Bytes in use before the first tensor."""
    if device.type == "cpu":
        return float(psutil.Process().memory_info().rss)
    torch.ones(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) + FRAGMENTS


def _peaks(name: str, products: Mapping[str, Points]) -> dict[str, float]:
    """Operations a second by type: of the data sheet in a cluster file of the package, else the best measured."""
    best = {key: max(rate for _, rate in points) for key, points in products.items()}
    known = (load_cluster(file).device for file in shipped_clusters())
    sheet = next((device.peaks for device in known if device.name == name), {})
    return {key: max(rate, sheet.get(key, 0.0)) for key, rate in best.items()}


def efficiency_curve(points: Points, best: float) -> list[list[float]]:
    """Returns the curve of a cluster file for (size, rate) points: [size, share of the best rate]."""
    return [[short(size), short(rate / best)] for size, rate in points]


def attention_curve(points: Points, peak: float, block: int, exponentials: float | None) -> list[list[float]]:
    """Returns the curve of a cluster file for fused attention, [keys, share of the peak], from (keys, seconds) of
    forward and backward; `exponentials` is their rate, None if they take no time of their own."""
    rates = []
    for keys, seconds in points:
        operations, taken = attention_work(keys, block)
        rest = seconds - taken / exponentials if exponentials else seconds
        rates.append((keys, operations / max(0.2 * seconds, rest)))
    return efficiency_curve(rates, peak)


def waiting_entry(seconds: float) -> float:
    """Returns the entry of a cluster file for the seconds that ranks wait after a second of computation."""
    return short(seconds * 1e6 * math.sqrt(1e-3))
