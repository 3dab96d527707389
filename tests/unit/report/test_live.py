"""Figures of the logs, by hand under a clock that stands still."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from hf_helix.measure.overlap import Overlap
from hf_helix.planning.timing.token_flops import TokenFlops
from hf_helix.report.live import LiveScore, short_entries
from hf_helix.runtime.streams.trace import Span, Trace

FLOPS = TokenFlops(linear=2e9, attention_per_length=1e6)  # at 1000 tokens: 2.5 causal and 3 full GFLOP a token


@dataclass
class Clock:
    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    result = Clock()
    monkeypatch.setattr("hf_helix.report.live.time", SimpleNamespace(perf_counter=result.perf_counter))
    return result


def train(score: LiveScore, clock: Clock, tokens: int, length: int, seconds: float) -> None:
    score.begin()
    clock.now += seconds
    score.add(tokens, length)


def trace_of(*spans: tuple[str, float, float]) -> Trace:
    return Trace(spans=[Span(stream, "F0.layers.0.op", start, end) for stream, start, end in spans])


# Computation 0-2 and 4-6, communication 1-5: half of its 4 s is beside computation.
HALF = trace_of(("compute", 0, 2), ("intra_node", 1, 5), ("compute", 4, 6))


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
    assert score.wants_trace, "the first window after a log is traced"
    score.add_trace(HALF, 100, 6.0)
    assert not score.wants_trace
    result = score.entries(None)
    assert result["helix/tokens_per_second"] == 100.0
    assert result["helix/overlapped_fraction"] == 0.5
    assert result["helix/exposed_ms"] == 2000.0, "of communication ran beside no computation"
    assert "helix/hidden_fraction" not in result, "without a measurement of what it takes alone"
    assert score.wants_trace
    assert score.entries(None) == {}
    clock.now += 1000.0  # an evaluation between two windows of different logs
    train(score, clock, 100, 500, 2.0)
    result = score.entries(None)
    assert result["helix/tokens_per_second"] == 50.0
    assert result["helix/tflops_per_device"] == pytest.approx(50 * 2.25e9 / 1e12)
    assert "helix/overlapped_fraction" not in result


@pytest.mark.parametrize(
    ("tokens", "seconds", "hidden", "exposed"),
    [
        (100, 5.0, 0.5, 2000.0),  # 3 s of computation, 4 s of communication: 2 of them show
        (50, 2.5, 0.5, 1000.0),  # a window of half the size
        (100, 2.0, 1.0, 0.0),  # faster than its computation was alone: noise
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
    result = score.entries(alone)
    assert result["helix/overlapped_fraction"] == 0.5
    assert result["helix/hidden_fraction"] == pytest.approx(hidden)
    assert result["helix/exposed_ms"] == pytest.approx(exposed)


def test_a_little_communication_says_nothing_of_what_is_hidden(clock: Clock) -> None:
    """4 s of communication in a window of 100 s: its time varies by more than that."""
    alone = Overlap(step=99.0, computation=96.0, communication=4.0, overlapped_fraction=0.9, tokens=100)
    score = LiveScore(None, ranks=2, batches=1, peak=None)
    train(score, clock, 100, 10, 100.0)
    score.add_trace(HALF, 100, 100.0)
    result = score.entries(alone)
    assert "helix/hidden_fraction" not in result
    assert short_entries(result) == {"helix/overlapped_fraction": 0.5}


def test_one_rank_has_nothing_to_overlap(clock: Clock) -> None:
    score = LiveScore(None, ranks=1, batches=1, peak=None)
    train(score, clock, 100, 10, 1.0)
    score.add_trace(trace_of(("compute", 0, 1)), 100, 1.0)
    alone = Overlap(step=1.0, computation=1.0, communication=0.0, overlapped_fraction=0.0, tokens=100)
    assert score.entries(alone).keys() == {"helix/tokens_per_second"}
