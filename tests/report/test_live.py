"""Figures of the logs: by hand under a clock that stands still, and of a real training on two ranks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.models import llama

from hf_helix.report.flops import TokenFlops, token_flops
from hf_helix.report.live import SHORT, LiveScore, short_entries
from hf_helix.runtime.trace import Span, Trace
from hf_helix.tuning.measure.overlap import Overlap

JOB = "support.tuning_jobs:score"
FLOPS = TokenFlops(linear=2e9, attention_per_length=1e6)  # at 1000 tokens: 2.5 causal and 3 full GFLOP a token


@dataclass
class Clock:
    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("hf_helix.report.live.time", SimpleNamespace(perf_counter=found.perf_counter))
    return found


def train(score: LiveScore, clock: Clock, tokens: int, length: int, seconds: float) -> None:
    def window() -> str:
        clock.now += seconds
        return "losses"

    assert score.add(tokens, length, window) == "losses"


def trace_of(*spans: tuple[str, float, float]) -> Trace:
    return Trace(spans=[Span(stream, "F0.layers.0.op", start, end) for stream, start, end in spans])


# Computation 0-2 and 4-6, communication 1-5: half of its 4 s is beside computation.
HALF = trace_of(("compute", 0, 2), ("local", 1, 5), ("compute", 4, 6))


def test_speed_by_hand(clock: Clock) -> None:
    score = LiveScore(FLOPS, ranks=4, batches=2, peak=10.0)
    train(score, clock, tokens=500, length=1000, seconds=3.0)
    clock.now += 1.0  # the optimizer counts
    train(score, clock, tokens=300, length=800, seconds=4.0)
    # (500 + 300) tokens of each of 2 batches in 8 s: 200 a second, 50 a rank; 2.5 and 3 GFLOP each.
    assert score.entries(None) == pytest.approx(
        {
            "helix/tokens_per_second": 200.0,
            "helix/tflops_per_device": 0.125,
            "helix/mfu": 0.0125,
            "helix/mfu_full_attention": 0.015,
        }
    )


def test_what_is_not_known_is_left_out(clock: Clock) -> None:
    score = LiveScore(None, ranks=2, batches=1, peak=10.0)
    train(score, clock, 100, 10, 2.0)
    assert score.entries(None) == {"helix/tokens_per_second": 50.0}
    score = LiveScore(FLOPS, ranks=2, batches=1, peak=None)
    train(score, clock, 100, 1000, 2.0)
    assert score.entries(None).keys() == {"helix/tokens_per_second", "helix/tflops_per_device"}


def test_a_log_forgets_what_came_before(clock: Clock) -> None:
    score = LiveScore(FLOPS, ranks=1, batches=1, peak=None)
    assert score.entries(None) == {}
    train(score, clock, 100, 1000, 1.0)
    score.add_trace(HALF, 100, 1.0)
    assert score.entries(None)["helix/tokens_per_second"] == 100.0
    assert score.entries(None) == {}
    clock.now += 1000.0  # an evaluation between two windows of different logs
    train(score, clock, 100, 500, 2.0)
    found = score.entries(None)
    assert found["helix/tokens_per_second"] == 50.0
    assert found["helix/tflops_per_device"] == pytest.approx(50 * 2.25e9 / 1e12)
    assert "helix/overlapped_fraction" not in found


def test_the_first_window_after_a_log_is_traced(clock: Clock) -> None:
    score = LiveScore(None, ranks=1, batches=1, peak=None)
    assert score.wants_trace
    train(score, clock, 100, 10, 1.0)
    score.add_trace(HALF, 100, 1.0)
    assert not score.wants_trace
    score.entries(None)
    assert score.wants_trace


def test_overlap_by_hand_without_a_measurement(clock: Clock) -> None:
    """2 s of communication ran beside no computation."""
    score = LiveScore(None, ranks=1, batches=1, peak=None)
    train(score, clock, 100, 10, 6.0)
    score.add_trace(HALF, 100, 6.0)
    found = score.entries(None)
    assert found["helix/overlapped_fraction"] == 0.5
    assert found["helix/exposed_ms"] == 2000.0
    assert "helix/hidden_fraction" not in found


@pytest.mark.parametrize(
    ("tokens", "seconds", "hidden", "exposed"),
    [
        (100, 5.0, 0.5, 2000.0),  # 3 s of computation, 4 s of communication: 2 of them show
        (50, 2.5, 0.5, 1000.0),  # a window of half the size
        (200, 10.0, 0.5, 4000.0),
        (100, 3.0, 1.0, 0.0),
        (100, 2.0, 1.0, 0.0),  # faster than its computation was alone: noise
        (100, 7.0, 0.0, 4000.0),
        (100, 9.0, 0.0, 6000.0),  # nothing is hidden where contention costs more than communication itself
    ],
)
@pytest.mark.parametrize("batches", [1, 2])
def test_overlap_by_hand_beside_what_was_measured_alone(
    tokens: int, seconds: float, hidden: float, exposed: float, batches: int, clock: Clock
) -> None:
    alone = Overlap(step=99.0, computation=3.0, communication=4.0, overlapped_fraction=0.9, tokens=100 * batches)
    score = LiveScore(None, ranks=2, batches=batches, peak=None)
    train(score, clock, tokens, 10, seconds)
    score.add_trace(HALF, tokens, seconds)
    found = score.entries(alone)
    assert found["helix/overlapped_fraction"] == 0.5
    assert found["helix/hidden_fraction"] == pytest.approx(hidden)
    assert found["helix/exposed_ms"] == pytest.approx(exposed)


def test_a_little_communication_says_nothing_of_what_is_hidden(clock: Clock) -> None:
    """4 s of communication in a window of 100 s: its time varies by more than that."""
    alone = Overlap(step=99.0, computation=96.0, communication=4.0, overlapped_fraction=0.9, tokens=100)
    score = LiveScore(None, ranks=2, batches=1, peak=None)
    train(score, clock, 100, 10, 100.0)
    score.add_trace(HALF, 100, 100.0)
    found = score.entries(alone)
    assert "helix/hidden_fraction" not in found
    assert short_entries(found) == {"helix/overlapped_fraction": 0.5}


def test_one_rank_has_nothing_to_overlap(clock: Clock) -> None:
    score = LiveScore(None, ranks=1, batches=1, peak=None)
    train(score, clock, 100, 10, 1.0)
    score.add_trace(trace_of(("compute", 0, 1)), 100, 1.0)
    alone = Overlap(step=1.0, computation=1.0, communication=0.0, overlapped_fraction=0.0, tokens=100)
    assert score.entries(alone).keys() == {"helix/tokens_per_second"}


# Real trainings on two ranks

CASE = {
    "model": {"num_hidden_layers": 2},
    "data": {"count": 40, "lengths": (16,)},
    "training": {"gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 2},
}
SPEED = {"helix/tokens_per_second", "helix/tflops_per_device"}


def tuned_case(folder: Path) -> dict[str, Any]:
    return {"folder": str(folder), "helix": {"tp_size": 2, "plan": "search", "cache": False}, **CASE}


def test_logs_of_a_real_training(cluster_of: Any, tmp_path: Path) -> None:
    """After tuning, in the same training; and what everything else logs is still there."""
    found = cluster_of(2).run(JOB, **tuned_case(tmp_path), trace=str(tmp_path / "trace.json"))
    flops = token_flops(llama(num_hidden_layers=2)).causal(16)
    for rank in found:
        assert rank["plan"] == "search"
        assert len(rank["logs"]) == 2
        for entry in rank["logs"]:
            ours = {key for key in entry if key.startswith("helix/")}
            assert {"helix/overlapped_fraction"} <= ours <= set(SHORT)
            assert {"loss", "grad_norm", "learning_rate", "epoch", "step"} <= entry.keys()
            assert all(0 <= entry[key] <= 1 for key in ours)
        figures = rank["figures"]
        assert SPEED | {"helix/overlapped_fraction", "helix/exposed_ms"} <= figures.keys()
        # A window has 64 tokens; anything from 6 ms to a minute may pass for it.
        assert 1 < figures["helix/tokens_per_second"] < 1e4
        each = figures["helix/tokens_per_second"] * flops / 2 / 1e12
        assert figures["helix/tflops_per_device"] == pytest.approx(each, rel=1e-4)
        assert 0 <= figures["helix/exposed_ms"] < 6e4
        assert not any(key.startswith("helix/") for entry in rank["other_logs"] for key in entry)
        assert not rank["still_traced"]
        assert rank["gradients"] == 0
    check_trace(tmp_path / "trace.json")


def check_trace(path: Path) -> None:
    """Both ranks, every operator of both micro-batches of the last window."""
    events = json.loads(path.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    runs = [event for event in events if event["ph"] == "X"]
    by_rank = [Counter((e["name"], e["args"]["unit"], e["cat"]) for e in runs if e["pid"] == pid) for pid in (1, 2)]
    assert by_rank[0] == by_rank[1]
    assert set(by_rank[0].values()) == {1}
    assert {e["args"]["microbatch"] for e in runs} == {0, 1}
    assert {e["cat"] for e in runs} == {"compute", "local"}
    assert sum(name.startswith("F0.") and unit == "layers.1" for name, unit, _ in by_rank[0]) == 14
    assert all(event["dur"] > 0 for event in runs)


def test_logs_of_a_plan_that_needs_no_measurement(cluster_of: Any, tmp_path: Path) -> None:
    """Nothing was measured alone, so nothing is said of it; `measure_overlap` says what a window moves."""
    case = {"folder": str(tmp_path), "helix": {"tp_size": 2, "plan": "greedy"}, **CASE}
    first, second = cluster_of(2).run(JOB, **case, measure=True)
    for entry in first["logs"] + second["logs"]:
        assert {key for key in entry if key.startswith("helix/")} == {"helix/overlapped_fraction"}
    for rank in (first, second):
        assert rank["figures"].keys() == SPEED | {"helix/overlapped_fraction", "helix/exposed_ms"}
        overlap = rank["overlap"]
        assert overlap["tokens"] == 2 * 2 * 16
        assert overlap["by_kind"] == {"local": pytest.approx(overlap["overlapped"])}
        assert rank["gradients"] == 0
    # A shard is half of 16 tokens of 2 sequences, 32 numbers each, in fp32; a rank sends it to one other. Per
    # micro-batch: 2 layers with 4 collectives forward and 4 backward, 2 of the embedding, 2 of the head; and in the
    # head the statistics of the loss.
    shard = 8 * 2 * 32 * 4
    hidden = 2 * (2 * 8 + 2 + 2) * shard
    assert first["overlap"]["bytes_moved"] == second["overlap"]["bytes_moved"]
    assert hidden < first["overlap"]["bytes_moved"] < 1.2 * hidden


def test_tensorboard_shows_them(cluster_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    case = tuned_case(tmp_path)
    case["training"] = {**CASE["training"], "report_to": ["tensorboard"]}
    logs = cluster_of(2).run(JOB, **case)[0]["logs"]
    files = list(tmp_path.rglob("events.out.tfevents.*"))
    assert len(files) == 1, "rank 0 alone writes"
    events = accumulator.EventAccumulator(str(files[0]))
    events.Reload()
    names = [key for key in logs[0] if key.startswith("helix/")]
    assert "helix/overlapped_fraction" in names
    for name in names:
        scalars = events.Scalars(f"train/{name}")
        logged = [entry for entry in logs if name in entry]
        assert [scalar.step for scalar in scalars] == [entry["step"] for entry in logged]
        assert [scalar.value for scalar in scalars] == pytest.approx([entry[name] for entry in logged], rel=1e-5)


def test_a_trace_needs_a_window(cluster_of: Any, tmp_path: Path) -> None:
    for failure in cluster_of(2).errors("support.tuning_jobs:trace_untrained", folder=str(tmp_path)):
        assert failure.kind == "ValueError"
        assert "after train()" in failure.message


def test_data_parallel_ranks_have_nothing_to_hide(cluster_of: Any, tmp_path: Path) -> None:
    """Each with a batch of its own: twice the tokens, and no communication that a plan could order."""
    case = {"folder": str(tmp_path), "helix": {"tp_size": 1, "plan": "auto"}, **CASE}
    flops = token_flops(llama(num_hidden_layers=2)).causal(16)
    for rank in cluster_of(2).run(JOB, **case):
        assert not any(key.startswith("helix/") for entry in rank["logs"] for key in entry)
        figures = rank["figures"]
        assert figures.keys() == SPEED
        each = figures["helix/tokens_per_second"] * flops / 2 / 1e12
        assert figures["helix/tflops_per_device"] == pytest.approx(each, rel=1e-4)
