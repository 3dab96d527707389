"""A record of a run: operators, their streams, their order and times.

In:   calls from the streams and the executor while a trace is on.
Out:  `events`, the order of actions of the issuing thread; `spans`, start and end of every operator.
Must hold: without a trace nothing is recorded, at no cost.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

COLLECTIVE = {"intra_node", "inter_node"}

Interval = tuple[float, float]
"""Start and end, in seconds."""


@dataclass(frozen=True)
class Span:
    """One operator on one stream; seconds on the device's own clock. `core` is the time that a computation has had a
    core, which other processes may take from it; None if the device has no other users."""

    stream: str
    label: str
    start: float
    end: float
    core: float | None = field(default=None, kw_only=True)

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Trace:
    """The events and spans of a trace. Plans hide collectives; the other communication streams wait for other ranks,
    and are only drawn.

    An event is ("run" | "issue" | "wait", label); a label is strand letter, micro-batch, unit, operator.
    """

    events: list[tuple[str, str]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def note(self, verb: str, label: str) -> None:
        self.events.append((verb, label))

    def busy(self, compute: bool, stream: str | None = None) -> float:
        """Seconds with computation, or with a collective, running; on one stream if given."""
        return sum(end - start for start, end in self._union(compute, stream))

    def overlapped(self, stream: str | None = None) -> float:
        """Seconds of collectives overlapped with computation; on one stream if given."""
        return sum(end - start for start, end in common(self._union(compute=False, stream=stream), self._union(True)))

    def collective_streams(self) -> list[str]:
        """The streams with collectives."""
        return sorted({span.stream for span in self.spans} & COLLECTIVE)

    def _union(self, compute: bool, stream: str | None = None) -> list[Interval]:
        return merge(
            (s.start, s.end)
            for s in self.spans
            if (s.stream == "compute" if compute else s.stream in COLLECTIVE) and stream in (None, s.stream)
        )


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def common(first: Sequence[Interval], second: Sequence[Interval]) -> Iterator[Interval]:
    """Yields the intersections of two lists of intervals, each as `merge` returns it."""
    a = b = 0
    while a < len(first) and b < len(second):
        start, end = max(first[a][0], second[b][0]), min(first[a][1], second[b][1])
        if start < end:
            yield start, end
        if first[a][1] < second[b][1]:
            a += 1
        else:
            b += 1
