"""Timelines: which stream runs what, and when, as text and as figures.

In:   `Bar`s, of a window that the cost function predicted or of one that ran.
Out:  rows of letters for terminals; SVG, PNG and PDF files.
Must hold: everything is to scale; time in which a stream idles stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_helix.planning.window.window import STREAMS
from hf_helix.report.bars import MEANING, Bar, bars_of_timeline, bars_of_trace, between, busy_fraction, extent
from hf_helix.report.figures import COLOURS, EMPTY, FAINT, INK, figure_file, text_width
from hf_helix.runtime.trace import Span, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Bar", "bars_of_timeline", "bars_of_trace", "between", "draw_timeline", "text_timeline"]

ROWS = tuple(kind.value for kind in STREAMS)
WIDTH, LEFT, RIGHT, HEAD, FOOT, ROW, AXIS = 10.0, 0.8, 0.4, 0.4, 0.25, 0.56, 0.34  # inches; AXIS below every line
SIZE = 6.5  # of names in bars
OPERATORS_PER_LINE, MOST_LINES = 70, 10


def streams_of(bars: Iterable[Bar]) -> list[str]:
    """The streams that run something; the order is that of a rank's devices, from the cores outward."""
    streams = {bar.stream for bar in bars}
    return [*(stream for stream in ROWS if stream in streams), *sorted(streams - set(ROWS))]


def tick_step(span: float, max_steps: int) -> float:
    """The round number (1, 2 or 5 times a power of ten) that leaves at most `max_steps` steps in a span."""
    power = 10.0 ** math.floor(math.log10(span / max_steps))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * max_steps >= span * (1 - 1e-9))


def text_timeline(bars: Sequence[Bar], width: int = 100) -> str:
    """A row of letters for every stream; every column is the same stretch of time. Raises ValueError without bars."""
    start, end = extent(bars)
    rows = streams_of(bars)
    indent = max(len(row) for row in rows) + 2
    columns = max(10, width - indent - len("  100% busy"))
    lines = []
    for row in rows:
        drawn = letters([bar for bar in bars if bar.stream == row], start, (end - start) / columns, columns)
        lines.append(f"{row:<{indent}}{drawn}  {busy_fraction(bars, row, start, end):4.0%} busy")
    lines += [" " * indent + line for line in text_axis(start, end, columns)]
    used = {bar.letter for bar in bars}
    legend = [f"{letter} {meaning}" for letter, meaning in MEANING.items() if letter in used]
    return "\n".join([*lines, *wrapped([*legend, "· idle"], indent, width)])


def letters(bars: Sequence[Bar], start: float, step: float, columns: int) -> str:
    """In every column the letter that takes most of it; a dot where the stream idles for more than half of it.

    Args:
        bars: of one stream.
        start: of the first column, in seconds.
        step: seconds of a column.
        columns: how many there are.
    """
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for bar in bars:
        first, last = (bar.start - start) / step, (bar.end - start) / step
        for column in range(int(first), min(columns, math.ceil(last))):
            share = min(last, column + 1) - max(first, column)
            shares[column][bar.letter] = shares[column].get(bar.letter, 0.0) + share
    return "".join(
        max(in_column, key=lambda k: in_column[k]) if sum(in_column.values()) >= 0.5 else "·" for in_column in shares
    )


