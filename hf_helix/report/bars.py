"""Bars: one neutral form of what ran, or will run, for every picture.

In:   a window that the cost function predicted, or the trace of one that ran.
Out:  `Bar`s: an operator, its stream, its strand and micro-batch, its start and end.
Must hold: prediction and measurement look the same from here on; nothing needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.timing.clock import Timeline
from hf_helix.planning.window.instructions import Instruction
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
"""The letters of what a bar does."""


@dataclass(frozen=True)
class Bar:
    """One operator that runs.

    Attributes:
        stream: "compute", "intra_node", "inter_node" or "gradients".
        strand: "F" or "B".
        label: as in a trace, such as "B2.layers.3.mlp.down.W".
        start: seconds, as `end`.
        communicates: whether it moves data instead of computing.
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
        """Its name without the unit's."""
        return parse_label(self.label)[3]

    @property
    def letter(self) -> str:
        """What it does; see `MEANING`."""
        if self.stream == Kind.GRADIENTS.value and self.strand == "B":
            return "s"
        part = part_of(self.strand, self.operator)
        letter = part if part in "WR" else self.strand
        return letter.lower() if self.communicates else letter


def parse_label(label: str) -> tuple[str, int, str, str]:
    """Strand letter, micro-batch, unit label and operator of a label such as "B2.layers.3.mlp.down.W"."""
    match = _LABEL.match(label)
    if match is None:
        raise ValueError(f"not the label of an operator: {label!r}; one looks like 'B2.layers.3.mlp.down.W'")
    return match[1], int(match[2]), match[3], match[4]


def sums_gradients(label: str) -> bool:
    """Whether it names no operator, but a sum of gradients over ranks."""
    return label.startswith(f"{Kind.GRADIENTS.value}.")


def part_of(strand: str, operator: str) -> str:
    """The part (see `Part`) that an operator of a strand is, by its name."""
    endings = {"I": Part.I, "W": Part.W, "again": Part.R}
    return (Part.F if strand == "F" else endings.get(operator.rpartition(".")[2], Part.B)).value


def bars_of_timeline(timeline: Timeline, program: Sequence[Instruction]) -> list[Bar]:
    """What the cost function predicts. The program is the one that `timeline.arrays` was made from, in its order."""
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
    """By index of a unit: its name, numbered where the rank holds several; like "layers.3" of a trace."""
    entries = timeline.arrays.entries
    names = {
        i.unit: timeline.arrays.names[n][0]
        for i, n in zip(program, entries, strict=True)
        if i.operator is not None and not i.is_per_step
    }
    alike: dict[str, list[int]] = {}
    for unit, name in sorted(names.items()):
        alike.setdefault(name, []).append(unit)
    return {u: f"{name}.{n}" if len(units) > 1 else name for name, units in alike.items() for n, u in enumerate(units)}


def bars_of_trace(trace: Trace) -> list[Bar]:
    """What ran; times from the start of the first operator on. Sums of gradients are of the last micro-batch."""
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
    """What runs in a stretch of time, in seconds; bars that reach beyond it are cut.

    Args:
        bars: of any streams.
        start: of the stretch, in seconds.
        end: of the stretch, in seconds.
    """
    return [
        replace(bar, start=max(bar.start, start), end=min(bar.end, end))
        for bar in bars
        if bar.start < end and bar.end > start
    ]


def busy_fraction(bars: Iterable[Bar], stream: str, start: float, end: float) -> float:
    """The part of a stretch of time in which a stream runs something.

    Args:
        bars: of any streams.
        stream: the name of the stream.
        start: of the stretch, in seconds.
        end: of the stretch, in seconds.
    """
    pieces = merge((bar.start, bar.end) for bar in between(bars, start, end) if bar.stream == stream)
    return sum(b - a for a, b in pieces) / (end - start)


def extent(bars: Sequence[Bar]) -> tuple[float, float]:
    """When the first starts and the last ends. Raises ValueError where nothing takes any time."""
    first, last = min((bar.start for bar in bars), default=0.0), max((bar.end for bar in bars), default=0.0)
    if last <= first:
        raise ValueError("there is nothing to draw: no operator took any time")
    return first, last
