"""Placements: where a value is computed, and which of its dimensions a rank has a share of.

In:   nothing; these are the words of inference.
Out:  `Placed`, the placement of one value, and `Decisions`, what inference settles on the way.

    SHARD     this rank's part of the sequence
    WHOLE     the whole sequence: the same on every rank, or this rank's share of the heads or features
    PARTIAL   of the whole sequence, a part of a sum over the ranks
    FREE      does not depend on the batch: parameters, constants, and what a micro-batch brings for all layers

The gradient of a value that is WHOLE and not a share is a partial sum; that of a partial sum is whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from hf_helix.models.trace.trace import BATCH, SEQUENCE

SHARD, WHOLE, PARTIAL, FREE = "shard", "whole", "partial", "free"

TOKENS = (SEQUENCE, BATCH * SEQUENCE)
"""The lengths of dimensions along which tokens lie."""

COLUMN, ROW, REPLICATED = "column", "row", "replicated"


@dataclass(frozen=True)
class Placed:
    """The placement of a value.

    Attributes:
        where: SHARD, WHOLE, PARTIAL or FREE.
        dim: the dimension of which this rank has a share; None where it has all.
        blocks: the lengths of what lies side by side along that dimension and is cut each by itself.
        origins: the linears that the share comes from.
        is_direct: whether that dimension is the output features of one linear still.
        expanded: the node that repeated a single entry along a dimension, and that dimension.
        is_summand: whether this is this rank's part of a mean over features, to be summed over the ranks.
    """

    where: str
    dim: int | None = None
    blocks: tuple[int, ...] = ()
    origins: frozenset[str] = frozenset()
    is_direct: bool = False
    expanded: tuple[Node, int] | None = None
    is_summand: bool = False

    @property
    def size(self) -> int:
        """The whole length of the dimension that is cut."""
        return sum(self.blocks)


@dataclass
class Decisions:
    """What inference has settled, round by round.

    Attributes:
        demoted: the linears that run whole.
        boundaries: where the outputs of a linear are taken apart.
        cut: the parameters, by node, that are cut along their first dimension.
        shortened: the nodes that repeat an entry, and the dimension in which they do so for this rank's share only.
        ways: how every linear is cut.
    """

    demoted: set[str] = field(default_factory=set)
    boundaries: dict[str, set[int]] = field(default_factory=dict)
    cut: dict[Node, None] = field(default_factory=dict)
    shortened: set[tuple[Node, int]] = field(default_factory=set)
    ways: dict[Node, str] = field(default_factory=dict)


class NeedsInlining(Exception):
    """A norm over all features of which a rank has a share: it must be traced through."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Again(Exception):
    """Something was decided, and inference begins anew."""


def seq_of(placed: Placed) -> str:
    """Returns where a value is when it is next computed with: a partial sum is summed up first."""
    return SHARD if placed.where == PARTIAL else placed.where


def dim_of(placed: Placed) -> int:
    """Returns the dimension of a share."""
    assert placed.dim is not None
    return placed.dim
