"""What scripts do to a trainer's model is right in every layout, or an error that names it. Stock is the oracle."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import saving_jobs, user_code_jobs

SLOW = pytest.mark.slow
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp_size": 2}),
    "pp2": (2, {"pp_size": 2}),
    "shard_parameters": (2, {"shard_parameters": True}),
    "shard_optimizer": (2, {"shard_optimizer": True}),
    "cp2": (2, {"cp_size": 2}),
    "tp2 pp2": (4, {"tp_size": 2, "pp_size": 2}),
    "tp2 shard_parameters": (4, {"tp_size": 2, "shard_parameters": True}),
    "pp2 shard_optimizer": (4, {"pp_size": 2, "shard_optimizer": True}),
    "cp2 shard_parameters": (4, {"cp_size": 2, "shard_parameters": True}),
}
MIXTURES: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"ep_size": 2}),
    "ep2 tp2 shard_parameters": (4, {"ep_size": 2, "tp_size": 2, "shard_parameters": True}),
}
QUICK = {"tp2", "pp2", "shard_parameters", "shard_optimizer"}


def marked(layouts: dict[str, Any], quick: set[str] = QUICK) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else SLOW) for name in layouts]


def differences(expected: dict[str, Any], seen: dict[str, Any], tolerance: float = 2e-5) -> dict[str, Any]:
    return {name: (value, seen[name]) for name, value in expected.items() if not is_close(value, seen[name], tolerance)}


def is_close(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(is_close(*pair, tolerance) for pair in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= tolerance * max(abs(one), abs(other)) + 1e-5
    return bool(one == other)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return user_code_jobs.look(str(tmp_path_factory.mktemp("stock")), None)


def test_the_oracle_sees_something(expected: dict[str, Any]) -> None:
    assert not {name: value for name, value in expected.items() if isinstance(value, str)}
    states = [expected[name] for name in user_code_jobs.WRITINGS]
    assert all(before != after for before, after in pairwise(states))


@pytest.mark.parametrize("layout", marked(LAYOUTS))
def test_parameters_are_read_and_written_whole(
    layout: str, expected: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    ranks, helix = LAYOUTS[layout]
    for seen in cluster_of(ranks).run(user_code_jobs.look, folder=str(tmp_path), helix=helix):
        assert not differences(expected, seen)


@pytest.mark.parametrize("layout", marked(MIXTURES, set()))
def test_experts_are_read_and_written_whole(layout: str, cluster_of: Any, tmp_path: Path) -> None:
    ranks, helix = MIXTURES[layout]
    model = {"family": "mixtral", "num_hidden_layers": 4}
    stock = user_code_jobs.look(str(tmp_path), None, model=model)
    for seen in cluster_of(ranks).run(user_code_jobs.look, folder=str(tmp_path), helix=helix, model=model):
        assert not differences(stock, seen, 1e-4)


@pytest.mark.parametrize("layout", marked(LAYOUTS, {"tp2", "shard_parameters"}))
@pytest.mark.parametrize("kind", saving_jobs.KINDS)
def test_what_is_saved_is_what_the_trainer_holds(kind: str, layout: str, cluster_of: Any, tmp_path: Path) -> None:
    ranks, helix = LAYOUTS[layout]
    dp = 2 if {"shard_parameters", "shard_optimizer"} & helix.keys() else 1
    job = {"folder": str(tmp_path / "stock"), "helix": None, "kind": kind}
    stock = saving_jobs.save(**job) if dp == 1 else cluster_of(2).run(saving_jobs.save, **job)[0]
    results = cluster_of(ranks).attempt(saving_jobs.save, folder=str(tmp_path / "cut"), helix=helix, kind=kind)
    for result in results:
        if kind == "converted" and dp == 2:
            assert "cannot be converted; save the model, and convert it with from_pretrained" in result.message
        else:
            assert isinstance(result, dict), result
            assert not differences(stock, result, 1e-4)


# The words of the error; "" for what is followed.
CHANGES = {
    "merge_adapters": "has merged its adapters",
    "scale": "model.layers.0.self_attn.scaling was 0.35",
    "drop": "model.layers.0.self_attn.attention_dropout was 0.0 and is 0.9",
    "weigh_routers": "router_aux_loss_coef was ",
    "set_config": "config.",
    "add_hook": "model.layers.0.mlp has a forward hook",
    "add_module": "model.layers.0.mlp has got a module or parameter",
    "replace_module": "lm_head was replaced or removed",
    "resize": "was 131 and is 140",
    "soften_norms": "",
    "freeze": "",
    "soften_adapters": "",
}


@pytest.mark.parametrize("layout", marked(LAYOUTS, {"tp2", "shard_parameters"}))
def test_changes_of_the_model_are_followed_or_refused(layout: str, cluster_of: Any, tmp_path: Path) -> None:
    ranks, helix = LAYOUTS[layout]
    for name, words in CHANGES.items():
        job = {"folder": str(tmp_path), "helix": None, "name": name}
        stock: Any = None  # which DDP may refuse in its own words
        if not words and "shard" in layout:
            stock = cluster_of(2).run(user_code_jobs.change, **job)[0]
        elif not words:
            stock = user_code_jobs.change(**job)
        for result in cluster_of(ranks).run(user_code_jobs.change, folder=str(tmp_path), helix=helix, name=name):
            assert words in result if words else is_close(stock, result, 1e-4), (name, stock, result)


@pytest.mark.parametrize("layout", marked(LAYOUTS))
def test_a_full_weight_and_a_full_gradient(layout: str, cluster_of: Any, tmp_path: Path) -> None:
    ranks, helix = LAYOUTS[layout]
    stock = user_code_jobs.write_full(str(tmp_path), None)
    for result in cluster_of(ranks).run(user_code_jobs.write_full, folder=str(tmp_path), helix=helix):
        assert is_close(stock, result, 2e-5)
