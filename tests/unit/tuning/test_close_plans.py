"""Plans are timed in turn; the first round leaves those that are close to the fastest."""

from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from hf_helix.measure import overlap
from hf_helix.measure.overlap import time_in_turn

ROUNDS = {"alone": [3.0, 4.0, 3.5], "slow": [2.0], "good": [1.05, 0.9, 0.95], "best": [1.0, 1.2, 1.1]}
"""By work, the seconds of each round."""


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], object]]:
    """Works whose times are known; the other rank is as fast, or a half faster."""
    left: dict[object, Iterator[float]] = {}

    def timed(work: Callable[[], object], *_: object) -> float:
        return next(left[work])

    made: dict[str, Callable[[], object]] = {name: mock.Mock(name=name) for name in ROUNDS}
    left.update({made[name]: iter(seconds) for name, seconds in ROUNDS.items()})
    monkeypatch.setattr(overlap, "_timed", timed)
    monkeypatch.setattr(overlap, "all_gather_object", lambda mine: [[each / 2 for each in mine], mine])
    return made


def test_only_close_rivals_are_timed_again(works: dict[str, Callable[[], object]]) -> None:
    """Also those that a later round finds slower; what runs beside them is timed in every round."""
    rivals = [works[name] for name in ("slow", "good", "best")]
    times = time_in_turn([*works.values()], mock.MagicMock(), 3, warm_up=False, rivals=rivals, close=1.1)
    assert dict(zip(works, times, strict=True)) == ROUNDS


def test_without_rivals_everything_is_timed_in_every_round(works: dict[str, Callable[[], object]]) -> None:
    asked = [works[name] for name in ("alone", "best")]
    assert time_in_turn(asked, mock.MagicMock(), 2) == [[4.0, 3.5], [1.2, 1.1]]  # the first round warms up
