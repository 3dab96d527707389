"""What CUDA reads when it starts is set before that, and asked for where it is too late."""

import os
from pathlib import Path

import pytest
import torch

from hf_helix import HelixPlugin
from hf_helix.integrations.accelerate.checks import launch_problems
from hf_helix.integrations.accelerate.plugin import launch_options
from hf_helix.runtime.distributed import environment
from hf_helix.runtime.distributed.environment import (
    CONNECTIONS,
    LOADING,
    check_environment,
    load_eagerly,
    set_connections,
)

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CONNECTIONS, LOADING, "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.setenv(name, "")  # so that whatever a test sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "cuda_has_started", lambda: False)


@pytest.fixture
def started(unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cuda_has_started", lambda: True)


def test_nothing_is_set_once_cuda_has_started(started: None) -> None:
    set_connections()
    load_eagerly()
    assert CONNECTIONS not in os.environ
    assert LOADING not in os.environ


def test_kernels_are_loaded_at_start_for_pipelines_only() -> None:
    assert check_environment(pp_size=2) == [], "nothing is said without CUDA"
    HelixPlugin(tp_size=2)
    assert LOADING not in os.environ
    HelixPlugin(pp_size=2)
    assert os.environ[LOADING] == "EAGER"


def test_a_pipeline_is_known_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "helix.yaml"
    monkeypatch.setenv("HELIX_CONFIG_FILE", str(file))
    for text, expected in (("pp_size: 2", True), ("tp_size: 2", False), ("pp_sise: 2", False)):
        file.write_text(text)
        config = launch_options()
        assert (config is not None and config.pp_size > 1) is expected


def test_what_came_too_late_is_said(started: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (connections,) = check_environment(pp_size=1)
    assert f"set {CONNECTIONS}=32 in the environment of the launcher" in connections
    monkeypatch.setenv(CONNECTIONS, "1")
    connections, loading = check_environment(pp_size=2)
    assert "is 1, which takes half of the overlap" in connections
    assert f"pp_size=2) may hang; set {LOADING}=EAGER in the environment of the launcher" in loading
    assert "TrainingArguments(parallelism_config=HelixPlugin(pp_size=2), ...) instead of helix_config" in loading
    monkeypatch.setenv(CONNECTIONS, "32")
    monkeypatch.setenv(LOADING, "EAGER")
    assert check_environment(pp_size=2) == []
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    (note,) = check_environment(pp_size=2)
    assert note.startswith("NCCL_MAX_CTAS=8 limits the kernels of every NCCL group")


def test_launches_that_wait_are_refused_for_pipelines_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_problems(1, CUDA, True) == launch_problems(2, torch.device("cpu"), True) == []
    assert launch_problems(2, CUDA) == []
    (problem,) = launch_problems(2, CUDA, True)
    assert problem.startswith("full_determinism=True: use full_determinism=False")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    (problem,) = launch_problems(2, CUDA)
    assert problem.startswith("CUDA_LAUNCH_BLOCKING=1 in the environment: unset it, or use pp_size=1")
