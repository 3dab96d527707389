"""`plan="auto"` and `plan="search"` measure before the first step; training goes on as if they had not."""

import datetime
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tuning_jobs
from support.marks import slow
from support.models import llama

from hf_helix.planning.plan.registry import load_plan, make_plan
from hf_helix.planning.timing.profile_file import load_profile
from hf_helix.tuning import cache
from hf_helix.tuning.budget import CANDIDATES, FULL

TUNE = "support.tuning_jobs:tune"
SMALL = {
    "model": {"num_hidden_layers": 2, "attention_dropout": 0.1},
    "data": {"count": 20, "lengths": (9,)},
    "training": {"gradient_accumulation_steps": 2, "max_steps": 2},
}


def tune(cluster: Any, folder: Path, plan: str, cache: Path | None = None, **options: Any) -> dict[str, Any]:
    """What both ranks found and chose, which is the same, and what rank 0 said."""
    helix = {"plan": plan, **options.pop("helix", {})}
    case = {**SMALL, **options}
    first, second = cluster.run(TUNE, folder=str(folder), cache=str(cache or folder / "cache"), helix=helix, **case)
    counted = [(run["tuning"] or {}).pop("gradient_bytes", None) for run in (first, second)]
    for key in ("plan", "first", "kept", "steps", "predicted", "tuning", "measured", "losses", "norms", "eval"):
        assert first[key] == second[key], key
    first["gradient_bytes"] = counted
    assert second["said"] == []
    return first


MEASURED = ["auto", slow("search")]


@pytest.fixture(scope="module")
def kept(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """By plan, a cache and what was found when it was filled."""

    @functools.cache
    def fill(plan: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(plan)
        return folder / "cache", tune(cluster_of(2), folder, plan)

    return fill


def test_the_fastest_plan_is_kept(kept: Any) -> None:
    result = kept("auto")[1]
    assert set(result["predicted"]) == set(CANDIDATES)
    fastest = sorted((r for r in CANDIDATES if r != "sequential"), key=result["predicted"].get)[: FULL.timed]
    assert set(result["steps"]) == {"sequential", *fastest}
    assert result["kept"] == min(result["steps"], key=result["steps"].get)
    assert json.loads(result["plan"])["rule"] == result["kept"]
    # Plans are measured before the step.
    assert result["measured_in"] == [["get_batch_samples"]]
    # Gradients are counted to the byte.
    whole = sum(parameter.numel() for parameter in llama(num_hidden_layers=2).parameters())
    assert result["gradient_bytes"] == [4 * whole] * 2


@pytest.mark.parametrize("plan", MEASURED)
def test_measuring_leaves_no_trace_in_the_results(plan: str, kept: Any, cluster_of: Any, tmp_path: Path) -> None:
    """The same bits as a run that measures nothing, dropout included; only tiles may round differently."""
    plain = tune(cluster_of(2), tmp_path, "sequential")
    assert plain["tuning"] is None
    result = kept(plan)[1]
    tolerance = 1e-5 if result["rule"] == "intra_batch" else 0.0
    for key in ("losses", "norms", "eval"):
        assert result[key] == pytest.approx(plain[key], rel=tolerance, abs=0)


@pytest.mark.parametrize("plan", MEASURED)
def test_the_second_run_of_a_case_measures_nothing(plan: str, kept: Any, cluster_of: Any, tmp_path: Path) -> None:
    cache, first = kept(plan)
    assert first["measured"] == 1
    again = tune(cluster_of(2), tmp_path, plan, cache, forbidden=True)
    assert again["measured"] == 0
    for key in ("plan", "tuning", "kept", "steps", "predicted"):
        assert again[key] == first[key], key
    assert again["tuning"]["measured"] == datetime.date.today().isoformat()
    before, verdict = first["said"]
    assert before.startswith("hf_helix: measuring and searching plans, about ")
    assert before.endswith("; cached afterwards")
    assert len(again["said"]) == 1
    for said in (verdict, *again["said"]):
        assert said.startswith(f"hf_helix: plan `{again['kept']}`")
    assert verdict.partition(" (details: ")[0] == again["said"][0].partition(" (details: ")[0]
    assert again["report"] in (tmp_path / "helix" / "tuning.txt").read_text()
    made_for = {"model": "LlamaForCausalLM", "mesh": {"tp_size": 2, "pp_size": 1}}
    graphs = load_profile(tmp_path / "helix" / "profile.json").layout.graphs
    assert load_plan(tmp_path / "helix" / "plan.json", graphs, **made_for).to_json() == again["plan"]


@pytest.mark.parametrize("plan", MEASURED)
def test_the_cache_holds_files_for_people(plan: str, kept: Any) -> None:
    (folder,) = kept(plan)[0].iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "profile.json", "tuning.json"]
    profile = load_profile(folder / "profile.json")
    case = json.loads((folder / "tuning.json").read_text())["case"]
    assert case["model"] == profile.about["model"]
    assert case["plan"] == plan
    mesh = {"tp_size": 2, "pp_size": 1}
    loaded = load_plan(folder / "plan.json", profile.layout.graphs, model="LlamaForCausalLM", mesh=mesh)
    assert loaded.rule == plan or plan == "auto"


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["search", "dhelix"])
def test_a_plan_that_is_asked_for_is_kept_whether_fastest_or_not(plan: str, kept: Any) -> None:
    result = kept(plan)[1]
    assert result["first"] == "greedy", "until it was measured"
    assert result["rule"] == result["kept"] == plan
    assert result["steps"].keys() == {plan}
    assert result["tuning"]["bound"] > 0
    assert result["tuning"]["ranks"] == 2


