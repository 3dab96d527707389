"""Pictures of the paper's figures, its numbers beside ours.

In:   numbers by group and by series; None where the paper has none.
Out:  a picture file.
Must hold: pale is the paper, full is ours, in every picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_helix.report.figures import INK, figure_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HUES = ("#7b828c", "#f2b84b", "#7a9a4c", "#d1603d", "#2e6fae", "#6d4d9a")
PALE = 0.35
LEFT, RIGHT, HEAD, FOOT = 0.7, 0.2, 0.62, 0.62  # inches
LEGEND_SIZE, VALUE_SIZE = 7.0, 5.0


@dataclass(frozen=True)
class Series:
    """One colour of a picture.

    Attributes:
        name: of the method, or of the part.
        ours: a number for every group.
        paper: likewise; None where the paper has none.
    """

    name: str
    ours: Sequence[float | None]
    paper: Sequence[float | None]


def draw_groups(path: Path, title: str, unit: str, groups: Sequence[str], series: Sequence[Series]) -> None:
    """Draws bars beside each other, as figures 11 to 14 have them.

    Args:
        path: of the file.
        title: of the picture.
        unit: of the numbers.
        groups: names below the bars; a line each where they hold line breaks.
        series: one colour each.
    """
    width = max(5.0, 1.5 * len(groups))
    with figure_file(path, width, 3.0) as figure:
        axes = figure.add_axes(_place(width, 3.0))
        bar = 0.8 / (2 * len(series))
        for number, each in enumerate(series):
            for place in range(len(groups)):
                for side, (value, alpha) in enumerate(((each.paper[place], PALE), (each.ours[place], 1.0))):
                    at = place - 0.4 + (2 * number + side + 0.5) * bar
                    if value is not None:
                        axes.bar(at, value, bar * 0.92, color=HUES[number % len(HUES)], alpha=alpha)
                        axes.text(at, value, f"{value:,.0f}", rotation=90, size=VALUE_SIZE, ha="center", va="bottom")
        axes.set_ylabel(unit)
        axes.set_xticks(range(len(groups)), groups)
        axes.set_xlim(-0.6, len(groups) - 0.4)
        axes.margins(y=0.15)
        _finish(axes, title, series)


def draw_stacks(path: Path, title: str, unit: str, groups: Sequence[str], series: Sequence[Series]) -> None:
    """Draws parts on top of each other, the paper's stack beside ours where it has one.

    Args:
        path: the file, .svg, .png or .pdf.
        title: above the figure.
        unit: of the values.
        groups: the names below the stacks.
        series: the parts, from below.
    """
    width = max(4.0, 1.2 * len(groups) + 1.5)
    with figure_file(path, width, 3.0) as figure:
        axes = figure.add_axes(_place(width, 3.0))
        for place in range(len(groups)):
            for side, alpha in ((-1, PALE), (1, 1.0)):
                bottom = 0.0
                for number, each in enumerate(series):
                    value = (each.paper if side < 0 else each.ours)[place]
                    if value is None:
                        continue
                    axes.bar(
                        place + 0.2 * side * _has_paper(series),
                        value,
                        0.36,
                        bottom,
                        color=HUES[number % len(HUES)],
                        alpha=alpha,
                    )
                    bottom += value
        axes.set_ylabel(unit)
        axes.set_xticks(range(len(groups)), groups)
        axes.set_xlim(-0.6, len(groups) - 0.4)
        _finish(axes, title, series)


def draw_cells(
    path: Path, title: str, names: Sequence[str], tables: Sequence[tuple[str, Sequence[Sequence[float]]]]
) -> None:
    """Draws square tables of numbers between 0 and 1 beside each other, as figure 4 has them.

    Args:
        path: of the file.
        title: of the picture.
        names: of rows and columns.
        tables: the name of each, and its numbers.
    """
    side = 0.55 * len(names)
    width = 0.9 + len(tables) * (side + 0.5)
    with figure_file(path, width, side + 1.0) as figure:
        figure.text(0.02, 0.95, title, size=9, weight="bold", va="top")
        for number, (name, cells) in enumerate(tables):
            left = 0.8 + number * (side + 0.5)
            axes = figure.add_axes((left / width, 0.3 / (side + 1.0), side / width, side / (side + 1.0)))
            axes.imshow(cells, cmap="Blues", vmin=0.0, vmax=2.0)
            axes.set_xticks(range(len(names)), names)
            axes.set_yticks(range(len(names)), names if number == 0 else [""] * len(names))
            axes.set_title(name, size=8)
            for row, values in enumerate(cells):
                for column, value in enumerate(values):
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center", size=7, color=INK)


def _place(width: float, height: float) -> tuple[float, float, float, float]:
    return LEFT / width, FOOT / height, (width - LEFT - RIGHT) / width, (height - HEAD - FOOT) / height


def _has_paper(series: Sequence[Series]) -> bool:
    return any(value is not None for each in series for value in each.paper)


def _finish(axes: Axes, title: str, series: Sequence[Series]) -> None:
    from matplotlib.patches import Patch

    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title(title, size=9, weight="bold", loc="left", pad=26)
    legend = [Patch(color=HUES[number % len(HUES)], label=each.name) for number, each in enumerate(series)]
    if _has_paper(series):
        legend += [Patch(color=INK, alpha=PALE, label="pale: the paper"), Patch(color=INK, label="full: ours")]
    axes.legend(
        handles=legend,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=len(legend),
        frameon=False,
        fontsize=LEGEND_SIZE,
        handlelength=1.0,
        columnspacing=1.0,
    )
