"""The runtime of the intra-batch baseline (`benchmarks.paper.tiles`): units in tiles.

In:   the runner of a rank, and the number of tiles.
Out:  a runner of the same parameters, whose units have tiled graphs. The same linears and collectives serve the tiles;
      new operators cut and join.
Must hold: values and gradients equal the untiled unit's, rounding aside. An all-gather brings the ranks' parts in
rank order, so the rows of tile t of a gathered value are the t-th part of every rank's shard. A shard with fewer rows
than tiles leaves the last tiles empty; empty tiles are not communicated.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.paper.tiles import Site, sites, tile_layout, tile_pair
from hf_helix.operators.base import Communication, Computation, OperatorContext, TensorOperator, Tensors, TransferFn
from hf_helix.operators.communication.collectives import AllGather, ReduceScatter
from hf_helix.operators.units.rows import shared_gradients, with_adders
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.rules.registry import baseline_plan
from hf_helix.planning.window.layout import Layout
from hf_helix.runtime.rank_units import RankUnits
from hf_helix.runtime.runner import Runner


def in_tiles(runner: Runner, tiles: int, make_plan: Callable[[Layout], Plan] | None = None) -> Runner:
    """Returns a runner of the same parameters whose units are in tiles.

    Args:
        runner: of whole units.
        tiles: how many; the baseline has one for each rank of a collective.
        make_plan: makes the plan of the tiled layout; None for `sequential`.
    """
    tiled = tile_units(runner.rank_units, tiles)
    plan = make_plan(tiled.layout) if make_plan else _one_strand(runner, tiled.layout)
    return runner.of_units(tiled, plan)


def _one_strand(runner: Runner, layout: Layout) -> Plan:
    return baseline_plan(layout, model=runner.plan.model, mesh=runner.plan.mesh)


def tile_unit(unit: Unit, tiles: int) -> Unit:
    """Returns the unit with its collectives and their linears cut into tiles along the sequence.

    Raises:
        ValueError: fewer than one tile, or a collective next to a linear is neither an `AllGather` nor a
            `ReduceScatter`.
    """
    forward = unit.graphs.forward
    graphs = tile_pair(unit.graphs, tiles)
    if graphs is unit.graphs:
        return unit
    operators = dict(unit.operators)
    for site in sites(forward):
        operators |= _operators(unit, site, tiles)
        del operators[site.first.name], operators[site.second.name]
    return replace(unit, graphs=graphs, operators=operators)


class Cut(Computation):
    """A value of `blocks` * n rows to tiles: the t-th holds the t-th part of every block."""

    has_saved_state = False

    def __init__(self, blocks: int, tiles: int) -> None:
        self.blocks = blocks
        self.tiles = tiles

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        return cut_rows(inputs[0], self.blocks, self.tiles)

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        return (join_rows(gradients, self.blocks),)


class Join(Computation):
    """Tiles back to values, the reverse of `Cut`. The inputs are every value's first tile, then every value's
    second."""

    has_saved_state = False

    def __init__(self, blocks: int, tiles: int) -> None:
        self.blocks = blocks
        self.tiles = tiles

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        num_values = len(inputs) // self.tiles
        return tuple(join_rows(inputs[place::num_values], self.blocks) for place in range(num_values))

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        cut = (cut_rows(gradient, self.blocks, self.tiles) for gradient in gradients)
        return tuple(piece for tile in zip(*cut, strict=True) for piece in tile)


class TileTransfer(Communication):
    """A collective for tiles; an empty tile is not communicated. Shards have equal lengths on all ranks."""

    def __init__(self, collective: Communication) -> None:
        self.collective = collective

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        (value,) = inputs
        if value.shape[0] == 0:
            return (torch.empty_like(value),), lambda: None
        return self.collective.prepare(ctx, part, value)


def cut_rows(value: Tensor, blocks: int, tiles: int) -> Tensors:
    """Returns tiles as even as possible, the longer tiles first; views if there is one block.

    Args:
        value: [rows, ...].
    """
    by_block = value.unflatten(0, (blocks, value.shape[0] // blocks))
    return tuple(piece.flatten(0, 1) for piece in by_block.tensor_split(tiles, dim=1))


def join_rows(pieces: Sequence[Tensor], blocks: int) -> Tensor:
    """Returns the value that `cut_rows` cut."""
    by_block = [piece.unflatten(0, (blocks, piece.shape[0] // blocks)) for piece in pieces]
    return torch.cat(by_block, dim=1).flatten(0, 1)


def _operators(unit: Unit, site: Site, tiles: int) -> dict[str, TensorOperator]:
    """Returns the operators for the pieces of a site."""
    first, second = unit.operators[site.first.name], unit.operators[site.second.name]
    collective, wanted = (first, AllGather) if site.gathers else (second, ReduceScatter)
    if not isinstance(collective, wanted):
        name = (site.first if site.gathers else site.second).name
        raise ValueError(
            f"{unit.label}: {name!r} is of class {type(collective).__name__} where tiles need {wanted.__name__}; "
            "leave out tiles, or teach benchmarks.paper.tiled_units how its rows lie"
        )
    size = collective.axis.size
    # The full sequence lies between a gather and a scatter.
    cut, join = (Cut(1, tiles), Join(size, tiles)) if site.gathers else (Cut(size, tiles), Join(1, tiles))
    operators: dict[str, TensorOperator] = {site.cut: cut, site.join: join}
    for op, operator in ((site.first, first), (site.second, second)):
        shared = TileTransfer(operator) if isinstance(operator, Communication) else operator
        operators |= {f"{op.name}.{tile}": shared for tile in range(tiles)}
    return operators


def tile_units(rank_units: RankUnits, tiles: int) -> RankUnits:
    """Returns the units with collectives and their linears cut into tiles."""
    model = {index: tile_unit(unit, tiles) for index, unit in rank_units.all_units.items()}
    rows = with_adders(rank_units.rows, model)
    return replace(
        rank_units,
        all_units=model,
        rows=rows,
        layout=replace(tile_layout(rank_units.layout, tiles), shared=shared_gradients(rows.values())),
    )
