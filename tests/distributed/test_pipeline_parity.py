"""A pipeline does what the unsplit model does: losses and gradients by name, under every schedule and plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.pipeline_jobs import batches_of, reference

SCHEDULES = ("w", "dualpipe_v")
LENGTHS = (9, 5, 8)


def counts_of(pp: int) -> list[int]:
    """The numbers of micro-batches: fewer than ranks, as many, more, many."""
    return sorted({1, 2, max(1, pp - 1), pp, pp + 1, 3 * pp})


@pytest.fixture(scope="module")
def expected() -> Any:
    """The unsplit model's windows, each run once."""
    known: dict[Any, Any] = {}

    def get(model: dict[str, Any], count: int) -> Any:
        key = (*sorted(model.items()), count)
        if key not in known:
            known[key] = reference(model, batches_of(count, lengths=LENGTHS))
        return known[key]

    return get


def check(cluster: Any, folder: Any, expected: Any, tp: int, pp: int, dp: int, tied: bool) -> None:
    model = {"num_hidden_layers": max(3, 2 * pp + 1), "tie_word_embeddings": tied}
    cases = [("greedy", schedule, count) for schedule in SCHEDULES for count in counts_of(pp)]
    cases += [(rule, schedule, pp + 1) for schedule in SCHEDULES for rule in ("sequential", "round_robin", "dhelix")]
    helix = {"tp_size": tp, "pp_size": pp, "plan": "sequential"}
    job = {"folder": str(folder), "helix": helix, "model": model, "cases": cases, "lengths": LENGTHS}
    ranks = cluster.run("support.pipeline_jobs:windows", **job)
    for place, (rule, schedule, count) in enumerate(cases):
        what = f"{rule} {schedule} M={count}"
        wanted = expected(model, count * dp)
        for d in range(dp):
            mine = dp * np.array(wanted["losses"][d * count : (d + 1) * count])
            for rank in range(d * tp * pp, (d + 1) * tp * pp):
                np.testing.assert_allclose(ranks[rank][place]["losses"], mine, rtol=0, atol=1e-5 * dp, err_msg=what)
            found = ranks[d * tp * pp][place]["gradients"]
            assert found.keys() == wanted["gradients"].keys()
            for name, gradient in wanted["gradients"].items():
                distance = np.linalg.norm(found[name].astype(np.float64) - gradient)
                assert distance <= 1e-4 * np.linalg.norm(gradient) + 1e-12, f"{what}: {name}"
    for schedule in SCHEDULES:
        same = [place for place, case in enumerate(cases) if case[1:] == (schedule, pp + 1)]
        for place in same[1:]:
            assert_same_bits(ranks[0][place], ranks[0][same[0]])
    if not tied:  # gradients that two units share add up in the schedule's order
        for count in counts_of(pp):
            first, second = (cases.index(("greedy", schedule, count)) for schedule in SCHEDULES)
            assert_same_bits(ranks[0][first], ranks[0][second])


def assert_same_bits(found: dict[str, Any], other: dict[str, Any]) -> None:
    assert found["losses"] == other["losses"]
    for name, gradient in found["gradients"].items():
        np.testing.assert_array_equal(gradient, other["gradients"][name], err_msg=name)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("tp", "pp", "dp"), [(1, 2, 1), (2, 2, 1), pytest.param(1, 4, 1, marks=pytest.mark.slow), (1, 2, 2)]
)
def test_a_pipeline_equals_the_unsplit_model(
    tp: int, pp: int, dp: int, tied: bool, cluster_of: Any, expected: Any, tmp_path: Any
) -> None:
    check(cluster_of(tp * pp * dp), tmp_path, expected, tp, pp, dp, tied)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 1, 1), (1, 1, 2), (2, 1, 2), (2, 4, 1), (1, 4, 2), (2, 2, 2)])
def test_every_layout_equals_the_unsplit_model(
    tp: int, pp: int, dp: int, tied: bool, cluster_of: Any, expected: Any, tmp_path: Any
) -> None:
    check(cluster_of(tp * pp * dp), tmp_path, expected, tp, pp, dp, tied)
