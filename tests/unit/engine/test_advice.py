"""A run says that another layout is clearly faster, if the doctor found it for this model and these devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.on_paper import on_meta

from hf_helix.engine.advice import better_layout, remember
from hf_helix.engine.on_paper import OnPaper
from hf_helix.simulation.cluster import Cluster, load_cluster
from hf_helix.simulation.layouts import Ranking, Search
from hf_helix.tuning.fingerprint import model_digest

MESH = {"dp": 2, "pp": 1, "cp": 1, "tp": 1, "ep": 1}


@pytest.fixture(scope="module")
def found() -> tuple[Any, Ranking, Cluster]:
    cluster = replace(load_cluster("h100x8"), devices_per_node=2)
    paper = OnPaper(on_meta(num_key_value_heads=4), cluster)
    return paper.model, Search(paper.amounts, cluster, 2**17, 2048, paper.layers).run(), cluster


@pytest.fixture
def known(found: tuple[Any, Ranking, Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Ranking]:
    monkeypatch.setenv("HELIX_CACHE", str(tmp_path))
    remember(*found)
    return found[:2]


def test_says_what_is_clearly_faster(known: tuple[Any, Ranking]) -> None:
    model, ranking = known
    slowest = ranking.steps[-1].case.sizes
    mesh = {"dp": slowest.dp, "pp": slowest.pp, "cp": slowest.cp, "tp": slowest.tp, "ep": slowest.ep}
    gain = ranking.steps[0].tokens_per_second / ranking.steps[-1].tokens_per_second
    assert gain > 1.2
    line = better_layout(model, mesh, "NVIDIA H100 80GB HBM3")
    assert line is not None
    assert f"{gain:.2f} times" in line


def test_a_model_that_was_loaded_in_another_type_is_the_same_model(known: tuple[Any, Ranking]) -> None:
    """The doctor has a configuration alone, and a run loads weights as they were saved."""
    slowest = known[1].steps[-1].case.sizes
    mesh = {"dp": slowest.dp, "pp": slowest.pp, "cp": slowest.cp, "tp": slowest.tp, "ep": slowest.ep}
    loaded = on_meta(num_key_value_heads=4).to(torch.bfloat16)
    assert better_layout(loaded, mesh, "NVIDIA H100 80GB HBM3") is not None
    assert model_digest(loaded) != model_digest(known[0]), "the times of operators depend on the type"


def test_says_nothing_otherwise(known: tuple[Any, Ranking]) -> None:
    model, ranking = known
    best = ranking.steps[0].case.sizes
    mesh = {"dp": best.dp, "pp": best.pp, "cp": best.cp, "tp": best.tp, "ep": best.ep}
    device = load_cluster("h100x8").device.name
    slow = {**MESH, "dp": 1, "tp": 2}
    assert better_layout(model, mesh, device) is None
    assert better_layout(model, slow, "another device") is None
    assert better_layout(on_meta(num_hidden_layers=3), slow, device) is None
    assert better_layout(model, {**MESH, "dp": 4}, device) is None


def test_a_damaged_file_is_as_good_as_none(known: tuple[Any, Ranking], tmp_path: Path) -> None:
    model, _ = known
    (file,) = (tmp_path / "layouts").iterdir()
    for text in ("", "{}", '{"format": "hf_helix.layouts/1", "device": "NVIDIA H100 80GB HBM3", "layouts": 3}'):
        file.write_text(text)
        assert better_layout(model, {**MESH, "dp": 1, "tp": 2}, load_cluster("h100x8").device.name) is None
