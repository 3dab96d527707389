"""What the paper shows of the inside of a step: figures 3, 4, 5, 10 and 16, table 1, section 6.5.

In:   `Runs`.
Out:  artifacts.
Must hold: everything comes from the amounts and times that the speeds come from.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.paper.draw import Series, draw_cells, draw_stacks
from benchmarks.paper.published import (
    DHELIX,
    FIGURE_11,
    FIGURE_12,
    FIGURE_13A,
    LARGEST,
    MEGATRON,
    METHODS,
    OVERLAPPED,
    SHARES,
    STATES_SHARE,
    TABLE_1,
    TABLE_6,
    WAVELET,
    Row,
)
from benchmarks.paper.runs import Run, Runs, case_of
from benchmarks.paper.table import Artifact
from hf_helix.config import RECOMPUTE
from hf_helix.doctor.amounts.records import GRADIENT
from hf_helix.doctor.step import memory_of_case
from hf_helix.planning.graph.backward import RECEIVE, SEND
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.block_plan import BARRIER, BlockPlan
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.profile import Pair
from hf_helix.planning.window.layout import named_operators
from hf_helix.report.strands import draw_strips, strips_of_plans

AXES = {"tp": "TP", "cp": "CP", "experts": "EP", "pp": "PP"}
PARTS = ("computation", *AXES.values(), "DP")


# --- Figure 3 ---


def breakdown(runs: Runs) -> Artifact:
    """Returns figure 3: what a step is made of under Megatron."""
    rows = (*FIGURE_11[:2], *FIGURE_12[2:3], *FIGURE_11[4:5], *TABLE_6)
    parts_of_rows = [shares(runs, row) for row in rows]
    cells = []
    for row, parts in zip(rows, parts_of_rows, strict=True):
        axes, printed = SHARES.get(row.model, ("", None))
        ours = sum(parts[axis] for axis in axes.split(" and ")) if axes else 0.0
        paper = (f"{axes} {100 * printed:.1f}", f"{100 * ours:.1f}") if printed is not None else ("", "")
        cells.append((row.name, *(f"{100 * parts[part]:.1f}" for part in PARTS), *paper))
    notes = (
        "In percent of the seconds of all work, as if nothing overlapped; DP is what shows after the last backward.",
    )

    def draw(path: Path) -> None:
        series = [Series(part, [100 * parts[part] for parts in parts_of_rows], [None] * len(rows)) for part in PARTS]
        draw_stacks(path, "Figure 3", "percent of the time", [row.name.replace(" ", "\n", 1) for row in rows], series)

    header = ("model and layout", *PARTS, "paper", "ours")
    return Artifact("Figure 3", "computation and communication under Megatron, A40", header, cells, notes, draw)


def shares(runs: Runs, row: Row) -> dict[str, float]:
    """Returns the part of the work that computation and every axis take, on the first rank of the pipeline."""
    run = runs.run(row, MEGATRON)
    layout, amounts = run.profile.layout, runs.amounts(row)
    operators = dict(named_operators(layout))
    seconds = dict.fromkeys(PARTS, 0.0)
    for unit in layout.units_of(0):
        name = layout.units[unit]
        for key in (key for key in operators if key[0] == name):
            if not operators[key].kind.communicates:
                seconds["computation"] += run.profile.times[key]
            elif name in (SEND, RECEIVE):
                seconds["PP"] += 0.0 if operators[key].receives else run.profile.times[key]
            elif amounts.operators[key].transfers:
                seconds[AXES[amounts.operators[key].transfers[0].axis]] += run.profile.times[key]
    seconds["DP"] = run.step.sums / row.microbatches
    whole = sum(seconds.values())
    return {part: each / whole for part, each in seconds.items()}


# --- Figure 4 ---

OPERATORS = {"GEMM": Kind.COMPUTE, "FA": Kind.COMPUTE, "C1": Kind.INTRA_NODE, "C2": Kind.INTER_NODE}
SENT = 1 << 24
"""Bytes of a collective; contention of the paper's clusters does not depend on it."""


def effectiveness(runs: Runs) -> Artifact:
    """Returns figure 4: how well two operators of equal length overlap, by kind."""
    rows = {"A40": FIGURE_11[0], "A800": FIGURE_13A[0], "H100": replace(FIGURE_11[0], cluster="h100x32")}
    tables = {device: _overlaps(runs.cluster(row)) for device, row in rows.items()}
    names = list(OPERATORS)
    cells = [
        (device, name, *(f"{value:.2f}" for value in values))
        for device, table in tables.items()
        for name, values in zip(names, table, strict=True)
    ]
    notes = (
        "Overlap effectiveness (equation 1) of two operators of equal length: 1 where one is hidden, 0 where nothing "
        "is gained. The paper's cells cannot be read. Here computation runs on one stream, so two computations never "
        "overlap, nor do two communications over the same links; the rest follows from the cluster's contention.",
    )

    def draw(path: Path) -> None:
        draw_cells(path, "Figure 4: overlap effectiveness", names, list(tables.items()))

    return Artifact("Figure 4", "what overlaps well", ("device", "", *names), cells, notes, draw)


