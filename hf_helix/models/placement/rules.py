"""What every rule of placement needs: the placements found so far, and the ways to decide something and begin anew.

In:   a trace, the placement of the value that enters it, and the decisions of earlier rounds.
Out:  placements of operands, joined or moved; a decision, which ends the round by `Again`.
Must hold: a decision is never taken back within the same demotions, so that inference ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch.fx import Node

from hf_helix.models.placement.placed import (
    FREE,
    PARTIAL,
    SHARD,
    TOKENS,
    WHOLE,
    Again,
    Decisions,
    ValuePlacement,
    arguments_of_slice,
    as_list,
    bounds_of_slice,
    dim_of,
    edges_of,
    is_sum,
    name_of,
    tensors_of,
)
from hf_helix.models.trace.leaves import ATTENTION, LINEAR
from hf_helix.models.trace.trace import SEQUENCE, ModuleTrace, Underivable, args_of


class Rules:
    """The state of an inference, and what its rules share.

    Args:
        trace: the trace.
        tp_size: the number of tensor-parallel ranks.
        hidden: the placement of the value that enters.
    """

    def __init__(self, trace: ModuleTrace, tp_size: int, hidden: ValuePlacement) -> None:
        self.trace = trace
        self.tp_size = tp_size
        self.hidden = hidden
        self.decisions = Decisions()
        self.placed: dict[Node, ValuePlacement] = {}

    def _of(self, value: Any) -> ValuePlacement:
        return self.placed[value]

    def _leaf(self, node: Node) -> Any:
        return self.trace.leaf(node)

    def _dims(self, value: Any) -> int:
        return len(self.trace.shape(value))

    def _origins(self, operands: Iterable[Node]) -> frozenset[str]:
        return frozenset().union(*(self._of(value).origins for value in operands))

    def _moved(self, given: ValuePlacement, places: dict[int, int]) -> ValuePlacement:
        dim = None if given.dim is None else places[given.dim]
        is_same = given.expanded is not None and places[given.expanded[1]] == given.expanded[1]
        return replace(given, dim=dim, is_direct=False, expanded=given.expanded if is_same else None)

    def _join(self, operands: Sequence[Node]) -> str:
        """Returns where a computation of several values takes place."""
        places = {self._of(value).where for value in operands}
        if places <= {FREE}:
            return FREE
        # What is free and has a place for every token, such as a rope, is that of the whole sequence.
        of_all = any(self._of(value).where == FREE and SEQUENCE in self.trace.shape(value) for value in operands)
        return WHOLE if WHOLE in places or of_all else SHARD

    def _cut(self, value: Node) -> None:
        if value not in self.decisions.cut:
            self.decisions.cut[value] = None
            raise Again

    def _demote(self, origins: Iterable[str], node: Node) -> NoReturn:
        new = set(origins) - self.decisions.demoted
        if not new:
            where = self.trace.path(node)
            raise Underivable(f"{name_of(node)} in {where or 'the layer'} cannot be computed on cut values")
        self.decisions.demoted |= new
        self.decisions.cut.clear()  # what was decided for shares that are none now is decided anew
        self.decisions.shortened.clear()
        raise Again

    def _feeds_attention(self, node: Node) -> bool:
        """Returns whether what comes of a value reaches attention before any other linear."""
        waiting, seen = list(node.users), set()
        while waiting:
            user = waiting.pop()
            leaf = self.trace.leaf(user)
            if leaf is not None and leaf.kind == LINEAR:
                return False
            if leaf is not None and leaf.kind == ATTENTION:
                continue
            if user not in seen:
                seen.add(user)
                waiting += user.users
        return True

    def _refuse_mixing(self, node: Node) -> NoReturn:
        where = self.trace.path(node) or "the layer"
        raise Underivable(f"{name_of(node)} in {where} mixes tokens outside of attention")


# -- views ---------------------------------------------------------------------------------------------------------
# Placements of views: what becomes of the dimension that a rank has a share of, where values are viewed anew.
#
# In:   a view, a permutation, a slice or a split, and the placement of what it takes.
# Out:  the placement of what it gives.
# Must hold: a share stays whole blocks; a slice that would cut a block asks for a boundary there.


class ViewRules(Rules):
    """The rules of operations that give the elements that they take."""

    def _same(self, node: Node) -> ValuePlacement:
        return self._of(args_of(node)[0])

    def _view(self, node: Node) -> ValuePlacement:
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

    def _permute(self, node: Node) -> ValuePlacement:
        given = self._of(args_of(node)[0])
        dims = self._dims(node)
        if name_of(node) == "permute":
            order = [dim % dims for dim in args_of(node)[1]]
        else:
            order = list(range(dims))
            a, b = (-2, -1) if len(args_of(node)) < 3 else args_of(node)[1:3]
            order[a], order[b] = order[b], order[a]
        return self._moved(given, {old: new for new, old in enumerate(order)})

    def _unsqueeze(self, node: Node) -> ValuePlacement:
        place = args_of(node)[1] % self._dims(node)
        given = self._of(args_of(node)[0])
        return self._moved(given, {dim: dim + (dim >= place) for dim in range(self._dims(args_of(node)[0]))})

    def _squeeze(self, node: Node) -> ValuePlacement:
        value, *over = args_of(node)
        dims = self._dims(value)
        asked = {dim % dims for dim in (as_list(over[0]) if over else range(dims))}
        gone = {dim for dim in asked if self.trace.shape(value)[dim] == 1}
        return self._moved(self._of(value), {d: d - sum(g < d for g in gone) for d in range(dims)})

    def _select(self, node: Node) -> ValuePlacement:
        given, gone = self._of(args_of(node)[0]), args_of(node)[1] % self._dims(args_of(node)[0])
        if given.dim == gone:
            self._demote(given.origins, node)
        return self._moved(given, {d: d - (d > gone) for d in range(self._dims(args_of(node)[0]))})

    def _expand(self, node: Node) -> ValuePlacement:
        given = self._of(args_of(node)[0])
        before, after = self.trace.shape(args_of(node)[0]), self.trace.shape(node)
        shift = len(after) - len(before)
        for place, size in enumerate(after):
            old = 1 if place < shift else before[place - shift]
            if old == 1 and size > 1 and (node, place) in self.decisions.shortened:
                return ValuePlacement(given.where, place, (size,), given.origins)
        dim = None if given.dim is None else given.dim + shift
        grown = [p for p, size in enumerate(after) if size > 1 and (p < shift or before[p - shift] == 1)]
        expanded = (node, grown[0]) if len(grown) == 1 and dim is None else None
        return replace(given, dim=dim, is_direct=False, expanded=expanded)

    def _slice(self, node: Node) -> ValuePlacement:
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

    def _split(self, node: Node) -> ValuePlacement:
        return replace(self._of(args_of(node)[0]), expanded=None)

    def _getitem(self, node: Node) -> ValuePlacement:
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

    def _parts(self, node: Node, given: ValuePlacement, parts: Sequence[tuple[int, int]]) -> list[ValuePlacement]:
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


# -- arithmetic ----------------------------------------------------------------------------------------------------
# Placements of arithmetic: element by element, over a dimension, joined, or multiplied.
#
# In:   an operation of glue, and the placements of what it takes.
# Out:  the placement of what it gives.
# Must hold: an operand that is whole meets a share only where this rank's part of it is known: a parameter that is
# cut
# with the heads, or an entry that is repeated for this rank's share only.


SAME = (
    "clone",
    "contiguous",
    "detach",
    "alias",
    "to",
    "_to_copy",
    "type_as",
    "lift_fresh_copy",
    "float",
    "view_as_complex",
    "view_as_real",
)
"""What leaves every dimension that a rank may have a share of; parts of complex numbers lie along the last one."""

MIXING = ("conv", "roll", "flip", "fft", "stft", "scaled_dot_product", "flex_attention", "cumprod", "logcumsumexp")
"""The beginnings of names of operations that, as models use them, mix tokens."""


class ArithmeticRules(Rules):
    """The rules of operations that compute."""

    def _pointwise(self, node: Node) -> ValuePlacement:
        operands = tensors_of(node)
        dims = self._dims(node)
        shares = [(value, self._of(value)) for value in operands if self._of(value).dim is not None]
        if not shares and is_sum(self.trace, node) and all(self._of(value).where == PARTIAL for value in operands):
            return ValuePlacement(PARTIAL, origins=self._origins(operands))
        where = self._join(operands)
        if not shares:
            return ValuePlacement(where, origins=self._origins(operands))
        first, share = shares[0]
        place = dims - self._dims(first) + dim_of(share)
        blocks = share.blocks
        for value, other in shares[1:]:
            if dims - self._dims(value) + dim_of(other) != place or other.blocks != blocks:
                self._demote(share.origins | other.origins, node)
        for value in operands:
            if self._of(value).dim is None:
                self._fit(node, value, place - dims + self._dims(value), share)
        is_direct = all(other.is_direct for _, other in shares) and len(shares) == 1
        return ValuePlacement(where, place, blocks, self._origins(operands), is_direct)

    def _fit(self, node: Node, value: Node, dim: int, share: ValuePlacement) -> None:
        """Makes an operand that is whole along a dimension meet one of which a rank has a share."""
        if dim < 0 or self.trace.shape(value)[dim] == 1:
            return
        source, place = self._parameter_of(value, dim)
        if source is not None and place == 0 and len(share.blocks) == 1:
            self._cut(source)
            raise Again
        expanded = self._of(value).expanded
        if expanded is not None and expanded[1] == dim:
            self.decisions.shortened.add(expanded)
            raise Again
        self._demote(share.origins, node)

    def _parameter_of(self, value: Node, dim: int) -> tuple[Node | None, int]:
        """Returns the parameter that a value shows, and which of its dimensions one of the value is; else None."""
        while value.op == "call_function":
            if name_of(value) == "unsqueeze":
                dim -= args_of(value)[1] % self._dims(value) < dim
            elif name_of(value) not in SAME:
                break
            value = args_of(value)[0]
        return (value if value in self.trace.attributes else None), dim

    def _cat(self, node: Node) -> ValuePlacement:
        operands = tensors_of(node)
        dim = (args_of(node)[1] if len(args_of(node)) > 1 else 0) % self._dims(node)
        shares = [self._of(value) for value in operands if self._of(value).dim is not None]
        where = self._join(operands)
        if not shares:
            return ValuePlacement(where, origins=self._origins(operands))
        share = shares[0]
        is_stack = name_of(node) == "stack"
        if (not is_stack and share.dim == dim) or any((s.dim, s.blocks) != (share.dim, share.blocks) for s in shares):
            self._demote(self._origins(operands), node)
        for value in operands:
            if self._of(value).dim is None:
                self._fit(node, value, dim_of(share), share)
        place = dim_of(share) + (is_stack and dim <= dim_of(share))
        return ValuePlacement(where, place, share.blocks, self._origins(operands))

    def _reduce(self, node: Node) -> ValuePlacement:
        given = self._of(args_of(node)[0])
        where = self._join(tensors_of(node))
        dims = self._dims(args_of(node)[0])
        place = 2 if name_of(node) == "topk" else 1
        default = -1 if name_of(node) in ("topk", "sort") else list(range(dims))
        over = args_of(node)[place] if len(args_of(node)) > place else default
        reduced = {dim % dims for dim in as_list(over)}
        if where != FREE and any(self.trace.shape(args_of(node)[0])[dim] in TOKENS for dim in reduced):
            self._refuse_mixing(node)
        if given.dim is None:
            return ValuePlacement(where, origins=given.origins)
        if given.dim in reduced:
            if (
                name_of(node) == "mean"
                and reduced == {given.dim}
                and self._dims(node) == dims
                and len(given.blocks) == 1
            ):
                return ValuePlacement(WHOLE, origins=given.origins, is_summand=True)
            self._demote(given.origins, node)
        value = node.meta["val"]
        first = value[0] if isinstance(value, (tuple, list)) else value
        lost = 0 if first.dim() == dims else sum(dim < given.dim for dim in reduced)
        return replace(given, where=where, dim=given.dim - lost, is_direct=False, expanded=None)

    def _matmul(self, node: Node) -> ValuePlacement:
        left, right = (self._of(value) for value in args_of(node)[:2])
        where = self._join(tensors_of(node))
        if left.dim is None and right.dim is None:
            return ValuePlacement(where, origins=left.origins | right.origins)
        dims = self._dims(node)
        same = self._dims(args_of(node)[0]) == self._dims(args_of(node)[1]) == dims
        if same and left.dim == right.dim and left.blocks == right.blocks and dim_of(left) < dims - 2:
            return replace(left, where=where, is_direct=False, expanded=None)
        self._demote(left.origins | right.origins, node)

    def _rope(self, node: Node) -> ValuePlacement:
        """Queries and keys, each with its own share of heads: `_getitem` takes them apart."""
        q, k, cos, sin = operands = args_of(node)
        for value in operands:
            given = self._of(value)
            if given.dim is not None and (given.dim != 1 or value in (cos, sin)):
                self._demote(given.origins, node)
        return ValuePlacement(self._join(operands), origins=self._origins((q, k)))

    def _unknown(self, node: Node) -> ValuePlacement:
        operands = tensors_of(node)
        if name_of(node).startswith(MIXING) and any(self._of(value).where != FREE for value in operands):
            self._refuse_mixing(node)
        origins = frozenset().union(*(self._of(v).origins for v in operands if self._of(v).dim is not None))
        if any(self._of(value).dim is not None for value in operands):
            self._demote(origins, node)
        return ValuePlacement(self._join(operands) if operands else FREE, origins=self._origins(operands))
