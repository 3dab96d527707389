"""Trace files are what viewers expect: a process for every rank, a track for every stream, every operator once."""

import json
from pathlib import Path

from hf_helix.report.perfetto import perfetto_json, write_perfetto
from hf_helix.runtime.streams.trace import Span

SPANS = [
    Span("intra_node", "F3.layers.0.mlp.gather", 10.001, 10.004),
    Span("compute", "F3.embedding.lookup", 10.0, 10.002),
    Span("compute", "B2.layers.3.mlp.down.W", 10.002, 10.0025),
]


def test_perfetto() -> None:
    events = json.loads(perfetto_json([SPANS, [Span("compute", "F0.head.loss", 5.0, 6.0)]]))["traceEvents"]
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")
    }
    complete = [e for e in events if e["ph"] == "X"]
    tracks = [(names[e["pid"], None], names[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"]) for e in complete]
    assert tracks == [
        ("rank 0", "compute", "F3.lookup", 0.0, 2000.0),
        ("rank 0", "intra_node", "F3.mlp.gather", 1000.0, 3000.0),
        ("rank 0", "compute", "B2.mlp.down.W", 2000.0, 500.0),
        ("rank 1", "compute", "F0.loss", 0.0, 1_000_000.0),
    ]
    assert len(names) == 2 + 3  # no tracks without operators
    assert len({tid for _, tid in names if tid is not None}) == 3
    assert [e["cat"] for e in complete] == ["compute", "intra_node", "compute", "compute"]
    assert complete[2]["args"] == {"unit": "layers.3", "strand": "B", "microbatch": 2, "part": "W"}
    # Sums of gradients are no operators.
    spans = [Span("compute", "B0.embedding.lookup", 1.0, 2.0), Span("gradients", "gradients.average", 1.5, 3.0)]
    last = json.loads(perfetto_json([spans]))["traceEvents"][-1]
    assert (last["name"], last["cat"], last["args"]) == ("gradients.average", "gradients", {})


def test_perfetto_files(tmp_path: Path) -> None:
    write_perfetto(tmp_path / "trace.json", [SPANS, []])
    assert (tmp_path / "trace.json").read_text() == perfetto_json([SPANS, []])
    assert json.loads(perfetto_json([]))["traceEvents"] == []
