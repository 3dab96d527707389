"""Plans whose times are close are measured again, and the report mixes no two measurements of a plan."""

from typing import Any
from unittest import mock

import pytest

from hf_helix.measure.overlap import Overlap
from hf_helix.tuning import tuner
from hf_helix.tuning.budget import FULL

FIRST = {"sequential": (2.0, 1.5), "greedy": (1.01, 0.9), "search": (1.0, 0.9)}
AGAIN = {"greedy": (1.1, 1.0), "search": (1.2, 1.1)}


def test_all_figures_of_a_plan_are_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int]] = []

    def measure(runners: Any, window: Any, repeats: int, *_: Any, **__: Any) -> dict[str, Overlap]:
        figures = AGAIN if asked else FIRST
        asked.append((list(runners), repeats))
        return {
            name: Overlap(step=step, computation=computation, communication=1.0, overlapped_fraction=0.5, tokens=8)
            for name, (step, computation) in figures.items()
        }

    runner = mock.MagicMock()
    runner.rank_units.own_rows.items.return_value = []
    monkeypatch.setattr(tuner, "measure_overlap", measure)
    monkeypatch.setattr(tuner, "plan_runners", lambda *_: dict.fromkeys(FIRST, runner))
    monkeypatch.setattr(tuner, "predict_window", lambda *_: 1.0)
    monkeypatch.setattr(tuner, "lower_bound", lambda *_: 1.0)
    _, result = tuner.tune(runner, [mock.MagicMock()], FULL, profile=mock.MagicMock())
    assert asked == [(list(FIRST), FULL.repeats), (list(AGAIN), 2 * FULL.repeats)]
    assert result.chosen == "greedy"
    assert {name: (each.step, each.computation) for name, each in result.overlaps.items()} == {**FIRST, **AGAIN}
