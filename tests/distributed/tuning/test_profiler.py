"""The profiler on two real ranks: it covers every operator, all ranks agree, and nothing else is touched."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hf_helix.planning.timing.profile_file import load_profile, profile_json
from hf_helix.planning.window.layout import named_operators

JOB = "support.tuning_jobs:profile"
CASE = {"model": {"num_hidden_layers": 2, "attention_dropout": 0.1}, "data": {"lengths": (17,)}}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile") / "profile.json"


@pytest.fixture(scope="module")
def per_rank(cluster_of: Any, file: Path) -> list[dict[str, Any]]:
    return cluster_of(2).run(JOB, folder=str(file.parent), output=str(file), **CASE)


def test_operators_and_pairs_have_possible_times(per_rank: Any) -> None:
    for rank in per_rank:
        assert rank["times"].keys() == rank["kinds"].keys()
        assert all(math.isfinite(seconds) and 0 < seconds < 10 for seconds in rank["times"].values())
        assert {"embedding", "layer", "head"} == {unit for unit, _ in rank["times"]}
        assert {"intra_node"} == set(rank["kinds"].values()) - {"compute"}
    # Pairs have possible times.
    for names, (together, first, second) in per_rank[0]["pairs"].items():
        assert all(math.isfinite(seconds) and seconds > 0 for seconds in (together, first, second)), names


def test_ranks_agree_and_training_is_left_as_it_was_found(per_rank: Any) -> None:
    first, second = per_rank
    assert first["text"] == second["text"]
    for key in ("times", "pairs", "like", "about"):
        assert first[key] == second[key]
    # Training is left as it was found.
    for rank in per_rank:
        assert rank["same_parameters"]
        assert rank["same_buffers"]
        assert rank["same_random_state"]
        assert rank["gradients"] == 0
        assert not rank["traced"]
    # Progress goes from none to all.
    for rank in per_rank:
        assert rank["shares"] == sorted(rank["shares"])
        assert len(rank["shares"]) == len(rank["pairs"])
        assert 0 < rank["shares"][0] <= 1 == rank["shares"][-1]


def test_what_is_measured_beside_what(per_rank: Any) -> None:
    rank = per_rank[0]
    kinds, layers = rank["kinds"], set(rank["layers"])
    moving = [name for name in layers if kinds[name] == "intra_node" and name not in rank["like"]]
    assert moving
    assert {name for names in rank["pairs"] for name in names} <= layers
    beside = {a for a, b in rank["pairs"] if kinds[a] == "compute" and kinds[b] == "intra_node"}
    longest = max((name for name in layers if kinds[name] == "compute"), key=rank["times"].get)
    assert longest in beside
    # Whatever is measured beside one collective is measured beside all of them.
    assert {pair for pair in rank["pairs"] if kinds[pair[1]] != kinds[pair[0]]} == {
        (a, b) for a in beside for b in moving
    }
    # Like is measured beside like.
    rank = per_rank[0]
    kinds = rank["kinds"]
    alike = [(a, b) for a, b in rank["pairs"] if kinds[a] == kinds[b]]
    assert {kinds[a] for a, _ in alike} == {"compute", "intra_node"}
    for name in rank["layers"]:
        if kinds[name] == "intra_node" and name not in rank["like"]:
            assert (name, name) in alike


def test_collectives_of_one_size_stand_for_each_other(per_rank: Any) -> None:
    rank = per_rank[0]
    kinds, like = rank["kinds"], rank["like"]
    assert like
    for name, other in like.items():
        assert kinds[name] == kinds[other] != "compute"
        assert other not in like
        assert name != other
    # Both gathers of a layer carry a micro-batch of hidden states.
    layer = {name: like.get(name, name) for name in rank["layers"] if kinds[name] == "intra_node"}
    assert layer["layer", "F.attn.gather"] == layer["layer", "F.mlp.gather"]
    assert layer["layer", "F.attn.scatter"] == layer["layer", "F.mlp.scatter"]
    assert layer["layer", "F.attn.gather"] != layer["layer", "F.attn.scatter"]


def test_about_says_what_it_is_for(per_rank: Any) -> None:
    about = per_rank[0]["about"]
    assert {
        "device",
        "backend",
        "hosts",
        "torch",
        "model",
        "mesh",
        "attention",
        "transformers",
        "shapes",
    } <= about.keys()
    assert about["mesh"] == "tp=2"
    assert about["backend"] == "gloo"
    assert about["hosts"] == "1"
    assert about["threads"] == "1"
    assert about["attention"] == "sdpa"
    assert about["shapes"] == "2 x 17, 2 x 17"
    assert all(isinstance(value, str) and value for value in about.values())


def test_the_file_comes_back_the_same(per_rank: Any, file: Path) -> None:
    loaded = load_profile(file, about=per_rank[0]["about"])
    assert file.read_text() == per_rank[0]["text"]
    again, written = json.loads(profile_json(loaded)), json.loads(file.read_text())
    for ours, theirs in zip(again["pairs"], written["pairs"], strict=True):
        # For people; the file's times are rounded.
        assert ours.pop("oef") == pytest.approx(theirs.pop("oef"), abs=1e-2, rel=1e-3)
    assert again == written
    assert {name for name, _ in named_operators(loaded.layout)} == per_rank[0]["times"].keys()
    assert dict(loaded.like) == per_rank[0]["like"]
    for name, seconds in per_rank[0]["times"].items():
        assert loaded.times[name] == pytest.approx(seconds, rel=1e-5)


def test_another_model_is_another_case_and_pairs_may_be_left_out(
    cluster_of: Any, per_rank: Any, tmp_path: Path
) -> None:
    case = {**CASE, "model": {"num_hidden_layers": 2, "intermediate_size": 58}}
    other = cluster_of(2).run(JOB, folder=str(tmp_path), pairs=False, **case)
    for rank in other:
        assert rank["pairs"] == {}
        assert rank["times"].keys() == rank["kinds"].keys()
    assert other[0]["about"]["model"] != per_rank[0]["about"]["model"]
    assert other[0]["about"]["model"].split()[0] == "LlamaForCausalLM"


def test_every_computation_can_run_in_the_thread_of_a_stream(cluster_of: Any, tmp_path: Path) -> None:
    """Experts write their products to memory of their own, which autograd refuses; and its mode is that of a thread."""
    case = {"helix": {"ep_size": 2, "recompute": "full"}, "model": {"family": "phimoe", "num_hidden_layers": 1}}
    names, other = cluster_of(2).run("support.tuning_jobs:beside_themselves", folder=str(tmp_path), **case)
    assert names == other
    assert {"F.experts.up", "B.experts.up.again", "B.experts.up.W"} <= set(names)
