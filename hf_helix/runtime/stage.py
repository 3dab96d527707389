"""Stages: what a rank holds of the model.

In:   every unit of the model in forward order, and the rank's place in the pipeline.
Out:  the units of each of the rank's chunks, by virtual stage.
Must hold: one copy of the parameters serves both strands; the units of a stage are in forward order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hf_helix.operators.tiling import tile_unit
from hf_helix.operators.unit import Placement, Unit
from hf_helix.planning.fold import chunks_of_rank, fold_layers
from hf_helix.planning.graph import GraphPair, Part
from hf_helix.planning.window import Layout


@dataclass(frozen=True)
class Stage:
    """The chunks of one rank."""

    chunks: Mapping[int, Sequence[Unit]]

    @property
    def units(self) -> list[Unit]:
        return [unit for chunk in self.chunks.values() for unit in chunk]

    @property
    def layout(self) -> Layout:
        """The same by name, for planning."""
        numbered = iter(range(len(self.units)))
        chunks = {stage: [next(numbered) for _ in chunk] for stage, chunk in self.chunks.items()}
        return Layout([unit.name for unit in self.units], chunks, self.graphs, _shared(self.units))

    @property
    def graphs(self) -> dict[str, GraphPair]:
        """The graphs of the units by name; units of one name have one graph."""
        return {unit.name: unit.graphs for unit in self.units}

    @property
    def placements(self) -> dict[nn.Parameter, Placement]:
        """Every parameter of the rank, once."""
        return {parameter: placement for unit in self.units for parameter, placement in unit.placements.items()}

    def tiled(self, tiles: int) -> Stage:
        """The same with collectives and the linears beside them cut into tiles (`hf_helix.operators.tiling`)."""
        return Stage({stage: [tile_unit(unit, tiles) for unit in chunk] for stage, chunk in self.chunks.items()})


def fold_units(units: Sequence[Unit], pp_rank: int = 0, pp_size: int = 1) -> Stage:
    """The stage of a rank: the embedding goes with the first layers, the head with the last."""
    embedding, *layers, head = units
    ranges = fold_layers(len(layers), pp_size)
    chunks: dict[int, list[Unit]] = {}
    for stage in chunks_of_rank(pp_rank, pp_size):
        chunk = [layers[index] for index in ranges[stage]]
        if stage == 0:
            chunk.insert(0, embedding)
        if stage == len(ranges) - 1:
            chunk.append(head)
        chunks[stage] = chunk
    return Stage(chunks)


def _shared(units: Sequence[Unit]) -> list[list[tuple[int, str]]]:
    """The operators of backward that add to a gradient of several units, see `Layout.shared`."""
    users: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for index in reversed(range(len(units))):
        backward = units[index].graphs.backward
        for op in backward.operators:
            if op.part is not Part.I:
                for parameter in getattr(units[index].operators[op.of], "parameters", ()):
                    users.setdefault(parameter, []).append((index, op.name))
    return [found for found in users.values() if len({index for index, _ in found}) > 1]
