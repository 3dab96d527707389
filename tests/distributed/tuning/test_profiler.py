"""The profiler on two real ranks: it covers every operator, all ranks agree, and nothing else is touched."""

import json
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
    first, second = per_rank
    for key in ("text", "times", "pairs", "like", "about"):
        assert first[key] == second[key]
    for rank in per_rank:
        assert rank["times"].keys() == rank["kinds"].keys()
        assert all(0 < seconds < 10 for seconds in rank["times"].values())
        assert {"embedding", "layer", "head"} == {unit for unit, _ in rank["times"]}
        assert {"intra_node"} == set(rank["kinds"].values()) - {"compute"}
        # Progress goes from none to all.
        assert rank["shares"] == sorted(rank["shares"])
        assert len(rank["shares"]) == len(rank["pairs"])
        assert 0 < rank["shares"][0] <= 1 == rank["shares"][-1]
    for times in first["pairs"].values():
        assert all(0 < seconds < 10 for seconds in times)
    assert first["about"]["shapes"] == "2 x 17, 2 x 17"
    assert first["about"]["mesh"] == "tp=2"


def test_training_is_left_as_it_was_found(per_rank: Any) -> None:
    for rank in per_rank:
        assert rank["same_parameters"]
        assert rank["same_buffers"]
        assert rank["same_random_state"]
        assert rank["gradients"] == 0
        assert not rank["traced"]


def test_what_is_measured_beside_what(per_rank: Any) -> None:
    """Whatever is measured beside one collective is measured beside all of them, and like beside like."""
    rank = per_rank[0]
    kinds, layers, like, pairs = rank["kinds"], set(rank["layers"]), rank["like"], set(rank["pairs"])
    moving = [name for name in layers if kinds[name] == "intra_node" and name not in like]
    assert moving
    assert {name for names in pairs for name in names} <= layers
    beside = {a for a, b in pairs if kinds[a] == "compute" and kinds[b] == "intra_node"}
    assert max((name for name in layers if kinds[name] == "compute"), key=rank["times"].get) in beside
    assert {pair for pair in pairs if kinds[pair[1]] != kinds[pair[0]]} == {(a, b) for a in beside for b in moving}
    assert {kinds[a] for a, b in pairs if kinds[a] == kinds[b]} == {"compute", "intra_node"}
    assert {(name, name) for name in moving} <= pairs
    # Collectives of one size stand for each other: both gathers of a layer carry a micro-batch of hidden states.
    assert all(kinds[name] == kinds[other] != "compute" and other not in like for name, other in like.items())
    layer = {name: like.get(("layer", name), ("layer", name)) for name in ("F.attn.gather", "F.mlp.gather")}
    assert layer["F.attn.gather"] == layer["F.mlp.gather"] != ("layer", "F.attn.scatter")


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
