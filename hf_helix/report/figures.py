"""Figures: files, colours, heads and legends of all pictures.

In:   a path whose suffix names the format, and the size in inches.
Out:  an empty matplotlib figure, saved when its `with` block ends.
Must hold: matplotlib is imported inside functions only; no display, no global state; the same data make the same file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METADATA: dict[str, dict[str, Any]] = {
    ".svg": {"Creator": "hf_helix", "Date": None},
    ".png": {"Software": "hf_helix"},
    ".pdf": {"Creator": "hf_helix", "CreationDate": None},
}
"""By the suffix of a file; without a date, equal data make equal files."""

INK, FAINT, EMPTY = "#2b2f36", "#7b828c", "#f1f2f4"

# A hue for each strand, pale for communication. The colours also differ in lightness, for colour blindness and for
# prints in grey.
COLOURS = {
    "F": "#2e6fae",
    "B": "#d1603d",
    "W": "#f2b84b",
    "R": "#7a9a4c",
    "f": "#a9cbe8",
    "b": "#f3bda8",
    "r": "#cbdcb0",
    "s": "#8d7bb0",
}

STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib brings it, so names fit everywhere as they fit here
    "font.size": 8.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "hf_helix",  # else the ids of every file are random
}


@contextlib.contextmanager
def figure_file(path: str | Path, width: float, height: float) -> Iterator[Figure]:
    """Yields a figure of a width and a height in inches, which is saved at the end of the context.

    Raises:
        ValueError: a suffix that is not in `METADATA`.
        ImportError: matplotlib is missing.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in METADATA:
        raise ValueError(f"cannot draw {str(path)!r}: its name must end with one of {', '.join(METADATA)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    style: dict[Any, Any] = STYLE
    with matplotlib.rc_context(style):
        figure = Figure((width, height))
        yield figure
        figure.savefig(path, dpi=200, facecolor="white", metadata=METADATA[suffix])


def draw_legend(figure: Figure, colours: Mapping[str, str]) -> None:
    """Draws a legend of colours by label at the bottom of a figure with a constrained layout."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), frameon=False, handlelength=1.2)
