"""Real launches: stock `accelerate launch` finds the options; ranks that fail end the others and are named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cluster import free_port
from support.paths import ROOT

SCRIPT = ROOT / "tests" / "support" / "script.py"
LIMIT = 60  # seconds within which every rank ends after one has failed


def launch_config(folder: Path, helix: dict[str, Any] | None, **changes: Any) -> Path:
    """A copy of accelerate_configs/cpu_tp2.yaml with another helix block and a port of its own."""
    config = yaml.safe_load((ROOT / "accelerate_configs" / "cpu_tp2.yaml").read_text())
    config.update(main_process_port=free_port(), **changes)
    if helix is None:
        del config["parallelism_config"]
    else:
        config["parallelism_config"]["helix"] = helix
    path = folder / "launch.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def accelerate(config: Path, *flags: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config.name, str(SCRIPT), *flags]
    return subprocess.Popen(
        command,
        cwd=config.parent,  # the path of the configuration is relative to the launcher's folder
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def output_of(process: subprocess.Popen[str], limit: float = 150) -> str:
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"still running after {limit} s:\n{process.communicate()[0]}") from None


def test_options_from_the_launchers_yaml(tmp_path: Path) -> None:
    process = accelerate(launch_config(tmp_path, {"tp_size": 2, "plan": "round_robin"}))
    output = output_of(process)
    assert process.returncode == 0, output
    # Rank 0 alone talks.
    assert output.count("done: tp_size=2 plan=round_robin") == 1
    assert output.count("'train_runtime'") == 1


@pytest.mark.slow
def test_the_environment_comes_before_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("tp_size: 2\nplan: sequential\n")
    config = launch_config(tmp_path, {"tp_size": 2, "plan": "round_robin"})
    output = output_of(accelerate(config, HELIX_CONFIG_FILE=str(tmp_path / "options.yaml")))
    assert "done: tp_size=2 plan=sequential" in output


@pytest.mark.slow
def test_the_plugin_comes_before_the_environment(tmp_path: Path) -> None:
    config = launch_config(tmp_path, {"tp_size": 1})
    output = output_of(accelerate(config, "--plugin", "greedy"))
    assert "done: tp_size=2 plan=greedy" in output


@pytest.mark.slow
def test_options_given_nowhere(tmp_path: Path) -> None:
    process = accelerate(launch_config(tmp_path, None))
    output = output_of(process)
    assert process.returncode != 0
    assert "no helix options were given" in output
    assert "parallelism_config:" in output


@pytest.mark.slow
def test_unknown_option_in_the_yaml(tmp_path: Path) -> None:
    output = output_of(accelerate(launch_config(tmp_path, {"tp_sise": 2})))
    assert "launch.yaml: unknown option 'tp_sise' (did you mean 'tp_size'?)" in output


@pytest.mark.slow
def test_multi_cpu_is_explained(tmp_path: Path) -> None:
    """Accelerate's MULTI_CPU starts one process."""
    output = output_of(accelerate(launch_config(tmp_path, {"tp_size": 2}, distributed_type="MULTI_CPU")))
    assert "tp_size=2 must divide the world size, 1 process" in output
    assert "MULTI_GPU" in output


@pytest.mark.slow
def test_ranks_without_use_cpu_are_explained(tmp_path: Path) -> None:
    output = output_of(accelerate(launch_config(tmp_path, {"tp_size": 2}), "--no-use-cpu"))
    assert "started 2 processes, but this one runs alone" in output
    assert "TrainingArguments(use_cpu=True)" in output


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_exception_on_one_rank_ends_all(victim: int, tmp_path: Path) -> None:
    process = accelerate(launch_config(tmp_path, {"tp_size": 2}), "--fail", "raise", "--victim", str(victim))
    output = output_of(process)
    assert process.returncode != 0
    assert "the data of this rank is broken" in output
    assert_soon(output)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_all(victim: int, tmp_path: Path) -> None:
    process = accelerate(launch_config(tmp_path, {"tp_size": 2}), "--fail", "kill", "--victim", str(victim))
    output = output_of(process)
    assert process.returncode != 0
    # torchrun's own summary.
    assert f"(local_rank: {victim})" in output
    assert "Signal 9 (SIGKILL)" in output
    assert_soon(output)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["kill", pytest.param("raise", marks=pytest.mark.slow)])
def test_without_a_launcher_the_survivor_names_the_rank(victim: int, how: str, tmp_path: Path) -> None:
    """As on several hosts, where nobody kills the survivors: they find out by themselves."""
    port = str(free_port())
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "tests"),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "HELIX_CONFIG_FILE": str(tmp_path / "options.yaml"),
            "PYTHONFAULTHANDLER": "1",  # a crash should leave a word, too
        }
        (tmp_path / "options.yaml").write_text("tp_size: 2\n")
        command = [sys.executable, str(SCRIPT), "--fail", how, "--victim", str(victim)]
        with (tmp_path / f"{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path))
    survivor = 1 - victim
    try:
        ranks[victim].wait(timeout=120)
        died = time.monotonic()
        ranks[survivor].wait(timeout=LIMIT)
        assert time.monotonic() - died < LIMIT
    finally:
        for process in ranks:
            process.kill()
    log = (tmp_path / f"{survivor}.log").read_text()
    assert ranks[survivor].returncode != 0, log
    said = "failed: RuntimeError: the data of this rank is broken" if how == "raise" else "died"
    if f"rank {victim} {said}" not in log:
        pytest.fail(f"exit status {ranks[survivor].returncode}, and the log does not name rank {victim}:\n{log}")


def assert_soon(output: str) -> None:
    failed = next(float(line.split()[-1]) for line in output.splitlines() if line.startswith("failing at"))
    assert time.time() - failed < LIMIT
