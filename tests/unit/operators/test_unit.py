"""`cut_bounds` gives every index of a dimension to exactly one rank, as evenly as can be, the longer slices first."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hf_helix.operators.unit import cut_bounds


@given(length=st.integers(0, 10_000), size=st.integers(1, 64))
def test_slices_cover_the_dimension_evenly(length: int, size: int) -> None:
    bounds = [cut_bounds(length, size, rank) for rank in range(size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    lengths = [last - first for first, last in bounds]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_by_hand() -> None:
    assert [cut_bounds(7, 3, rank) for rank in range(3)] == [(0, 3), (3, 5), (5, 7)]
