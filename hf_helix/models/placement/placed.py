"""Placements: where a value is computed, and which of its dimensions a rank has a share of.

In:   nothing; these are the words of inference.
Out:  `ValuePlacement`, the placement of one value, and `Decisions`, what inference settles on the way.

    SHARD     this rank's part of the sequence
    WHOLE     the whole sequence: the same on every rank, or this rank's share of the heads or features
    PARTIAL   of the whole sequence, a part of a sum over the ranks
    FREE      does not depend on the batch: parameters, constants, and what a micro-batch brings for all layers

The gradient of a value that is WHOLE and not a share is a partial sum; that of a partial sum is whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from hf_helix.models.trace.trace import BATCH, SEQUENCE, ModuleTrace, Underivable, args_of, has_value, is_tensor

SHARD, WHOLE, PARTIAL, FREE = "shard", "whole", "partial", "free"

TOKENS = (SEQUENCE, BATCH * SEQUENCE)
"""The lengths of dimensions along which tokens lie."""

COLUMN, ROW, REPLICATED = "column", "row", "replicated"


@dataclass(frozen=True)
class ValuePlacement:
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


def where_reduced(placed: ValuePlacement) -> str:
    """Returns where a value is when it is next computed with: a partial sum is summed up first."""
    return SHARD if placed.where == PARTIAL else placed.where


def dim_of(placed: ValuePlacement) -> int:
    """Returns the dimension of a share."""
    assert placed.dim is not None
    return placed.dim


# -- nodes ---------------------------------------------------------------------------------------------------------
# Questions about the nodes of a trace: what an operation is called, what it takes, how its value is laid out.
#
# In:   a node, and the trace that it belongs to.
# Out:  names, operands, bounds of slices.


def is_canonical(trace: ModuleTrace, node: Node) -> bool:
    """Returns whether a value can lie between operators: its tokens come first, as batch and sequence or as one."""
    if not is_tensor(node):
        return False
    shape = trace.shape(node)
    return shape[:2] == (BATCH, SEQUENCE) or shape[:1] == (BATCH * SEQUENCE,)


def features_of(trace: ModuleTrace, node: Node) -> tuple[Any, ...]:
    """Returns the dimensions of a value that can lie between operators, without those of its tokens."""
    shape = trace.shape(node)
    return tuple(shape[2:] if shape[:2] == (BATCH, SEQUENCE) else shape[1:])


def is_sum(trace: ModuleTrace, node: Node) -> bool:
    """Returns whether a node is the plain sum of two values of its own shape."""
    if name_of(node) != "add" or node.kwargs or len(args_of(node)) != 2:
        return False
    return all(is_tensor(value) and trace.shape(value) == trace.shape(node) for value in args_of(node))


def name_of(node: Node) -> str:
    """Returns the name of an operation, without its overload."""
    target: Any = node.target
    return str(target.overloadpacket.__name__) if hasattr(target, "overloadpacket") else str(target.__name__)


def edges_of(lengths: Sequence[int]) -> list[int]:
    """Returns where pieces that lie side by side begin, and where the last one ends."""
    return [0, *itertools.accumulate(lengths)]


def tensors_of(node: Node) -> list[Node]:
    """Returns the tensors that an operation takes, those in lists, too."""
    tensors: list[Node] = []
    torch.fx.map_arg((args_of(node), node.kwargs), lambda value: tensors.append(value) if has_value(value) else None)
    return tensors


def arguments_of_slice(node: Node) -> tuple[int, Any, Any, int]:
    """Returns dimension, begin, end and step."""
    args = list(args_of(node)[1:])
    dim, first, last, step = args + [0, None, None, 1][len(args) :]
    return dim, first, last, step


def bounds_of_slice(node: Node, length: int) -> tuple[int, int]:
    """Returns where a slice of a dimension begins and ends."""
    _, first, last, _ = arguments_of_slice(node)
    return _bound(first, length, 0), _bound(last, length, length)


def as_list(value: Any) -> list[int]:
    """Returns dimensions, of which one may be given by itself, as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _bound(value: Any, length: int, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int):
        raise Underivable("a slice depends on the sizes of the batch")
    return min(length, value + length if value < 0 else value)
