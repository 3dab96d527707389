"""A run says that another layout is clearly faster, if the doctor advised it for this model and what trains it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.simulated import case_of, on_meta

from hf_helix.doctor.layouts import Ranking, Search
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.engine.advice import better_layout, known_layouts
from hf_helix.planning.timing.cluster import Cluster, load_cluster
from hf_helix.planning.timing.sizes import Sizes
from hf_helix.tuning.cache import model_digest
from hf_helix.tuning.found_layouts import Machine, remember

LENGTH, TOKENS = 2048, 2**17
MACHINE = Machine("NVIDIA H100 80GB HBM3", devices=2, nodes=1, dtype="bf16")


@pytest.fixture(scope="module")
def advised() -> tuple[Any, Ranking, Cluster]:
    cluster = replace(load_cluster("h100x8"), devices_per_node=2)
    paper = SimulatedModel(on_meta(num_key_value_heads=4), cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "rival", lambda *_: None)  # nothing is said of rivals, which take long to simulate
        return paper.model, Search(paper, cluster, TOKENS, case_of(length=LENGTH)).run(), cluster


@pytest.fixture
def known(
    advised: tuple[Any, Ranking, Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Ranking]:
    monkeypatch.setenv("HELIX_CACHE", str(tmp_path))
    model, ranking, cluster = advised
    speeds = {step.case.sizes: step.tokens_per_second for step in ranking.steps}
    remember(model_digest(model, with_types=False), speeds, cluster, "bf16", LENGTH, TOKENS)
    return model, ranking


def sizes_of(sizes: Sizes) -> dict[str, int]:
    return {"dp": sizes.dp, "pp": sizes.pp, "cp": sizes.cp, "tp": sizes.tp, "ep": sizes.ep}


def test_says_what_is_clearly_faster(known: tuple[Any, Ranking]) -> None:
    model, ranking = known
    gain = ranking.steps[0].tokens_per_second / ranking.steps[-1].tokens_per_second
    assert gain > 1.2
    line = better_layout(known_layouts(model, MACHINE), sizes_of(ranking.steps[-1].case.sizes), LENGTH, TOKENS)
    assert line is not None
    assert f"{gain:.2f} times" in line
    assert "2,048 tokens a sequence and 131,072 a step in bf16" in line
    # Says nothing of the fastest.
    model, ranking = known
    data = known_layouts(model, MACHINE)
    assert better_layout(data, sizes_of(ranking.steps[0].case.sizes), LENGTH, TOKENS) is None
    assert better_layout(data, sizes_of(Sizes(dp=4)), LENGTH, TOKENS) is None, "the doctor knows no such layout"
    # The doctor has a configuration alone, and a run loads weights as they were saved.
    loaded = on_meta(num_key_value_heads=4).to(torch.bfloat16)
    assert known_layouts(loaded, MACHINE) is not None
    assert model_digest(loaded) != model_digest(known[0]), "the times of operators depend on the type"


def test_what_was_found_for_another_machine_or_other_sequences_is_not_known(known: tuple[Any, Ranking]) -> None:
    model, ranking = known
    data, slow = known_layouts(model, MACHINE), sizes_of(ranking.steps[-1].case.sizes)
    assert data is not None
    for changes in ({"device": "another device"}, {"devices": 4}, {"nodes": 2}, {"dtype": "fp32"}):
        assert known_layouts(model, replace(MACHINE, **changes)) is None
    assert known_layouts(on_meta(num_hidden_layers=3), MACHINE) is None
    for length, tokens, says in ((1, 1, True), (1.2, 0.85, True), (2, 1, False), (1, 0.5, False)):
        line = better_layout(data, slow, int(length * LENGTH), int(tokens * TOKENS))
        assert (line is not None) is says


def test_a_damaged_file_is_as_good_as_none(known: tuple[Any, Ranking], tmp_path: Path) -> None:
    model, ranking = known
    (file,) = (tmp_path / "layouts").iterdir()
    whole = file.read_text()
    for text in ("", "{}", '{"format": "hf_helix.layouts/1", "machine": 3}'):
        file.write_text(text)
        assert known_layouts(model, MACHINE) is None
    file.write_text(whole.replace('"tokens_per_second"', '"tokens"'))
    slow = sizes_of(ranking.steps[-1].case.sizes)
    assert better_layout(known_layouts(model, MACHINE), slow, LENGTH, TOKENS) is None
