"""What fails on one rank ends all of them soon, with its name, and the next run goes on from the last checkpoint."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.fault_script import OUT
from support.launches import LIMIT, SUPPORT, output_of, seconds_until_others_end, start_ranks, torchrun
from support.resume_jobs import ROOM, run, run_into_bad_gradients, run_out_of_room

SCRIPT = SUPPORT / "fault_script.py"
SEQUENTIAL = "tp_size: 2\nplan: sequential\n"
SPREAD = "shard_parameters: true\nplan: sequential\n"
KEPT = "shard_optimizer: true\nplan: sequential\n"


def ranks_of(folder: Path, *flags: object, helix: str) -> list[subprocess.Popen[bytes]]:
    return start_ranks(folder, SCRIPT, *flags, helix=helix)


def losses(folder: Path, step: int) -> list[tuple[int, float]]:
    """By step, from the state of a checkpoint."""
    state = json.loads((folder / OUT / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [(entry["step"], entry["loss"]) for entry in state["log_history"] if "loss" in entry]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[tuple[int, float]]]:
    """The losses of a run that nothing happens to, by its options."""

    @cache
    def run(helix: str) -> list[tuple[int, float]]:
        folder = tmp_path_factory.mktemp("sound")
        ranks = ranks_of(folder, helix=helix)
        assert [process.wait(timeout=150) for process in ranks] == [0, 0], (folder / "0.log").read_text()
        return losses(folder, 6)

    return run


DIED, UNREADABLE, FULL = "died", "OSError: [Errno 5] the samples of this rank", "No space left on device"
CASES: list[Any] = [
    ("in saving states", 0, DIED),
    ("in saving states", 1, DIED),
    ("in saving the model", 0, DIED),
    ("in saving the model", 1, DIED),
    ("before its place", 0, DIED),
    ("in a step", 0, DIED),
    ("in a step", 1, DIED),
    ("in a collective", 0, DIED),
    ("in a collective", 1, DIED),
    ("in the data", 0, UNREADABLE),
    ("in the data", 1, UNREADABLE),
    ("no room for the model", 0, FULL),
    ("no room for the model", 1, FULL),
    ("no room for states", 0, FULL),
    ("no room for states", 1, FULL),
]
CASES = [(SEQUENTIAL, *case) for case in CASES] + [
    (SPREAD, "in saving states", 1, DIED),
    (SPREAD, "in saving the model", 0, DIED),
    (SPREAD, "in a step", 1, DIED),
    (SPREAD, "in a collective", 0, DIED),
    (SPREAD, "no room for the model", 1, FULL),
    (SPREAD, "no room for states", 0, FULL),
    (KEPT, "in saving states", 0, DIED),
    (KEPT, "in saving the model", 1, DIED),
    (KEPT, "in a step", 0, DIED),
    (KEPT, "in a collective", 1, DIED),
    (KEPT, "no room for the model", 0, FULL),
    (KEPT, "no room for states", 1, FULL),
]


@pytest.mark.slow
@pytest.mark.parametrize(("helix", "fault", "victim", "said"), CASES)
def test_the_other_rank_ends_and_the_next_run_goes_on(
    helix: str, fault: str, victim: int, said: str, expected: Any, tmp_path: Path
) -> None:
    ranks = ranks_of(tmp_path, "--fault", fault, "--victim", victim, helix=helix)
    seconds = seconds_until_others_end(ranks, victim)
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    assert all(process.returncode != 0 for process in ranks), logs
    assert seconds < LIMIT
    assert "failing at" in logs[victim], logs[victim]
    assert f"rank {victim}" in logs[1 - victim]
    assert said in logs[1 - victim], logs[1 - victim]
    assert (tmp_path / OUT / "checkpoint-2").is_dir()
    assert not (tmp_path / OUT / "checkpoint-4").exists()
    again = ranks_of(tmp_path, helix=helix)
    assert [process.wait(timeout=150) for process in again] == [0, 0], (tmp_path / "0.log").read_text()
    assert f"done: 6 steps, from {OUT}/checkpoint-2" in (tmp_path / "0.log").read_text()
    assert losses(tmp_path, 6) == expected(helix)
    assert sorted(path.name for path in (tmp_path / OUT).iterdir()) == ["checkpoint-4", "checkpoint-6"]


def restarted(folder: Path, restarts: int, *flags: object) -> str:
    """What a run under torchrun prints that is started again so many times, at most."""
    (folder / "options.yaml").write_text(SEQUENTIAL)
    options = (f"--max_restarts={restarts}", "--monitor_interval=0.2")
    process = torchrun(folder, SCRIPT, *flags, options=options, HELIX_CONFIG_FILE="options.yaml")
    output = output_of(process, 1700)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    """torchrun starts all ranks again, the script goes on by itself, and the losses are those of a quiet run."""
    sound, killed = tmp_path / "sound", tmp_path / "killed"
    for folder in (sound, killed):
        folder.mkdir()
    steps = ("--steps", "200")
    restarted(sound, 0, *steps, "--save-steps", "200")
    output = restarted(killed, 25, *steps, "--save-steps", "1", "--kills", "20")
    assert output.count("killed after") == 20
    assert "after 20 restarts" in output
    assert losses(killed, 200) == losses(sound, 200)


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_a_loss_that_is_not_finite_ends_all_ranks(dp_rank: int, cluster_of: Any, tmp_path: Path) -> None:
    failures = cluster_of(2).errors("support.resume_jobs:run_into_nan", folder=str(tmp_path), victim=dp_rank)
    for failure in failures:
        assert failure.kind == "FloatingPointError"
        assert f"step 2: the loss of rank {dp_rank} is not finite" in failure.message
        assert "Resume from an earlier checkpoint" in failure.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"step 2: the norm of the gradient.*max_grad_norm=1\.0"):
        run_into_bad_gradients(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]


QUICK = ("for the model", "on the disk")


@pytest.mark.parametrize("where", [pytest.param(w, marks=() if w in QUICK else pytest.mark.slow) for w in ROOM])
def test_a_save_that_fails_leaves_what_was_there(where: str, tmp_path: Path) -> None:
    """In one process; what several ranks do then is among the slow tests."""
    with pytest.raises((OSError, RuntimeError), match="No space left on device"):
        run_out_of_room(str(tmp_path), where)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2"]
    assert run(str(tmp_path), {"plan": "greedy"}, resume=True)["checkpoints"] == ["checkpoint-2", "checkpoint-4"]