@pytest.mark.slow
def test_nothing_is_kept_where_that_is_not_wanted(cluster_of: Any, tmp_path: Path) -> None:
    assert tune(cluster_of(2), tmp_path, "search", helix={"cache": False})["measured"] == 1
    assert not (tmp_path / "cache").exists()


OTHER_CASES: dict[str, dict[str, Any]] = {
    "another plan": {"helix": {"plan": "auto"}},
    "longer": {"data": {"count": 20, "lengths": (11,)}},
    "larger batches": {"training": {**SMALL["training"], "per_device_train_batch_size": 3}},
    "more micro-batches": {"training": {**SMALL["training"], "gradient_accumulation_steps": 3}},
    "another model": {"model": {**SMALL["model"], "intermediate_size": 58}},
    "recomputed": {"helix": {"recompute": "full"}},
    "another attention": {"model": {**SMALL["model"], "attn_implementation": "eager"}},
}


@pytest.mark.parametrize("case", OTHER_CASES)
@pytest.mark.slow
def test_other_cases_are_measured_anew(case: str, kept: Any, cluster_of: Any, tmp_path: Path) -> None:
    cache = Path(shutil.copytree(kept("search")[0], tmp_path / "cache"))
    result = tune(cluster_of(2), tmp_path, "search", cache, **OTHER_CASES[case])
    assert result["measured"] == 1
    assert len(list(cache.iterdir())) == 2


def damage(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))

    return write


def some(data: dict[str, Any]) -> dict[str, Any]:
    """The figures of one of the plans that were timed."""
    return data["overlaps"][min(data["overlaps"])]  # type: ignore[no-any-return]


def garble(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no tuning": lambda folder: (folder / "tuning.json").unlink(),
    "no plan": lambda folder: (folder / "plan.json").unlink(),
    "empty tuning": garble("tuning.json", ""),
    "truncated tuning": garble("tuning.json", '{"format": "hf_helix.tuning/1", "case"'),
    "tuning is a list": garble("tuning.json", "[]"),
    "bytes": lambda folder: (folder / "tuning.json").write_bytes(b"\xff\xfe"),
    "another format": damage("tuning.json", lambda data: data.update(format="hf_helix.tuning/0")),
    "another case": damage("tuning.json", lambda data: data["case"].update(torch="1.0")),
    "no bound": damage("tuning.json", lambda data: data.pop("bound")),
    "no schedule": damage("tuning.json", lambda data: data.pop("schedule")),
    "an unknown figure": damage("tuning.json", lambda data: some(data).update(luck=1)),
    "truncated plan": garble("plan.json", '{"format"'),
    "empty plan": garble("plan.json", ""),
    "a plan for other graphs": damage("plan.json", lambda data: data.update(graphs="0")),
    "a plan of an older version": damage("plan.json", lambda data: data.update(format="hf_helix.plan/0")),
    "a profile of an older version": damage("profile.json", lambda data: data.update(format="hf_helix.profile/0")),
    "truncated profile": garble("profile.json", '{"format"'),
    "an impossible profile": damage("profile.json", lambda data: data["operators"]["layer"].popitem()),
}
UNREAD: dict[str, Callable[[Path], object]] = {
    "figures are a list": damage("tuning.json", lambda data: data.update(overlaps=[])),
    "kept is unknown": damage("tuning.json", lambda data: data.update(kept="magic")),
    "figures are text": damage("tuning.json", lambda data: some(data).update(step="fast")),
}


