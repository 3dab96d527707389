"""A trainer may be made with its model and arguments by position or by name; either can be replaced."""

from __future__ import annotations

import pytest

from hf_helix.integrations.trainer.stock import TrainerCall


@pytest.mark.parametrize(
    ("positional", "named"), [((), {"model": 1, "args": 2}), ((1,), {"args": 2}), ((1, 2), {}), ((1, 2, 3), {})]
)
def test_what_is_given_is_found_and_replaced(positional: tuple[int, ...], named: dict[str, int]) -> None:
    call = TrainerCall(positional, {**named, "other": 5})
    assert (call.get("model"), call.get("args"), call.get("other"), call.get("absent")) == (1, 2, 5, None)
    for name in ("model", "args", "other"):
        call.set(name, 7)
    count = min(len(positional), 2)
    assert call.positional == [7] * count + list(positional[2:])
    assert call.named == {**dict.fromkeys(named, 7), "other": 7}


def test_what_is_absent_is_given_by_name() -> None:
    call = TrainerCall((1,), {})
    call.set("args", 2)
    assert (call.positional, call.named) == ([1], {"args": 2})
