"""Launches: ranks of stock `accelerate launch` find the options (see test_endings.py, too); ranks that fail end the
others and are named.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.forked_ranks import fork_ranks
from support.launches import LIMIT, SUPPORT, accelerate, launch_config, output_of, seconds_until_others_end, start_ranks

SCRIPT, PIPELINE_SCRIPT = SUPPORT / "script.py", SUPPORT / "pipeline_trainer_jobs.py"


@pytest.mark.slow
def test_options_from_the_launchers_yaml(tmp_path: Path) -> None:
    process = accelerate(launch_config(tmp_path, helix={"tp_size": 2, "plan": "round_robin"}), SCRIPT)
    output = output_of(process)
    assert process.returncode == 0, output
    # Rank 0 alone talks.
    assert output.count("done: tp_size=2 plan=round_robin") == 1
    assert output.count("'train_runtime'") == 1
    assert "ignores them" not in output


@pytest.mark.slow
def test_the_environment_comes_before_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("tp_size: 2\nplan: sequential\n")
    config = launch_config(tmp_path, helix={"tp_size": 2, "plan": "round_robin"})
    output = output_of(accelerate(config, SCRIPT, HELIX_CONFIG_FILE=str(tmp_path / "options.yaml")))
    assert "done: tp_size=2 plan=sequential" in output


@pytest.mark.slow
def test_the_plugin_comes_before_the_environment(tmp_path: Path) -> None:
    config = launch_config(tmp_path, helix={"tp_size": 1})
    output = output_of(accelerate(config, SCRIPT, "--plugin", "greedy"))
    assert "done: tp_size=2 plan=greedy" in output


@pytest.mark.slow
def test_a_layout_in_accelerates_own_words(tmp_path: Path) -> None:
    config = launch_config(tmp_path, helix={"plan": "sequential"})
    launch = yaml.safe_load(config.read_text())
    launch["parallelism_config"]["parallelism_config_tp_size"] = 2
    config.write_text(yaml.safe_dump(launch))
    process = accelerate(config, SCRIPT)
    output = output_of(process)
    assert process.returncode == 0, output
    assert "done: tp_size=2 plan=sequential" in output


@pytest.mark.slow
def test_options_given_nowhere(tmp_path: Path) -> None:
    config = launch_config(tmp_path)
    launch = yaml.safe_load(config.read_text())
    del launch["parallelism_config"]
    config.write_text(yaml.safe_dump(launch))
    process = accelerate(config, SCRIPT)
    output = output_of(process)
    assert process.returncode != 0
    assert "no helix options were given" in output
    assert "parallelism_config:" in output


@pytest.mark.slow
def test_unknown_option_in_the_yaml(tmp_path: Path) -> None:
    output = output_of(accelerate(launch_config(tmp_path, helix={"tp_sise": 2}), SCRIPT))
    assert "launch.yaml: unknown option 'tp_sise' (did you mean 'tp_size'?)" in output


@pytest.mark.slow
def test_multi_cpu_is_explained(tmp_path: Path) -> None:
    """Accelerate's MULTI_CPU starts one process."""
    output = output_of(accelerate(launch_config(tmp_path, helix={"tp_size": 2}, distributed_type="MULTI_CPU"), SCRIPT))
    assert "tp_size=2 must divide the world size, 1 process" in output
    assert "MULTI_GPU" in output


@pytest.mark.slow
def test_ranks_without_use_cpu_are_explained(tmp_path: Path) -> None:
    output = output_of(accelerate(launch_config(tmp_path, helix={"tp_size": 2}), SCRIPT, "--no-use-cpu"))
    assert "started 2 processes, but this one runs alone" in output
    assert "TrainingArguments(use_cpu=True)" in output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_an_exception_on_one_rank_ends_all(victim: int, tmp_path: Path) -> None:
    process = accelerate(launch_config(tmp_path), SCRIPT, "--fail", "raise", "--victim", victim)
    output = output_of(process)
    assert process.returncode != 0
    assert "the data of this rank is broken" in output
    assert_soon(output)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all(victim: int, tmp_path: Path) -> None:
    process = accelerate(launch_config(tmp_path), SCRIPT, "--fail", "kill", "--victim", victim)
    output = output_of(process)
    assert process.returncode != 0
    # torchrun's own summary.
    assert f"(local_rank: {victim})" in output
    assert "Signal 9 (SIGKILL)" in output
    assert_soon(output)


def assert_soon(output: str) -> None:
    failed = next(float(line.split()[-1]) for line in output.splitlines() if line.startswith("failing at"))
    assert time.time() - failed < LIMIT


# Without a launcher, as on several hosts, where nobody kills the survivors: they find out by themselves.

GREEDY_PIPELINE = "pp_size: 2\nplan: greedy\n"


@pytest.mark.parametrize(
    ("script", "helix", "victim", "how"),
    [(SCRIPT, "tp_size: 2\n", 0, "kill"), (PIPELINE_SCRIPT, GREEDY_PIPELINE, 1, "raise")],
)
def test_the_survivor_names_the_rank(script: Path, helix: str, victim: int, how: str, tmp_path: Path) -> None:
    check_survivors(2, script, helix, victim, how, tmp_path, fork_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("script", "helix"), [(SCRIPT, "tp_size: 2\n"), (PIPELINE_SCRIPT, GREEDY_PIPELINE)])
def test_the_survivor_among_processes_of_their_own(
    script: Path, helix: str, victim: int, how: str, tmp_path: Path
) -> None:
    check_survivors(2, script, helix, victim, how, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize(
    ("sizes", "victim"), [("tp_size: 2\n", 0), ("tp_size: 2\n", 3), ("", 1), ("schedule: dualpipe_v\n", 2)]
)
def test_a_rank_of_four_that_fails_ends_all(victim: int, how: str, sizes: str, tmp_path: Path) -> None:
    check_survivors(4, PIPELINE_SCRIPT, GREEDY_PIPELINE + sizes, victim, how, tmp_path)


def check_survivors(
    world: int,
    script: Path,
    helix: str,
    victim: int,
    how: str,
    folder: Path,
    start: Callable[..., list[Any]] = start_ranks,
) -> None:
    ranks = start(folder, script, "--fail", how, "--victim", victim, helix=helix, world=world)
    assert seconds_until_others_end(ranks, victim) < LIMIT
    said = "failed: RuntimeError: the data of this rank is broken" if how == "raise" else "died"
    for rank in set(range(world)) - {victim}:
        log = (folder / f"{rank}.log").read_text()
        assert ranks[rank].returncode != 0, log
        assert f"rank {victim} {said}" in log, log
