"""Pipelines as text are to scale, and show idle time as such."""

import pytest

from hf_helix.planning.choice.slot_clock import Costs, Simulated, simulate_schedule
from hf_helix.planning.schedule.actions import parse_schedule
from hf_helix.planning.schedule.named import PLACEMENT_OF, build_schedule
from hf_helix.planning.schedule.placement import stage_ranks
from hf_helix.report.timeline import text_pipeline


def simulated(name: str = "folded_1f1b", num_ranks: int = 2, num_microbatches: int = 4, **options: float) -> Simulated:
    ranks = stage_ranks(PLACEMENT_OF[name], num_ranks)
    schedule = build_schedule(name, num_ranks, num_microbatches)
    return simulate_schedule(schedule, ranks, Costs.of_layers([1] * len(ranks), **options))


def apart() -> Simulated:
    """0F0 takes 2, then 1F0 1; I 1 and W 1 each."""
    schedule = parse_schedule("0F0 1F0 1I0 1W0 0B0", 1)
    return simulate_schedule(schedule, (0, 0), Costs((2.0, 1.0), (1.0, 1.0), (1.0, 1.0)))


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("rank ")]


def test_text_is_to_scale():
    (row,) = rows(text_pipeline(apart(), width=8 + 28 + 11))
    assert row == "rank 0  F0──────f0──i0──w0──B0──────    0% idle"
    (row,) = rows(text_pipeline(apart(), width=8 + 14 + 11))
    assert row.split()[2] == "F0──f0i0w0B0──"
    (row,) = rows(text_pipeline(apart(), width=8 + 10 + 11))
    assert len(row.split()[2]) == 10
    # Idle time is dots and fused slots are marked.
    result = simulated(forward=1.0, input=0.5, weight=0.5, gain=2.0)
    text = text_pipeline(result, width=8 + 14 * 4 + 11)
    assert result.seconds == 14
    cells = [row.split()[2] for row in rows(text)]
    assert [len(cell) for cell in cells] == [56, 56]
    assert cells[1].startswith("····F0──f0──F1──f1──")
    assert [cell.count("·") for cell in cells] == [2 * 4, 2 * 4]
    assert "F2b0" in cells[0]
    assert "F2b0" in cells[1]
    narrow = [row.split()[2] for row in rows(text_pipeline(result, width=8 + 14 * 2 + 11))]
    assert [row.count("X") for row in narrow] == result.fused == [4, 4]
    assert "X forward beside backward" in text
    # Dots are the bubble.
    result = simulated("1f1b", 4, 8)
    for line, bubble in zip(rows(text_pipeline(result, 8 + 330 + 11)), result.bubbles, strict=True):
        assert line.count("·") / 330 == pytest.approx(bubble, abs=0.01)


@pytest.mark.parametrize("width", [20, 100])
def test_text_keeps_to_its_width(width: int):
    result = simulated("dualpipe_v", 4, 12)
    lines = rows(text_pipeline(result, width))
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) == max(width, 8 + 10 + 11)
    for line, bubble in zip(lines, result.bubbles, strict=True):
        assert line.endswith(f"{bubble:4.0%} idle")
