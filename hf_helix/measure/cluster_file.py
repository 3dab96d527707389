"""The cluster file of this machine, measured.

In:   the ranks that a launcher started, or a single process; perhaps an emulated link.
Out:  the content of a cluster file, the same on every rank.
Must hold: ranks with the same host name share a node; the file says when and on which machine it was measured.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hf_helix import __version__
from hf_helix.config import HelixConfig, parse_link
from hf_helix.measure.device import (
    CPU_BLOCK,
    GPU_BLOCK,
    Points,
    attention_work,
    measure_attention,
    measure_calls,
    measure_exponentials,
    measure_memory,
    measure_products,
)
from hf_helix.measure.links import link_entry, measure_contention, measure_link, measure_waiting, short
from hf_helix.measure.machine import describe_device, device_in_clusters
from hf_helix.measure.progress import StageProgress
from hf_helix.measure.timing import Stopwatch
from hf_helix.operators.communication.transport import Axis
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import load_cluster, shipped_clusters
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.distributed.groups import backend_of, host_name
from hf_helix.runtime.distributed.mesh import Mesh, mesh_of, world_size
from hf_helix.runtime.streams import make_streams

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
    forward and backward; `exponentials` is their rate, None where they take no time of their own."""
    rates = []
    for keys, seconds in points:
        operations, taken = attention_work(keys, block)
        rest = seconds - taken / exponentials if exponentials else seconds
        rates.append((keys, operations / max(0.2 * seconds, rest)))
    return efficiency_curve(rates, peak)


def waiting_entry(seconds: float) -> float:
    """Returns the entry of a cluster file for the seconds that ranks wait after a second of computation."""
    return short(seconds * 1e6 * math.sqrt(1e-3))
