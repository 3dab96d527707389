"""What excuses a difference of a cut model: rounding that the unsplit model has itself, and only that."""

import pytest
import torch

from hf_helix.engine.proof.reference import Outcome
from hf_helix.engine.proof.verdict import BARS, GRADIENTS, compare

ONE = torch.ones(4, dtype=torch.float64)


def outcome(by: float) -> Outcome:
    """An outcome whose gradient is off by some bars."""
    return Outcome((1.0,), {"weight": ONE * (1 + by * BARS[GRADIENTS])}, ONE)


@pytest.mark.parametrize(
    ("off", "moved", "is_equal"),
    [
        (0.5, (), True),
        (5.0, (), False),  # fp64 is a reference, and says that the unsplit model rounds less
        (5.0, (0.1,), False),
        (5.0, (0.1, 3.0), True),  # one step of the weights changes the unsplit model as much
        (30.0, (30.0,), False),  # no conditioning explains more than ten bars
    ],
)
def test_conditioning_where_fp64_is_no_reference(off: float, moved: tuple[float, ...], is_equal: bool) -> None:
    window = compare(
        "rows",
        "sequential",
        outcome(off),
        outcome(0.0),
        lambda: [outcome(0.0)],
        lambda: [outcome(each) for each in moved],
    )
    assert (not window.wrong) == is_equal
