"""The timeline model: bars, from a prediction or from a trace.

In:   a predicted window, or the trace of a window.
Out:  `Bar`s: an operator with its stream, strand and micro-batch, its start and end.
Must hold: predictions and traces look the same from here on; nothing needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.timing.operator_clock import Timeline
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.window import STREAMS
from hf_helix.runtime.trace import Trace, merge

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
class Bar:
    """An operator that runs.

    Attributes:
        stream: "compute", "intra_node", "inter_node" or "gradients".
        strand: "F" or "B".
        label: as in a trace, such as "B2.layers.3.mlp.down.W".
        start: seconds, as `end`.
        communicates: whether the operator moves data.
    """

    stream: str
    strand: str
    microbatch: int
    label: str
    start: float
    end: float
    communicates: bool

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def operator(self) -> str:
        """The name of the operator, without its unit."""
        return parse_label(self.label)[3]

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
            times = timeline.starts[place], timeline.ends[place]
            bars.append(Bar(op.kind.value, strand, instruction.microbatch, label, *times, op.kind.communicates))
    return bars


def _unit_labels(timeline: Timeline, program: Sequence[Instruction]) -> dict[int, str]:
    """The labels of units by index: their names, numbered where the rank holds several, like "layers.3" of a trace."""
    entries = timeline.arrays.entries
    names = {
        i.unit: timeline.arrays.names[n][0]
        for i, n in zip(program, entries, strict=True)
        if i.operator is not None and not i.is_per_step
    }
    same: dict[str, list[int]] = {}
    for unit, name in sorted(names.items()):
        same.setdefault(name, []).append(unit)
    return {u: f"{name}.{n}" if len(units) > 1 else name for name, units in same.items() for n, u in enumerate(units)}


def bars_of_trace(trace: Trace) -> list[Bar]:
    """Returns the bars of a trace, from the first start on. Gradient reductions belong to the last micro-batch."""
    first = min((span.start for span in trace.spans), default=0.0)
    last = max((parse_label(s.label)[1] for s in trace.spans if not sums_gradients(s.label)), default=0)
    bars = []
    for s in trace.spans:
        label = f"B{last}.{s.label}" if sums_gradients(s.label) else s.label
        strand, microbatch, *_ = parse_label(label)
        times = s.start - first, s.end - first
        bars.append(Bar(s.stream, strand, microbatch, label, *times, s.stream != Kind.COMPUTE.value))
    return bars


def between(bars: Iterable[Bar], start: float, end: float) -> list[Bar]:
    """Returns the bars from `start` to `end`, in seconds; bars that reach beyond are cut."""
    return [
        replace(bar, start=max(bar.start, start), end=min(bar.end, end))
        for bar in bars
        if bar.start < end and bar.end > start
    ]


def busy_fraction(bars: Iterable[Bar], stream: str, start: float, end: float) -> float:
    """Returns the share of the time from `start` to `end` in which a stream is busy.

    Args:
        bars: bars of any streams.
        stream: the name of the stream.
        start: seconds.
        end: seconds.
    """
    busy = merge((bar.start, bar.end) for bar in between(bars, start, end) if bar.stream == stream)
    return sum(b - a for a, b in busy) / (end - start)


def extent(bars: Sequence[Bar]) -> tuple[float, float]:
    """Returns the first start and the last end. Raises ValueError where no bar takes any time."""
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