# Of these, `cache.load` knows nothing.
PLANS_DAMAGED = ("truncated plan", "empty plan", "a plan for other graphs", "a plan of an older version")


def damaged(harm: Callable[[Path], object], cache: Path, folder: Path) -> Path:
    """A copy of a cache of one case, harmed; returns the folder of the case."""
    (case,) = cache.iterdir()
    copy = Path(shutil.copytree(case, folder / "cache" / case.name))
    harm(copy)
    return copy


def loads(harm: Callable[[Path], object], kept: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether something is read from the harmed cache; in this process."""
    whole, _ = kept("auto")
    (case,) = (json.loads((path / "tuning.json").read_text())["case"] for path in whole.iterdir())
    monkeypatch.setenv("HELIX_CACHE", str(damaged(harm, whole, folder).parent))
    return cache.load(case) is not None


@pytest.mark.slow
@pytest.mark.parametrize("harm", DAMAGES)
def test_what_cannot_be_read_is_measured_anew(harm: str, kept: Any, cluster_of: Any, tmp_path: Path) -> None:
    folder = damaged(DAMAGES[harm], kept("search")[0], tmp_path).parent
    assert tune(cluster_of(2), tmp_path, "search", folder)["measured"] == 1
    assert tune(cluster_of(2), tmp_path, "search", folder, forbidden=True)["measured"] == 0, "whole again"


@pytest.mark.parametrize("harm", [harm for harm in DAMAGES if harm not in PLANS_DAMAGED])
def test_what_is_damaged_is_not_read(harm: str, kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loads(lambda folder: None, kept, tmp_path / "other", monkeypatch)
    assert not loads(DAMAGES[harm], kept, tmp_path, monkeypatch)


@pytest.mark.parametrize("harm", UNREAD)
def test_what_makes_no_sense_is_not_read(harm: str, kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read or raised on rank 0, it takes the training down."""
    assert not loads(UNREAD[harm], kept, tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_said(cluster_of: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = tune(cluster_of(2), tmp_path, "search", tmp_path / "file" / "cache")
    assert result["rule"] == "search"
    assert any("could not be kept for the next run" in line for line in result["said"])


# Profiles that are given


@pytest.fixture(scope="module")
def profile(kept: Any) -> Path:
    """As a run that has measured leaves it in its cache."""
    (case,) = kept("auto")[0].iterdir()
    return case / "profile.json"


@pytest.mark.parametrize(
    "plan",
    ["search", *(slow(p) for p in ("dhelix", "greedy", "round_robin", "intra_batch"))],
)
def test_a_given_profile_is_planned_with(plan: str, profile: Path, cluster_of: Any, tmp_path: Path) -> None:
    """Nothing is measured or waited for; the plan is the one that the file gives anywhere."""
    result = tune(cluster_of(2), tmp_path, plan, helix={"profile": str(profile)}, forbidden=True)
    assert result["first"] == result["rule"] == plan
    assert result["tuning"] is None
    mesh = {"tp_size": 2, "pp_size": 1}
    with tuning_jobs.hasty():  # as on the ranks
        made = make_plan(plan, load_profile(profile), model="LlamaForCausalLM", mesh=mesh)
    assert result["plan"] == made.to_json()


@pytest.mark.slow
def test_auto_with_a_given_profile_times_plans_only(profile: Path, cluster_of: Any, tmp_path: Path) -> None:
    result = tune(cluster_of(2), tmp_path, "auto", helix={"profile": str(profile)}, forbidden=True)
    assert result["predicted"].keys() == set(CANDIDATES)
    assert result["kept"] == result["rule"]
    assert len(result["steps"]) == 1 + FULL.timed


@pytest.mark.slow
def test_another_profile_at_the_same_path_is_another_case(
    profile: Path, cluster_of: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    path = Path(shutil.copy(profile, tmp_path / "profile.json"))
    tune(cluster_of(2), tmp_path, "auto", helix={"profile": str(path)})
    data = json.loads(path.read_text())
    for figures in data["operators"]["layer"].values():
        figures["ms"] *= 1000
    path.write_text(json.dumps(data))
    again = tune(cluster_of(2), tmp_path, "auto", helix={"profile": str(path)})
    assert again["predicted"]["sequential"] > 0.5


WRONG_PROFILES: dict[str, tuple[Callable[[dict[str, Any]], object] | None, str]] = {
    "cut off": (None, "is damaged"),
    "another model": (lambda data: data["about"].update(model="LlamaForCausalLM 0"), "is for model"),
    "another mesh": (lambda data: data["about"].update(mesh="tp=4"), "is for mesh 'tp=4', this run has 'tp=2'"),
    "nothing said of the model": (lambda data: data["about"].pop("model"), "is for model None"),
}
"""What else may be wrong with one is among the tests of its files (unit/planning/timing/test_profile.py)."""


@pytest.mark.parametrize("wrong", WRONG_PROFILES)
def test_a_wrong_profile_is_refused_at_construction(wrong: str, profile: Path, cluster_of: Any, tmp_path: Path) -> None:
    change, message = WRONG_PROFILES[wrong]
    path = Path(shutil.copy(profile, tmp_path / "profile.json"))
    damage(path.name, change)(tmp_path) if change else path.write_text(path.read_text()[:-20])
    check_refused(path, message, cluster_of(2))


def check_refused(path: Path, message: str, cluster: Any) -> None:
    """On every rank, with what was wrong and the command that makes a right one."""
    helix = {"tp_size": 2, "plan": "search", "profile": str(path)}
    words = message, f"profile file {path}", f"hf-helix profile --model FOLDER --tp_size N --output {path}"
    cluster.assert_raises("construct", *words, folder=str(path.parent), helix=helix, model=SMALL["model"])


# Windows that tell nothing


WAITING = [
    ("auto", "greedy"),
    *(slow(*p) for p in [("dhelix", "greedy"), ("round_robin",) * 2]),
]


@pytest.mark.parametrize(("plan", "rule"), WAITING)
def test_a_window_of_one_micro_batch_waits(plan: str, rule: str, cluster_of: Any, tmp_path: Path) -> None:
    """Nothing is interleaved, and that is said once, whatever the plan, with what to change."""
    training = {"gradient_accumulation_steps": 1, "max_steps": 2}
    result = tune(cluster_of(2), tmp_path, plan, training=training, forbidden=True)
    assert result["rule"] == rule
    assert result["tuning"] is None
    (said,) = result["said"]
    assert "one micro-batch here, and nothing to interleave it with; set gradient_accumulation_steps=2" in said
    assert not (tmp_path / "cache").exists()


def test_a_data_set_of_one_batch_is_the_reason(cluster_of: Any, tmp_path: Path) -> None:
    """Accumulation is on already, so no advice to switch it on."""
    training = {"gradient_accumulation_steps": 4, "max_steps": 3}
    options = {"training": training, "data": {"count": 2, "lengths": (9,)}}
    (said,) = tune(cluster_of(2), tmp_path, "auto", forbidden=True, **options)["said"]
    assert "gradient_accumulation_steps is 4, but the data set has only one batch for this rank" in said


@pytest.mark.parametrize("plan", ["intra_batch", slow("sequential")])
def test_plans_of_one_micro_batch_at_a_time_need_no_other(plan: str, cluster_of: Any, tmp_path: Path) -> None:
    training = {"gradient_accumulation_steps": 1, "max_steps": 2}
    result = tune(cluster_of(2), tmp_path, plan, training=training, forbidden=True)
    assert result["rule"] == plan
    assert result["said"] == []


def test_one_rank_a_batch_has_nothing_to_tune(cluster_of: Any, tmp_path: Path) -> None:
    result = tune(cluster_of(2), tmp_path, "auto", helix={"tp_size": 1}, forbidden=True)
    assert result["first"] == result["rule"] == "sequential"
    assert result["tuning"] is None
    assert result["said"] == []


@pytest.mark.slow
def test_tuning_beside_data_parallelism(cluster_of: Any, tmp_path: Path) -> None:
    """Four ranks, two batches: every rank decides the same, and the second run measures nothing."""
    case = {**SMALL, "data": {"count": 40, "lengths": (9,)}, "folder": str(tmp_path), "cache": str(tmp_path / "cache")}
    first = cluster_of(4).run(TUNE, helix={"plan": "auto"}, **case)
    again = cluster_of(4).run(TUNE, helix={"plan": "auto"}, forbidden=True, **case)
    assert len({run["plan"] for run in first + again}) == 1
    assert all(run["measured"] == 1 for run in first)
    assert all(run["measured"] == 0 for run in again)
    assert all(run["steps"] == first[0]["steps"] for run in first + again)
