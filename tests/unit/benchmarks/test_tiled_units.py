"""Tiles of a unit: rows come back in order, gradients likewise, and the same linears serve every tile."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import llama
from torch import Tensor, nn

from benchmarks.paper.tiled_units import TileTransfer, cut_rows, join_rows, tile_unit, tile_units
from benchmarks.paper.tiles import tile_graph, tile_pair
from hf_helix.models.families.llama import Llama
from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import ParallelContext
from hf_helix.operators.base import OperatorContext
from hf_helix.operators.communication.collectives import AllGather, AllGatherReplicated, ReduceScatter
from hf_helix.operators.communication.transport import Axis, Recorder, SilentTransport
from hf_helix.planning.graph.operator import Part
from hf_helix.runtime.rank_units import place_units

SIZES = {"rows": st.integers(0, 9), "size": st.integers(1, 4), "tiles": st.integers(1, 5)}


def new_context() -> OperatorContext:
    return OperatorContext({}, 0, True)


def numbered(rows: int) -> Tensor:
    """Every element another number, [rows, 2, 3]."""
    return torch.arange(rows * 6, dtype=torch.float32).view(rows, 2, 3)


@given(**SIZES)
def test_rows_come_back_as_they_were(rows: int, size: int, tiles: int) -> None:
    value = numbered(size * rows)
    pieces = cut_rows(value, size, tiles)
    assert torch.equal(join_rows(pieces, size), value)
    lengths = [piece.shape[0] // size for piece in pieces]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize("part", [Part.F, Part.B])
@pytest.mark.parametrize("kind", [AllGather, ReduceScatter])
def test_an_empty_tile_communicates_nothing(part: Part, kind: type) -> None:
    transport = Recorder(SilentTransport(2, 0))
    transfer = TileTransfer(kind(Axis(transport)))
    (out,), work = transfer.prepare(new_context(), part, torch.empty(0, 2, 3))
    work()
    assert out.shape == (0, 2, 3)
    assert transport.moved == []
    (out,), work = transfer.prepare(new_context(), part, torch.empty(4, 2, 3))
    work()
    assert len(transport.moved) == 1
    assert len(out) in (2, 8)


@pytest.mark.parametrize("tiles", [2, 3])
def test_units_and_graphs_are_tiled_alike(tiles: int) -> None:
    whole = place_units(Llama().units(llama(), ParallelContext(Axis(SilentTransport(2, 0)))))
    rank_units = tile_units(whole, tiles)
    assert list(rank_units.own_rows) == list(whole.own_rows)
    assert whole.units.keys() == rank_units.units.keys()
    for index, after in rank_units.units.items():
        before = whole.units[index]
        forward = after.graphs.forward
        assert forward == tile_graph(before.graphs.forward, tiles)
        assert after.graphs == tile_pair(before.graphs, tiles)
        assert set(after.operators) == {op.name for op in forward.operators}
        assert after.label == before.label
        assert rank_units.layout.graphs[after.name] == after.graphs
    layer, whole_layer = rank_units.units[1], whole.units[1]
    for tile in range(tiles):
        assert layer.operators[f"mlp.up.{tile}"] is whole_layer.operators["mlp.up"]
        assert layer.operators[f"mlp.gather.{tile}"].collective is whole_layer.operators["mlp.gather"]


def test_without_tiles_or_collectives_units_stay() -> None:
    for axis, tiles in ((Axis.single(), 4), (Axis(SilentTransport(2, 0)), 1)):
        for unit in Llama().units(llama(), ParallelContext(axis)):
            assert tile_unit(unit, tiles) is unit


def test_a_collective_whose_rows_lie_otherwise_is_refused() -> None:
    builder = Builder("layer", "layers.0", ParallelContext(Axis(SilentTransport(2, 0))))
    gathered = builder.all_gather("gather", builder.input("x"))
    unit = builder.build(*builder.column_parallel("up", {"up": nn.Linear(3, 4)}, gathered))
    unit.operators["gather"] = AllGatherReplicated(builder.tp)
    with pytest.raises(
        ValueError, match=r"layers\.0: 'gather' is of class AllGatherReplicated where tiles need AllGather"
    ):
        tile_unit(unit, 2)