def _overlaps(cluster: Cluster) -> list[list[float]]:
    def cell(first: Kind, second: Kind) -> float:
        if first is second:
            return 0.0
        pair = Pair.of(1.0, 1.0, *cluster.slowdowns(first, second, (SENT, SENT)))
        return 2.0 - pair.together

    return [[cell(first, second) for second in OPERATORS.values()] for first in OPERATORS.values()]


# --- Figure 5 and section 6.5 ---


def memory(runs: Runs) -> Artifact:
    """Returns figure 5: what the memory of a device holds."""
    row = FIGURE_11[1]
    parts = runs.run(row, MEGATRON).step.memory.parts()
    room = runs.cluster(row).device.memory
    states = sum(parts[name] for name in ("weights", "gradients", "states"))
    cells = [(name, f"{size / 1e9:.1f}", f"{100 * size / sum(parts.values()):.1f}") for name, size in parts.items()]
    notes = (
        f"States of the model: {100 * states / room:.0f} % of the memory of a device, in the paper more than "
        f"{100 * STATES_SHARE:.0f} %. All parts together: {sum(parts.values()) / 1e9:.1f} of {room / 1e9:.1f} GB. Our "
        "runtime keeps weights and gradients in fp32, and what its eager kernels need; Megatron-LM keeps less.",
    )

    def draw(path: Path) -> None:
        series = [Series(name, [size / 1e9], [None]) for name, size in parts.items()]
        draw_stacks(path, "Figure 5", "GB", [row.name], series)

    return Artifact(
        "Figure 5", f"memory of {row.name}, micro-batches of 1", ("part", "GB", "percent"), cells, notes, draw
    )


def largest(runs: Runs) -> Artifact:
    """Returns section 6.5: the largest model that fits with tp 8, pp 2 and dp 4."""
    row = replace(FIGURE_11[1], sizes=replace(FIGURE_11[1].sizes, pp=2, dp=4))
    cells = []
    for recompute in RECOMPUTE:
        ours = {name: _largest(runs, row, name, recompute) for name in LARGEST}
        for name, printed in LARGEST.items():
            shares = [f"{100 * each[name] / each[MEGATRON]:.1f} %" for each in (LARGEST, ours)]
            cells.append((recompute, name, f"{printed:.0f}", f"{ours[name]:.1f}", *shares))
    notes = (
        "Billions of parameters: layers of Llama-25B, one more at a time, while they fit an A40. `two copies` keeps "
        "the states of the model twice, as bidirectional pipelines do. The paper does not say what it recomputes.",
    )
    header = ("recomputed", "method", "paper", "ours", "paper, of Megatron", "ours, of Megatron")
    return Artifact("Section 6.5", "the largest model", header, cells, notes)


def _largest(runs: Runs, row: Row, name: str, recompute: str) -> float:
    amounts, cluster = runs.amounts(row, recompute=recompute), runs.cluster(row)
    layer = amounts.model.units[1]
    each = amounts.weights[layer].trained * row.sizes.tp
    ends = sum(amounts.weights[unit].trained for unit in {amounts.model.units[0], amounts.model.units[-1]})
    fitting = 0.0
    for layers in range(4, 120):
        units = [amounts.model.units[0], *[layer] * layers, amounts.model.units[-1]]
        case = case_of(row, MEGATRON if name == MEGATRON else WAVELET).changed(recompute=recompute)
        memory = memory_of_case(replace(amounts, model=replace(amounts.model, units=units)), case)
        copies = memory.weights + memory.gradients + memory.states if name not in METHODS else 0.0
        if memory.total + copies > cluster.device.memory:
            break
        fitting = (layers * each + ends * row.sizes.tp) / 1e9
    return fitting


# --- Figures 10 and 16 ---


