"""Timelines show what they are given: every operator once, to scale, under its name."""

from dataclasses import replace

import pytest
from support.arrays import arrays_of
from support.windows import MS, bar, profile, window

from hf_helix.planning.plan.predict import predict
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.schedule.named import build_schedule
from hf_helix.planning.timing.operator_clock import simulate
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.traffic import Bucket
from hf_helix.planning.window.instructions import BARRIER_INSTRUCTION
from hf_helix.planning.window.layout import with_traffic
from hf_helix.report.timeline import (
    bars_of_timeline,
    busy_fraction,
    parse_label,
    part_of,
    summary_of,
    text_timeline,
)

# What bars say.


def test_labels_and_parts() -> None:
    for label, parts in {
        "B2.layers.3.mlp.down.W": ("B", 2, "layers.3", "mlp.down.W"),
        "F12.head.loss.statistics": ("F", 12, "head", "loss.statistics"),
        "B1.layer.0.attention": ("B", 1, "layer.0", "attention"),
    }.items():
        assert parse_label(label) == parts
    for label in ("", "X0.layers.0.up", "F.layers.0.up", "F0.head"):
        with pytest.raises(ValueError, match="not the label of an operator"):
            parse_label(label)
    pairs = [("F", "up"), ("B", "up.I"), ("B", "up.W"), ("B", "norm"), ("F", "x.W"), ("B", "norm.again")]
    assert [part_of(*pair) for pair in pairs] == ["F", "I", "W", "B", "F", "R"]


def test_bars_of_a_prediction() -> None:
    timeline, program = window()
    bars = bars_of_timeline(timeline, program)
    assert len(bars) == len(program) == 2 * 2 * (5 + 6)
    assert len({b.label for b in bars}) == len(bars)
    assert {b.label for b in bars} >= {"F0.layer.0.norm", "F1.layer.1.send", "B1.layer.0.up.W"}
    for b in bars:
        assert b.end - b.start == pytest.approx(MS[f"{b.strand}.{b.operator}"] / 1e3)
        assert b.communicates == (b.stream in ("intra_node", "inter_node")) == (b.operator in ("gather", "send"))
        assert b.label[1] in "01"
    assert max(b.end for b in bars) == timeline.seconds


def test_barriers_are_no_bars() -> None:
    timeline, program = window()
    known = profile()
    stopped = [*program[:5], BARRIER_INSTRUCTION, *program[5:]]
    result = bars_of_timeline(simulate(arrays_of(stopped, known.layout, known.times)), stopped)
    assert [b.label for b in result] == [b.label for b in bars_of_timeline(timeline, program)]
    with pytest.raises(ValueError, match="not of one window"):
        bars_of_timeline(timeline, stopped)


def test_sums_of_gradients_have_a_row_of_their_own() -> None:
    known = profile()
    sums = [Bucket((), ((unit, "up.W"),), 4) for unit in (1, 0)]
    times = {**known.times, ("gradients", "B.sum.0"): 20e-3, ("gradients", "B.sum.1"): 20e-3}
    known = Profile({}, with_traffic(known.layout, sums, ()), times)
    plan = make_plan("sequential", known, model="m", mesh={"tp_size": 1})
    predicted = predict(plan, known, build_schedule("folded_1f1b", 1, 2), timeline=True)
    program, timeline = predicted.instructions, predicted.timeline
    bars = bars_of_timeline(timeline, program)
    mine = [b for b in bars if b.stream == "gradients"]
    assert [(b.label, b.letter) for b in mine] == [("B1.gradients.sum.0", "s"), ("B1.gradients.sum.1", "s")]
    *rest, last = (line for line in text_timeline(bars).splitlines() if "% busy" in line)
    assert last.startswith("gradients ")
    assert "ss" in last
    assert not any("s" in line.split(maxsplit=1)[1].split("  ")[0] for line in rest)


def test_a_stretch() -> None:
    bars = [bar(0, 2), bar(2, 5), bar(6, 8)]
    assert busy_fraction(bars, "compute", 1, 6) == pytest.approx(4 / 5)
    assert busy_fraction(bars, "intra_node", 1, 6) == 0


# Text.


def test_ranks_of_a_pipeline_have_rows_of_their_own() -> None:
    bars = [bar(0, 4), replace(bar(4, 8), rank=1)]
    rows = [line.split() for line in text_timeline(bars, width=104).splitlines()[:2]]
    assert [(*row[:3], row[-2]) for row in rows] == [("rank", "0", "compute", "50%"), ("rank", "1", "compute", "50%")]
    assert [set(row[3]) for row in rows] == [{"F", "·"}] * 2
    assert summary_of(bars) == "8,000.0 ms"


def test_rows_fill_as_their_streams_are_busy() -> None:
    bars = [bar(0, 4), bar(4, 6, strand="B", operator="up.I"), bar(6, 8, strand="B", operator="up.W")]
    bars += [bar(2, 6, "intra_node", "F", "gather"), bar(7, 8, "inter_node", "B", "send")]
    lines = text_timeline(bars, width=103).splitlines()
    rows = {name: (letters, busy) for name, letters, busy in (line.split()[:3] for line in lines[:3])}
    assert list(rows) == ["compute", "intra_node", "inter_node"]
    assert rows["compute"] == ("F" * 40 + "B" * 20 + "W" * 20, "100%")
    assert rows["intra_node"] == ("·" * 20 + "f" * 40 + "·" * 20, "50%")
    assert rows["inter_node"] == ("·" * 70 + "b" * 10, "12%")
    assert max(map(len, lines)) <= 103


def test_the_ruler_and_the_legend() -> None:
    lines = text_timeline([bar(0, 0.04), bar(0.04, 0.08)], width=100).splitlines()
    assert len(lines) == 4  # no rows for streams that run nothing
    assert lines[2].split() == ["0", "ms", "20", "40", "60", "80"]
    assert [lines[2].index(f"{ms}") - lines[2].index("0 ms") for ms in (20, 40, 60)] == [20, 40, 60]
    assert lines[3].split("   ")[-2:] == ["F forward", "· idle"]
    assert [place - 9 for place, mark in enumerate(lines[1]) if mark == "┬"] == [0, 20, 40, 60, 79]


def test_short_operators_do_not_hide_that_a_stream_idles() -> None:
    bars = [bar(place, place + 0.25) for place in range(100)] + [bar(99, 100, "intra_node", operator="gather")]
    compute = text_timeline(bars).splitlines()[0]
    assert compute.count("F") == 0
    assert "25% busy" in compute
    for nothing in ([], [bar(1, 1)]):
        with pytest.raises(ValueError, match="nothing to draw"):
            text_timeline(nothing)
