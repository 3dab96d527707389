"""A run of HelixTrainer says what `hf-helix doctor` found for it; tests/unit/engine/test_advice.py has when not."""

from pathlib import Path
from typing import Any

import pytest
from support.models import llama

from hf_helix.cli import main

LENGTH, TOKENS = 9, 36  # two micro-batches of two sequences
MODEL = {"num_hidden_layers": 2}


def said(cluster: Any, folder: Path) -> list[str]:
    """What two tensor-parallel ranks say of layouts."""
    training = {"gradient_accumulation_steps": 2, "max_steps": 2}
    case = {"model": MODEL, "data": {"count": 20, "lengths": (LENGTH,)}, "training": training}
    helix = {"plan": "sequential"}
    job = "support.tuning_jobs:tune"
    first, second = cluster.run(job, folder=str(folder), cache=str(folder / "cache"), helix=helix, **case)
    assert second["said"] == []
    return [line for line in first["said"] if "doctor" in line]


def ask(folder: Path) -> None:
    llama(**MODEL).config.save_pretrained(folder / "model")
    sizes = ["--sequence_length", LENGTH, "--batch_tokens", TOKENS]
    given = ["--model", folder / "model", "--cluster", "emulated-link", "--dtype", "fp32", *sizes]
    main(["doctor", *map(str, given)])


@pytest.mark.slow
def test_a_run_says_that_another_layout_is_faster(
    cluster_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("hf_helix.cli.doctor.usable_cores", lambda: 1)  # what is counted serves all its questions
    ask(tmp_path)
    (line,) = said(cluster_of(2), tmp_path)
    assert line.startswith("hf_helix: hf-helix doctor predicts that dp 2 trains ")
    assert "times as fast as this layout, tp 2 (2 CPU processes, joined by an emulated link of 300 Mbit/s, 9" in line
    assert "9 tokens a sequence and 36 a step in fp32)" in line
