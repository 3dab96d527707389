"""Pipelines measure, choose a plan and a schedule, remember both, and are scored and traced afterwards."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_helix.planning.schedule.named import FOLDED
from hf_helix.planning.timing.profile_file import load_profile
from hf_helix.tuning.budget import CANDIDATES, FULL
from hf_helix.tuning.result_text import format_scorecard

pytestmark = pytest.mark.slow

TUNE = "support.tuning_jobs:tune"
SMALL: dict[str, Any] = {
    "model": {"num_hidden_layers": 5},
    "data": {"count": 40, "lengths": (9,)},
    "training": {"gradient_accumulation_steps": 5, "max_steps": 2},
}
SCHEDULES = (*FOLDED, "auto")


def tune(cluster: Any, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """All ranks, which have found and trained the same; only rank 0 talks."""
    helix = {"tp_size": 1, "pp_size": 2, **options.pop("helix", {})}
    job = {"folder": str(folder), "cache": str(options.pop("cache", folder / "cache")), "helix": helix}
    ranks: list[dict[str, Any]] = cluster.run(TUNE, **job, **{**SMALL, **options})
    for result in ranks[1:]:
        for key in ("plan", "schedule", "measured", "losses", "kept", "steps", "predicted"):
            assert result[key] == ranks[0][key], key
        assert result["said"] == []
    return ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuned")


@pytest.fixture(scope="module")
def tuned(folder: Path, cluster_of: Any) -> list[dict[str, Any]]:
    """Plan and schedule free, two ranks."""
    helix = {"plan": "auto", "schedule": "auto"}
    return tune(cluster_of(2), folder, helix=helix, extras=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, cluster_of: Any) -> dict[str, Any]:
    helix = {"plan": "sequential", "schedule": "folded_1f1b", "cache": False}
    return tune(cluster_of(2), tmp_path_factory.mktemp("plain"), helix=helix, forbidden=True)[0]


def test_plans_and_schedules_are_measured_and_the_fastest_is_kept(tuned: Any, plain: Any, folder: Path) -> None:
    result = tuned[0]
    assert result["measured"] == 1
    assert set(result["predicted"]) == {f"{rule} on {schedule}" for rule in CANDIDATES for schedule in SCHEDULES}
    assert len(result["steps"]) == 1 + FULL.timed
    assert "sequential on folded_1f1b" in result["steps"]
    assert result["kept"] == min(result["steps"], key=result["steps"].get)
    rule, _, schedule = result["kept"].partition(" on ")
    assert json.loads(result["plan"])["rule"] == rule
    assert result["schedule"] == schedule
    # Tied to the bits: without tensor parallelism there are no tiles, and untied gradients add up in one order.
    assert result["losses"] == plain["losses"]
    before, verdict = result["said"]
    assert before.startswith("hf_helix: measuring and searching plans, about ")
    assert verdict.startswith(f"hf_helix: plan `{rule}` on the schedule `{schedule}`")
    for said in (f"plan {result['kept']}: ", "of it a rank waits for others", "no collectives to hide"):
        assert said in result["report"]
    assert all(f"\n  {name} " in result["report"] for name in result["steps"])
    # The profile covers what ranks send each other.
    (case,) = (folder / "cache").iterdir()
    profile = load_profile(case / "profile.json")
    assert profile.layout.num_ranks == 2
    assert profile.about["mesh"] == "tp=1 pp=2"
    assert profile.times["send", "F.transfer"] > profile.times["receive", "F.transfer"] > 0
    assert {("send", "B.transfer"), ("receive", "B.transfer")} <= profile.times.keys()
    assert json.loads((case / "tuning.json").read_text())["schedule"] == schedule


def test_the_second_run_comes_from_the_cache(tuned: Any, folder: Path, cluster_of: Any, tmp_path: Path) -> None:
    helix = {"plan": "auto", "schedule": "auto"}
    again = tune(cluster_of(2), tmp_path, cache=folder / "cache", helix=helix, forbidden=True)[0]
    assert again["measured"] == 0
    assert len(again["said"]) == 1
    for key in ("plan", "schedule", "kept", "steps", "report", "losses"):
        assert again[key] == tuned[0][key], key


@pytest.mark.parametrize(
    "helix",
    [{"plan": "search", "schedule": "1f1b"}, {"plan": "auto", "schedule": "auto", "layers_per_stage": [2, 1, 1, 1]}],
    ids=str,
)
def test_other_schedules_and_stages_are_other_cases(
    helix: dict[str, Any], tuned: Any, folder: Path, cluster_of: Any, tmp_path: Path
) -> None:
    shutil.copytree(folder / "cache", tmp_path / "cache")
    assert tune(cluster_of(2), tmp_path, helix=helix)[0]["measured"] == 1


def test_a_given_profile_finds_the_schedule_at_once(
    tuned: Any, plain: Any, folder: Path, cluster_of: Any, tmp_path: Path
) -> None:
    (case,) = (folder / "cache").iterdir()
    helix = {"plan": "greedy", "schedule": "auto", "profile": str(case / "profile.json")}
    result = tune(cluster_of(2), tmp_path, helix=helix, forbidden=True)[0]
    assert (result["schedule"], result["kept"]) == ("auto", None)
    assert result["losses"] == plain["losses"]


# What can be looked at afterwards


def test_what_is_measured_afterwards(tuned: Any, plain: Any) -> None:
    overlap = tuned[0]["overlap"]
    assert all(result["overlap"] == overlap for result in tuned)
    assert overlap.step > 0
    assert overlap.computation > 0
    assert overlap.tokens == 5 * 2 * 9
    # Five micro-batches on two ranks: some waiting, some work.
    assert 0 < overlap.bubble_fraction < 1
    assert (overlap.communication, overlap.bytes_moved, dict(overlap.overlapped_by_kind)) == (0.0, 0, {})
    assert "pipeline bubbles" in format_scorecard(overlap, "greedy")
    # Memory and what measuring leaves.
    assert all(result["memory"] == tuned[0]["memory"] for result in tuned)
    assert len(tuned[0]["memory"]) == 2
    assert min(tuned[0]["memory"]) > 0
    assert all(result["gradients"] == 0 for result in tuned)
    assert tuned[0]["losses after"] == tuned[1]["losses after"]
    assert sum(tuned[0]["losses after"]) == pytest.approx(plain["losses"][-1], rel=0.05)


@pytest.mark.parametrize(("processes", "tp", "streams"), [(4, 2, {"intra_node"}), (8, 2, {"intra_node", "gradients"})])
def test_beside_tensor_and_data_parallelism(
    processes: int, tp: int, streams: set[str], cluster_of: Any, tmp_path: Path
) -> None:
    """Four or eight ranks decide the same, and the second run measures nothing."""
    helix = {"tp_size": tp, "plan": "auto", "schedule": "auto"}
    options: dict[str, Any] = {"helix": helix, "cache": tmp_path / "cache", "data": {"count": 80, "lengths": (9,)}}
    first = tune(cluster_of(processes), tmp_path, extras=True, **options)
    again = tune(cluster_of(processes), tmp_path, forbidden=True, **options)
    assert (first[0]["measured"], again[0]["measured"]) == (1, 0)
    assert (first[0]["kept"], first[0]["plan"]) == (again[0]["kept"], again[0]["plan"])
    overlap = first[0]["overlap"]
    assert overlap.communication > 0
    assert 0 <= overlap.overlapped_fraction <= 1
    assert 0 < overlap.bubble_fraction < 1
    assert overlap.tokens == 5 * 2 * 9 * processes // (2 * tp)
    assert len(first[0]["memory"]) == processes
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in range(1, processes + 1):
        names = {each["args"]["name"] for each in events if each["name"] == "thread_name" and each["pid"] == rank}
        # Values and gradients over each of the boundaries between the ranks.
        assert names >= {"compute", "pipeline 0F", "pipeline 0B", "pipeline 2F", "pipeline 2B", *streams}
