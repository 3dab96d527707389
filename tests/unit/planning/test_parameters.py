"""Rows say where every element of a parameter is: on some rank once for sums, on every rank where it says so."""

import itertools
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_helix.operators.parameters.parts import cut_tensor, views_of
from hf_helix.planning.parameters import (
    EXPERTS,
    TP,
    Cut,
    Flat,
    FlatLayout,
    Parameter,
    Part,
    Place,
    Ranks,
    Sharers,
    boxes_of,
)


def places(tp: int, replicas: int, copies: int, axis: str, pipeline: int = 1) -> list[Place]:
    """Every rank of a mesh whose replicas shard in groups of `replicas`, `copies` of them."""
    return [
        Place(
            {
                axis: Sharers(
                    slices=Ranks(tp, slice_),
                    replicas=Ranks(replicas * copies, copy * replicas + shard),
                    shards=Ranks(replicas, shard),
                    copies=Ranks(copies, copy),
                )
            },
            pipeline=stage,
        )
        for stage in range(pipeline)
        for slice_, copy, shard in itertools.product(range(tp), range(copies), range(replicas))
    ]


@given(
    rows=st.integers(1, 9),
    blocks=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    tp=st.integers(1, 3),
    replicas=st.integers(1, 3),
    copies=st.integers(1, 2),
    dim=st.sampled_from([0, 1, None]),
    sharded=st.booleans(),
    axis=st.sampled_from([TP, EXPERTS]),
)
def test_parts_that_count_hold_every_element_once(
    rows: int, blocks: list[int], tp: int, replicas: int, copies: int, dim: int | None, sharded: bool, axis: str
) -> None:
    """A parameter alone and with others in its flat parameter; the views are those of a cut and flattened tensor."""
    length = sum(blocks)
    shape = (length, rows) if dim == 0 else (rows, length)
    cut = Cut(dim, 0 if dim is None else length, blocks=tuple(blocks), mesh_axis=axis)
    flat = Flat(0, "weights", (((7,), Cut(mesh_axis=axis)), (shape, cut), ((3, 3), Cut(mesh_axis=axis))))
    row = Parameter("weight", shape, cut=cut, owner=1, flat=flat if sharded else None, number=1)
    full = torch.arange(prod(shape)).view(shape)
    counted = torch.zeros_like(full)
    for place in places(tp, replicas, copies, axis, pipeline=2):
        part = Part(row, place)
        held = cut_tensor(full, cut, *part.ranks)
        assert held.shape == part.shape
        if part.elements is not None:
            held = held.reshape(-1)[slice(*part.elements)]
        assert held.shape == part.stepped_shape
        assert sum(piece.numel() for piece in views_of(part, held).values()) == held.numel()
        for offset, piece in views_of(part, held).items():
            index = tuple(slice(at, at + count) for at, count in zip(offset, piece.shape, strict=True))
            assert torch.equal(piece, full[index])
            counted[index] += part.counts
        assert part.is_full == (tuple(held.shape) == shape and held.numel() == full.numel())
        for offset, piece in views_of(part.in_slice, held).items():
            index = tuple(slice(at, at + count) for at, count in zip(offset, piece.shape, strict=True))
            assert torch.equal(piece, cut_tensor(full, cut, *part.ranks)[index])
    assert (counted == 1).all()


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_boxes_are_the_elements_in_their_range(shape: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    end = data.draw(st.integers(start, prod(shape)))
    full = torch.arange(prod(shape)).view(shape)
    found = [
        full[tuple(slice(at, at + count) for at, count in zip(offset, box, strict=True))].reshape(-1)
        for offset, box in boxes_of(start, end, shape)
    ]
    assert torch.equal(torch.cat([*found, torch.empty(0, dtype=torch.long)]).sort().values, torch.arange(start, end))
    assert all(torch.equal(each, torch.arange(int(each[0]), int(each[-1]) + 1)) for each in found), "in a row"


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_buffer_begins_large_parameters_at_blocks(num_shards: int) -> None:
    """Optimizer states of 8 bits have a common scale for 256 elements, which no border divides."""
    layout = FlatLayout.of([(5,), (64, 64), (7,)], num_shards)
    assert [extent.start for extent in layout.extents] == [0, 256, 256 + 64 * 64]
    assert layout.shard % 256 == 0
    borders = {layout.elements(1, rank)[1] for rank in range(num_shards)}
    assert all(border % 256 == 0 for border in borders)