def text_axis(start: float, end: float, columns: int) -> tuple[str, str]:
    """A ruler, and below it milliseconds.

    Args:
        start: of the first column, in seconds.
        end: of the last column, in seconds.
        columns: how many there are.
    """
    step = tick_step((end - start) * 1e3, max(1, columns // 12))
    marks, numbers = ["─"] * columns, [" "] * (columns + 12)
    for tick in range(math.ceil(start * 1e3 / step - 1e-9), math.floor(end * 1e3 / step + 1e-9) + 1):
        column = round((tick * step - start * 1e3) / ((end - start) * 1e3) * columns)
        text = f"{tick * step:,.10g}" + (" ms" if not "".join(numbers).strip() else "")
        marks[min(column, columns - 1)] = "┬"
        numbers[column : column + len(text)] = text
    return "".join(marks), "".join(numbers).rstrip()


def wrapped(items: Sequence[str], indent: int, width: int) -> list[str]:
    """Returns lines of items, three blanks between them.

    Args:
        items: at least one.
        indent: blanks at the start of each line.
        width: of the longest line, in characters; an item that is wider has a line of its own.
    """
    lines = [" " * indent + items[0]]
    for item in items[1:]:
        fits = len(lines[-1]) + 3 + len(item) <= width
        lines = [*lines[:-1], f"{lines[-1]}   {item}"] if fits else [*lines, " " * indent + item]
    return lines


def draw_timeline(bars: Sequence[Bar], path: str | Path, title: str = "", lines: int | None = None) -> None:
    """Saves a figure: a row for every stream, to scale; names where there is room.

    Args:
        path: its suffix names the format: .svg, .png or .pdf.
        lines: how many the timeline is broken into, like a text; None for as many as names need.

    Raises:
        ValueError: no bars, or another suffix.
        ImportError: matplotlib is missing.
    """
    start, end = extent(bars)
    rows = streams_of(bars)
    lines = lines or min(MOST_LINES, math.ceil(len(bars) / OPERATORS_PER_LINE))
    height = HEAD + lines * (len(rows) * ROW + AXIS) + FOOT
    step = (end - start) / lines
    with figure_file(path, WIDTH, height) as figure:
        for line in range(lines):
            top = HEAD + line * (len(rows) * ROW + AXIS)
            box = (LEFT / WIDTH, 1 - (top + len(rows) * ROW) / height)
            axes = figure.add_axes((*box, 1 - (LEFT + RIGHT) / WIDTH, len(rows) * ROW / height))
            _draw_line(axes, bars, rows, start + line * step, start + (line + 1) * step, f"line{line}")
        _head_and_legend(figure, bars, title, height)


def _draw_line(axes: Axes, bars: Sequence[Bar], rows: list[str], start: float, end: float, name: str) -> None:
    points = (WIDTH - LEFT - RIGHT) * 72 / (end - start)  # per second
    for place, row in enumerate(rows):
        axes.barh(place, (end - start) * 1e3, 0.84, start * 1e3, color=EMPTY, linewidth=0)
        for bar in between(bars, start, end):
            if bar.stream == row:
                draw_bar(axes, bar, place, bar.seconds * points, f"{name}:{bar.label}")
    shares = [f"{row}\n{busy_fraction(bars, row, start, end):.0%} busy" for row in rows]
    axes.set_yticks(range(len(rows)), shares, linespacing=1.4)
    axes.set_xlim(start * 1e3, end * 1e3)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter("{x:,.10g} ms")
    axes.tick_params(axis="x", length=3, width=0.6, pad=2, labelsize=7.5)
    axes.spines[["left", "right", "top"]].set_visible(False)


def draw_bar(axes: Axes, bar: Bar, place: int, points: float, name: str) -> None:
    """A rectangle `points` wide, its name in it where there is room: along it, over the micro-batch, else upright.

    Args:
        axes: to draw on, in milliseconds.
        bar: what runs when.
        place: the row, from 0.
        points: the width of the rectangle in points.
        name: the id of the rectangle in an SVG file.
    """
    edge = min(0.8, 0.12 * points)  # a fixed one would hide what is short
    style: dict[str, Any] = {"color": COLOURS[bar.letter], "edgecolor": "white", "linewidth": edge}
    patch = axes.barh(place, bar.seconds * 1e3, 0.84, bar.start * 1e3, **style)
    patch[0].set_gid(name)
    middle = (bar.start + bar.end) / 2 * 1e3
    text, upright = _name_that_fits(bar, points)
    style = {"color": "white" if bar.letter in "FB" else INK, "ha": "center", "va": "center"}
    if upright:
        axes.text(middle, place, text, fontsize=SIZE, rotation=90, **style)
    elif text:
        axes.text(middle, place + 0.07, text, fontsize=SIZE, **style)
        axes.text(middle, place - 0.24, f"{bar.strand}{bar.microbatch}", fontsize=SIZE - 1.5, alpha=0.75, **style)


def _name_that_fits(bar: Bar, points: float) -> tuple[str, bool]:
    """The longest form of a bar's name that fits into it, and whether it must stand upright; empty where none does."""
    words = bar.operator.split(".")
    forms = [".".join(words[i:]) for i in range(len(words)) if words[i] not in ("I", "W")]
    rooms = {False: points - 3, True: 0.84 * ROW * 72 - 2 if points >= SIZE + 1 else 0.0}
    fitting = ((text, upright) for upright, room in rooms.items() for text in forms if text_width(text, SIZE) <= room)
    return next(fitting, ("", False))


def _head_and_legend(figure: Figure, bars: Sequence[Bar], title: str, height: float) -> None:
    from matplotlib.patches import Patch

    figure.text(LEFT / WIDTH, 1 - 0.16 / height, title, fontsize=10.5, fontweight="bold", va="center")
    figure.text(1 - RIGHT / WIDTH, 1 - 0.16 / height, _summary(bars), ha="right", va="center", color=FAINT)
    used = {bar.letter for bar in bars}
    patches = [Patch(color=COLOURS[letter], label=text) for letter, text in MEANING.items() if letter in used]
    patches.append(Patch(color=EMPTY, label="idle"))
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (LEFT / WIDTH, 0), "ncols": len(patches)}
    figure.legend(handles=patches, frameon=False, handlelength=1.2, handletextpad=0.5, borderaxespad=0.2, **place)


def _summary(bars: Sequence[Bar]) -> str:
    """The length, and how much of communication computation hides."""
    start, end = extent(bars)
    trace = Trace(spans=[Span(bar.stream, bar.label, bar.start, bar.end) for bar in bars])
    moving = trace.busy(compute=False)
    beside = f";  {trace.overlapped() / moving:.0%} of communication beside computation" if moving else ""
    return f"{(end - start) * 1e3:,.1f} ms{beside}"
