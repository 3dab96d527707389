"""The scorecard tells the truth: gains, small gains with their reason, losses, and the layout that would be faster."""

from types import SimpleNamespace
from typing import Any

import pytest

from hf_helix.config import LinkSpeed
from hf_helix.measure.overlap import Overlap, link_loads
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.bounds import busiest_link
from hf_helix.tuning.result_text import TuningResult, format_scorecard, format_summary, format_tuning


def overlap(step: float = 8.0, **changes: Any) -> Overlap:
    """Figures in ms: 6 of computation, 4 of communication, of which 2 show at a step of 8."""
    figures = {"computation": 6.0, "communication": 4.0, **changes}
    seconds = {name: value / 1e3 for name, value in figures.items() if name in ("computation", "communication")}
    rest = {name: value for name, value in figures.items() if name not in seconds}
    return Overlap(**{"overlapped_fraction": 0.5, "tokens": 4000, "step": step / 1e3, **seconds, **rest})


BOTH = {"sequential": overlap(10.0), "search": overlap(8.0)}


def test_figures_of_an_overlap() -> None:
    result = overlap()
    assert result.exposed == pytest.approx(2e-3)
    assert result.hidden_fraction == pytest.approx(0.5)
    assert result.bound == pytest.approx(6e-3)
    assert result.tokens_per_second == pytest.approx(500_000)
    assert overlap(5.0).exposed == 0.0
    assert overlap(5.0).hidden_fraction == 1.0
    assert overlap(12.0).hidden_fraction == pytest.approx(-0.5)
    assert overlap(communication=9.0).bound == pytest.approx(9e-3)
    assert overlap(communication=0.0).hidden_fraction == 0.0


INTRA, INTER = Kind.INTRA_NODE, Kind.INTER_NODE


@pytest.mark.parametrize(
    ("kinds", "sums", "link", "expected"),
    [
        ((INTRA,), INTER, None, 4.0),  # inside a host, beside sums between hosts
        ((INTRA,), INTRA, None, 4.0 + 3.0),
        ((INTRA, INTER), INTER, None, 2.0 + 3.0),
        ((INTRA, INTRA), INTER, None, 4.0 + 2.0),
        ((INTRA, Kind.GRADIENTS), INTER, None, 2.0 + 3.0),  # weights are gathered over the stream of the sums
        ((INTRA, INTER), INTER, LinkSpeed(8e6, 0.5), 0.5 + 5.0 + 3.0),  # 5 MB, and sums
        ((INTRA, INTER), INTER, LinkSpeed(80e6), 4.0),  # latencies are most of it
    ],
)
def test_the_busiest_link(kinds: tuple[Kind, ...], sums: Kind, link: LinkSpeed | None, expected: float) -> None:
    """Axes whose collectives take 4 s and 2 s, and sums of 3 s."""
    mesh: Any = SimpleNamespace(axes=[SimpleNamespace(kind=kind) for kind in kinds], reduction_kind=sums, link=link)
    loads = link_loads(mesh, [4.0, 2.0][: len(kinds)], 3.0, 5_000_000)
    assert busiest_link(loads) == pytest.approx(expected)


def test_a_scorecard() -> None:
    text = format_scorecard(overlap(), "search")
    assert text.startswith("plan search: 500,000 tokens/s, 8.0 ms a window of 4,000 tokens")
    lines = {line[:23].strip(): line[23:].strip() for line in text.splitlines()[1:]}
    assert lines["computation alone"] == "6.0 ms"
    assert lines["communication alone"] == "4.0 ms"
    assert lines["overlapped"].startswith("50% ")
    assert lines["hidden"].startswith("50% ")
    assert lines["hidden"].endswith("2.0 ms are exposed")
    assert lines["one after the other"] == "10.0 ms"
    assert lines["no plan can beat"] == "6.0 ms"
    assert "slows" not in text


