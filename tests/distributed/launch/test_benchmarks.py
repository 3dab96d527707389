"""Benchmarks run. Of the acceptance on a GPU every piece on the CPU; what fails, hangs or says nothing is a FAIL."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_piece_passes_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    (file,) = tmp_path.glob("*-gpu-dry.json")
    result = json.loads(file.read_text())
    assert result["environment"]["gpu"]
    assert result["environment"]["torch"]
    for piece in result["pieces"]:
        assert piece["ending"] == "done", piece["name"]
        assert any(entry["outcome"] == "PASS" for entry in piece["entries"]), piece["name"]
    page = file.with_suffix(".md").read_text()
    assert all(f"## {piece['name']}: PASS" in page for piece in result["pieces"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "ending", "figure"),
    [
        ("report.check('sum', False, '3 (4 asked)')", "done", "3 (4 asked)"),
        ("report.check('first', True, 'fine'); import os; os.abort()", "ended with status -6", ""),
        ("import time; report.check('first', True, 'fine'); time.sleep(60)", "killed after 25 s", ""),
        ("pass", "ended without telling anything", ""),
    ],
    ids=["fails", "crashes", "hangs", "is silent"],
)
def test_a_piece_that_does_not_pass(code: str, ending: str, figure: str, tmp_path: Path) -> None:
    """In a process that knows one piece more."""
    (tmp_path / "piece_that_fails.py").write_text(f"def run(report, options):\n    {code}\n")
    limit = 25 if "killed" in ending else 200
    runs = f"""
import sys, pathlib
from benchmarks.gpu.pieces import Piece, run_pieces
folder = pathlib.Path({str(tmp_path)!r})
(outcome,) = run_pieces([Piece("piece_that_fails", "what fails", 25)], folder, True, {limit})
figures = [entry["figure"] for entry in outcome.failures]
print(repr((outcome.passed, outcome.ending, figures, outcome.verdict)))
"""
    # `gpu` finds modules in this folder, too, in the process of the piece as in this one.
    site = tmp_path / "sitecustomize.py"
    site.write_text(f"import benchmarks.gpu\nbenchmarks.gpu.__path__.append({str(tmp_path)!r})\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", runs], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    passed, ended, figures, verdict = eval(done.stdout.splitlines()[-1])
    assert not passed
    assert ended == ending
    assert figures == ([figure] if figure else [])
    assert verdict.startswith("FAIL")


# -- benchmarks with ranks of their own run to their end, and end with the status of a rank that fails ----------------

TINY = ("--hidden", "64", "--layers", "4", "--repeats", "1")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_plans_are_compared_on_an_emulated_link(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    few = ("--sequence", "32", "--heads", "4", "--microbatches", "4", "--plans", "greedy", "--json", str(file))
    done = run("benchmarks.plans", "tp", "--links", "300mbit", *TINY, *few)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(file.read_text())["results"]
    assert list(result["rows"]) == ["sequential", "greedy"]
    assert all(row["peak"] > 0 and len(row["steps"]) == 1 for row in result["rows"].values())
    assert "300 Mbit/s, emulated, 4 micro-batches" in done.stdout


@pytest.mark.slow
def test_costs_of_saving_and_loading_are_counted_on_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    for study, more in (("model", ("--ranks", "2")), ("load", ("--tp", "2", "--ways", "folder", "save"))):
        done = run("benchmarks.checkpoint", study, *TINY, "--vocabulary", "128", *more, "--json", str(file))
        assert done.returncode == 0, done.stderr
        rows = json.loads(file.read_text())["results"]
        assert all(len(row["ranks"]) == 2 and row["ranks"][0][0]["seconds"] > 0 for row in rows)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_command() -> None:
    done = run("benchmarks.plans", "tp", "--links", "300mbit", *TINY, "--heads", "5")  # 64 features, 5 heads
    assert done.returncode == 1
