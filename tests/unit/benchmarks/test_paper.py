"""`python -m benchmarks.paper`: the paper's rows on paper, and how far they are from what it printed."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.paths import ROOT

from benchmarks.paper.__main__ import main
from benchmarks.paper.ablation import exposed_only, layer_seconds
from benchmarks.paper.artifacts import FIGURES, KINDS, makers_of
from benchmarks.paper.bounds import ROWS, shares
from benchmarks.paper.published import (
    FIGURE_11,
    FIGURE_12,
    FIGURE_13A,
    INTRA_BATCH,
    MEGATRON,
    METHODS,
    SPEEDS,
    TABLE_6,
    WAVELET,
)
from benchmarks.paper.runs import SEARCH, Runs
from benchmarks.paper.throughput import errors, summary
from benchmarks.paper.tiles import tile_profile
from hf_helix.planning.graph.operator import Kind

PAGE = ROOT / "benchmarks" / "paper" / "README.md"


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs()


def test_megatrons_speed_is_near_the_papers(runs: Runs):
    row = FIGURE_12[2]
    assert runs.run(row, MEGATRON).speed == pytest.approx(row.printed[MEGATRON], rel=0.1)


@pytest.mark.slow
def test_methods_are_ordered_as_in_the_paper(runs: Runs):
    assert runs.gain(FIGURE_11[0], INTRA_BATCH) > 1.0
    row = FIGURE_12[3]
    assert 1.0 < runs.gain(row, WAVELET) < row.printed["DHelix"] / row.printed[MEGATRON]


def test_tiles_cost_more_than_their_part_of_the_whole(runs: Runs):
    row = FIGURE_11[0]
    run = runs.run(row, INTRA_BATCH)
    plain, tiled = tile_profile(runs.profile(row, INTRA_BATCH), row.sizes.tp).times, run.profile.times
    slower = [name for name in plain if tiled[name] > plain[name] * 1.01]
    assert ("layer", "F.mlp.up.0") in slower
    assert not [name for name in plain if tiled[name] < plain[name] * 0.99]


def test_what_one_strand_hides_is_left_out_of_the_first_step_of_figure_15(runs: Runs):
    profile = runs.profile(FIGURE_12[2], MEGATRON)
    moved = exposed_only(profile, Kind.INTER_NODE)

    assert not [name for name in profile.times if name[0] == "layer" and moved.kind(name) is Kind.INTER_NODE]
    assert layer_seconds(moved, "layer") == pytest.approx(layer_seconds(profile, "layer"), rel=0.01)


def test_the_ring_of_the_papers_methods_turns_beside_attention(runs: Runs):
    """Each step of four ranks but the last brings what the next block of backward needs; the first block has its keys
    from forward. Ours starts with the layer's backward."""
    row = FIGURE_13A[1]
    ours, theirs = (runs.amounts(row, method) for method in (SEARCH, MEGATRON))
    assert theirs.operators == ours.operators
    before, after = (amounts.layout.graphs["layer"].backward for amounts in (ours, theirs))
    assert {op.name for op in after.operators} == {op.name for op in before.operators}
    place, first = ({op.name: at for at, op in enumerate(graph.operators)} for graph in (after, before))
    assert first["attention.ring1.again"] < first["mlp.down.I"]
    assert place["attn.out.I"] < place["attention.ring1.again"]
    for step in (1, 2, 3):
        names = f"ring{step}.again", f"block{4 - step}", f"block{3 - step}"
        fetch, beside, behind = (f"attention.{name}" for name in names)
        assert place[fetch] == place[beside] - 1
        assert after[fetch].control_deps == tuple(value for value in after["attention.join"].reads if value[:2] == "d.")
        assert after[fetch].writes[0] in after[behind].control_deps
        assert not {*after[fetch].writes} & {*after[beside].depends_on, *after[behind].reads}


@pytest.mark.slow
def test_experts_stay_in_a_node_and_their_capacity_is_computed(runs: Runs):
    row = TABLE_6[0]
    run, balanced = runs.run(row, MEGATRON), runs.run(replace(row, capacity=0), MEGATRON)
    assert run.step.loads[Kind.INTER_NODE] == 0.0 < run.step.loads[Kind.INTRA_NODE]
    assert run.step.loads[Kind.INTRA_NODE] > 2.9 * balanced.step.loads[Kind.INTRA_NODE]


def test_unknown_numbers_are_refused_with_those_that_exist(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--figure", "9"])
    assert ended.value.code == 2
    assert "--figure 9 is not simulated" in (said := capsys.readouterr().err)
    assert all(number in said for number in FIGURES)
    assert all(makers_of(kind, number) for kind, result in KINDS.items() for number in result)


def test_a_figure_is_printed_and_drawn_and_a_table_has_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["--figure", "4", "--output", str(tmp_path / "oef.svg")])
    assert "GEMM" in capsys.readouterr().out
    assert (tmp_path / "oef.svg").read_text().startswith("<?xml")
    with pytest.raises(SystemExit):
        main(["--table", "1", "--output", str(tmp_path / "one.svg")])
    assert "leave out --output" in capsys.readouterr().err


def test_what_the_paper_prints_fits_together():
    """Section 6.2: gains over Megatron of figures 11 and 12."""
    for rows, low, high in ((FIGURE_11, 1.25, 1.41), (FIGURE_12, 1.21, 1.39)):
        gains = [row.printed["DHelix"] / row.printed[MEGATRON] for row in rows]
        assert low < min(gains)
        assert max(gains) < high
        assert all(set(row.printed) == set(METHODS) for row in rows)


@pytest.mark.slow
def test_errors_are_those_of_the_page(runs: Runs):
    said = re.findall(r"^\| (.+?) \| (fitted|held out) \| \d+ \| ([\d.]+) % \| ([\d.]*) \|$", PAGE.read_text(), re.M)
    result = {cells[0]: cells for cells in summary(runs).rows}
    assert errors(runs, SPEEDS, METHODS).count == sum(len(row.printed) for row in SPEEDS), "every row, every method"
    assert len(said) == len(result) > 5
    for name, role, speed, gain in said:
        assert result[name][1] == role
        assert float(result[name][3].rstrip(" %")) <= float(speed) + 0.1
        assert not gain or float(result[name][4]) <= float(gain) + 0.001


# Bounds: nothing beats them, and `search` is near them


@pytest.mark.parametrize("row", [FIGURE_11[3], FIGURE_13A[1]], ids=lambda row: row.name)
def test_nothing_beats_the_bound(runs: Runs, row) -> None:
    result = shares(runs, row, ("sequential", "greedy"))
    assert min(result.rules.values()) >= result.bound * 0.998  # the two ends of a chain are not quite alike
    assert result.rules["greedy"] < result.rules["sequential"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_search_is_near_the_bound(runs: Runs) -> None:
    results = [shares(runs, row, ("dhelix", "search")) for row in ROWS]
    assert not [each.row.name for each in results if each.rules["search"] > each.rules["dhelix"]]
    assert sum(each.bound / each.rules["search"] for each in results) / len(results) >= 0.95
