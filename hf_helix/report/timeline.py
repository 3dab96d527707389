"""Timelines: the streams of a window, as text and as figures.

In:   `Bar`s.
Out:  rows of letters for terminals; SVG, PNG and PDF files.
Must hold: everything is to scale; idle time stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_helix.report.bars import Bar, between, busy_fraction, extent, legend, streams_of
from hf_helix.report.figures import COLOURS, EMPTY, INK, draw_head, draw_legend, figure_file, text_width
from hf_helix.runtime.trace import Span, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, LEFT, RIGHT, HEAD, FOOT, ROW, AXIS = 10.0, 0.8, 0.4, 0.4, 0.25, 0.56, 0.34  # inches; AXIS below every line
SIZE = 6.5  # of names in bars
OPERATORS_PER_LINE, MOST_LINES = 70, 10


def tick_step(span: float, max_steps: int) -> float:
    """Returns the round number (1, 2 or 5 times a power of ten) that leaves at most `max_steps` steps in a span."""
    power = 10.0 ** math.floor(math.log10(span / max_steps))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * max_steps >= span * (1 - 1e-9))


def text_timeline(bars: Sequence[Bar], width: int = 100) -> str:
    """Returns a row of letters for every stream; all columns are equally long. Raises ValueError without bars."""
    start, end = extent(bars)
    rows = streams_of(bars)
    indent = max(len(row) for row in rows) + 2
    columns = max(10, width - indent - len("  100% busy"))
    lines = []
    for row in rows:
        drawn = letters([bar for bar in bars if bar.stream == row], start, (end - start) / columns, columns)
        lines.append(f"{row:<{indent}}{drawn}  {busy_fraction(bars, row, start, end):4.0%} busy")
    lines += [" " * indent + line for line in text_axis(start, end, columns)]
    return "\n".join([*lines, *text_legend(bars, indent, width)])


def letters(bars: Sequence[Bar], start: float, step: float, columns: int) -> str:
    """Returns the longest letter of every column of `step` seconds; a dot in columns with more than half idle time."""
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
    """Returns a ruler from `start` to `end` (seconds), and a line of milliseconds."""
    step = tick_step((end - start) * 1e3, max(1, columns // 12))
    marks, numbers = ["─"] * columns, [" "] * (columns + 12)
    for tick in range(math.ceil(start * 1e3 / step - 1e-9), math.floor(end * 1e3 / step + 1e-9) + 1):
        column = round((tick * step - start * 1e3) / ((end - start) * 1e3) * columns)
        text = f"{tick * step:,.10g}" + (" ms" if not "".join(numbers).strip() else "")
        marks[min(column, columns - 1)] = "┬"
        numbers[column : column + len(text)] = text
    return "".join(marks), "".join(numbers).rstrip()


def text_legend(bars: Sequence[Bar], indent: int, width: int) -> list[str]:
    """Returns the legend of bars, in lines of at most `width` characters that begin with `indent` blanks."""
    first, *items = [*(f"{letter} {meaning}" for letter, meaning in legend(bars).items()), "· idle"]
    lines = [" " * indent + first]
    for item in items:
        fits = len(lines[-1]) + 3 + len(item) <= width
        lines = [*lines[:-1], f"{lines[-1]}   {item}"] if fits else [*lines, " " * indent + item]
    return lines


def draw_timeline(bars: Sequence[Bar], path: str | Path, title: str = "", lines: int | None = None) -> None:
    """Saves a figure: a row for every stream, to scale; names where there is room.

    Args:
        bars: the bars of a window.
        path: its suffix names the format: .svg, .png or .pdf.
        title: the title.
        lines: the number of lines that the timeline is broken into; None for as many as names need.

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
        draw_head(figure, title, _summary(bars), (LEFT, RIGHT))
        draw_legend(figure, colours_of(bars), LEFT)


def _draw_line(axes: Axes, bars: Sequence[Bar], rows: list[str], start: float, end: float, name: str) -> None:
    shares = {row: f"{row}\n{busy_fraction(bars, row, start, end):.0%} busy" for row in rows}
    draw_rows(axes, between(bars, start, end), shares, (start, end), end, WIDTH - LEFT - RIGHT, name)
    axes.set_yticks(range(len(rows)), list(shares.values()), linespacing=1.4)
    axes.tick_params(axis="x", length=3, width=0.6, pad=2, labelsize=7.5)


def colours_of(bars: Sequence[Bar]) -> dict[str, str]:
    """Returns the colours of a legend of bars, by label."""
    return {**{meaning: COLOURS[letter] for letter, meaning in legend(bars).items()}, "idle": EMPTY}


def draw_rows(
    axes: Axes,
    bars: Sequence[Bar],
    rows: Mapping[str, str],
    span: tuple[float, float],
    until: float,
    inches: float,
    name: str,
) -> None:
    """Draws a row of bars for every stream, on an axis of milliseconds.

    The axis spans `span` seconds over `inches`; idle time is shown `until` a second. `rows` are the labels by stream,
    `name` is the prefix of the ids of bars in an SVG file.
    """
    start, end = span
    points = inches * 72 / (end - start)  # per second
    for place, row in enumerate(rows):
        axes.barh(place, (until - start) * 1e3, 0.84, start * 1e3, color=EMPTY, linewidth=0)
        for bar in bars:
            if bar.stream == row:
                _draw_bar(axes, bar, place, bar.seconds * points, f"{name}:{bar.label}")
    axes.set_xlim(start * 1e3, end * 1e3)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter("{x:,.10g} ms")
    axes.spines[["left", "right", "top"]].set_visible(False)


def _draw_bar(axes: Axes, bar: Bar, place: int, points: float, name: str) -> None:
    """A rectangle `points` wide, its name in it where there is room: along it, over the micro-batch, else upright."""
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
    """The longest form of a bar's name that fits, and whether it must stand upright; empty where no form fits."""
    words = bar.operator.split(".")
    forms = [".".join(words[i:]) for i in range(len(words)) if words[i] not in ("I", "W")]
    rooms = {False: points - 3, True: 0.84 * ROW * 72 - 2 if points >= SIZE + 1 else 0.0}
    fitting = ((text, upright) for upright, room in rooms.items() for text in forms if text_width(text, SIZE) <= room)
    return next(fitting, ("", False))


def _summary(bars: Sequence[Bar]) -> str:
    """The length, and the share of communication that computation hides."""
    start, end = extent(bars)
    trace = Trace(spans=[Span(bar.stream, bar.label, bar.start, bar.end) for bar in bars])
    moving = trace.busy(compute=False)
    beside = f";  {trace.overlapped() / moving:.0%} of communication beside computation" if moving else ""
    return f"{(end - start) * 1e3:,.1f} ms{beside}"
