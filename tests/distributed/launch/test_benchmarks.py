"""Benchmarks with ranks of their own run to their end, and end with the status of a rank that fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

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