def pairings(runs: Runs) -> Artifact:
    """Returns figure 10: the pairs of segments that DHelix finds on two clusters."""
    rows = (FIGURE_11[1], replace(FIGURE_11[1], cluster="a800x64"))
    results = [runs.run(row, DHELIX) for row in rows]
    pairs = [_segments(run) for run in results]
    cells = []
    for number in range(max(map(len, pairs))):
        cells.append((str(number + 1), *(each[number] if number < len(each) else "" for each in pairs)))
    notes = ("Operators of the forward (F) and the backward (B) strand between two barriers.",)

    def draw(path: Path) -> None:
        for run in results:
            device = run.row.cluster.partition("x")[0]
            title = f"Figure 10: {run.row.name} on {device.upper()}"
            draw_strips(strips_of_plans(run.profile, [run.plan]), path.with_stem(f"{path.stem}-{device}"), title=title)

    return Artifact("Figure 10", f"pairs of segments, {rows[0].name}", ("", "on A40", "on A800"), cells, notes, draw)


def _segments(run: Run) -> list[str]:
    assert isinstance(run.plan, BlockPlan)
    layer = next(name for name, pair in run.profile.layout.graphs.items() if pair.forward.repeats)
    segments: list[list[str]] = [[]]
    for entry in run.plan.order(layer, layer):
        if entry == BARRIER:
            segments.append([])
        else:
            segments[-1].append(entry)
    return [", ".join(segment) for segment in segments if segment]


def visualization(runs: Runs) -> Artifact:
    """Returns figure 16: the layers of Llama-66B with one strand and with two."""
    row = FIGURE_13A[1]
    one, two = runs.run(row, MEGATRON), runs.run(row, DHELIX)
    kinds = (Kind.INTRA_NODE, Kind.INTER_NODE)

    def overlapped(run: Run) -> float:
        exposed = sum(run.step.exposed.get(kind, 0.0) for kind in kinds)
        return 1 - exposed / sum(run.step.loads[kind] for kind in kinds)

    gain = two.speed / one.speed
    cells = [
        ("communication beside computation, Megatron", "", f"{100 * overlapped(one):.0f} %"),
        ("communication beside computation, DHelix", f"{100 * OVERLAPPED:.0f} %", f"{100 * overlapped(two):.0f} %"),
        ("gain", "1.240", f"{gain:.3f}"),
    ]

    def draw(path: Path) -> None:
        draw_strips(strips_of_plans(two.profile, [one.plan, two.plan]), path, title=f"Figure 16: {row.name} on A800")

    return Artifact("Figure 16", "one strand and two, Llama-66B on A800", ("", "paper", "ours"), cells, (), draw)


# --- Table 1 ---

SEQUENCES = 2048
"""Sequences in a step of Llama-3.1-405B; with so many, the table's volumes come out."""


def volumes(runs: Runs) -> Artifact:
    """Returns table 1: bytes and seconds of communication inside and between nodes, Llama-405B on H100."""
    cells = []
    for sizes, length, local, cross in TABLE_1:
        row = Row("Table 1", "Llama-405B", "h100x16384", length, sizes, sequences=SEQUENCES)
        for where, printed, ours in zip(
            ("in a node", "between nodes"), (local, cross), _volumes(runs, row), strict=True
        ):
            numbers = [f"{value:,.{digits}f}" for value, digits in zip((*printed, *ours), (1, 2, 1, 2), strict=True)]
            cells.append((row.name, where, numbers[0], numbers[2], numbers[1], numbers[3]))
    notes = (
        "GiB and seconds of a rank in a step, at the full rate of the links: 450 GB/s of NVLink in each direction, "
        "50 GB/s of the network. Between nodes: context parallelism, the pipeline, sums of gradients in fp32, which "
        "the paper may count otherwise. It prints 0.3 s where its own rate makes 0.49 s of 220 GB.",
    )
    header = ("layout", "communication", "GiB, paper", "ours", "s, paper", "ours")
    return Artifact("Table 1", "communication of Llama-405B", header, cells, notes)


def _volumes(runs: Runs, row: Row) -> tuple[tuple[float, float], tuple[float, float]]:
    amounts, cluster = runs.amounts(row), runs.cluster(row)
    sent: dict[str, float] = {"tp": 0.0, "cp": 0.0}
    for (unit, _), counted in amounts.operators.items():
        if unit == amounts.model.units[1]:
            for each in counted.transfers:
                sent[each.axis] += each.bytes
    layers = len(amounts.model.units[1:-1]) / row.sizes.pp
    local = sent["tp"] * layers * row.microbatches
    copies = row.sizes.dp * row.sizes.cp
    trained = amounts.weights[amounts.model.units[1]].trained * layers
    summed = 2 * (copies - 1) / copies * trained * GRADIENT
    cross = (sent["cp"] * layers + 2 * amounts.handed_on) * row.microbatches + summed
    rates = _rates(cluster)
    return (local / 2**30, local / rates["node"]), (cross / 2**30, cross / rates["network"])


def _rates(cluster: Cluster) -> Mapping[str, float]:
    network = cluster.network
    return {"node": cluster.node.bandwidth, "network": network.bandwidth / network.devices}