def test_a_scorecard_of_spread_weights_of_a_loss_and_of_one_rank() -> None:
    figures = {"bytes_summed": 3_000_000, "bytes_gathered": 1_500_000, "bytes_spared": 12_000_000}
    text = format_scorecard(overlap(**figures), "search")
    assert "      3.0 MB   sent by a rank in gradient sums" in text
    assert "      1.5 MB   sent by a rank in gathers of weights" in text
    assert "     12.0 MB   of weights and AdamW's states fewer on a rank" in text
    assert "MB" not in format_scorecard(overlap(), "search")
    assert "communication slows computation down" in format_scorecard(overlap(12.0), "search")
    assert "-50%" in format_scorecard(overlap(12.0), "search")
    alone = format_scorecard(overlap(6.0, communication=0.0), "sequential")
    assert alone.endswith("one rank: there is no communication to hide")
    assert "hidden" not in alone


def test_a_gain() -> None:
    result = TuningResult("search", BOTH, predicted={"search": 7e-3, "dhelix": 9e-3}, measured="2026-01-02")
    head, names, *rows = format_tuning(result).splitlines()
    assert head == "measured on 2026-01-02: a window of 4,000 tokens under each plan, all in turn"
    assert names.split() == ["plan", "window", "predicted", "gain", "hidden", "overlapped", "of", "the", "bound"]
    assert rows[0].split() == ["sequential", "10.0", "ms", "1.00x", "0%", "50%", "0.60"]
    assert rows[1].split() == ["search", "8.0", "ms", "7.0", "ms", "1.25x", "50%", "50%", "0.75"]
    assert "\n".join(rows[2:]) == format_scorecard(BOTH["search"], "search")
    alone = format_tuning(TuningResult("dhelix", {"dhelix": overlap()}))
    assert alone.splitlines()[2].split() == ["dhelix", "8.0", "ms", "50%", "50%", "0.75"], "compared with nothing"


def test_kinds_of_communication_are_told_apart_where_there_are_two() -> None:
    two = overlap(overlapped_by_kind={"inter_node": 0.75, "intra_node": 0.25})
    assert "beside computation (inter_node 75%, intra_node 25%)" in format_scorecard(two, "search")
    one = overlap(overlapped_by_kind={"intra_node": 0.25})
    assert "intra_node" not in format_scorecard(one, "search")


def test_data_parallelism_is_named_where_it_would_be_faster() -> None:
    """4 ms for 4,000,000 bytes sent: a gradient of 1,000,000 bytes summed over 2 ranks sends as many, in 1 ms."""
    kept = overlap(8.0, bytes_moved=4_000_000)
    result = TuningResult("search", {**BOTH, "search": kept}, gradient_bytes=1_000_000, ranks=2)
    assert result.gradient_seconds == pytest.approx(1e-3)
    text = format_tuning(result)
    assert "Data parallelism alone would take about 7.0 ms a step instead of 8.0 ms (an estimate" in text
    assert text.endswith("if the whole model fits on every rank.")
    # Half of a step's micro-batches were timed: twice the computation, the same gradients.
    assert "would take about 13.0 ms a step instead of 16.0 ms" in format_tuning(result, 0.5)

    for gradients, ranks in ((3_000_000, 2), (1_000, 1), (10_000_000, 4)):
        result = TuningResult("search", {**BOTH, "search": kept}, gradient_bytes=gradients, ranks=ranks)
        assert "Data parallelism" not in format_tuning(result), "where it would not be faster"
    # Each of four ranks sends 2 * 3/4 of all bytes.
    assert TuningResult(
        "search", {"search": kept}, gradient_bytes=2_000_000, ranks=4
    ).gradient_seconds == pytest.approx(3e-3)
    assert TuningResult("search", {"search": overlap()}, gradient_bytes=1, ranks=4).gradient_seconds == 0.0


# Pipelines


