"""Tuning in proportion: a short run is not tuned, a longer one in its midst, and nothing else changes by it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_helix.tuning.budget import FULL, SHORT

SEARCH = "hf_helix.planning.plan.search"


def run(
    cluster: Any, folder: Path, share: float, cache: Path | None = None, helix: Any = None, **training: Any
) -> dict[str, Any]:
    """Five steps of one (imagined) second; of rank 0, where every rank has decided the same."""
    training = {"gradient_accumulation_steps": 2, "max_steps": 5, **training}
    job = {"folder": str(folder), "share": share, "cache": str(cache or folder / "cache"), "training": training}
    job["helix"] = helix
    first, second = cluster.run("support.share_jobs:train", **job)
    for key in ("tier", "rule", "measured", "losses"):
        assert first[key] == second[key], key
    assert second["said"] == []
    return first  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def plain(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(cluster_of(2), tmp_path_factory.mktemp("plain"), share=0.0)


def test_a_run_of_a_few_steps_is_not_tuned(plain: Any, cluster_of: Any, tmp_path: Path) -> None:
    """Neither is one step, before which nothing is known; `plain` says why."""
    one = run(cluster_of(2), tmp_path, share=0.05, max_steps=1)
    assert (one["measured"], one["said"]) == ([0], [])
    assert (plain["measured"], plain["rule"]) == ([0] * 5, "greedy")
    (said,) = plain["said"]
    assert said.startswith("hf_helix: plan `greedy`, not measured: that would take about 1 s of the about 3 s")


@pytest.fixture(scope="module")
def tuned(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run that is tuned, and its cache."""
    folder = tmp_path_factory.mktemp("tuned")
    return run(cluster_of(2), folder, share=0.5), folder / "cache"


def test_a_longer_run_is_tuned_in_its_midst(plain: Any, tuned: Any) -> None:
    """Three of five seconds are left when the step time is known; half of that pays for the second of three tiers."""
    result, _ = tuned
    assert (result["measured"], result["tier"]) == ([0, 0, 1, 1, 1], SHORT.name)
    before, verdict = result["said"]
    assert before == "hf_helix: measuring and searching plans, about 1 s of about 3 s; cached afterwards"
    assert verdict.startswith(f"hf_helix: plan `{result['rule']}`")
    tolerance = 1e-5 if result["rule"] == "intra_batch" else 0.0
    assert result["losses"] == pytest.approx(plain["losses"], rel=tolerance, abs=0)


def test_the_next_run_takes_over_what_was_tuned(tuned: Any, cluster_of: Any, tmp_path: Path) -> None:
    """At its first step."""
    result, cache = tuned
    again = run(cluster_of(2), tmp_path, share=0.01, cache=cache)
    assert (again["measured"], again["rule"], again["tier"]) == ([0] * 5, result["rule"], SHORT.name)
    assert again["said"][0].startswith(f"hf_helix: plan `{result['rule']}`")


@pytest.mark.slow
def test_a_run_that_can_afford_more_measures_anew(tuned: Any, cluster_of: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(tuned[1], cache)
    better = run(cluster_of(2), tmp_path, share=0.9, cache=cache)
    assert (better["measured"], better["tier"]) == ([0, 0, 1, 1, 1], FULL.name)


def test_steps_exchange_no_objects(plain: Any, cluster_of: Any, tmp_path: Path) -> None:
    """Where one micro-batch a step never lets `auto` measure, none at all. Otherwise the first step says what the case
    is, and after 2, 4, ... steps rank 0 says what the rest of the run is worth; both before `training_step`."""
    alone = run(cluster_of(2), tmp_path, share=0.05, gradient_accumulation_steps=1)
    assert alone["pickled"] == [0] * 5
    assert plain["pickled"][1:] == [0, 1, 0, 1]
    assert alone["pickled_within"] == [0] * 5
    assert plain["pickled_within"] == [0] * 10
    assert alone["in_windows"] == plain["in_windows"] == [0] * 5


def test_no_window_reaches_what_measures_or_chooses_plans(plain: Any, tuned: Any) -> None:
    """Followed through every function of the library that `Engine.train_window` enters, also in a run that is tuned."""
    for result in (plain, tuned[0]):
        assert {"hf_helix.engine.engine", "hf_helix.runtime.executor"} <= result["modules"], "the scan sees the window"
        reached = {module for module in result["modules"] if module.startswith(("hf_helix.tuning", SEARCH))}
        assert reached == set()


def test_a_loop_is_tuned_once_it_has_lasted(cluster_of: Any, tmp_path: Path) -> None:
    """As many steps as there were are expected: after four, half of their time pays for it. Gradients stay."""
    job = {"cache": str(tmp_path), "steps": 6}
    first, second = cluster_of(2).run("support.share_jobs:loop", share=0.5, **job)
    plain, _ = cluster_of(2).run("support.share_jobs:loop", share=0.0, **job)
    assert first["measured"] == second["measured"] == [0, 0, 0, 0, 1, 1]
    assert plain["measured"] == [0] * 6
    tolerance = 0.0 if "`intra_batch`" not in first["said"][1] else 1e-5
    for key in ("losses", "norms"):
        assert first[key] == pytest.approx(plain[key], rel=tolerance, abs=0)
    assert plain["norms"][-1] > 5 * plain["norms"][0], "gradients add up"
    assert first["said"][0] == "hf_helix: measuring and searching plans, about 2 s; cached afterwards"
    assert first["said"][1].endswith("(details: print(model.engine.tuning))")


@pytest.mark.slow
def test_a_pipeline_changes_its_schedule_in_the_midst(cluster_of: Any, tmp_path: Path) -> None:
    """Plan and schedule are those that were measured from the third step on; the losses are as if they were not."""
    helix = {"pp_size": 2, "schedule": "auto"}
    plain = run(cluster_of(2), tmp_path / "plain", share=0.0, helix=helix)
    result = run(cluster_of(2), tmp_path / "tuned", share=0.9, helix=helix)
    assert (plain["measured"], result["measured"]) == ([0] * 5, [0, 0, 1, 1, 1])
    assert f"plan `{result['rule']}` on the schedule `{result['schedule']}`" in result["said"][1]
    assert result["losses"] == plain["losses"]
    assert result["eval"] == plain["eval"]
