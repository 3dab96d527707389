"""Plans beside the bound on the paper's rows: nothing beats it, and `search` is near it."""

import pytest

from benchmarks.paper.bounds import ROWS, shares
from benchmarks.paper.published import FIGURE_11, FIGURE_13A
from benchmarks.paper.runs import Runs


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs()


@pytest.mark.parametrize("row", [FIGURE_11[2], FIGURE_11[3], FIGURE_13A[1]], ids=lambda row: row.name)
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
