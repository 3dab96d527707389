"""Questions about the nodes of a trace: what an operation is called, what it takes, how its value is laid out.

In:   a node, and the trace that it belongs to.
Out:  names, operands, bounds of slices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from hf_helix.models.trace.trace import BATCH, SEQUENCE, ModuleTrace, Underivable, args_of, has_value, is_tensor


def is_canonical(trace: ModuleTrace, node: Node) -> bool:
    """Returns whether a value can lie between operators: its tokens come first, as batch and sequence or as one."""
    if not is_tensor(node):
        return False
    shape = trace.shape(node)
    return shape[:2] == (BATCH, SEQUENCE) or shape[:1] == (BATCH * SEQUENCE,)


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
