"""An error is said whole once, by the rank it arises on, and in the launcher's summary; other ranks say one line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cluster import free_port
from support.forked_ranks import fork_ranks
from support.launches import PATHS, SUPPORT, accelerate, launch_config, torchrun
from support.launches import output_of as printed_by
from support.marks import slow

LIMIT = 200  # a busy machine takes a minute to start two processes


def launch(folder: Path, script: str, how: str, launcher: str = "torchrun") -> subprocess.Popen[str]:
    if launcher == "accelerate":
        return accelerate(launch_config(folder), SUPPORT / script, how)
    return torchrun(folder, SUPPORT / script, how)


def output_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What the ranks have printed, and the launcher's summary; asserts that all have ended with an error."""
    output = printed_by(process, LIMIT)
    assert process.returncode != 0, output
    ranks, title, summary = output.partition("Root Cause")
    launcher = "Traceback (most recent call last)"  # the launcher's own comes after those of the ranks
    said = ranks[: ranks.rindex(launcher)] if title and launcher in ranks else ranks
    return said, summary


def wait_for(folder: Path, name: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not all((folder / f"{name}-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline, f"no {name} within {LIMIT} s"
        time.sleep(0.1)


@pytest.mark.slow
def test_an_error_of_one_rank(tmp_path: Path) -> None:
    """Ranks of `accelerate launch` have found the options of its YAML; Accelerators that ignore them say so once."""
    config = launch_config(tmp_path, helix={"tp_size": 2, "plan": "round_robin"})
    said, summary = output_of(accelerate(config, SUPPORT / "endings_script.py", "raise"))
    for rank in range(2):
        assert said.count(f"rank {rank}: tp_size=2 plan=round_robin") == 1, said
    assert said.count("stock Trainer ignores them") == 1, said
    assert said.count("RuntimeError: boom on one rank\n[rank1]: and what to do about it") == 1, said
    assert said.count("hf_helix: rank 0 ends because rank 1 failed: RuntimeError: boom on one rank\n") == 1, said
    assert said.index("rank 0 ends") < said.index("[rank1]: RuntimeError")
    assert said.count("Traceback") == 1
    assert "GLHF" not in said
    assert summary.count("RuntimeError: boom on one rank") == 1, summary
    assert "rank      : 1 " in summary


def test_an_error_that_every_rank_raises_alike(tmp_path: Path) -> None:
    """The launcher's summary is what is in the error file of a rank."""
    ranks = fork_ranks(tmp_path, SUPPORT / "endings_script.py", "options", files=True)
    assert [rank.wait(LIMIT) for rank in ranks] == [1, 1]
    said = "".join((tmp_path / f"{rank}.log").read_text() for rank in range(2))
    files = [tmp_path / "attempt_0" / str(rank) / "error.json" for rank in range(2)]
    first, second = (json.loads(file.read_text())["message"]["message"] for file in files)
    summary = min(first, second, key=len)
    assert {first, second} == {summary, f"rank {summary == second:d} failed: {summary}"}
    sentence = "ValueError: tp_size must be at least 1, such as tp_size=1; got 0"
    assert said.count(sentence) == 1, said
    assert said.count("Traceback") == 1
    # The user's own frames, and the one that raises.
    assert "HelixPlugin(HelixConfig(tp_size=0))" in said
    assert said.count("config.py") == 1, said
    assert sentence in summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "mistake", "sentence", "line"),
    [
        ("torchrun", "size", "ValueError: tp_size=4 must divide the world size, 2 processes; values that work:", ""),
        ("torchrun", "callback", "RuntimeError: boom on one rank", "rank 0 ends because rank 1 failed: RuntimeError:"),
        ("accelerate", "data", "ValueError: the batch has no labels", ""),
    ],
)
def test_mistakes_in_a_training_script(launcher: str, mistake: str, sentence: str, line: str, tmp_path: Path) -> None:
    said, summary = output_of(launch(tmp_path, "mistakes_script.py", mistake, launcher))
    whole = [text for text in said.splitlines() if sentence in text and "ends because" not in text]
    assert len(whole) == 1, said
    assert said.index(line) <= said.index(whole[0])
    assert "GLHF" not in said
    assert sentence in summary


@pytest.mark.slow
def test_ctrl_c_says_which_checkpoint_the_run_goes_on_from(tmp_path: Path) -> None:
    process = launch(tmp_path, "mistakes_script.py", "interrupt", "accelerate")
    wait_for(tmp_path, "stepping")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does; the launcher hands it on to the ranks
    said, _ = output_of(process)
    lines = [text for text in said.splitlines() if "interrupted; stopped after step" in text]
    assert len(lines) == 1, said
    assert "trainer.train(resume_from_checkpoint=True) goes on from out/checkpoint-" in lines[0]
    assert "KeyboardInterrupt" not in said


def test_a_rank_that_saves_alone(tmp_path: Path) -> None:
    ranks = fork_ranks(tmp_path, SUPPORT / "mistakes_script.py", "alone")
    assert [rank.wait(LIMIT) for rank in ranks] == [1, 0]
    said = (tmp_path / "0.log").read_text()
    script = (SUPPORT / "mistakes_script.py").read_text().splitlines()
    number = 1 + next(n for n, line in enumerate(script) if "save_model" in line)
    saving = f"trainer.save_model() is called (mistakes_script.py:{number}) on rank 0"
    assert said.count(f"rank 0 ends because rank 1 has ended its script while {saving}: every rank") == 1, said
    assert "EnforceNotMet" not in said


@pytest.mark.slow
def test_sigterm_to_the_launcher(tmp_path: Path) -> None:
    """With `enable_jit_checkpoint` all ranks save at one step, and the script goes on."""
    process = launch(tmp_path, "mistakes_script.py", "preempt")
    wait_for(tmp_path, "stepping")
    process.terminate()
    said, _ = output_of(process)
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    for rank in range(2):
        assert f"rank {rank} went on after step {saved.name.removeprefix('checkpoint-')}" in said


def test_ctrl_c(tmp_path: Path) -> None:
    ranks = fork_ranks(tmp_path, SUPPORT / "endings_script.py", "interrupt")
    wait_for(tmp_path, "communicating")
    for rank in ranks:
        rank.interrupt()
    assert 0 not in [rank.wait(LIMIT) for rank in ranks]
    said = "".join((tmp_path / f"{rank}.log").read_text() for rank in range(2))
    assert said.count("hf_helix: interrupted; stopped after step 2; out/checkpoint-2 is there\n") == 1, said
    assert "KeyboardInterrupt" not in said


@pytest.mark.parametrize("how", ["killed", slow("stopped")])
def test_the_host_of_the_store_is_lost(how: str, tmp_path: Path) -> None:
    """Without a launcher the store is in rank 0: the other rank ends within a minute, and says nothing but why."""
    ranks = fork_ranks(tmp_path, SUPPORT / "endings_script.py", "interrupt")
    wait_for(tmp_path, "communicating")
    pid = ranks[0].process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    try:
        assert ranks[1].wait(60) != 0
    finally:
        ranks[0].kill()
    said = (tmp_path / "1.log").read_text()
    why = {"killed": "rank 0 died", "stopped": "rank 0 (or its launcher) was stopped, or its host"}[how]
    assert said.startswith(f"hf_helix: rank 1 ends because {why}"), said
    assert said.count("\n") == 1, said


@pytest.mark.slow
def test_the_cells_of_a_notebook(tmp_path: Path) -> None:
    """`notebook_launcher` forks the ranks; a cell that fails raises what the rank has raised."""
    ran = subprocess.run(
        [sys.executable, str(SUPPORT / "notebook_script.py"), str(free_port())],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("trained: ") == 1, ran.stdout
    _, size, callback = ran.stdout.split("the cell ")
    assert "tp_size=4 must divide the world size, 2 processes; values that work: 1, 2" in size
    assert "rank      : 1 " in callback[callback.index("Root Cause") :]
    assert "RuntimeError: boom on one rank\n" in callback
