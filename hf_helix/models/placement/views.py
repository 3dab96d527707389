"""Placements of views: what becomes of the dimension that a rank has a share of, where values are viewed anew.

In:   a view, a permutation, a slice or a split, and the placement of what it takes.
Out:  the placement of what it gives.
Must hold: a share stays whole blocks; a slice that would cut a block asks for a boundary there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from hf_helix.models.placement.nodes import (
    arguments_of_slice,
    as_list,
    bounds_of_slice,
    edges_of,
    name_of,
)
from hf_helix.models.placement.placed import Again, Placed
from hf_helix.models.placement.rules import Rules
from hf_helix.models.trace.trace import args_of


class ViewRules(Rules):
    """The rules of operations that give the elements that they take."""

    def _same(self, node: Node) -> Placed:
        return self._of(args_of(node)[0])

    def _view(self, node: Node) -> Placed:
        given = self._of(args_of(node)[0])
        if given.dim is None:
            return replace(given, expanded=None)
        if len(given.blocks) > 1:
            self._demote(given.origins, node)
        place = self._viewed(self.trace.shape(args_of(node)[0]), self.trace.shape(node), given.dim)
        if place is None:
            self._demote(given.origins, node)
        return replace(given, dim=place, blocks=(self.trace.shape(node)[place],), is_direct=False, expanded=None)

    def _viewed(self, before: Sequence[int], after: Sequence[int], dim: int) -> int | None:
        """Returns the dimension of a view that is cut as one before it is; None where there is none."""
        outer = math.prod(before[:dim])
        product = 1
        for place, size in enumerate(after):
            if product == outer and size > 1:
                inner = math.prod(before[dim:])
                if inner % size:
                    return None
                whole = before[dim]
                # A rank's heads are those of its features only if both divide.
                divides = size == whole or not (size % self.tp_size or whole % self.tp_size)
                return place if divides and (size % whole == 0 or whole % size == 0) else None
            product *= size
        return None

    def _permute(self, node: Node) -> Placed:
        given = self._of(args_of(node)[0])
        dims = self._dims(node)
        if name_of(node) == "permute":
            order = [dim % dims for dim in args_of(node)[1]]
        else:
            order = list(range(dims))
            a, b = (-2, -1) if len(args_of(node)) < 3 else args_of(node)[1:3]
            order[a], order[b] = order[b], order[a]
        return self._moved(given, {old: new for new, old in enumerate(order)})

    def _unsqueeze(self, node: Node) -> Placed:
        place = args_of(node)[1] % self._dims(node)
        given = self._of(args_of(node)[0])
        return self._moved(given, {dim: dim + (dim >= place) for dim in range(self._dims(args_of(node)[0]))})

    def _squeeze(self, node: Node) -> Placed:
        value, *over = args_of(node)
        dims = self._dims(value)
        asked = {dim % dims for dim in (as_list(over[0]) if over else range(dims))}
        gone = {dim for dim in asked if self.trace.shape(value)[dim] == 1}
        return self._moved(self._of(value), {d: d - sum(g < d for g in gone) for d in range(dims)})

    def _select(self, node: Node) -> Placed:
        given, gone = self._of(args_of(node)[0]), args_of(node)[1] % self._dims(args_of(node)[0])
        if given.dim == gone:
            self._demote(given.origins, node)
        return self._moved(given, {d: d - (d > gone) for d in range(self._dims(args_of(node)[0]))})

    def _expand(self, node: Node) -> Placed:
        given = self._of(args_of(node)[0])
        before, after = self.trace.shape(args_of(node)[0]), self.trace.shape(node)
        shift = len(after) - len(before)
        for place, size in enumerate(after):
            old = 1 if place < shift else before[place - shift]
            if old == 1 and size > 1 and (node, place) in self.decisions.shortened:
                return Placed(given.where, place, (size,), given.origins)
        dim = None if given.dim is None else given.dim + shift
        grown = [p for p, size in enumerate(after) if size > 1 and (p < shift or before[p - shift] == 1)]
        expanded = (node, grown[0]) if len(grown) == 1 and dim is None else None
        return replace(given, dim=dim, is_direct=False, expanded=expanded)

    def _slice(self, node: Node) -> Placed:
        value = args_of(node)[0]
        dim, *_, step = arguments_of_slice(node)
        given, length = self._of(value), self.trace.shape(value)[dim]
        if given.dim is None or given.dim != dim % self._dims(value):
            return replace(given, expanded=None) if given.dim is not None else given
        first, last = bounds_of_slice(node, length)
        if (first, last, step) == (0, length, 1):
            return given
        if step != 1:
            self._demote(given.origins, node)
        return self._parts(node, given, [(first, last)])[0]

    def _split(self, node: Node) -> Placed:
        return replace(self._of(args_of(node)[0]), expanded=None)

    def _getitem(self, node: Node) -> Placed:
        source: Any = args_of(node)[0]
        given = self._of(source)
        if name_of(source) == "rope":
            heads = self._of(args_of(source)[args_of(node)[1]])
            return replace(heads, where=given.where, is_direct=False, expanded=None)
        if given.dim is None or name_of(source) not in ("split", "split_with_sizes", "chunk", "unbind"):
            return given
        if name_of(source) == "unbind":
            gone = (args_of(source)[1] if len(args_of(source)) > 1 else 0) % (self._dims(node) + 1)
            if gone == given.dim:
                self._demote(given.origins, node)
            return self._moved(given, {d: d - (d > gone) for d in range(self._dims(node) + 1)})
        dim = (args_of(source)[2] if len(args_of(source)) > 2 else 0) % self._dims(node)
        if dim != given.dim:
            return given
        lengths = [self.trace.number(v.shape[dim]) for v in source.meta["val"]]
        parts = self._parts(source, given, list(itertools.pairwise(edges_of(lengths))))
        return parts[args_of(node)[1]]

    def _parts(self, node: Node, given: Placed, parts: Sequence[tuple[int, int]]) -> list[Placed]:
        """Returns the placements of parts of a dimension that is cut: of whole blocks each."""
        edges = edges_of(given.blocks)
        wanted = {edge for part in parts for edge in part}
        if not wanted <= set(edges):
            if not given.is_direct or len(given.origins) != 1:
                self._demote(given.origins, node)
            (origin,) = given.origins
            self.decisions.boundaries.setdefault(origin, set()).update(wanted)
            raise Again
        return [
            replace(given, blocks=given.blocks[edges.index(first) : edges.index(last)], is_direct=False)
            for first, last in parts
        ]
