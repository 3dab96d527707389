"""A record of what ran: which operator, on which stream, in which order and when.

In:   calls from the streams and the executor while a trace is switched on.
Out:  `events`, the order in which the issuing thread did things; `spans`, start and end of every operator.
Must hold: nothing is recorded, and nothing costs anything, while no trace is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

COLLECTIVE = {"intra_node", "inter_node"}

Interval = tuple[float, float]
"""Start and end, in seconds."""


@dataclass(frozen=True)
class Span:
    """One operator on one stream; seconds on the device's own clock."""

    stream: str
    label: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Trace:
    """Collectives are what plans hide; the other streams wait for other ranks, and are only drawn.

    Events are ("run" | "issue" | "wait", label); a label is strand letter, micro-batch, unit, operator."""

    events: list[tuple[str, str]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def note(self, verb: str, label: str) -> None:
        self.events.append((verb, label))

    def busy(self, compute: bool, stream: str | None = None) -> float:
        """Seconds in which computation, or a collective, ran; of one stream, if it is given."""
        return sum(end - start for start, end in self._union(compute, stream))

    def beside(self, stream: str | None = None) -> float:
        """Seconds of communication that ran beside computation; of one stream, if it is given."""
        return sum(end - start for start, end in common(self._union(compute=False, stream=stream), self._union(True)))

    def communicating(self) -> list[str]:
        """The streams on which collectives ran."""
        return sorted({span.stream for span in self.spans} & COLLECTIVE)

    def _union(self, compute: bool, stream: str | None = None) -> list[Interval]:
        return merge(
            (s.start, s.end)
            for s in self.spans
            if (s.stream == "compute" if compute else s.stream in COLLECTIVE) and stream in (None, s.stream)
        )


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Overlapping intervals joined, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def common(first: Sequence[Interval], second: Sequence[Interval]) -> Iterator[Interval]:
    """Where intervals of both overlap; each must be as `merge` returns them."""
    a = b = 0
    while a < len(first) and b < len(second):
        start, end = max(first[a][0], second[b][0]), min(first[a][1], second[b][1])
        if start < end:
            yield start, end
        if first[a][1] < second[b][1]:
            a += 1
        else:
            b += 1