def test_a_scorecard_of_a_pipeline() -> None:
    text = format_scorecard(overlap(bubble_fraction=0.25), "search")
    assert "  pipeline bubbles              25%   of it a rank waits for others" in text
    assert "overlapped" in text
    kept = overlap(bubble_fraction=0.25)
    whole = format_tuning(TuningResult("search", {**BOTH, "search": kept}, gradient_bytes=1_000, ranks=2))
    assert text in whole
    assert "Data parallelism" not in whole
    alone = format_scorecard(overlap(communication=0.0, bubble_fraction=0.25), "search")
    assert alone.splitlines()[-2].startswith("  pipeline bubbles ")
    assert alone.endswith("\n  no collectives to hide")
    assert "one rank" not in alone


def test_a_choice_among_schedules() -> None:
    steps = {
        "sequential on folded_1f1b": overlap(10.0),
        "greedy on folded_1f1b": overlap(9.0),
        "greedy on dualpipe_v": overlap(8.0),
    }
    rows = [
        line.rsplit("ms", 1) for line in format_tuning(TuningResult("greedy on dualpipe_v", steps)).splitlines()[2:5]
    ]
    gains = {name.split("  ")[1]: rest.split()[0] for name, rest in rows}
    assert gains == {
        "sequential on folded_1f1b": "1.00x",
        "greedy on folded_1f1b": "1.11x",
        "greedy on dualpipe_v": "1.25x",
    }


def test_sums_of_gradients_are_not_called_overlapped() -> None:
    """With data parallelism alone, no plan orders what is communicated."""
    text = format_scorecard(overlap(overlapped_fraction=0.0, bubble_fraction=0.25), "greedy")
    assert "overlapped" not in text
    assert "only the sums of gradients" in text
    assert "hidden" in text


# The sentence that is said

SHARED = "2 ranks compute and communicate on the same 2 cores"
FEW = {"sequential": overlap(10.0, communication=0.5), "search": overlap(9.9, communication=0.5)}


LOSS = {**BOTH, "sequential": overlap(7.0)}
NOTHING = "plan `sequential`: overlap gains nothing here, because "


def on(*rows: tuple[str, float]) -> dict[str, Overlap]:
    return {name: overlap(step) for name, step in rows}


@pytest.mark.parametrize(
    ("kept", "steps", "contention", "sentence"),
    [
        ("search", BOTH, SHARED, "plan `search`, 1.25x as fast as without overlap"),
        ("sequential", LOSS, SHARED, f"{NOTHING}{SHARED}"),
        ("sequential", LOSS, "", f"{NOTHING}computation beside communication loses as much time as it hides"),
        (
            "search",
            FEW,
            SHARED,
            "plan `search`, 1.01x as fast as without overlap; overlap gains little here, because communication is only "
            "8% of the work",
        ),
        (
            "greedy on auto",
            on(("sequential on folded_1f1b", 10.0), ("greedy on auto", 8.0)),
            "",
            "plan `greedy` on the schedule `auto`, 1.25x as fast as without overlap",
        ),
        (
            "sequential on auto",
            on(("sequential on folded_1f1b", 10.0), ("sequential on auto", 8.0)),
            "",
            "plan `sequential` on the schedule `auto`, "
            "1.25x as fast as with `sequential` on the schedule `folded_1f1b`",
        ),
        (
            "dhelix",
            on(("dhelix", 12.0)),
            "",
            "plan `dhelix`, as asked for: 50% of communication runs beside computation, 0% of it is hidden",
        ),
        (
            "sequential",
            {"sequential": overlap(7.0, communication=0.0), "greedy": overlap(7.1, communication=0.0)},
            SHARED,
            f"{NOTHING}there are no collectives to hide",
        ),
    ],
)
def test_the_verdict_is_a_sentence(kept: str, steps: dict[str, Overlap], contention: str, sentence: str) -> None:
    assert format_summary(TuningResult(kept, steps), contention) == sentence
