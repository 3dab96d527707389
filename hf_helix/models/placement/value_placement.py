"""The placement of a traced value on tensor-parallel ranks, and questions about the nodes of a trace.

    SHARD     this rank's part of the sequence
    FULL      the full sequence: equal on every rank, or this rank's share of the heads or features
    PARTIAL   the full sequence, a partial sum that must be reduced over the ranks
    FREE      independent of the batch: parameters, constants, and the inputs that a micro-batch brings for all layers

Must hold: the gradient of a FULL value without a share is a partial sum; the gradient of a partial sum is full.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from hf_helix.models.trace.trace import BATCH, SEQUENCE, ModuleTrace, Underivable, args_of, has_value, is_tensor

SHARD, FULL, PARTIAL, FREE = "shard", "full", "partial", "free"

TOKENS = (SEQUENCE, BATCH * SEQUENCE)
"""The lengths of token dimensions."""

COLUMN, ROW, REPLICATED = "column", "row", "replicated"


@dataclass(frozen=True)
class ValuePlacement:
    """The placement of a value.

    Attributes:
        where: SHARD, FULL, PARTIAL or FREE.
        dim: the dimension of the rank's share; None for a value without a share.
        blocks: the lengths of the blocks along the dimension; each block is cut by itself.
        origins: the linears from which the share comes.
        start: the first output feature of the blocks in one linear; None if they are no longer output features of it.
        expanded: a node that repeats a single entry along a dimension, and the dimension.
        is_summand: whether the value is the rank's part of a mean over features, to be summed over the ranks.
    """

    where: str
    dim: int | None = None
    blocks: tuple[int, ...] = ()
    origins: frozenset[str] = frozenset()
    start: int | None = None
    expanded: tuple[Node, int] | None = None
    is_summand: bool = False

    @property
    def size(self) -> int:
        """The full length of the cut dimension."""
        return sum(self.blocks)


@dataclass
class PlacementDecisions:
    """The decisions of placement inference, round by round.

    Attributes:
        demoted: linears that run replicated on the sequence shard.
        boundaries: block boundaries of the outputs of linears.
        cut: parameters and buffers, by node, that are cut: the dimension, and the blocks along it.
        gathered: values of which every rank has a share of the features, and all ranks need all features.
        shortened: nodes that repeat an entry, and the dimension that has only the rank's length.
        styles: the parallel style of every linear (COLUMN, ROW or REPLICATED).
    """

    demoted: set[str] = field(default_factory=set)
    boundaries: dict[str, set[int]] = field(default_factory=dict)
    cut: dict[Node, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    gathered: set[Node] = field(default_factory=set)
    shortened: set[tuple[Node, int]] = field(default_factory=set)
    styles: dict[Node, str] = field(default_factory=dict)


class NeedsInlining(Exception):
    """Asks to trace through a norm over features of which a rank has only a share."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Restart(Exception):
    """Restarts inference after a decision."""


def where_reduced(placement: ValuePlacement) -> str:
    """Returns the placement of a value for its readers: partial sums are reduced and scattered first."""
    return SHARD if placement.where == PARTIAL else placement.where


def dim_of(placement: ValuePlacement) -> int:
    """Returns the dimension of a share."""
    assert placement.dim is not None
    return placement.dim


# -- nodes ---------------------------------------------------------------------------------------------------------


def is_canonical(trace: ModuleTrace, node: Node) -> bool:
    """Returns whether a value can lie between operators: tokens come first, as batch and sequence or flattened."""
    if not is_tensor(node):
        return False
    shape = trace.shape(node)
    return shape[:2] == (BATCH, SEQUENCE) or shape[:1] == (BATCH * SEQUENCE,)


def features_of(trace: ModuleTrace, node: Node) -> tuple[Any, ...]:
    """Returns the dimensions of a value that can lie between operators, without the dimensions of its tokens."""
    shape = trace.shape(node)
    return tuple(shape[2:] if shape[:2] == (BATCH, SEQUENCE) else shape[1:])


def is_sum(trace: ModuleTrace, node: Node) -> bool:
    """Returns whether a node is the plain sum of two values of the node's shape."""
    if name_of(node) != "add" or node.kwargs or len(args_of(node)) != 2:
        return False
    return all(is_tensor(value) and trace.shape(value) == trace.shape(node) for value in args_of(node))


def name_of(node: Node) -> str:
    """Returns the name of an operation, without its overload."""
    target: Any = node.target
    return str(target.overloadpacket.__name__) if hasattr(target, "overloadpacket") else str(target.__name__)


def edges_of(lengths: Sequence[int]) -> list[int]:
    """Returns the bounds of consecutive blocks, from 0 to the total length."""
    return [0, *itertools.accumulate(lengths)]


def tensors_of(node: Node) -> list[Node]:
    """Returns the tensor arguments of an operation, with tensors in lists."""
    tensors: list[Node] = []
    torch.fx.map_arg((args_of(node), node.kwargs), lambda value: tensors.append(value) if has_value(value) else None)
    return tensors


def argument(node: Node, name: str) -> Any:
    """Returns an argument of an operation of torch, given by place or by name, or its default; None if it has none."""
    target: Any = node.target
    for place, known in enumerate(target._schema.arguments):
        if known.name == name:
            by_place = args_of(node)[place] if place < len(args_of(node)) else known.default_value
            return node.kwargs.get(name, by_place)
    return None


def bounds_of_slice(node: Node, length: int) -> tuple[int, int]:
    """Returns begin and end of a slice, as indices of a dimension."""
    return _bound(argument(node, "start"), length, 0), _bound(argument(node, "end"), length, length)


def as_list(value: Any) -> list[int]:
    """Returns one or several dimensions as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _bound(value: Any, length: int, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int):
        raise Underivable("a slice depends on the sizes of the batch")
    return min(length, value + length if value < 0 else value)
