"""`hf-helix profile` on two processes; the other commands read what it wrote."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked_ranks import fork_ranks, logs_of
from transformers import LlamaConfig

from hf_helix.cli import main, options
from hf_helix.cli import plan as plan_command
from hf_helix.planning.plan import search
from hf_helix.planning.timing.profile_file import load_profile

SIZES = {"hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of a few steps, and predictions of two rules only."""
    monkeypatch.setattr(search, "EFFORT", 20_000)
    monkeypatch.setattr(plan_command, "RULES", ("sequential", "greedy"))


def run(*words: object) -> None:
    main([str(word) for word in words])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(vocab_size=131, num_hidden_layers=2, max_position_embeddings=64, **SIZES).save_pretrained(folder)
    return folder


cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="two processes would want two GPUs")


@cpu_only
def test_its_ranks_measure_and_trace(model_folder: Path, tmp_path: Path, capsys: Any) -> None:
    """As a launcher starts them, or the command by itself."""
    words = ("--model", model_folder, "--tp_size", 2, "--batch_size", 2, "--sequence_length", 17, "--microbatches", 2)
    said = logs_of(fork_ranks(tmp_path, "-m", "hf_helix", "profile", *words, "--trace", "trace.json"), tmp_path)
    # The default output, in the folder it was started in; rank 0 alone talks.
    profile = load_profile(tmp_path / "profile.json")
    assert said.count(f"{len(profile.times)} operators and {len(profile.pairs)} pairs: profile.json") == 1
    assert profile.about["mesh"] == "tp=2"
    assert profile.about["model"].startswith("LlamaForCausalLM ")
    assert profile.about["shapes"] == "2 x 17, 2 x 17"
    assert profile.about["backend"] == "gloo"
    assert [*profile.layout.units] == ["embedding", "layer", "layer", "head"]
    assert profile.pairs
    assert profile.like
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert {event["args"]["microbatch"] for event in events if event["ph"] == "X"} == {0, 1}
    # What it wrote is what the others take.
    run("plan", tmp_path / "profile.json", "--rule", "greedy", "--output", tmp_path / "plan.json")
    run("show", tmp_path / "profile.json")
    run("show", tmp_path / "plan.json", "--profile", tmp_path / "profile.json")
    assert "greedy: 3 micro-batches" in capsys.readouterr().out


def test_the_command_starts_as_many_processes_as_the_mesh_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torchrun, each with what the command was given."""
    called: list[list[str]] = []
    monkeypatch.setattr(options.subprocess, "call", lambda words, env: called.append(words) or 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    given = {"--tp_size": "2", "--pp_size": "3", "--microbatches": "5", "--output": "there.json"}
    deep = tmp_path / "deep"
    LlamaConfig(vocab_size=131, num_hidden_layers=6, max_position_embeddings=64, **SIZES).save_pretrained(deep)
    run("profile", "--model", deep, *(word for pair in given.items() for word in pair), "--bf16")
    (words,) = called
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=6"]
    assert words[:8] == [*started, "-m", "hf_helix", "profile"]
    assert {f"{name}={value}" for name, value in given.items()} | {"--bf16"} <= set(words)
