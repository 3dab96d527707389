"""Heat maps hold what was measured and nothing else; breakdowns add up to all of a micro-batch's time."""

import re
from dataclasses import replace

import pytest
from support.windows import MS, PAIRS, layer, profile

from hf_helix.planning.timing.profile import Pair, Profile
from hf_helix.planning.window.layout import Layout
from hf_helix.report.heatmap import breakdown, pair_table, text_breakdown, text_heatmap


def test_the_heat_map_holds_what_was_measured_and_nothing_else() -> None:
    known = profile(pairs=PAIRS)
    gather, up, weight = ("layer", "F.gather"), ("layer", "F.up"), ("layer", "B.up.W")
    assert pair_table(known) == (
        [up, weight],
        [gather],
        {(up, gather): pytest.approx(0.75), (weight, gather): pytest.approx(-0.5)},
    )
    lines = [line.split() for line in text_heatmap(known).splitlines()]
    assert lines[1:4] == [["F.gather"], ["F.up", "0.75"], ["B.up.W", "-0.50"]]
    assert text_heatmap(profile()) == "no pairs of operators were measured"
    short = text_heatmap(replace(known, times={**known.times, ("layer", "F.up"): 1e-5}))
    assert re.search(r"F\.up +\(-?\d+\)", short)
    assert "too little to tell" in short
    assert "too little to tell" not in text_heatmap(known)
    # Cells of the heat map that were not measured stay empty.
    more = {(("layer", "F.up"), ("layer", "F.send")): Pair(9e-3, 6e-3, 3e-3)}
    head, up, weight = text_heatmap(profile(pairs=PAIRS | more)).splitlines()[1:4]
    assert up.split() == ["F.up", "0.75", "0.00"]
    assert weight.split() == ["B.up.W", "-0.50"]
    assert len(weight) == head.index("F.gather") + len("F.gather")  # under its column
    # A pair is found in either order.
    up, gather = ("layer", "F.up"), ("layer", "F.gather")
    alike = {(up, up): Pair(12e-3, 12e-3, 12e-3), (gather, gather): Pair(8e-3, 8e-3, 8e-3)}
    _, _, cells = pair_table(profile(pairs=PAIRS | alike))
    assert cells[up, gather] == cells[gather, up] == pytest.approx(0.75)
    _, _, cells = pair_table(profile(pairs=PAIRS | alike | {(gather, up): Pair(10e-3, 4e-3, 6e-3)}))
    assert (cells[up, gather], cells[gather, up]) == pytest.approx((0.75, 0.0))  # each as it was measured


def test_units_are_named_where_there_are_several() -> None:
    pairs, times = layer(), {("layer", entry): ms / 1e3 for entry, ms in MS.items()}
    layout = Layout(["layer", "other"], {0: [0], 1: [1]}, {"layer": pairs, "other": pairs})
    times |= {("other", entry): seconds for (_, entry), seconds in times.items()}
    like = {("other", "F.gather"): ("layer", "F.gather")}
    result = {(("other", "F.up"), ("layer", "F.gather")): Pair(7e-3, 7e-3, 4e-3)}
    text = text_heatmap(Profile({}, layout, times, pairs=result, like=like))
    assert re.search(r"^other/F\.up +0\.75$", text, re.MULTILINE)
    assert "layer/F.gather stands for other/F.gather, too" in text


def test_the_breakdown() -> None:
    """Two layers, by hand."""
    assert {kind: [round(s * 1e3, 6) for s in seconds] for kind, seconds in breakdown(profile()).items()} == {
        "GEMM": [12, 26],
        "attention": [4, 10],
        "other computation": [2, 4],
        "intra-node communication": [8, 8],
        "inter-node communication": [6, 6],
    }
    lines = {line[:19].strip(): line[19:].split() for line in text_breakdown(profile()).splitlines()}
    assert lines["together"] == ["32.0", "ms", "37.2%", "54.0", "ms", "62.8%", "86.0", "ms", "100.0%"]
    assert lines["GEMM"][6:] == ["38.0", "ms", "44.2%", "█" * 11]
