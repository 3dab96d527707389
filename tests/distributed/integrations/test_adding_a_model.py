"""A family registered from outside the package, by the code of the page that explains how, equals its unsplit model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.page_jobs import PAGE, blocks
from support.parity import check, references

JOB = "support.page_jobs:"
LAYOUTS = {"tp": (1, 2, 1, 1), "pp": (1, 1, 2, 1), "cp": (2, 1, 1, 1)}


@pytest.fixture(scope="module")
def expected() -> Any:
    return references()


@pytest.mark.parametrize(("layout", "kind"), [("tp", "left"), ("pp", "dense"), ("cp", "packed")])
def test_equals_the_unsplit_model(layout: str, kind: str, cluster_of: Any, expected: Any, tmp_path: Path) -> None:
    job = f"{JOB}windows"
    check(cluster_of(2), tmp_path, expected, LAYOUTS[layout], kind, ("sequential", "greedy"), job, family="starcoder2")


def test_dropout_draws_the_same_under_every_plan(cluster_of: Any, tmp_path: Path) -> None:
    dropout = {"residual_dropout": 0.2, "embedding_dropout": 0.2, "attention_dropout": 0.2}
    options = {
        "folder": str(tmp_path),
        "helix": {"tp_size": 2, "plan": "sequential"},
        "cases": [("sequential", "folded_1f1b", 3), ("greedy", "folded_1f1b", 3)],
    }
    dry, wet = (
        cluster_of(2).run(f"{JOB}windows", model={"family": "starcoder2", **changes}, **options)[0]
        for changes in ({}, dropout)
    )
    assert wet[0]["losses"] == wet[1]["losses"] != dry[0]["losses"]
    for name, gradient in wet[0]["gradients"].items():
        np.testing.assert_array_equal(gradient, wet[1]["gradients"][name], err_msg=name)


def test_the_check_on_the_page_runs(cluster_of: Any, tmp_path: Path) -> None:
    cluster_of(2).run(f"{JOB}check", folder=str(tmp_path))


def test_the_page_keeps_its_promises() -> None:
    code, _ = blocks()
    assert len(code.splitlines()) < 100
    root = PAGE.parent
    for link in PAGE.read_text().split("](")[1:]:
        target = link.split(")")[0]
        assert (root / target).exists(), target
