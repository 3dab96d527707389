"""Strips: two layers under several plans, on the same time axis.

In:   a profile, and plans; gains are against the first.
Out:  `Strip`s: under each plan, the forward of a micro-batch and the backward of another through the same layers;
      rows of letters for terminals; SVG, PNG and PDF files.
Must hold: every strip does the same work at the same scale, computation above communication, so that readers see gaps
close; times are predicted from the measured operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.link_speeds import link_of
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.registry import runs_one_strand
from hf_helix.planning.plan.search import chains
from hf_helix.planning.timing.predict import predict
from hf_helix.planning.timing.profile import Profile
from hf_helix.report.figures import FAINT, INK, draw_legend, figure_file
from hf_helix.report.timeline import (
    ROW,
    Bar,
    bars_of_timeline,
    busy_fraction,
    colours_of,
    draw_rows,
    extent,
    letters,
    streams_of,
    text_axis,
    text_legend,
    tick_step,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LAYERS = 2
HEADING = "Two decoder layers, without overlap and with"
WIDTH, LEFT, RIGHT, HEAD, FOOT, TITLE, AXIS = 10.0, 1.28, 0.3, 0.5, 0.42, 0.36, 0.3  # inches
NAMES = {
    Kind.COMPUTE.value: "computation",
    Kind.INTRA_NODE.value: "communication",
    Kind.INTER_NODE.value: "between hosts",
}


@dataclass(frozen=True)
class Strip:
    """The layers under one plan: its title, and the operators from second 0 on."""

    title: str
    bars: Sequence[Bar]

    @property
    def seconds(self) -> float:
        return extent(self.bars)[1]

    @property
    def busy(self) -> float:
        """The share of the time in which the rank computes."""
        return busy_fraction(self.bars, Kind.COMPUTE.value, 0.0, self.seconds)


def strips_of_plans(profile: Profile, plans: Sequence[Plan]) -> list[Strip]:
    """Returns a strip for each plan: `LAYERS` layers of the most frequent kind in a row. Raises ValueError without a
    layer."""
    layout = profile.layout
    views = chains(layout, LAYERS)
    if not views:
        raise ValueError("there is nothing to draw: the profile holds no decoder layer")
    chain, schedule = max(views, key=lambda view: list(layout.units).count(view[0].units[0]))
    result = []
    for plan in plans:
        predicted = predict(plan, replace(profile, layout=chain), schedule, timeline=True)
        strands = "one strand" if runs_one_strand(plan.rule) else "two strands"
        result.append(Strip(f"{strands} ({plan.rule})", bars_of_timeline(predicted.timeline, predicted.instructions)))
    return result


def note_of(profile: Profile) -> str:
    """Returns the origin of the times, in words."""
    link = link_of(profile)
    return f"emulated link of {link}, predicted from measured operators" if link.rate else "predicted"


def _streams(strips: Sequence[Strip]) -> dict[str, str]:
    """The streams of strips, with their labels."""
    streams = streams_of([bar for strip in strips for bar in strip.bars])
    both = {Kind.INTRA_NODE.value, Kind.INTER_NODE.value} <= set(streams)
    names = {**NAMES, Kind.INTRA_NODE.value: "inside a host" if both else NAMES[Kind.INTRA_NODE.value]}
    if not both:
        names[Kind.INTER_NODE.value] = NAMES[Kind.INTRA_NODE.value]
    return {stream: names.get(stream, stream) for stream in streams}


def text_strips(strips: Sequence[Strip], width: int = 100) -> str:
    """Returns a block of rows of letters for each strip; all columns are equally long."""
    streams = _streams(strips)
    end = max(strip.seconds for strip in strips)
    indent = max(map(len, streams.values())) + 6
    columns = max(10, width - indent)
    lines = []
    for strip in strips:
        gain = "" if strip is strips[0] else f", {strips[0].seconds / strip.seconds:.2f}x as fast"
        lines.append(f"  {strip.title}: {strip.seconds * 1e3:,.1f} ms, computes {strip.busy:.0%} of it{gain}")
        taken = round(strip.seconds / end * columns)
        for stream, name in streams.items():
            mine = [bar for bar in strip.bars if bar.stream == stream]
            lines.append(f"    {name:<{indent - 4}}{letters(mine, 0.0, end / columns, columns)[:taken]}")
    lines += [" " * indent + line for line in text_axis(0.0, end, columns)]
    return "\n".join([*lines, *text_legend([bar for strip in strips for bar in strip.bars], indent, width)])


def draw_strips(strips: Sequence[Strip], path: str | Path, note: str = "", title: str = HEADING) -> None:
    """Saves the picture: a block for every strip, the gain in the time that the strip leaves free.

    Args:
        path: its suffix names the format: .svg, .png or .pdf.
        note: a note at its upper right, see `note_of`.

    Raises:
        ValueError: another suffix.
        ImportError: matplotlib is missing.
    """
    streams = _streams(strips)
    block = TITLE + len(streams) * ROW
    height = HEAD + len(strips) * block + AXIS + FOOT
    end = max(strip.seconds for strip in strips)
    with figure_file(path, WIDTH, height) as figure:
        figure.text(0.12 / WIDTH, 1 - 0.24 / height, title, fontsize=12.5, fontweight="bold", va="center")
        figure.text(1 - RIGHT / WIDTH, 1 - 0.24 / height, note, fontsize=8.5, color=FAINT, ha="right", va="center")
        for place, strip in enumerate(strips):
            top = HEAD + place * block + TITLE
            box = (LEFT / WIDTH, 1 - (top + len(streams) * ROW) / height)
            axes = figure.add_axes((*box, 1 - (LEFT + RIGHT) / WIDTH, len(streams) * ROW / height))
            _draw_strip(axes, strip, streams, end, f"strip{place}", last=place == len(strips) - 1)
            _draw_title(figure, strip, 1 - (top - 0.15) / height)
            if strip is not strips[0]:
                _draw_gain(axes, strip, strips[0], end)
        bars = [bar for strip in strips for bar in strip.bars]
        draw_legend(figure, colours_of(bars), 0.1, fontsize=8.5, columnspacing=1.5, borderaxespad=0.3)


def _draw_strip(axes: Axes, strip: Strip, streams: Mapping[str, str], end: float, name: str, last: bool) -> None:
    draw_rows(axes, strip.bars, streams, (0.0, end), strip.seconds, WIDTH - LEFT - RIGHT, name)
    axes.set_yticks(range(len(streams)), list(streams.values()), fontsize=9.5)
    step = tick_step(end * 1e3, 10)
    axes.set_xticks([tick * step for tick in range(int(end * 1e3 / step) + 1)])
    axes.tick_params(axis="x", length=3 if last else 0, width=0.6, pad=2, labelsize=8.5, labelbottom=last)
    axes.spines["bottom"].set_visible(last)


def _draw_title(figure: Figure, strip: Strip, height: float) -> None:
    words, _, rule = strip.title.partition(" (")
    text = figure.text(LEFT / WIDTH, height, words[:1].upper() + words[1:], fontsize=10.5, fontweight="bold")
    note = f"plan {rule.rstrip(')')}:  {strip.seconds * 1e3:,.1f} ms, computes {strip.busy:.0%} of it"
    place = text.get_window_extent().x1 / (WIDTH * figure.dpi) + 0.012
    figure.text(place, height, note, fontsize=9.5, color=FAINT)


def _draw_gain(axes: Axes, strip: Strip, first: Strip, end: float) -> None:
    """The gain, in the saved time of the shorter strip."""
    saved = first.seconds - strip.seconds
    if saved <= 0.04 * end:
        return
    middle, rows = (strip.seconds + first.seconds) / 2 * 1e3, axes.get_ylim()[0] + 0.5
    arrow: dict[str, Any] = {"arrowstyle": "<->", "color": INK, "linewidth": 1.0, "shrinkA": 2, "shrinkB": 0}
    line = rows / 2 - 0.5 + 0.12
    axes.annotate("", (strip.seconds * 1e3, line), (first.seconds * 1e3, line), arrowprops=arrow)
    roomy = saved > 0.14 * end
    gain = f"{first.seconds / strip.seconds:.2f}x"
    big: dict[str, Any] = {"ha": "center", "fontsize": 17 if roomy else 10.5, "fontweight": "bold", "color": INK}
    axes.text(middle, line - 0.14, gain, va="bottom", **big)
    if roomy:
        axes.text(middle, line + 0.16, "as fast", ha="center", va="top", fontsize=10, color=INK)
