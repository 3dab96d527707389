"""Heat maps and breakdowns of a profile, as text and as figures.

In:   a `Profile`.
Out:  the overlap efficiency of pairs of operators (the paper's figure 4), and the time of a micro-batch by kind.
Must hold: cells without a measurement stay empty; cells of too short operators are marked; nothing is clipped silently.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_helix.planning.graph.operator import Operator, Part
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.layout import Name, named_operators
from hf_helix.report.figures import COLOURS, EMPTY, FAINT, INK, figure_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOO_SHORT = 0.01  # of the longer operator's time, whose noise is larger than a shorter operator
KINDS = ("GEMM", "attention", "other computation", "intra-node communication", "inter-node communication")
KIND_COLOURS = ("#2e6fae", "#6a4c93", "#8fa3b5", "#f2b84b", "#d1603d")
CELL, LINE = 0.5, 0.26  # width and height of a cell of a heat map, in inches


def pair_table(profile: Profile) -> tuple[list[Name], list[Name], dict[tuple[Name, Name], float]]:
    """Returns the first operators of pairs, the second operators, and the efficiencies; either order finds a pair."""
    order = [name for name, _ in named_operators(profile.layout)]
    rows = sorted({a for a, _ in profile.pairs}, key=order.index)
    columns = sorted({b for _, b in profile.pairs}, key=lambda b: (not profile.kind(b).communicates, order.index(b)))
    cells: dict[tuple[Name, Name], float] = {}
    for a, b in profile.pairs:
        cells.setdefault((b, a), profile.overlap_efficiency(a, b))
        cells[a, b] = profile.overlap_efficiency(a, b)
    return rows, columns, {key: cells[key] for key in cells if key[0] in rows and key[1] in columns}


def tells(profile: Profile, a: Name, b: Name) -> bool:
    """Returns whether the shorter of two operators is long enough for their efficiency to mean anything."""
    short, long = sorted((profile.times[a], profile.times[b]))
    return short >= TOO_SHORT * long


def _short_names(names: Sequence[Name]) -> dict[Name, str]:
    """Names without the unit, where all have the same unit."""
    several = len({unit for unit, _ in names}) > 1
    return {name: "/".join(name) if several else name[1] for name in names}


def _number(value: float, means: bool) -> str:
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
    return text.replace("-0.00", "0.00") if means else f"({text})"


def _notes(profile: Profile, names: dict[Name, str]) -> list[str]:
    """Notes for the reader of the cells."""
    notes = ["1: the shorter is hidden; 0: as one after the other; below 0: a loss"]
    if not all(tells(profile, a, b) for a, b in profile.pairs):
        notes.append(f"(in brackets): one takes less than {TOO_SHORT:.0%} of the other's time, too little to tell")
    represented: dict[Name, list[Name]] = {}
    for name, other in profile.like.items():
        if other in names:
            represented.setdefault(other, []).append(name)
    units = {unit for unit, _ in names}
    for other, others in represented.items():
        same = [name[1] if {name[0]} == units else "/".join(name) for name in others]
        notes.append(f"{names[other]} stands for {', '.join(same)}, too")
    return notes


def text_heatmap(profile: Profile) -> str:
    """Returns the overlap efficiency of every measured pair, as a table."""
    if not profile.pairs:
        return "no pairs of operators were measured"
    rows, columns, cells = pair_table(profile)
    names = _short_names([*rows, *columns])
    indent = max(len(names[row]) for row in rows)
    widths = [max(7, len(names[column])) for column in columns]
    head = "  ".join(f"{names[column]:>{width}}" for column, width in zip(columns, widths, strict=True))
    lines = ["overlap efficiency", " " * indent + "  " + head]
    for row in rows:
        texts = [_number(cells[row, b], tells(profile, row, b)) if (row, b) in cells else "" for b in columns]
        numbers = "  ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
        lines.append(f"{names[row]:<{indent}}  {numbers}".rstrip())
    return "\n".join([*lines, *_notes(profile, names)])


def draw_heatmap(profile: Profile, path: str | Path, title: str = "Overlap efficiency (OEF)") -> None:
    """Saves the same table as a figure (.svg, .png, .pdf). Raises ValueError without measured pairs."""
    if not profile.pairs:
        raise ValueError("there is nothing to draw: the profile holds no pairs")
    rows, columns, cells = pair_table(profile)
    names = _short_names([*rows, *columns])
    left = 0.25 + 0.068 * max(len(names[row]) for row in rows)
    top = 0.5 + 0.068 * max(len(names[column]) for column in columns)
    width = max(left + CELL * len(columns) + 0.9, 5.6)
    notes = [line for note in _notes(profile, names) for line in textwrap.wrap(note, round(18 * width))]
    foot = 0.2 + 0.15 * len(notes)
    height = top + LINE * len(rows) + foot
    with figure_file(path, width, height) as figure:
        box = (left / width, foot / height, CELL * len(columns) / width, LINE * len(rows) / height)
        axes = figure.add_axes(box)
        image = _draw_cells(axes, profile, rows, columns, cells)
        axes.set_xticks(range(len(columns)), [names[column] for column in columns], rotation=90)
        axes.set_yticks(range(len(rows)), [names[row] for row in rows])
        tall = min(box[3], 2.0 / height)
        scale = figure.add_axes((box[0] + box[2] + 0.15 / width, box[1] + box[3] - tall, 0.12 / width, tall))
        bar = figure.colorbar(image, cax=scale, ticks=[-1, -0.5, 0, 0.5, 1], extend="both", extendfrac=0.03)
        bar.outline.set_visible(False)
        figure.text(0.1 / width, 1 - 0.2 / height, title, fontsize=10.5, fontweight="bold", va="center")
        figure.text(0.1 / width, 0.08 / height, "\n".join(notes), fontsize=6.5, color=FAINT, linespacing=1.5)


def _draw_cells(
    axes: Axes, profile: Profile, rows: list[Name], columns: list[Name], cells: dict[tuple[Name, Name], float]
) -> Any:
    """Red for a loss, blue for a gain; numbers in the cells; cells of too short operators have no colour."""
    from matplotlib.colors import LinearSegmentedColormap

    empty = float("nan")
    values = [[cells[a, b] if (a, b) in cells and tells(profile, a, b) else empty for b in columns] for a in rows]
    colours = LinearSegmentedColormap.from_list("gain", [COLOURS["B"], "white", COLOURS["F"]])
    image = axes.imshow(values, cmap=colours, vmin=-1, vmax=1, aspect="auto")
    axes.set_facecolor(EMPTY)
    for i, a in enumerate(rows):
        for j, b in enumerate(columns):
            if (a, b) in cells:
                means = tells(profile, a, b)
                ink = FAINT if not means else "white" if abs(cells[a, b]) > 0.6 else INK
                axes.text(j, i, _number(cells[a, b], means), ha="center", va="center", fontsize=7, color=ink)
    axes.set_xticks([j + 0.5 for j in range(len(columns) - 1)], minor=True)
    axes.set_yticks([i + 0.5 for i in range(len(rows) - 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="both", length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    return image


def kind_of(op: Operator) -> str:
    """Returns the member of `KINDS` of an operator."""
    if op.kind.communicates:
        return f"{op.kind.value.replace('_', '-')} communication"
    if op.splits_dgrad_wgrad:
        return "GEMM"
    return "attention" if "attention" in op.forward_name.split(".") else "other computation"


def breakdown(profile: Profile, num_layers: int | None = None) -> dict[str, tuple[float, float]]:
    """Returns, by kind, the seconds of a micro-batch's operators forward and backward, each alone, for `num_layers`
    repeating units; None for the units of the profile's layout."""
    units, graphs = profile.layout.units, profile.layout.graphs
    layers = sum(graphs[unit].forward.repeats for unit in units)
    by_kind: dict[str, list[float]] = {}
    for (unit, entry), op in named_operators(profile.layout):
        count = float(list(units).count(unit))
        if num_layers is not None and graphs[unit].forward.repeats:
            count *= num_layers / layers
        seconds = by_kind.setdefault(kind_of(op), [0.0, 0.0])
        seconds[op.part is not Part.F] += count * profile.times[unit, entry]
    return {kind: (by_kind[kind][0], by_kind[kind][1]) for kind in KINDS if kind in by_kind}


