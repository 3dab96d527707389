"""`cut_bounds` gives every index of a dimension to exactly one rank, as evenly as can be, the longer slices first;
`Cut` cuts each block of a fused matrix so."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_helix.operators.parameters.parts import cut_tensor, paste
from hf_helix.planning.parameters import Cut, cut_bounds


@given(length=st.integers(0, 10_000), size=st.integers(1, 64))
def test_slices_cover_the_dimension_evenly(length: int, size: int) -> None:
    bounds = [cut_bounds(length, size, rank) for rank in range(size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    lengths = [last - first for first, last in bounds]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(blocks=st.lists(st.integers(1, 20), min_size=1, max_size=4), size=st.integers(1, 5), dim=st.integers(0, 1))
def test_blocks_are_cut_by_themselves(blocks: list[int], size: int, dim: int) -> None:
    """What ranks hold is each block's slices, one after the other; pasted together they are the whole."""
    length = sum(blocks)
    whole = torch.arange(length * 3).view(length, 3)
    whole = whole if dim == 0 else whole.t().contiguous()
    cut = Cut(dim, length, blocks=tuple(blocks))
    pasted = torch.full_like(whole, -1)
    for rank in range(size):
        part = cut_tensor(whole, cut, size, rank)
        expected = [block.narrow(dim, *_place(block, dim, size, rank)) for block in whole.split(blocks, dim)]
        assert torch.equal(part, torch.cat(expected, dim))
        assert part.shape == cut.shape(whole.shape, size, rank)
        assert cut.full_shape(part.shape) == whole.shape
        paste(pasted, part, cut, size, rank)
    assert torch.equal(pasted, whole)


def _place(block: torch.Tensor, dim: int, size: int, rank: int) -> tuple[int, int]:
    first, last = cut_bounds(block.shape[dim], size, rank)
    return first, last - first
