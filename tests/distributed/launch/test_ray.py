"""HelixTrainer in the workers of Ray Train, as recipes/ray_train.py starts it: losses, lost workers, copies."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launches import PATHS, SUPPORT, output_of, start
from support.paths import ROOT
from transformers import Trainer

from hf_helix.checkpoint.whole import check_whole

pytest.importorskip("ray.train", reason="needs `pip install -e '.[ray]'`")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

spec = importlib.util.spec_from_file_location("ray_train", ROOT / "recipes" / "ray_train.py")
assert spec is not None
assert spec.loader is not None
RECIPE = importlib.util.module_from_spec(spec)
spec.loader.exec_module(RECIPE)

FLAGS = ["--steps", "40", "--save_steps", "10"]
COPIES = re.compile(r"rank (\d) copies checkpoint-40, (\d+) bytes")
SETTINGS = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "PYTHONPATH": PATHS,
}


def run(folder: Path, what: str, *flags: object) -> tuple[str, dict[str, Any]]:
    """What the run printed, and its result."""
    words = [SUPPORT / "ray_script.py", what, folder, *flags]
    said = output_of(start(folder, words, **SETTINGS), limit=1500)
    result = folder / "result.json"
    assert result.exists(), said
    return said, json.loads(result.read_text())


def history(folder: Path) -> dict[int, float]:
    """The losses of a checkpoint's run, by step."""
    state = json.loads((folder / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the stock Trainer in this process, with what the recipe trains."""
    folder = tmp_path_factory.mktemp("stock")
    options = {**vars(RECIPE.parse(FLAGS)), "output_dir": str(folder)}
    parts = RECIPE.parts(options)
    parts["args"].gradient_accumulation_steps = 6
    Trainer(**parts).train()
    return history(folder / "checkpoint-40")


def check_losses(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    torch.testing.assert_close(list(found.values()), list(expected.values()), rtol=1e-5, atol=0.0)


def test_a_worker_is_lost(tmp_path: Path, expected: dict[int, float]) -> None:
    """Ray starts the workers again, and they go on; metrics and the last checkpoint are Ray's, too."""
    said, result = run(tmp_path, "worker", *FLAGS, "--num_workers", 2)
    out = tmp_path / "helix" / "trainer"
    assert f"goes on from {out}/checkpoint-10, saved on tp 2" in said
    check_losses(history(out / "checkpoint-40"), expected)
    copied = Path(result["checkpoint"], "checkpoint")
    assert result["metrics"]["loss"] == pytest.approx(expected[40], rel=1e-5)
    assert names_in(copied) == names_in(out / "checkpoint-40")
    assert check_whole(copied).layout["tp"] == 2
    size = str(sum(file.stat().st_size for file in copied.rglob("*") if file.is_file()))
    assert COPIES.findall(said).count(("0", size)) == 1
    assert COPIES.findall(said).count(("1", size)) == 1, "every worker copies the whole checkpoint"


def test_a_node_is_lost(tmp_path: Path, expected: dict[int, float]) -> None:
    """Of four workers two are left, and take the layout for two."""
    said, _ = run(tmp_path, "node", *FLAGS, "--num_workers", 2, 4)
    out = tmp_path / "helix" / "trainer"
    starts = re.findall(r"layouts for 4, 3, 2 ranks: these (\d) take (.+), and (\d) micro-batches", said)
    assert starts[:2] == [("4", "tp 2 x dp 2", "3"), ("2", "tp 2", "6")]
    check_losses(history(out / "checkpoint-40"), expected)


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
