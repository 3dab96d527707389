"""Units by hand, without operators."""

from __future__ import annotations

from torch import nn

from hf_helix.operators.unit import Placement, Unit
from hf_helix.planning.graph.operator import Graph
from hf_helix.planning.graph.pair import GraphPair


def unit_of(placements: dict[nn.Parameter, Placement]) -> Unit:
    """Parameters without operators."""
    nothing = GraphPair.of(Graph("unit", (), (), ()))
    return Unit(label="unit", graphs=nothing, operators={}, placements=placements)
