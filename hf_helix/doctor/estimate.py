"""Seconds of operators on a cluster, estimated from amounts.

In:   amounts of every operator, the layout of ranks, and the rates of a cluster.
Out:  a `Profile`, used like a measured profile by plans, predictions, bounds and pictures.
Must hold: a kernel takes the longer of the times of its operations and its bytes; ranks on one link send at the same
time and share its bandwidth.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hf_helix.doctor.amounts.records import ATTENTION, MATMUL, Amounts, Kernel, OperatorAmounts, Transfer, of_each
from hf_helix.doctor.case import HELIX, Case, Software
from hf_helix.planning.graph.backward import OF_SLICES
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import FP8, Cluster
from hf_helix.planning.timing.profile import Pair, Profile
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES, HOST, Sizes
from hf_helix.planning.window.layout import Layout, Name, named_operators

SMALL = 256  # least rows, columns and depth of the products that fp8 is for
LEAST = 1e-7  # least seconds of an operator


@dataclass(frozen=True)
class Ring:
    """The ranks of an axis on a cluster: their number, and the number within one block of each level of the cluster."""

    size: int
    within: tuple[int, ...]

    @property
    def crosses(self) -> bool:
        """Whether the axis leaves a node."""
        return self.within[-1] < self.size

    def sent(self, count: int) -> int:
        """Returns the bytes sent by each rank in an all-gather or a reduce-scatter of `count` bytes."""
        return count * (self.size - 1) // self.size


def ring_of(cluster: Cluster, *dimensions: tuple[int, int]) -> Ring:
    """Returns the ring of an axis with dimensions (size, stride)."""
    within = [
        math.prod(max(1, min(size, block // stride)) for size, stride in dimensions) for block, _ in cluster.levels
    ]
    return Ring(math.prod(size for size, _ in dimensions), tuple(within))


def rings(cluster: Cluster, sizes: Sizes) -> dict[str, Ring]:
    """Returns the axes of a layout by name: tp, cp, experts, pp, dp, the host, and the axes of replicas."""
    copy = sizes.tp * sizes.cp * (1 if sizes.stages_outermost else sizes.pp)  # to the neighbour in data parallelism
    stage = sizes.tp * sizes.cp * (sizes.dp if sizes.stages_outermost else 1)
    tp, cp, ep = (sizes.tp, 1), (sizes.cp, sizes.tp), (sizes.ep, copy)
    return {
        "tp": ring_of(cluster, tp),
        "cp": ring_of(cluster, cp),
        "experts": ring_of(cluster, tp, ep),
        "pp": ring_of(cluster, (sizes.pp, stage)),
        "dp": ring_of(cluster, (sizes.dp, copy)),
        HOST: ring_of(cluster),
        COPIES: ring_of(cluster, cp, (sizes.dp, copy)),
        EXPERT_COPIES: ring_of(cluster, cp, (sizes.dp // sizes.ep, copy * sizes.ep)),
    }


def inter_node_axes(cluster: Cluster, sizes: Sizes, spreads: bool = False) -> list[str]:
    """Returns the axes of a layout between nodes, under the names of `HelixConfig`. If weights are sharded (`spreads`),
    operators also communicate over data-parallel ranks."""
    of_operators = ("tp", "cp", "ep", *["dp"] * spreads)
    return [name for name, ring in used_rings(cluster, sizes).items() if ring.crosses and name in of_operators]


def used_rings(cluster: Cluster, sizes: Sizes) -> dict[str, Ring]:
    """Returns the axes of a layout with several ranks, under the names of `HelixConfig`."""
    by_axis = rings(cluster, sizes)
    return {
        name: by_axis["experts" if name == "ep" else name]
        for name in ("tp", "cp", "ep", "pp", "dp")
        if getattr(sizes, name) > 1
    }


def kernel_seconds(kernel: Kernel, cluster: Cluster, dtype: str, software: Software = HELIX) -> float:
    """Returns the seconds of a kernel.

    Args:
        kernel: the kernel.
        cluster: the rates.
        dtype: the type of matrix products.
        software: of the run.
    """
    device = cluster.device
    of_attention = device.attention_kernels.get(software.attention, device.attention[dtype])
    moving = device.moving_seconds(kernel.bytes) / software.memory
    computing = kernel.exponentials / device.exponentials
    if kernel.sort == MATMUL and kernel.flops:
        kind = FP8 if kernel.fp8 else dtype
        computing += kernel.flops / (software.products * device.peaks[kind] * device.matmul[kind].at(kernel.flops))
    if kernel.sort == ATTENTION and kernel.flops:
        keys = kernel.sizes[1]
        blocks = -(-keys // device.attention_block)
        spared = (1 + 1 / blocks) if kernel.causal else 1.0  # a causal mask spares whole blocks, so less than half
        computing = spared * (computing + kernel.flops / (device.peaks[dtype] * of_attention.at(keys)))
    return device.kernel_seconds + max(moving, computing)


def transfer_seconds(transfer: Transfer, ring: Ring, cluster: Cluster) -> float:
    """Returns the seconds of a collective, run at the same time by every group of the node.

    Bytes over the edge of each block (device, island, node), by method:
        all-gather, reduction   the ring passes values on, so the bytes cross the edge once per group
        shift, send             once per group, with the last rank's value
        exchange                separate bytes for every pair of ranks
    All levels are busy at the same time, and the slowest level decides. A ring adds the latency of each hop's link;
    most hops are inside a node. NCCL's model of its rings counts latency the same way (`ncclTopoTuneModel`).

    Args:
        transfer: the transfer of one rank.
        ring: the ranks of the axis on the machine.
        cluster: the links.
    """
    if transfer.axis == HOST:
        return transfer.bytes / cluster.host.bandwidth
    if ring.size == 1 or transfer.bytes == 0:
        return 0.0
    farther = (*ring.within[1:], ring.size)
    rounds = 2 if transfer.method == "all_reduce" else 1
    taken, latency = [0.0], 0.0
    for (block, link), near, far in zip(cluster.levels, ring.within, farther, strict=True):
        if near == far:  # all ranks of the next larger block are in this block
            continue
        links = max(1, block // link.devices)
        groups = max(1, block // near)
        if transfer.method in ("exchange", "exchange_rows"):
            to_each = transfer.bytes / (ring.size - 1)
            taken.append(link.seconds(to_each * (far - near) * block / links, far - near))
        elif transfer.method in ("shift", "shift_back", "send"):
            taken.append(link.seconds(groups * transfer.bytes / links))
        else:
            latency += rounds * (ring.size // near - ring.size // far) * link.latency
            sent = groups * transfer.bytes / links / link.share_of(far)
            taken.append(link.carrying_seconds(sent, rounds * (ring.size - 1)))
    return latency + max(taken)


def operator_seconds(
    amounts: OperatorAmounts,
    kind: Kind,
    axes: Mapping[str, Ring],
    cluster: Cluster,
    dtype: str,
    software: Software = HELIX,
) -> float:
    """Returns the seconds of an operator by itself. On GPUs, collectives also have kernels: sums of exchanged
    parts, and rounding of gathered values; on a CPU the measured rates of links have their time.

    Args:
        amounts: of the operator.
        kind: of the operator.
        axes: see `rings`.
        cluster: the rates of devices and links.
        dtype: the type of matrix products.
        software: of the run.
    """
    seconds = sum(of_each(lambda kernel: kernel_seconds(kernel, cluster, dtype, software), amounts.kernels))
    if kind.communicates:
        transfers = amounts.transfers
        if software.once_a_node < 1.0:
            transfers = [_once_a_node(each, axes, software) for each in transfers]
        sending = sum(transfer_seconds(each, axes[each.axis], cluster) for each in transfers)
        has_kernels = sending and software.exchanges and cluster.backend == "nccl"
        return max(LEAST, sending + (seconds if has_kernels else 0.0))
    return max(
        LEAST, seconds if cluster.device.host_runs_ahead else seconds + amounts.calls * cluster.device.issue_seconds
    )


def _once_a_node(transfer: Transfer, axes: Mapping[str, Ring], software: Software) -> Transfer:
    """Returns the transfer of rows to experts, some of which one row for a node carries."""
    if transfer.method != "exchange_rows" or not axes[transfer.axis].crosses:
        return transfer
    return replace(transfer, bytes=int(software.once_a_node * transfer.bytes))


def estimate_profile(amounts: Amounts, layout: Layout, case: Case, cluster: Cluster) -> Profile:
    """Returns the profile of a layout on a cluster.

    Args:
        amounts: the amounts of one rank.
        layout: the units of all ranks of a pipeline, with the transfers between ranks.
        case: the parallel sizes of the layout, and the type of matrix products.
        cluster: the rates of devices and links.

    Raises:
        ValueError: the device has no peak for the type.
    """
    multiplies_fp8 = any(kernel.fp8 for counted in amounts.operators.values() for kernel in counted.kernels)
    known = ", ".join(cluster.device.peaks)
    if multiplies_fp8 and FP8 not in cluster.device.peaks:
        raise ValueError(
            f"{cluster.name} has no device.peak_tflops for {FP8}, which --float8 multiplies in; it has {known}: leave "
            f"--float8 out, or add {FP8} to its file if the device has products in fp8"
        )
    if case.dtype not in cluster.device.peaks:
        raise ValueError(
            f"{cluster.name} has no device.peak_tflops for {case.dtype}; it has {known}: add {case.dtype} to its "
            f"file, or use --dtype with one of these"
        )
    axes = rings(cluster, case.sizes)
    in_fp8 = _in_fp8(amounts, layout) if case.config.float8 and case.software.all_in_float8 else set()
    times: dict[Name, float] = {}
    sent: dict[Name, int] = {}
    for name, op in named_operators(layout):
        if name[0] in amounts.weights:
            counted = amounts.operators[name]
            if name in in_fp8:
                counted = replace(counted, kernels=[replace(each, fp8=_is_large(each)) for each in counted.kernels])
        else:
            handed = amounts.handed_over if name[0].endswith(OF_SLICES) else amounts.handed_on
            counted = OperatorAmounts(transfers=[Transfer("pp", "send", handed)])
        times[name] = operator_seconds(counted, op.kind, axes, cluster, case.dtype, case.software)
        if op.kind.communicates:
            sent[name] = sum(each.bytes for each in counted.transfers)
    for name, seconds in waiting(layout, times, cluster).items():
        times[name] += seconds
    about = {"model": amounts.model.name, "estimated": cluster.name}
    pairs, like = contended(layout, times, sent, cluster)
    return Profile(about, layout, times, pairs=pairs, like=like, bytes=sent)


def _in_fp8(amounts: Amounts, layout: Layout) -> set[Name]:
    """Returns the operators of layers with products of linears, among them weight gradients and frozen weights."""
    layers = {unit for unit, pair in layout.graphs.items() if pair.forward.repeats}
    return {
        name
        for name, counted in amounts.operators.items()
        if name[0] in layers and any(_is_large(kernel) for kernel in counted.kernels)
    }


def _is_large(kernel: Kernel) -> bool:
    """Returns whether a kernel is a product of a linear, and none of a low-rank adapter, a router or attention."""
    return kernel.sort == MATMUL and kernel.sizes[0] == 1 and min(kernel.sizes[1:]) >= SMALL


def waiting(layout: Layout, times: Mapping[Name, float], cluster: Cluster) -> dict[Name, float]:
    """Returns the seconds of waiting for the last rank at each collective, with the computation of a unit divided
    evenly between its collectives. Transfers between pipeline stages and copies from the host have no such waiting."""
    seconds: dict[Name, float] = {}
    for unit, pair in layout.graphs.items():
        for letter, graph in (("F", pair.forward), ("B", pair.backward)):
            kinds = {(unit, f"{letter}.{op.name}"): op.kind for op in graph.operators}
            computing = sum(times[name] for name, kind in kinds.items() if not kind.communicates)
            meetings = [name for name, kind in kinds.items() if kind in (Kind.INTRA_NODE, Kind.INTER_NODE)]
            seconds |= dict.fromkeys(meetings, cluster.waiting_seconds(computing / max(1, len(meetings))))
    return seconds


def contended(
    layout: Layout, times: Mapping[Name, float], sent: Mapping[Name, float], cluster: Cluster
) -> tuple[dict[tuple[Name, Name], Pair], dict[Name, Name]]:
    """Returns pairs of overlapped operators, and the representative of each operator without a pair: the longest
    operator represents all operators with equal slowdowns. Without representatives, each kind has a single group, the
    default of a profile. `sent` are the bytes sent by a rank in each operator."""
    kinds = [kind for kind in Kind if any(kind in both for both in cluster.contention)]
    groups: dict[tuple[object, ...], list[Name]] = {}
    for name, op in named_operators(layout):
        if op.kind in kinds:
            ways = [way for kind in kinds for way in ((op.kind, kind), (kind, op.kind))]
            slowed = [cluster.slowdown(*way, sent[name]) for way in ways] if op.kind.communicates else ()
            groups.setdefault((op.kind, *slowed), []).append(name)
    longest = {max(names, key=lambda name: times[name]): names for names in groups.values()}
    kind_of = {name: op.kind for name, op in named_operators(layout) if name in longest}
    pairs = {}
    for a, b in itertools.combinations(sorted(longest, key=lambda name: kinds.index(kind_of[name])), 2):
        first, second = kind_of[a], kind_of[b]
        if first is second or not {(first, second), (second, first)} & cluster.contention.keys():
            continue
        slow = cluster.slowdowns(first, second, (sent.get(a, 0), sent.get(b, 0)))
        # Pairs without a slowdown are also listed: missing pairs get the mean of their kinds.
        pairs[a, b] = Pair.of(times[a], times[b], *slow)
    if len(longest) == len(set(kind_of.values())):
        return pairs, {}
    return pairs, {name: first for first, names in longest.items() for name in names if name != first}
