"""`plan="auto"` and `plan="search"` measure before the first step; training goes on as if they had not."""

import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tuning_jobs
from support.marks import slow
from support.models import llama

from hf_helix.cli import main
from hf_helix.planning.rules.registry import load_plan, make_plan
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


@pytest.fixture(scope="module")
def kept(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A cache, and what was found when it was filled."""
    folder = tmp_path_factory.mktemp("auto")
    return folder / "cache", tune(cluster_of(2), folder, "auto")


def test_the_fastest_plan_is_kept(kept: Any) -> None:
    result = kept[1]
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


def test_measuring_leaves_no_trace_in_the_results(kept: Any, cluster_of: Any, tmp_path: Path) -> None:
    """The same bits as a run that measures nothing, dropout included."""
    plain = tune(cluster_of(2), tmp_path, "sequential")
    assert plain["tuning"] is None
    result = kept[1]
    for key in ("losses", "norms", "eval"):
        assert result[key] == plain[key]


def test_the_second_run_of_a_case_measures_nothing(kept: Any, cluster_of: Any, tmp_path: Path) -> None:
    cache, first = kept
    assert first["measured"] == 1
    again = tune(cluster_of(2), tmp_path, "auto", cache, forbidden=True)
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


def test_the_cache_holds_files_for_people(kept: Any) -> None:
    (folder,) = kept[0].iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "profile.json", "tuning.json"]
    profile = load_profile(folder / "profile.json")
    case = json.loads((folder / "tuning.json").read_text())["case"]
    assert case["model"] == profile.about["model"]
    assert case["plan"] == "auto"
    mesh = {"tp_size": 2, "pp_size": 1}
    load_plan(folder / "plan.json", profile.layout.graphs, model="LlamaForCausalLM", mesh=mesh)


@pytest.mark.slow
def test_a_plan_that_is_asked_for_is_kept_whether_fastest_or_not(cluster_of: Any, tmp_path: Path) -> None:
    result = tune(cluster_of(2), tmp_path, "dhelix", helix={"cache": False})
    assert result["first"] == "greedy", "until it was measured"
    assert result["rule"] == result["kept"] == "dhelix"
    assert result["steps"].keys() == {"dhelix"}
    assert result["tuning"]["bound"] > 0
    assert result["tuning"]["ranks"] == 2
    assert not (tmp_path / "cache").exists()


OTHER_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "another plan": (0, {"helix": {"plan": "search"}}),
    "longer": (1, {"data": {"count": 20, "lengths": (11,)}}),
    "recomputed": (1, {"helix": {"recompute": "full"}}),
}
"""How often operators are measured for another case."""


@pytest.mark.parametrize("case", OTHER_CASES)
@pytest.mark.slow
def test_other_operators_are_measured_anew(case: str, kept: Any, cluster_of: Any, tmp_path: Path) -> None:
    """What else is another case: tests/unit/tuning/test_fingerprint.py."""
    cache = Path(shutil.copytree(kept[0], tmp_path / "cache"))
    measured, options = OTHER_CASES[case]
    result = tune(cluster_of(2), tmp_path, "auto", cache, **options)
    assert result["measured"] == measured
    assert len(list(cache.iterdir())) == 2


def test_a_deeper_model_of_the_family_measures_no_operators(kept: Any, cluster_of: Any, tmp_path: Path) -> None:
    """Their times are those that the first model has left; plans are made and timed for this one, and kept."""
    cache = Path(shutil.copytree(kept[0], tmp_path / "cache"))
    (first,) = cache.iterdir()
    model = {**SMALL["model"], "num_hidden_layers": 3}
    result = tune(cluster_of(2), tmp_path, "auto", cache, forbidden=True, model=model)
    assert result["measured"] == 0
    assert result["kept"] == min(result["steps"], key=result["steps"].get)
    (second,) = (path for path in cache.iterdir() if path != first)
    one, other = (load_profile(folder / "profile.json") for folder in (first, second))
    assert (one.times, one.pairs) == (other.times, other.pairs)
    assert len(other.layout.units) == len(one.layout.units) + 1
    assert {name for name in one.about if one.about[name] != other.about[name]} == {"model", "configuration"}


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
    "no plan": lambda folder: (folder / "plan.json").unlink(),
    "truncated tuning": garble("tuning.json", '{"format": "hf_helix.tuning/1", "case"'),
    "tuning is a list": garble("tuning.json", "[]"),
    "bytes": lambda folder: (folder / "tuning.json").write_bytes(b"\xff\xfe"),
    "another format": damage("tuning.json", lambda data: data.update(format="hf_helix.tuning/0")),
    "another case": damage("tuning.json", lambda data: data["case"].update(torch="1.0")),
    "no bound": damage("tuning.json", lambda data: data.pop("bound")),
    "an unknown figure": damage("tuning.json", lambda data: some(data).update(luck=1)),
    "a profile of an older version": damage("profile.json", lambda data: data.update(format="hf_helix.profile/0")),
    "an impossible profile": damage("profile.json", lambda data: data["operators"]["layer"].popitem()),
    # Read or raised on rank 0, they take the training down.
    "figures are a list": damage("tuning.json", lambda data: data.update(overlaps=[])),
    "kept is unknown": damage("tuning.json", lambda data: data.update(kept="magic")),
    "figures are text": damage("tuning.json", lambda data: some(data).update(step="fast")),
}
PLANS_DAMAGED: dict[str, Callable[[Path], object]] = {  # of which `cache.load` knows nothing
    "truncated plan": garble("plan.json", '{"format"'),
    "a plan for other graphs": damage("plan.json", lambda data: data.update(graphs="0")),
}


def damaged(harm: Callable[[Path], object], cache: Path, folder: Path) -> Path:
    """A copy of a cache of one case, harmed; returns the folder of the case."""
    (case,) = cache.iterdir()
    copy = Path(shutil.copytree(case, folder / "cache" / case.name))
    harm(copy)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("harm", PLANS_DAMAGED)
def test_what_cannot_be_read_is_measured_anew(harm: str, kept: Any, cluster_of: Any, tmp_path: Path) -> None:
    """Of operators the profile, which is whole, has the times."""
    copy = damaged(PLANS_DAMAGED[harm], kept[0], tmp_path)
    folder, before = copy.parent, (copy / "plan.json").read_bytes()
    assert tune(cluster_of(2), tmp_path, "auto", folder)["measured"] == 0
    assert (copy / "plan.json").read_bytes() != before
    assert tune(cluster_of(2), tmp_path, "auto", folder, forbidden=True)["measured"] == 0, "whole again"


def test_what_is_damaged_is_not_read(kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = kept
    (case,) = (json.loads((path / "tuning.json").read_text())["case"] for path in whole.iterdir())

    def found(name: str, harm: Callable[[Path], object]) -> bool:
        monkeypatch.setenv("HELIX_CACHE", str(damaged(harm, whole, tmp_path / name).parent))
        return cache.load(case) is not None

    assert found("whole", lambda folder: None)
    assert [name for name, harm in DAMAGES.items() if found(name, harm)] == []


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
    (case,) = kept[0].iterdir()
    return case / "profile.json"


@pytest.mark.parametrize(
    "plan",
    ["search", slow("dhelix")],
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
    "another mesh": (lambda data: data["about"].update(mesh="tp=4"), "is for mesh 'tp=4', this run has 'tp=2'"),
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


ONE = {"gradient_accumulation_steps": 1, "max_steps": 2}


@pytest.mark.parametrize(
    ("plan", "options", "rule", "said"),
    [
        ("auto", {"training": ONE}, "greedy", "one micro-batch here, and nothing to interleave it with; set gradient_"),
        slow("round_robin", {"training": ONE}, "round_robin", "one micro-batch here, and nothing to interleave it"),
        (  # accumulation is on already, so no advice to switch it on
            "auto",
            {"training": {"gradient_accumulation_steps": 4, "max_steps": 3}, "data": {"count": 2, "lengths": (9,)}},
            "greedy",
            "gradient_accumulation_steps is 4, but the data set has only one batch for this rank",
        ),
        ("sequential", {"training": ONE}, "sequential", ""),  # a plan of one micro-batch at a time
        ("auto", {"helix": {"tp_size": 1}}, "sequential", ""),  # one rank a batch has nothing to tune
    ],
)
def test_windows_that_tell_nothing(
    plan: str, options: dict[str, Any], rule: str, said: str, cluster_of: Any, tmp_path: Path
) -> None:
    """Nothing is measured, and that is said once, whatever the plan, with what to change."""
    result = tune(cluster_of(2), tmp_path, plan, forbidden=True, **options)
    assert result["rule"] == rule
    assert result["tuning"] is None
    assert len(result["said"]) == bool(said)
    assert said in "".join(result["said"])
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_run_says_that_another_layout_is_faster(
    cluster_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `hf-helix doctor` has found one; tests/unit/engine/test_advice.py has when not."""
    monkeypatch.setenv("HELIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("hf_helix.cli.doctor.usable_cores", lambda: 1)  # what is counted serves all its questions
    llama(num_hidden_layers=2).config.save_pretrained(tmp_path / "model")
    sizes = ["--sequence_length", "9", "--batch_tokens", "36"]  # two micro-batches of two sequences
    main(["doctor", "--model", str(tmp_path / "model"), "--cluster", "emulated-link", "--dtype", "fp32", *sizes])
    found = tune(cluster_of(2), tmp_path, "sequential", model={"num_hidden_layers": 2})
    (line,) = (line for line in found["said"] if "doctor" in line)
    assert line.startswith("hf_helix: hf-helix doctor predicts that dp 2 trains ")
    assert "times as fast as this layout, tp 2 (2 CPU processes, joined by an emulated link of 300 Mbit/s, 9" in line
    assert "9 tokens a sequence and 36 a step in fp32)" in line
