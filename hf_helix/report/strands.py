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

from hf_helix.config import parse_link
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.plan.search import chains
from hf_helix.planning.rules.registry import runs_one_strand
from hf_helix.planning.timing.profile import EMULATED_LINK, Profile
from hf_helix.report.figures import COLOURS, EMPTY, FAINT, INK, draw_legend, figure_file
from hf_helix.report.timeline import (
    Bar,
    bars_of_timeline,
    busy_fraction,
    colours_of,
    extent,
    letters,
    streams_of,
    text_axis,
    text_legend,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAYERS = 2
HEADING = "Two decoder layers, without overlap and with"
WIDTH, NET_WIDTH, ROW = 10.0, 8.4, 0.56  # of a picture, of its bars, and the height of a row, in inches
SIZE, LETTER = 6.5, 3.5  # of names in bars, and about the width of their letters, in points
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
    link = profile.about.get(EMULATED_LINK)
    return f"emulated link of {parse_link(link)}, predicted from measured operators" if link else "predicted"


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
    end = max(strip.seconds for strip in strips)
    with figure_file(path, WIDTH, 0.8 + len(strips) * (0.45 + ROW * len(streams))) as figure:
        figure.set_layout_engine("constrained", hspace=0.08)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
        figure.text(0.99, 0.985, note, fontsize=8.5, color=FAINT, ha="right", va="top")
        blocks = figure.subplots(len(strips), sharex=True, squeeze=False)[:, 0]
        for place, (axes, strip) in enumerate(zip(blocks, strips, strict=True)):
            words, _, rule = strip.title.partition(" (")
            plan = f"plan {rule.rstrip(')')}:  {strip.seconds * 1e3:,.1f} ms, computes {strip.busy:.0%} of it"
            axes.set_title(words[:1].upper() + words[1:], loc="left", fontsize=10.5, fontweight="bold")
            axes.set_title(plan, loc="right", fontsize=9.5, color=FAINT)
            _draw_rows(axes, strip, streams, end, f"strip{place}")
            if strips[0].seconds - strip.seconds > 0.04 * end:
                _draw_gain(axes, strip, strips[0])
        draw_legend(figure, colours_of([bar for strip in strips for bar in strip.bars]))


def _draw_rows(axes: Axes, strip: Strip, streams: Mapping[str, str], end: float, name: str) -> None:
    """A row of bars for every stream, on an axis of milliseconds; `name` begins the ids of bars in an SVG file."""
    points = NET_WIDTH * 72 / end  # per second
    for row, stream in enumerate(streams):
        axes.barh(row, strip.seconds * 1e3, 0.84, color=EMPTY, linewidth=0)
        for bar in (bar for bar in strip.bars if bar.stream == stream):
            edge = min(0.8, 0.12 * bar.seconds * points)  # a fixed one would hide short ones
            style: dict[str, Any] = {"color": COLOURS[bar.letter], "edgecolor": "white", "linewidth": edge}
            axes.barh(row, bar.seconds * 1e3, 0.84, bar.start * 1e3, **style)[0].set_gid(f"{name}:{bar.label}")
            text, rotation = _name_that_fits(bar, bar.seconds * points)
            style = {"color": "white" if bar.letter in "FB" else INK, "fontsize": SIZE, "rotation": rotation}
            axes.text((bar.start + bar.end) / 2 * 1e3, row, text, ha="center", va="center", **style)
    axes.set_yticks(range(len(streams)), list(streams.values()), fontsize=9.5)
    axes.set_xlim(0, end * 1e3)
    axes.set_ylim(len(streams) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter("{x:,.10g} ms")
    axes.spines[["left", "right", "top"]].set_visible(False)


def _name_that_fits(bar: Bar, points: float) -> tuple[str, float]:
    """The longest form of a bar's name that fits into its width in points, and its rotation in degrees."""
    words = bar.operator.split(".")
    forms = [".".join(words[i:]) for i in range(len(words)) if words[i] not in ("I", "W")]
    rooms = {0.0: points - 3, 90.0: 0.84 * ROW * 72 - 2 if points >= SIZE + 1 else 0.0}
    fitting = ((text, turn) for turn, room in rooms.items() for text in forms if LETTER * len(text) <= room)
    return next(fitting, ("", 0.0))


def _draw_gain(axes: Axes, strip: Strip, first: Strip) -> None:
    """The gain, in the saved time of the shorter strip."""
    line, style = sum(axes.get_ylim()) / 2, {"arrowstyle": "<->", "color": INK, "linewidth": 1.0}
    axes.annotate("", (strip.seconds * 1e3, line), (first.seconds * 1e3, line), arrowprops=style)
    gain, middle = f"{first.seconds / strip.seconds:.2f}x as fast", (strip.seconds + first.seconds) / 2 * 1e3
    axes.text(middle, line - 0.1, gain, ha="center", va="bottom", fontsize=12, fontweight="bold")
