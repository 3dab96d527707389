"""Speeds: figures 11 to 15, tables 6 and 7, and how far ours are from the paper's.

In:   `Runs`.
Out:  artifacts.
Must hold: what was fitted and what was predicted is told apart, and every error is printed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from benchmarks.paper.ablation import STEPS, increments
from benchmarks.paper.draw import Series, draw_groups, draw_stacks
from benchmarks.paper.plain import best_plain
from benchmarks.paper.published import (
    DHELIX,
    FIGURE_14,
    FIGURE_15,
    INCREMENTS,
    INTRA_BATCH,
    MEGATRON,
    METHODS,
    MOST_GAIN,
    SPEEDS,
    TABLE_7,
    WAVELET,
    Row,
)
from benchmarks.paper.runs import SEARCH, Runs
from benchmarks.paper.table import Artifact, signed
from hf_helix.planning.graph.operator import Kind

SPEED_HEADER = ("model and layout", "method", "paper", "ours", "error", "paper's gain", "our gain", "error", "memory")


def speeds(runs: Runs, name: str, title: str, rows: Sequence[Row]) -> Artifact:
    """Returns rows under every method, with our own plan and the best layout of one strand.

    Args:
        runs: simulates rows.
        name: as the paper calls it, such as "Table 4".
        title: what it is about.
        rows: of the paper, all counted alike.
    """
    cells = [line for row in rows for line in _lines(runs, row)]
    unit = "tokens a second" if rows[0].counts_tokens else "TFLOP/s of a GPU, attention counted in full"
    room = runs.cluster(rows[0]).device.memory / 1e9
    notes = (
        f"Speeds in {unit}. Gains are over Megatron. `search` is our own plan, searched for a fifth of the usual "
        "length; `one strand` is the best layout without overlap of two strands that fits. Memory: GB that our runtime "
        f"takes on a device, which has {room:.0f}.",
    )
    return Artifact(
        name, title, SPEED_HEADER, cells, notes, partial(_draw_speeds, runs, f"{name}: {title}", unit, rows)
    )


def _lines(runs: Runs, row: Row) -> Iterator[tuple[str, ...]]:
    base = runs.run(row, MEGATRON)
    for method in (*METHODS, SEARCH):
        if method == INTRA_BATCH and row.sizes.tp == 1:
            continue
        run, printed = runs.run(row, method), row.printed.get(method)
        gain = run.speed / base.speed
        wanted = printed / row.printed[MEGATRON] if printed else None
        yield (
            row.name if method == MEGATRON else "",
            method,
            f"{printed:,.1f}" if printed else "",
            f"{run.speed:,.1f}",
            signed(run.speed / printed - 1) if printed else "",
            f"{wanted:.3f}" if wanted else "",
            f"{gain:.3f}",
            f"{gain - wanted:+.3f}" if wanted else "",
            f"{run.step.memory.total / 1e9:.1f}",
        )
    plain = best_plain(runs, row)
    if plain is not None:
        layout, speed, memory = plain
        yield "", f"one strand, {layout}", "", f"{speed:,.1f}", "", "", f"{speed / base.speed:.3f}", "", f"{memory:.1f}"


def _draw_speeds(runs: Runs, title: str, unit: str, rows: Sequence[Row], path: Path) -> None:
    methods = [method for method in (*METHODS, SEARCH) if method != INTRA_BATCH or rows[0].sizes.tp > 1]
    series = [
        Series(method, [runs.run(row, method).speed for row in rows], [row.printed.get(method) for row in rows])
        for method in methods
    ]
    groups = [row.name.replace(" ", "\n", 1) for row in rows]
    draw_groups(path, title, unit.partition(",")[0], groups, series)


# --- Errors ---


@dataclass(frozen=True)
class Errors:
    """Mean absolute errors of a group of bars.

    Attributes:
        speed: of speeds, in parts of the paper's.
        gain: of gains over Megatron.
        count: of bars.
    """

    speed: float
    gain: float
    count: int


def errors(runs: Runs, rows: Sequence[Row], methods: Sequence[str]) -> Errors:
    """Returns the errors of rows under methods, where the paper has a number.

    Args:
        runs: simulates rows.
        rows: of the paper.
        methods: keys of `RULES`, and `MEGATRON`.
    """
    bars = [(row, method) for row in rows for method in methods if method in row.printed]
    speed = [abs(runs.run(row, method).speed / row.printed[method] - 1) for row, method in bars]
    wanted = [row.printed[method] / row.printed[MEGATRON] for row, method in bars]
    gain = [abs(runs.gain(row, method) - each) for (row, method), each in zip(bars, wanted, strict=True)]
    return Errors(fmean(speed), fmean(gain), len(bars))


def summary(runs: Runs) -> Artifact:
    """Returns the errors of all rows, by group."""
    a40 = [row for row in SPEEDS if row.cluster == "a40x64" and not row.counts_tokens]
    a800 = [row for row in SPEEDS if row.cluster == "a800x64" and not row.counts_tokens]
    experts = [row for row in SPEEDS if row.counts_tokens]
    groups: list[tuple[str, str, Sequence[Row], Sequence[str]]] = [
        ("A40, Megatron (figures 11 and 12)", "fitted", a40, (MEGATRON,)),
        ("A40, Intra-batch", "held out", a40, (INTRA_BATCH,)),
        ("A40, Wavelet+", "held out", a40, (WAVELET,)),
        ("A40, DHelix without CP (figure 11)", "held out", [row for row in a40 if row.sizes.cp == 1], (DHELIX,)),
        ("A40, DHelix with CP (figure 12)", "held out", [row for row in a40 if row.sizes.cp > 1], (DHELIX,)),
        ("A800, Megatron (figure 13 a)", "fitted", a800, (MEGATRON,)),
        ("A800, Wavelet+ and DHelix (figure 13 a)", "held out", a800, (WAVELET, DHELIX)),
        ("Phi, Megatron (table 6, figure 13 b)", "held out", experts, (MEGATRON,)),
        ("Phi, Wavelet+ and DHelix", "held out", experts, (WAVELET, DHELIX)),
        ("all dense rows, DHelix", "held out", [*a40, *a800], (DHELIX,)),
        ("all rows, DHelix", "held out", SPEEDS, (DHELIX,)),
        ("all rows, all methods but Megatron", "held out", SPEEDS, (INTRA_BATCH, WAVELET, DHELIX)),
    ]
    cells = []
    for name, role, rows, methods in groups:
        total = errors(runs, rows, methods)
        gain = "" if methods == (MEGATRON,) else f"{total.gain:.3f}"
        cells.append((name, role, str(total.count), f"{100 * total.speed:.1f} %", gain))
    header = ("bars", "constants", "number", "error of speeds", "error of gains")
    return Artifact("Errors", "mean absolute errors against the paper", header, cells)


# --- Figure 14 and table 7 ---


def scaling(runs: Runs) -> Artifact:
    """Returns figure 14: tensor parallelism over nodes."""
    rows = [(device, row) for device, each in FIGURE_14.items() for row in each]
    cells = []
    for device, row in rows:
        speeds_of_methods = [runs.run(row, method).speed for method in (MEGATRON, DHELIX, SEARCH)]
        gains = [f"{100 * (each / speeds_of_methods[0] - 1):+.1f} %" for each in speeds_of_methods[1:]]
        cells.append(
            (device, str(row.sizes.tp), str(row.layers), *(f"{each:.1f}" for each in speeds_of_methods), *gains)
        )
    most = {device: max(runs.gain(row, DHELIX) for row in each) - 1 for device, each in FIGURE_14.items()}
    notes = [
        f"Largest gain of DHelix on {device}: {100 * gain:.0f} %, in the paper up to {100 * MOST_GAIN[device]:.0f} %."
        for device, gain in most.items()
    ]
    notes.append(
        "TFLOP/s of a GPU. The paper's bars cannot be read, and it does not name the model: layers of Llama-3.1-70B, "
        "sequences of 8192 tokens, 256 of them in a step, and more layers with more tensor parallelism are assumed."
    )
    header = ("device", "tp", "layers", MEGATRON, DHELIX, SEARCH, "gain of DHelix", "gain of search")

    def draw(path: Path) -> None:
        series = [
            Series(method, [runs.run(row, method).speed for _, row in rows], [None] * len(rows))
            for method in (MEGATRON, DHELIX, SEARCH)
        ]
        draw_groups(path, "Figure 14", "TFLOP/s of a GPU", [f"{d}\ntp{row.sizes.tp}" for d, row in rows], series)

    return Artifact("Figure 14", "tensor parallelism over nodes", header, cells, notes, draw)


def communication(runs: Runs) -> Artifact:
    """Returns table 7: what becomes of communication on H100."""
    cells = []
    for row in FIGURE_14["H100"]:
        ours = [100 * share for share in hidden_shares(runs, row)]
        for name, own, printed in zip(PARTS, ours, TABLE_7[row.sizes.tp], strict=True):
            cells.append((str(row.sizes.tp), name, f"{printed:.1f}", f"{own:.1f}", f"{own - printed:+.1f}"))
    notes = (
        "In percent of communication. Launches are 20 us after each barrier, an assumption of the size that the row of "
        "tp 8 has; slowdown is what else remains visible. The model is that of figure 14.",
    )
    return Artifact(
        "Table 7", "communication under DHelix on H100", ("tp", "part", "paper", "ours", "difference"), cells, notes
    )


PARTS = ("hidden", "visible by slowdown", "visible by launches")


def hidden_shares(runs: Runs, row: Row) -> tuple[float, float, float]:
    """Returns the parts of communication that DHelix hides, and leaves visible by slowdown and by launches."""
    run = runs.run(row, DHELIX)
    sent = sum(seconds for kind, seconds in run.step.loads.items() if kind in (Kind.INTRA_NODE, Kind.INTER_NODE))
    visible = max(0.0, run.step.window - run.step.loads[Kind.COMPUTE]) / sent
    launches = run.launches / sent
    return 1 - visible, visible - launches, launches


# --- Figure 15 ---


def steps(runs: Runs) -> Artifact:
    """Returns figure 15: what each kind of overlap adds."""
    measured = {key: increments(runs, row) for key, row in FIGURE_15.items()}
    cells = []
    for key, ours in measured.items():
        totals = sum(INCREMENTS[key]), sum(ours)
        for name, printed, own in zip((*STEPS, "all"), (*INCREMENTS[key], totals[0]), (*ours, totals[1]), strict=True):
            cells.append((f"({key})", name, f"{printed:.1f}", f"{own:.1f}", f"{own - printed:+.1f}"))
    notes = (
        "In percent of the baseline, Megatron. (a) was used to fit contention, (b) was not.",
        "(a) sequences of 16384 tokens with cp 2; (b) of 32768 with cp 4.",
    )

    def draw(path: Path) -> None:
        series = [
            Series(name, [ours[place] for ours in measured.values()], [each[place] for each in INCREMENTS.values()])
            for place, name in enumerate(STEPS)
        ]
        draw_stacks(
            path, "Figure 15: Llama-39B on A40", "percent of the baseline", [f"({key})" for key in measured], series
        )

    return Artifact(
        "Figure 15", "what each overlap adds", ("case", "overlap of", "paper", "ours", "difference"), cells, notes, draw
    )
