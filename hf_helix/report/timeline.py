"""Timelines: the streams of a window, as text, and the bars of figures.

In:   a predicted window.
Out:  `Bar`s: an operator with its rank, stream, strand and micro-batch, its start and end; rows of letters for
      terminals.
Must hold: everything is to scale; idle time stays visible; bars need no torch.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from hf_helix.planning.choice.slot_clock import Simulated
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.schedule.actions import Action, Slot
from hf_helix.planning.schedule.placement import stages_of_rank
from hf_helix.planning.timing.operator_clock import Timeline
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.window import STREAMS
from hf_helix.report.figures import COLOURS, EMPTY
from hf_helix.runtime.streams.trace import Span, Trace, common, merge

_LABEL = re.compile(r"^([FB])(\d+)\.([^.]+(?:\.\d+)?)\.(.+)$")

MEANING = {
    "F": "forward",
    "B": "backward, input gradient",
    "W": "weight gradient",
    "R": "forward again, in backward",
    "f": "communication of forward",
    "b": "communication of backward",
    "r": "communication of forward again",
    "s": "gradient sums (data parallel)",
}
"""The letters of bars."""


@dataclass(frozen=True)
class Bar(Span):
    """An operator that runs, on a rank of a pipeline."""

    rank: int = 0

    @property
    def strand(self) -> str:
        """The strand, "F" or "B"."""
        return self.label[0]

    @property
    def operator(self) -> str:
        """The name of the operator, without its unit."""
        return parse_label(self.label)[3]

    @property
    def communicates(self) -> bool:
        """Whether the operator moves data."""
        return self.stream != Kind.COMPUTE.value

    @property
    def letter(self) -> str:
        """A key of `MEANING`."""
        if self.stream == Kind.GRADIENTS.value and self.strand == "B":
            return "s"
        part = part_of(self.strand, self.operator)
        letter = part if part in "WR" else self.strand
        return letter.lower() if self.communicates else letter


def parse_label(label: str) -> tuple[str, int, str, str]:
    """Returns the strand, micro-batch, unit and operator of a label such as "B2.layers.3.mlp.down.W"."""
    match = _LABEL.match(label)
    if match is None:
        raise ValueError(f"not the label of an operator: {label!r}; one looks like 'B2.layers.3.mlp.down.W'")
    return match[1], int(match[2]), match[3], match[4]


def sums_gradients(label: str) -> bool:
    """Returns whether a label names a gradient reduction, which belongs to no unit."""
    return label.startswith(f"{Kind.GRADIENTS.value}.")


def part_of(strand: str, operator: str) -> str:
    """Returns the part (see `Part`) of an operator of a strand, by its name."""
    endings = {"I": Part.I, "W": Part.W, "again": Part.R}
    return (Part.F if strand == "F" else endings.get(operator.rpartition(".")[2], Part.B)).value


def bars_of_timeline(timeline: Timeline, program: Sequence[Instruction]) -> list[Bar]:
    """Returns the bars of a predicted window; `timeline.arrays` was made from the program."""
    work = timeline.arrays
    if len(program) != len(work):
        raise ValueError(
            f"a program of {len(program)} instructions and a timeline of {len(work)} are not of one window"
        )
    labels = _unit_labels(timeline, program)
    bars = []
    for place, instruction in enumerate(program):
        op = instruction.operator
        if op is not None:
            strand = "F" if op.part is Part.F else "B"
            label = f"{strand}{instruction.microbatch}.{labels[instruction.unit]}.{op.name}"
            bars.append(Bar(op.kind.value, label, timeline.starts[place], timeline.ends[place], work.ranks[place]))
    return bars


def _unit_labels(timeline: Timeline, program: Sequence[Instruction]) -> dict[int, str]:
    """The labels of units and of traffic by index: their names, of units numbered if the rank holds several, like
    "layers.3" of a trace."""
    entries, labels, same = timeline.arrays.entries, dict[int, str](), dict[str, set[int]]()
    for instruction, entry in zip(program, entries, strict=True):
        if instruction.operator is not None:
            labels[instruction.unit] = name = timeline.arrays.names[entry][0]
            if not instruction.is_traffic:
                same.setdefault(name, set()).add(instruction.unit)
    for name, units in same.items():
        labels |= {unit: f"{name}.{number}" for number, unit in enumerate(sorted(units)) if len(units) > 1}
    return labels


def busy_fraction(bars: Iterable[Bar], stream: str, start: float, end: float) -> float:
    """Returns the share of the seconds from `start` to `end` in which a stream is busy."""
    busy = merge((bar.start, bar.end) for bar in bars if bar.stream == stream)
    return sum(b - a for a, b in common(busy, [(start, end)])) / (end - start)


def extent(bars: Sequence[Bar]) -> tuple[float, float]:
    """Returns the first start and the last end. Raises ValueError if no bar takes any time."""
    first, last = min((bar.start for bar in bars), default=0.0), max((bar.end for bar in bars), default=0.0)
    if last <= first:
        raise ValueError("there is nothing to draw: no operator took any time")
    return first, last


def legend(bars: Iterable[Bar]) -> dict[str, str]:
    """Returns the letters of bars with their meaning."""
    used = {bar.letter for bar in bars}
    return {letter: meaning for letter, meaning in MEANING.items() if letter in used}


def streams_of(bars: Iterable[Bar]) -> list[str]:
    """Returns the streams of bars, from the cores of a rank outward."""
    streams = {bar.stream for bar in bars}
    rows = [kind.value for kind in STREAMS]
    return [*(stream for stream in rows if stream in streams), *sorted(streams - set(rows))]


def rows_of(bars: Sequence[Bar]) -> dict[str, list[Bar]]:
    """Returns the bars of every stream of every rank, by the name of the row; one rank has no number."""
    ranks, streams = sorted({bar.rank for bar in bars}), streams_of(bars)
    rows = {
        f"rank {rank} {stream}" if len(ranks) > 1 else stream: [b for b in bars if (b.rank, b.stream) == (rank, stream)]
        for rank in ranks
        for stream in streams
    }
    return {name: mine for name, mine in rows.items() if mine}


def summary_of(bars: Sequence[Bar]) -> str:
    """Returns the length of a window, and the share of communication that overlaps with computation, on all ranks."""
    start, end = extent(bars)
    traces = [Trace(spans=[bar for bar in bars if bar.rank == rank]) for rank in {bar.rank for bar in bars}]
    moving = sum(trace.busy(compute=False) for trace in traces)
    beside = sum(trace.overlapped() for trace in traces)
    hidden = f", {beside / moving:.0%} of communication beside computation" if moving else ""
    return f"{(end - start) * 1e3:,.1f} ms{hidden}"


# -- drawn -------------------------------------------------------------------------------------------------------------


def tick_step(span: float, max_steps: int) -> float:
    """Returns the round number (1, 2 or 5 times a power of ten) that leaves at most `max_steps` steps in a span."""
    power = 10.0 ** math.floor(math.log10(span / max_steps))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * max_steps >= span * (1 - 1e-9))


def text_timeline(bars: Sequence[Bar], width: int = 100) -> str:
    """Returns a row of letters for every stream of a rank, of equally long columns. Raises ValueError without bars."""
    start, end = extent(bars)
    rows = rows_of(bars)
    indent = max(len(row) for row in rows) + 2
    columns = max(10, width - indent - len("  100% busy"))
    lines = []
    for row, mine in rows.items():
        drawn = letters(mine, start, (end - start) / columns, columns)
        lines.append(f"{row:<{indent}}{drawn}  {busy_fraction(mine, mine[0].stream, start, end):4.0%} busy")
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


def colours_of(bars: Sequence[Bar]) -> dict[str, str]:
    """Returns the colours of a legend of bars, by label."""
    return {**{meaning: COLOURS[letter] for letter, meaning in legend(bars).items()}, "idle": EMPTY}


# -- pipelines -------------------------------------------------------------------------------------------------------

LEGEND = """F forward   B backward   I input gradient   W weight gradient   X forward beside backward
small letters: further chunks   · idle"""


def chunk_of(simulated: Simulated, action: Action) -> int:
    """Returns the number of the chunk of an action on its rank."""
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


def text_pipeline(simulated: Simulated, width: int = 100) -> str:
    """Returns a row for every rank, micro-batch numbers if there is room; all columns are equally long."""
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
