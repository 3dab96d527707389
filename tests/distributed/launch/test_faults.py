"""What fails on one rank ends all of them soon, with its name, and the next run goes on from the last checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.cluster import free_port
from support.fault_script import OUT
from support.paths import ROOT
from support.resume_jobs import ROOM, run, run_into_bad_gradients, run_out_of_room

SCRIPT = ROOT / "tests" / "support" / "fault_script.py"
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
LIMIT = 60  # seconds within which every rank ends after one has failed


def ranks_of(folder: Path, *flags: str, helix: str = "tp_size: 2\nplan: sequential\n") -> list[subprocess.Popen[bytes]]:
    """Two ranks without a launcher, as on two hosts: nobody ends the one when the other has failed."""
    folder.mkdir(exist_ok=True)
    (folder / "options.yaml").write_text(helix)
    port, started = str(free_port()), []
    for rank in range(2):
        environment = {
            **os.environ,
            "PYTHONPATH": PATHS,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "HELIX_CONFIG_FILE": "options.yaml",
        }
        with (folder / f"{rank}.log").open("w") as log:
            command = [sys.executable, str(SCRIPT), *flags]
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder))
    return started


def ends(ranks: list[subprocess.Popen[bytes]], victim: int) -> float:
    """Seconds between the end of the rank that fails and that of the other."""
    try:
        ranks[victim].wait(timeout=120)
        failed = time.monotonic()
        ranks[1 - victim].wait(timeout=LIMIT)
        return time.monotonic() - failed
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def losses(folder: Path, step: int) -> list[tuple[int, float]]:
    """By step, from the state of a checkpoint."""
    state = json.loads((folder / OUT / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [(entry["step"], entry["loss"]) for entry in state["log_history"] if "loss" in entry]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """The losses of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("sound")
    assert [process.wait(timeout=150) for process in ranks_of(folder)] == [0, 0], (folder / "0.log").read_text()
    return losses(folder, 6)


DIED, UNREADABLE, FULL = "died", "OSError: [Errno 5] the samples of this rank", "No space left on device"
CASES = [
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


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "victim", "said"), CASES)
def test_the_other_rank_ends_and_the_next_run_goes_on(
    fault: str, victim: int, said: str, expected: list[tuple[int, float]], tmp_path: Path
) -> None:
    seconds = ends(ranks := ranks_of(tmp_path, "--fault", fault, "--victim", str(victim)), victim)
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    assert all(process.returncode != 0 for process in ranks), logs
    assert seconds < LIMIT
    assert "failing at" in logs[victim], logs[victim]
    assert f"rank {victim}" in logs[1 - victim]
    assert said in logs[1 - victim], logs[1 - victim]
    assert (tmp_path / OUT / "checkpoint-2").is_dir()
    assert not (tmp_path / OUT / "checkpoint-4").exists()
    again = ranks_of(tmp_path)
    assert [process.wait(timeout=150) for process in again] == [0, 0], (tmp_path / "0.log").read_text()
    assert f"done: 6 steps, from {OUT}/checkpoint-2" in (tmp_path / "0.log").read_text()
    assert losses(tmp_path, 6) == expected
    assert sorted(path.name for path in (tmp_path / OUT).iterdir()) == ["checkpoint-4", "checkpoint-6"]


def torchrun(folder: Path, restarts: int, *flags: str, helix: str = "tp_size: 2\nplan: sequential\n") -> str:
    (folder / "options.yaml").write_text(helix)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
            *(f"--master_port={free_port()}", f"--max_restarts={restarts}", "--monitor_interval=0.2"),
            *(str(SCRIPT), *flags),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PATHS, "HELIX_CONFIG_FILE": "options.yaml"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=1700)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
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
    torchrun(sound, 0, *steps, "--save-steps", "200")
    output = torchrun(killed, 25, *steps, "--save-steps", "1", "--kills", "20")
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


@pytest.mark.parametrize("where", ROOM)
def test_a_save_that_fails_leaves_what_was_there(where: str, tmp_path: Path) -> None:
    """In one process; what several ranks do then is among the slow tests."""
    with pytest.raises((OSError, RuntimeError), match="No space left on device"):
        run_out_of_room(str(tmp_path), where)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3"]
    assert run(str(tmp_path), {"plan": "greedy"}, resume=True)["checkpoints"] == ["checkpoint-3", "checkpoint-6"]
