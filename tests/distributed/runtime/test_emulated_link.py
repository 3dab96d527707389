"""Training over an emulated link: the same bits as without one, every byte accounted for, and everything says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import jobs  # noqa: F401  (what the cluster runs)

from hf_helix.link_speed import parse_link

LINK = "20mbit,0.1ms"


@pytest.mark.parametrize("helix", [{"tp_size": 2}, {"pp_size": 2}, {}], ids=["tp2", "pp2", "dp2"])
def test_a_window_has_the_same_bits_and_every_byte_takes_its_time(cluster_of: Any, tmp_path: Path, helix: Any):
    for found in cluster_of(2).run("support.link_jobs:windows", folder=str(tmp_path), helix=helix, link=LINK):
        assert found["same_losses"]
        assert found["same_gradients"]
        assert found["num_gradients"] > 10
        if "pp_size" in helix:  # every micro-batch goes out once and its gradient comes back once, in fp32
            assert (found["link"], found["recorded"]) == (2 * 4 * found["tokens"] * found["hidden"], 0)
        else:
            assert found["link"] == found["recorded"]
        if not helix:  # all of it is the sum of gradients: a ring of two sends each once
            assert (found["link"], found["sums"]) == (0, found["parameters"])
        sent = found["link"] + found["sums"]
        assert sent > 0
        assert found["seconds"] >= 8 * sent / parse_link(LINK).rate


@pytest.fixture(scope="module")
def even(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cluster_of(2).run("support.link_jobs:even", folder=str(tmp_path_factory.mktemp("even")))


def test_an_even_link_is_found_agreed_and_said_once(even: Any):
    first, second = even
    assert first["rate"] == second["rate"] > 0
    said = f"hf_helix: emulated link: {str_of(first['rate'])} (even)"
    assert first["said"].count(said) == 1
    assert "emulated link" not in second["said"]
    assert parse_link(first["about"]["emulated_link"]).rate == first["rate"]


def test_everything_that_is_printed_says_that_the_link_is_emulated(even: Any):
    first = even[0]
    for text in (first["table"], first["scorecard"], first["card"]):
        assert f"emulated link of {str_of(first['rate'])} (even)" in text
    assert "without the emulated link, measured: sequential" in first["table"]
    assert "emulated link" in first["speeds"].splitlines()[1]
    assert first["speeds"].count("measured") == 2  # the heading, and the row
    assert set(first["bare"]) == set(first["steps"]) == {"sequential", "search"}


def test_losses_are_those_without_the_link(even: Any, cluster_of: Any, tmp_path: Path):
    case = {
        "helix": {"tp_size": 2, "plan": "greedy"},
        "model": {"num_hidden_layers": 4},
        "training": {"max_steps": 2, "gradient_accumulation_steps": 3},
    }
    without = cluster_of(2).run("train", folder=str(tmp_path), **case)
    assert [found["losses"] for found in without] == [found["losses"] for found in even]


def str_of(rate: float) -> str:
    return str(parse_link(f"{rate / 1e6}mbit"))
