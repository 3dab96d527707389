"""Traces for Perfetto: the operators of every rank, for ui.perfetto.dev or chrome://tracing.

In:   the spans of every rank.
Out:  JSON in the Chrome trace event format: a process for every rank, a track for every stream.
Must hold: no operator is lost, and only its unit leaves its name, for the arguments. Ranks have clocks of their own, so
the time of every rank starts at its first operator; the order of ranks in time is unknown.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_helix.planning.window.window import STREAMS
from hf_helix.report.timeline import parse_label, part_of, sums_gradients
from hf_helix.runtime.streams.trace import Span

TRACKS = [kind.value for kind in STREAMS]
Event = dict[str, Any]


def perfetto_json(traces: Sequence[Sequence[Span]]) -> str:
    """Returns the text of a trace file; the spans of rank r are `traces[r]`."""
    events = [event for rank, spans in enumerate(traces) for event in _events_of_rank(rank, spans)]
    lines = ",\n".join(json.dumps(event) for event in events)  # an event a line, for diff and grep
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def write_perfetto(path: str | Path, traces: Sequence[Sequence[Span]]) -> None:
    """Saves the traces of all ranks to a file, such as "trace.json"."""
    Path(path).write_text(perfetto_json(traces))


def _events_of_rank(rank: int, spans: Sequence[Span]) -> Iterator[Event]:
    # Viewers take process 0 and thread 0 for the idle process of an operating system, and want thread numbers that are
    # unique over all processes.
    process = rank + 1
    tracks = [*TRACKS, *sorted({span.stream for span in spans} - set(TRACKS))]
    threads = {stream: process * 100 + place for place, stream in enumerate(tracks)}
    yield from _names("process", f"rank {rank}", rank, {"pid": process})
    for place, stream in enumerate(tracks):
        if any(span.stream == stream for span in spans):
            yield from _names("thread", stream, place, {"pid": process, "tid": threads[stream]})
    first = min((span.start for span in spans), default=0.0)
    for span in sorted(spans, key=lambda span: span.start):
        yield _event(span, first, {"pid": process, "tid": threads[span.stream]})


def _names(kind: str, name: str, place: int, ids: Event) -> Iterator[Event]:
    """The name of a process or a thread, and its place."""
    yield {"ph": "M", "name": f"{kind}_name", **ids, "args": {"name": name}}
    yield {"ph": "M", "name": f"{kind}_sort_index", **ids, "args": {"sort_index": place}}


def _event(span: Span, first: float, ids: Event) -> Event:
    name = span.label
    about: dict[str, object] = {}
    if not sums_gradients(span.label):
        strand, microbatch, unit, operator = parse_label(span.label)
        name = f"{strand}{microbatch}.{operator}"
        about = {"unit": unit, "strand": strand, "microbatch": microbatch, "part": part_of(strand, operator)}
    return {
        "ph": "X",
        "name": name,
        "cat": span.stream,
        "ts": _microseconds(span.start - first),
        "dur": _microseconds(span.seconds),
        **ids,
        "args": about,
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