def text_breakdown(profile: Profile, num_layers: int | None = None) -> str:
    """Returns the time of a micro-batch by kind, as a table."""
    by_kind = breakdown(profile, num_layers)
    totals = [sum(column) for column in zip(*by_kind.values(), strict=True)]
    total = sum(totals)
    lines = [f"{'':<20}{'forward':>20}{'backward':>20}{'both':>20}"]
    for kind, seconds in [*by_kind.items(), ("together", totals)]:
        cells = [f"{value * 1e3:,.1f} ms {value / total:6.1%}" for value in (*seconds, sum(seconds))]
        bar = "" if kind == "together" else "█" * round(25 * sum(seconds) / total)
        lines.append(f"{kind:<20}{cells[0]:>20}{cells[1]:>20}{cells[2]:>20}  {bar}".rstrip())
    return "\n".join([*lines, "of one micro-batch, every operator alone, one after the other"])


def draw_breakdown(
    profile: Profile,
    path: str | Path,
    num_layers: int | None = None,
    title: str = "Where the time of a micro-batch goes",
) -> None:
    """Saves the same as a figure (.svg, .png, .pdf): stacked bars of forward, backward and both."""
    by_kind = breakdown(profile, num_layers)
    total = sum(map(sum, by_kind.values()))
    with figure_file(path, 7.2, 2.5) as figure:
        axes = figure.add_axes((0.11, 0.27, 0.86, 0.58))
        for place in range(3):
            left = 0.0
            for kind, (forward, backward) in by_kind.items():
                value = (forward, backward, forward + backward)[place]
                _draw_share(axes, place, left, value, total, kind)
                left += value
            axes.text((left + 0.006 * total) * 1e3, place, f"{left / total:.0%}", va="center", color=FAINT)
        axes.set_yticks(range(3), ["forward", "backward", "both"])
        axes.set_xlim(0, total * 1e3 * 1.06)
        axes.set_ylim(2.55, -0.55)
        axes.xaxis.set_major_formatter("{x:,.10g} ms")
        axes.tick_params(axis="y", length=0)
        axes.spines[["left", "right", "top"]].set_visible(False)
        figure.text(0.11, 0.93, title, fontsize=10.5, fontweight="bold", va="center")
        figure.legend(loc="lower left", bbox_to_anchor=(0.1, 0), ncols=len(by_kind), frameon=False, handlelength=1.2)


def _draw_share(axes: Axes, place: int, left: float, value: float, total: float, kind: str) -> None:
    """A segment of a stacked bar, with its share of the total where there is room."""
    style: dict[str, Any] = {"color": KIND_COLOURS[KINDS.index(kind)], "edgecolor": "white", "linewidth": 0.8}
    patch = axes.barh(place, value * 1e3, 0.72, left * 1e3, label=kind if place == 0 else None, **style)
    patch[0].set_gid(f"{('forward', 'backward', 'both')[place]}:{kind}")
    if value > 0.045 * total:
        ink = INK if kind == "intra-node communication" else "white"
        middle = (left + value / 2) * 1e3
        axes.text(middle, place, f"{value / total:.0%}", ha="center", va="center", color=ink, fontsize=7)
