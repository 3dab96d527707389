"""Pipelines: the ranks of a schedule, as text and as figures.

In:   simulated schedules.
Out:  a row for every rank, to scale, with bubbles, fused slots and peak memory; tables; SVG, PNG and PDF files.
Must hold: every slot of a figure is there once; idle time stays blank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_helix.planning.schedule.actions import Action, Slot
from hf_helix.planning.schedule.placement import stages_of_rank
from hf_helix.planning.schedule.slot_clock import Simulated
from hf_helix.report.figures import COLOURS, FAINT, INK, draw_head, draw_legend, figure_file, text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALE = {"F": "#8db8df", "B": "#eda98f"}  # of the second chunk
MEANING = {"F": "forward", "B": "backward or input gradient", "W": "weight gradient"}
LEGEND = """F forward   B backward   I input gradient   W weight gradient   X forward beside backward
small letters: second chunk   · idle"""
WIDTH, LEFT, RIGHT, HEAD, FOOT, ROW, BAR = 10.0, 0.6, 1.25, 0.4, 0.6, 0.42, 0.84  # inches; BAR: part of a row
SIZE = 6.5  # of micro-batch numbers


def chunk_of(simulated: Simulated, action: Action) -> int:
    """Returns the chunk of an action on its rank: 0 or 1."""
    return stages_of_rank(simulated.ranks[action.stage], simulated.ranks).index(action.stage)


def text_ranks(simulated: Simulated) -> str:
    """Returns a line for every rank: bubble, fused slots, activations."""
    lines = [f"{'':<8}{'bubble':>8}{'fused':>7}{'live activations':>18}{'in stage-shares':>17}"]
    for rank, bubble in enumerate(simulated.bubbles):
        numbers = f"{bubble:>8.1%}{simulated.fused[rank]:>7}{simulated.live[rank]:>18}{simulated.shares[rank]:>17.2f}"
        lines.append(f"{f'rank {rank}':<8}{numbers}")
    return "\n".join(lines)


def text_comparison(simulations: Mapping[str, Simulated]) -> str:
    """Returns a line for every schedule, with the numbers of its worst rank."""
    lines = [f"{'schedule':<24}{'time':>10}{'bubble':>8}{'fused':>7}{'live activations':>18}{'in stage-shares':>17}"]
    for name, simulated in simulations.items():
        numbers = f"{simulated.seconds:>10,.2f}{simulated.bubble:>8.1%}{max(simulated.fused):>7}"
        lines.append(f"{name:<24}{numbers}{max(simulated.live):>18}{max(simulated.shares):>17.2f}")
    return "\n".join(lines)


# -- text ------------------------------------------------------------------------------------------------------------


def text_pipeline(simulated: Simulated, width: int = 100) -> str:
    """Returns a row for every rank, micro-batch numbers where there is room; all columns are equally long."""
    names = [f"rank {rank}  " for rank in range(len(simulated.schedule))]
    margins = [f"  {bubble:4.0%} idle" for bubble in simulated.bubbles]
    columns = max(10, width - len(names[-1]) - len(margins[0]))
    lines = [
        f"{name:<{len(names[-1])}}{''.join(_cells(simulated, rank, columns))}{margins[rank]}"
        for rank, name in enumerate(names)
    ]
    return "\n".join([*lines, LEGEND])


def _cells(simulated: Simulated, rank: int, columns: int) -> Iterator[str]:
    """The texts of the slots of a rank in order; a column shows the slot at its middle."""
    step = simulated.seconds / columns
    starts, ends = simulated.starts[rank], simulated.ends[rank]

    def place(column: int) -> int | None:
        time = (column + 0.5) * step
        slot = bisect_right(starts, time) - 1
        return slot if slot >= 0 and time < ends[slot] else None

    for slot, group in groupby(range(columns), place):
        size = len(list(group))
        yield "·" * size if slot is None else _cell(simulated, simulated.schedule[rank][slot], size)


def _cell(simulated: Simulated, slot: Slot, size: int) -> str:
    """The longest name of a slot that fits, filled up with dashes."""
    letters = [a.computation_type.lower() if chunk_of(simulated, a) else a.computation_type for a in slot.actions]
    full = "".join(f"{letter}{a.microbatch}" for letter, a in zip(letters, slot.actions, strict=True))
    short = "X" if slot.fused else letters[0]
    return f"{full if len(full) <= size else short:─<{size}}"


# -- figures ---------------------------------------------------------------------------------------------------------


def draw_pipeline(simulated: Simulated, path: str | Path, title: str = "", unit: str = "") -> None:
    """Saves a figure: a row for every rank, to scale, with micro-batch numbers where there is room."""
    rows = len(simulated.schedule)
    height = HEAD + rows * ROW + FOOT
    with figure_file(path, WIDTH, height) as figure:
        box = (LEFT / WIDTH, FOOT / height, 1 - (LEFT + RIGHT) / WIDTH, rows * ROW / height)
        axes = figure.add_axes(box)
        points = (WIDTH - LEFT - RIGHT) * 72 / simulated.seconds
        for rank, slots in enumerate(simulated.schedule):
            for slot, start, end in zip(slots, simulated.starts[rank], simulated.ends[rank], strict=True):
                for number, action in enumerate(slot.actions):
                    tall = BAR / len(slot.actions)
                    _draw_action(axes, simulated, action, (start, rank - BAR / 2 + number * tall, end, tall), points)
        _draw_margins(axes, simulated, unit)
        note = f"{simulated.bubble:.1%} bubble;  shares: activations of a micro-batch on an average rank"
        draw_head(figure, title, note, (LEFT, 0.15), size=7)
        draw_legend(figure, _colours(simulated), LEFT)


def _draw_action(
    axes: Axes, simulated: Simulated, action: Action, box: tuple[float, float, float, float], points: float
) -> None:
    """A rectangle; fused slots are cut in halves, forward above."""
    from matplotlib.patches import Rectangle

    start, top, end, tall = box
    edge = min(0.6, 0.12 * points * (end - start))  # a fixed width would hide short actions
    colour, ink = _colour(action.computation_type, chunk_of(simulated, action))
    name = f"rank{simulated.ranks[action.stage]}:{action}"
    patch = Rectangle((start, top), end - start, tall, facecolor=colour, edgecolor="white", linewidth=edge, gid=name)
    axes.add_patch(patch)
    text = str(action.microbatch)
    if text_width(text, SIZE) <= points * (end - start) - 1.5:
        axes.text((start + end) / 2, top + tall / 2, text, fontsize=SIZE, color=ink, ha="center", va="center_baseline")


def _colour(direction: str, chunk: int) -> tuple[str, str]:
    """The colour of a box, and of its text."""
    if direction == "W":
        return COLOURS["W"], INK
    strand = "F" if direction == "F" else "B"
    return (PALE[strand], INK) if chunk else (COLOURS[strand], "white")


def _draw_margins(axes: Axes, simulated: Simulated, unit: str) -> None:
    rows = len(simulated.schedule)
    axes.set_yticks(range(rows), [f"rank {rank}" for rank in range(rows)])
    axes.set_xlim(0, simulated.seconds)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=3, width=0.6, pad=2, labelsize=7.5)
    axes.xaxis.set_major_formatter(f"{{x:,.10g}} {unit}".strip())
    axes.spines[["left", "right", "top"]].set_visible(False)
    for rank, bubble in enumerate(simulated.bubbles):
        text = f"{bubble:.1%} bubble\n{simulated.live[rank]} live, {simulated.shares[rank]:.3g} shares"
        style: dict[str, Any] = {"fontsize": SIZE, "color": FAINT, "va": "center", "linespacing": 1.3}
        axes.text(1.01, rank, text, transform=axes.get_yaxis_transform(), **style)


def _colours(simulated: Simulated) -> dict[str, str]:
    """The colours of the legend, by label."""
    actions = [action for slots in simulated.schedule for slot in slots for action in slot.actions]
    used = {(action.computation_type.replace("I", "B"), chunk_of(simulated, action)) for action in actions}
    return {
        MEANING[letter] + ("" if letter == "W" else f", chunk {chunk}"): _colour(letter, chunk)[0]
        for letter in MEANING
        for chunk in (0, 1)
        if (letter, chunk) in used
    }
