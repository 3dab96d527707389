"""`plan="auto"` and `plan="search"` measure in the first window; training goes on as if they had not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import jobs  # noqa: F401  (what the cluster runs)

from hf_helix.runtime.tuning import CANDIDATES, TIMED

CASE = {
    "model": {"num_hidden_layers": 4, "attention_dropout": 0.1},
    "training": {"gradient_accumulation_steps": 3, "max_steps": 4},
}


@pytest.fixture(scope="module")
def runs(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def run(plan: str) -> list[dict[str, Any]]:
        folder = str(tmp_path_factory.mktemp(plan))
        helix = {"tp_size": 2, "plan": plan, "cache": False}
        return cluster_of(2).run("train", folder=folder, helix=helix, **CASE)

    return {plan: run(plan) for plan in ("auto", "search", "sequential")}


def test_the_fastest_plan_is_kept(runs: Any) -> None:
    for result in runs["auto"]:
        assert set(result["predicted"]) == set(CANDIDATES)
        assert "sequential" in result["steps_by_rule"]
        fastest = sorted((r for r in CANDIDATES if r != "sequential"), key=result["predicted"].get)[:TIMED]
        assert set(result["steps_by_rule"]) == {"sequential", *fastest}
        assert result["kept"] == min(result["steps_by_rule"], key=result["steps_by_rule"].get)
        assert json.loads(result["plan"])["rule"] == result["kept"]


def test_search_is_kept_where_it_is_asked_for(runs: Any) -> None:
    assert [json.loads(result["plan"])["rule"] for result in runs["search"]] == ["search", "search"]
    assert "kept" not in runs["sequential"][0]


def test_all_ranks_choose_the_same(runs: Any) -> None:
    for plan in ("auto", "search"):
        first, second = runs[plan]
        assert first["plan"] == second["plan"]
        assert first["steps_by_rule"] == second["steps_by_rule"]


def test_measuring_leaves_no_trace_in_the_results(runs: Any) -> None:
    """The same bits as a run that measures nothing, dropout included; only tiles may round differently."""
    for plan in ("auto", "search"):
        tolerance = 1e-5 if runs[plan][0]["kept"] == "intra_batch" else 0.0
        for key in ("losses", "norms", "eval"):
            assert runs[plan][0][key] == pytest.approx(runs["sequential"][0][key], rel=tolerance, abs=0)
