"""Counts on disk: the same amounts again, without torch, and none of another model or of other code."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.simulated import case_of, cluster_with, on_meta

from hf_helix.doctor.amounts import kept
from hf_helix.doctor.amounts.kept import KeptAmounts
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import simulate_step

CLUSTER = cluster_with(devices_per_node=4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HELIX_CACHE", str(tmp_path))
    return tmp_path


def not_again() -> None:
    raise AssertionError("counted again")


def test_a_layout_is_counted_once_for_all_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, wrong = case_of(tp=2, dp=2, length=64), case_of(tp=3, length=64)
    about = {"config": {"sizes": 1}}
    counted = SimulatedModel(lambda: on_meta(num_key_value_heads=2), CLUSTER, kept=KeptAmounts(about))
    step = simulate_step(counted.amounts(case), case, CLUSTER)
    with pytest.raises(ValueError, match="tp_size=3") as refused:
        counted.amounts(wrong)
    again = SimulatedModel(not_again, CLUSTER, kept=KeptAmounts(about))
    assert again.facts == counted.facts
    assert again.amounts(case) == counted.amounts(case)
    assert simulate_step(again.amounts(case), case, CLUSTER).seconds == step.seconds
    with pytest.raises(ValueError, match="tp_size=3") as known:
        again.amounts(wrong)
    assert str(known.value) == str(refused.value)
    # Of another model, of other code, or from a damaged file: counted anew.
    with pytest.raises(AssertionError, match="counted again"):
        SimulatedModel(not_again, CLUSTER, kept=KeptAmounts({"config": {"sizes": 2}}))
    for file in folder.rglob("*.json"):
        file.write_text(file.read_text()[:-9])
    with pytest.raises(AssertionError, match="counted again"):
        SimulatedModel(not_again, CLUSTER, kept=KeptAmounts(about))
    monkeypatch.setattr(kept, "code_digest", lambda: "other")
    assert KeptAmounts(about).folder != again._kept.folder


def test_a_search_of_counted_layouts_needs_no_torch() -> None:
    code = (
        "import sys, hf_helix.doctor.layouts, hf_helix.doctor.report, hf_helix.cli.doctor, "
        "hf_helix.tuning.found_layouts; sys.exit(' '.join({'torch', 'transformers'} & sys.modules.keys()) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
