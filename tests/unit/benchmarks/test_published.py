"""Published runs: rows are predicted as the record has them, wrong rows are named, and the error stays small."""

import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
from support.paths import ROOT

from benchmarks.published import Compared, Predictor, Row, compare, markdown, record, summary
from hf_helix.doctor.exactness import KINDS, PublishedRun, published_runs

FILE = ROOT / "benchmarks" / "published.jsonl"
ROWS: dict[str, Row] = {row["id"]: row for row in map(json.loads, FILE.read_text().splitlines())}
RUNS = {run.name: run for run in published_runs()}
ON_EACH_WAY = ("mptg-a100-125m-2048-8", "aa-13B-2048-32-tp2pp1mb1", "nemo-l2-7b-sft")
"""FSDP, tensor parallelism, and fp8 with all products in it."""


def ratios(runs: list[PublishedRun]) -> list[float]:
    return [run.ratio for run in runs]


@pytest.mark.parametrize("name", ON_EACH_WAY)
def test_rows_are_predicted_as_the_record_has_them(name: str, tmp_path: Path) -> None:
    found = Predictor(tmp_path).tokens_per_second(ROWS[name])
    assert found == pytest.approx(RUNS[name].predicted, rel=0.01), "run python -m benchmarks.published --record"


@pytest.mark.slow
def test_all_rows_are_predicted_as_the_record_has_them(tmp_path: Path) -> None:
    rows = list(compare(FILE.read_text().splitlines(), Predictor(tmp_path).tokens_per_second))
    assert not [row.error for row in rows if row.error]
    for row in rows:
        assert row.predicted == pytest.approx(RUNS[row.row["id"]].predicted, rel=0.01), row.row["id"]


def test_the_error_of_the_record_is_small() -> None:
    runs = list(RUNS.values())
    assert len(runs) == len(ROWS)
    assert statistics.fmean(abs(math.log(ratio)) for ratio in ratios(runs)) <= 0.12
    assert statistics.fmean(abs(ratio - 1) <= 0.15 for ratio in ratios(runs)) >= 0.75
    assert 0.95 <= statistics.median(ratios(runs)) <= 1.05
    for kind in KINDS:
        assert abs(statistics.median(ratios([run for run in runs if run.kind == kind])) - 1) <= 0.12, kind


def tokens_of(row: Row) -> float:
    """Sequences of a step for each device."""
    shared = math.prod(row.get(name) or 1 for name in ("tp", "pp", "cp"))
    return float(row["batch"] * row["microbatches"] / shared)


def test_layouts_of_a_model_are_in_the_right_order() -> None:
    """Pairs of one source, model, machine and number of tokens whose published rates differ by more than 10 %."""
    right = total = 0
    for first, second in itertools.combinations(ROWS.values(), 2):
        alike = all(first[key] == second[key] for key in ("source", "model", "cluster", "gpus", "sequence_length"))
        tokens = {tokens_of(row) for row in (first, second)}
        runs = RUNS[first["id"]], RUNS[second["id"]]
        if alike and len(tokens) == 1 and max(r.published for r in runs) > 1.1 * min(r.published for r in runs):
            total += 1
            right += (runs[0].published > runs[1].published) == (runs[0].predicted > runs[1].predicted)
    assert total >= 20
    assert right >= 0.97 * total


def test_a_wrong_row_does_not_end_a_file(tmp_path: Path) -> None:
    good = ROWS[ON_EACH_WAY[0]]
    lines = [
        "no json",
        json.dumps({**good, "id": "a", "framework": "ddp"}),
        json.dumps({**good, "id": "b", "cluster": "h1000x8"}),
        json.dumps({**good, "id": "c", "tp": 3, "framework": "one strand, 1f1b"}),
        json.dumps({key: value for key, value in good.items() if key not in ("model", "id")}),
        json.dumps({**good, "id": "d", "tokens_per_second_per_gpu": 0}),
        json.dumps(good),
    ]
    rows = list(compare(lines, Predictor(tmp_path).tokens_per_second))
    assert [bool(row.error) for row in rows] == [True] * 6 + [False]
    assert "framework 'ddp' is not known; use one of one strand, 1f1b" in rows[1].error
    assert "h1000x8" in rows[2].error
    assert "tp 3 x pp 1 x cp 1 with ep 1 does not divide 8 devices" in rows[3].error
    assert rows[4].row["id"] == "line 5"
    assert "model" in rows[4].error
    assert summary(rows).startswith("rows 1, median ratio ")
    assert "h1000x8" in markdown(rows)
    assert len(json.loads(record(rows))) == 1


def test_the_summary_is_one_line() -> None:
    rows = [Compared({"tokens_per_second_per_gpu": 100}, predicted) for predicted in (90.0, 110.0, 150.0)]
    expected = (math.log(1 / 0.9) + math.log(1.1) + math.log(1.5)) / 3
    assert summary(rows) == f"rows 3, median ratio 1.100, mean |log ratio| {expected:.3f}, within 15 %: 67 %"
    assert summary([]).startswith("rows 0")
