"""Units: what a rank holds of the model, in pieces that a plan can order.

In:   the declaration of a decoder layer, of the embedding or of the head (see `hf_helix.adapters`).
Out:  its forward graph, the backward graph derived from it, the operators that the graphs name, and how its
      parameters are cut.
Must hold: units of the same name have equal graphs, so one order serves them all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from hf_helix.operators.base import Communication, Computation, SplitComputation
from hf_helix.planning.graph import GraphPair

TensorOperator = Computation | SplitComputation | Communication


@dataclass(frozen=True)
class Placement:
    """How a parameter lies on the ranks of the tensor-parallel axis.

    Attributes:
        dim: the dimension along which it is cut; None for a copy on every rank.
        length: of that dimension in the whole parameter.
        sums_gradient: a copy whose gradient each rank sees only for its part of the sequence, to be summed.
    """

    dim: int | None = None
    length: int = 0
    sums_gradient: bool = False

    def bounds(self, size: int, rank: int) -> tuple[int, int]:
        """The slice that a rank holds."""
        return cut_bounds(self.length, size, rank)


CUT_ROWS = Placement(dim=0)
CUT_COLUMNS = Placement(dim=1)
COPIED = Placement()
COPIED_ON_SHARDS = Placement(sums_gradient=True)


def cut_bounds(length: int, size: int, rank: int) -> tuple[int, int]:
    """The slice of a dimension that a rank holds: as even as can be, the longer ones first."""
    short, extra = divmod(length, size)
    first = rank * short + min(rank, extra)
    return first, first + short + (rank < extra)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A decoder layer, the embedding or the head, bound to its modules.

    Attributes:
        label: where it stands in the model, such as "layers.3"; for messages and traces.
        graphs: forward and backward.
        operators: by their declared names.
        placements: each parameter with the way it is cut.
    """

    label: str
    graphs: GraphPair
    operators: Mapping[str, TensorOperator]
    placements: Mapping[torch.nn.Parameter, Placement]

    @property
    def name(self) -> str:
        return self.graphs.forward.name

    def without(self, names: Collection[str]) -> Unit:
        """The unit with less freedom for plans, see `GraphPair.without`."""
        return replace(self, graphs=self.graphs.without(names)) if names else self
