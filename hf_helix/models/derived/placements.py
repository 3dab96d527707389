"""How the values of a trace lie on tensor-parallel ranks.

In:   the trace of a decoder layer, of the embedding or of the head.
Out:  the placement of every value, and what was decided for linears and parameters on the way.
Must hold: every linear is tried column-parallel first. Where what follows cannot be computed on a share of its outputs,
the linear that the share comes from is run whole, on this rank's part of the sequence, and inference begins anew; so it
ends, since every round decides something more.

    SHARD     this rank's part of the sequence
    WHOLE     the whole sequence: the same on every rank, or this rank's share of the heads or features
    PARTIAL   of the whole sequence, a part of a sum over the ranks
    FREE      does not depend on the batch: parameters, constants, and what a micro-batch brings for all layers

The gradient of a value that is WHOLE and not a share is a partial sum; that of a partial sum is whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch.fx import Node

from hf_helix.models.derived.leaves import (
    ATTENTION,
    DROPOUT,
    ELEMENTWISE,
    EXPERTS,
    LAYER,
    LINEAR,
    LOOKUP,
    NORM,
)
from hf_helix.models.derived.trace import BATCH, PLACES, SEQUENCE, Trace, Underivable, args_of, has_value, is_tensor

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


class _Again(Exception):
    """Something was decided, and inference begins anew."""


class Inference:
    """Infers the placements of a trace.

    Args:
        trace: the trace.
        tp_size: the number of tensor-parallel ranks.
        hidden: the placement of the value that enters.

    Attributes:
        placed: the placement of every tensor, by node.
        decisions: see `Decisions`.

    Raises:
        Underivable: the computation cannot be cut.
        NeedsInlining: a norm must be traced through first.
    """

    def __init__(self, trace: Trace, tp_size: int, hidden: Placed) -> None:
        self.trace = trace
        self.tp_size = tp_size
        self.hidden = hidden
        self.decisions = Decisions()
        self.placed: dict[Node, Placed] = {}
        while True:
            try:
                self._infer()
                return
            except _Again:
                self.placed.clear()
                self.decisions.ways.clear()

    def _infer(self) -> None:
        trace = self.trace
        self.placed[trace.hidden] = self.hidden
        for node in (*trace.attributes, *trace.constants, *trace.given):
            self.placed[node] = Placed(FREE)
        for node in self.decisions.cut:
            self.placed[node] = Placed(FREE, dim=0, blocks=(trace.shape(node)[0],))
        for node, name in trace.given.items():
            if name == PLACES:
                self.placed[node] = Placed(SHARD)
        for node in trace.nodes:
            if has_value(node):
                self.placed[node] = self._place(node)
        self._gather_early()

    def _gather_early(self) -> None:
        """Lets what cannot lie between operators be computed where it is used: what it comes from is gathered."""
        for node in reversed(self.trace.nodes):
            placed = self.placed.get(node)
            if placed is None or placed.where != SHARD or self.trace.leaf(node) or is_canonical(self.trace, node):
                continue
            if any(user in self.placed and self.placed[user].where == WHOLE for user in node.users):
                self.placed[node] = replace(placed, where=WHOLE)

    # -- one node ------------------------------------------------------------------------------------------------

    def _place(self, node: Node) -> Placed:
        leaf = self.trace.leaf(node)
        if leaf is not None:
            return self._OF_LEAVES[leaf.kind](self, node)
        rule = _RULES.get(name_of(node))
        if rule is not None:
            return rule(self, node)
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        return self._pointwise(node) if is_pointwise else self._unknown(node)

    def _linear(self, node: Node) -> Placed:
        leaf, given = self._leaf(node), self._of(args_of(node)[0])
        ways = self.decisions.ways
        if leaf.path in self.decisions.demoted:
            if given.dim is not None:
                self._demote(given.origins, node)
            ways[node] = REPLICATED
            return Placed(_seq(given))
        if given.dim is not None:
            if given.dim != self._dims(args_of(node)[0]) - 1 or len(given.blocks) > 1:
                self._demote(given.origins, node)
            ways[node] = ROW
            return Placed(PARTIAL, origins=given.origins)
        ways[node] = COLUMN
        features = self.trace.shape(node)[-1]
        if features < self.tp_size:
            self._demote({leaf.path}, node)
        edges = sorted({0, features, *self.decisions.boundaries.get(leaf.path, ())})
        blocks = tuple(last - first for first, last in itertools.pairwise(edges))
        return Placed(WHOLE, dim=self._dims(node) - 1, blocks=blocks, origins=frozenset({leaf.path}), is_direct=True)

    def _norm(self, node: Node) -> Placed:
        given = self._of(args_of(node)[0])
        if given.dim is not None and given.dim == self._dims(node) - 1:
            if self._feeds_attention(node):
                raise NeedsInlining(self._leaf(node).path)
            self._demote(given.origins, node)
        return replace(given, where=_seq(given), is_direct=False, expanded=None)

    def _elementwise(self, node: Node) -> Placed:
        given = self._of(args_of(node)[0])
        return replace(given, where=_seq(given), expanded=None)

    def _attention(self, node: Node) -> Placed:
        q, k, v, more = args_of(node)[:4]
        heads = [self._of(value) for value in (q, k, v)]
        shares = [value for value in heads if value.dim is not None]
        if not shares and self.tp_size == 1:  # a single head of keys, for one
            return Placed(WHOLE, dim=2, blocks=(self.trace.shape(q)[1],))
        if not shares:
            raise Underivable("no projection of its attention can be cut by heads")
        if any(value.dim != 1 or len(value.blocks) > 1 for value in heads):
            self._demote(frozenset().union(*(value.origins for value in shares)), node)
        for value in more:
            if value not in self.trace.attributes or self.trace.shape(value)[0] != heads[0].size:
                raise Underivable("its attention takes a tensor that is not a parameter of its heads")
            self._cut(value)
        return Placed(WHOLE, dim=2, blocks=heads[0].blocks, origins=frozenset().union(*(h.origins for h in heads)))

    def _experts(self, node: Node) -> Placed:
        for value in args_of(node)[:3]:
            given = self._of(value)
            if given.dim is not None:
                self._demote(given.origins, node)
            if _seq(given) != SHARD:
                raise Underivable("its experts read values of the whole sequence")
        return Placed(SHARD)

    def _layer(self, node: Node) -> Placed:
        given = self._of(args_of(node)[0])
        if given.dim is not None:
            self._demote(given.origins, node)
        return Placed(SHARD)

    def _lookup(self, node: Node) -> Placed:
        return Placed(PARTIAL)

    # -- glue ----------------------------------------------------------------------------------------------------

    def _pointwise(self, node: Node) -> Placed:
        operands = _tensors(node)
        dims = self._dims(node)
        shares = [(value, self._of(value)) for value in operands if self._of(value).dim is not None]
        if not shares and is_sum(self.trace, node) and all(self._of(value).where == PARTIAL for value in operands):
            return Placed(PARTIAL, origins=self._origins(operands))
        where = self._join(operands)
        if not shares:
            return Placed(where, origins=self._origins(operands))
        first, share = shares[0]
        place = dims - self._dims(first) + _dim(share)
        blocks = share.blocks
        for value, other in shares[1:]:
            if dims - self._dims(value) + _dim(other) != place or other.blocks != blocks:
                self._demote(share.origins | other.origins, node)
        for value in operands:
            if self._of(value).dim is None:
                self._fit(node, value, place - dims + self._dims(value), share)
        is_direct = all(other.is_direct for _, other in shares) and len(shares) == 1
        return Placed(where, place, blocks, self._origins(operands), is_direct)

    def _fit(self, node: Node, value: Node, dim: int, share: Placed) -> None:
        """Makes an operand that is whole along a dimension meet one of which a rank has a share."""
        if dim < 0 or self.trace.shape(value)[dim] == 1:
            return
        source, place = self._parameter_of(value, dim)
        if source is not None and place == 0 and len(share.blocks) == 1:
            self._cut(source)
            raise _Again
        expanded = self._of(value).expanded
        if expanded is not None and expanded[1] == dim:
            self.decisions.shortened.add(expanded)
            raise _Again
        self._demote(share.origins, node)

    def _parameter_of(self, value: Node, dim: int) -> tuple[Node | None, int]:
        """Returns the parameter that a value shows, and which of its dimensions one of the value is; else None."""
        while value.op == "call_function":
            if name_of(value) == "unsqueeze":
                dim -= args_of(value)[1] % self._dims(value) < dim
            elif name_of(value) not in _SAME:
                break
            value = args_of(value)[0]
        return (value if value in self.trace.attributes else None), dim

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
                return place if size % whole == 0 or whole % size == 0 else None
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
        asked = {dim % dims for dim in (_as_list(over[0]) if over else range(dims))}
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
            raise _Again
        return [
            replace(given, blocks=given.blocks[edges.index(first) : edges.index(last)], is_direct=False)
            for first, last in parts
        ]

    def _cat(self, node: Node) -> Placed:
        operands = _tensors(node)
        dim = (args_of(node)[1] if len(args_of(node)) > 1 else 0) % self._dims(node)
        shares = [self._of(value) for value in operands if self._of(value).dim is not None]
        where = self._join(operands)
        if not shares:
            return Placed(where, origins=self._origins(operands))
        share = shares[0]
        is_stack = name_of(node) == "stack"
        if (not is_stack and share.dim == dim) or any((s.dim, s.blocks) != (share.dim, share.blocks) for s in shares):
            self._demote(self._origins(operands), node)
        for value in operands:
            if self._of(value).dim is None:
                self._fit(node, value, _dim(share), share)
        place = _dim(share) + (is_stack and dim <= _dim(share))
        return Placed(where, place, share.blocks, self._origins(operands))

    def _reduce(self, node: Node) -> Placed:
        given = self._of(args_of(node)[0])
        where = self._join(_tensors(node))
        dims = self._dims(args_of(node)[0])
        place = 2 if name_of(node) == "topk" else 1
        over = args_of(node)[place] if len(args_of(node)) > place else -1 if place == 2 else list(range(dims))
        reduced = {dim % dims for dim in _as_list(over)}
        if where != FREE and any(self.trace.shape(args_of(node)[0])[dim] in TOKENS for dim in reduced):
            self._refuse_mixing(node)
        if given.dim is None:
            return Placed(where, origins=given.origins)
        if given.dim in reduced:
            if (
                name_of(node) == "mean"
                and reduced == {given.dim}
                and self._dims(node) == dims
                and len(given.blocks) == 1
            ):
                return Placed(WHOLE, origins=given.origins, is_summand=True)
            self._demote(given.origins, node)
        value = node.meta["val"]
        first = value[0] if isinstance(value, (tuple, list)) else value
        lost = 0 if first.dim() == dims else sum(dim < given.dim for dim in reduced)
        return replace(given, where=where, dim=given.dim - lost, is_direct=False, expanded=None)

    def _matmul(self, node: Node) -> Placed:
        left, right = (self._of(value) for value in args_of(node)[:2])
        where = self._join(_tensors(node))
        if left.dim is None and right.dim is None:
            return Placed(where, origins=left.origins | right.origins)
        dims = self._dims(node)
        same = self._dims(args_of(node)[0]) == self._dims(args_of(node)[1]) == dims
        if same and left.dim == right.dim and left.blocks == right.blocks and _dim(left) < dims - 2:
            return replace(left, where=where, is_direct=False, expanded=None)
        self._demote(left.origins | right.origins, node)

    def _refuse_mixing(self, node: Node) -> NoReturn:
        where = self.trace.path(node) or "the layer"
        raise Underivable(f"{name_of(node)} in {where} mixes tokens outside of attention")

    def _unknown(self, node: Node) -> Placed:
        operands = _tensors(node)
        if name_of(node).startswith(_MIXING) and any(self._of(value).where != FREE for value in operands):
            self._refuse_mixing(node)
        origins = frozenset().union(*(self._of(v).origins for v in operands if self._of(v).dim is not None))
        if any(self._of(value).dim is not None for value in operands):
            self._demote(origins, node)
        return Placed(self._join(operands) if operands else FREE, origins=self._origins(operands))

    # -- helpers -------------------------------------------------------------------------------------------------

    def _of(self, value: Any) -> Placed:
        return self.placed[value]

    def _leaf(self, node: Node) -> Any:
        return self.trace.leaf(node)

    def _dims(self, value: Any) -> int:
        return len(self.trace.shape(value))

    def _origins(self, operands: Iterable[Node]) -> frozenset[str]:
        return frozenset().union(*(self._of(value).origins for value in operands))

    def _moved(self, given: Placed, places: dict[int, int]) -> Placed:
        dim = None if given.dim is None else places[given.dim]
        is_same = given.expanded is not None and places[given.expanded[1]] == given.expanded[1]
        return replace(given, dim=dim, is_direct=False, expanded=given.expanded if is_same else None)

    def _join(self, operands: Sequence[Node]) -> str:
        """Returns where a computation of several values takes place."""
        found = {self._of(value).where for value in operands}
        if found <= {FREE}:
            return FREE
        # What is free and has a place for every token, such as a rope, is that of the whole sequence.
        of_all = any(self._of(value).where == FREE and SEQUENCE in self.trace.shape(value) for value in operands)
        return WHOLE if WHOLE in found or of_all else SHARD

    def _cut(self, value: Node) -> None:
        if value not in self.decisions.cut:
            self.decisions.cut[value] = None
            raise _Again

    def _demote(self, origins: Iterable[str], node: Node) -> NoReturn:
        new = set(origins) - self.decisions.demoted
        if not new:
            where = self.trace.path(node)
            raise Underivable(f"{name_of(node)} in {where or 'the layer'} cannot be computed on cut values")
        self.decisions.demoted |= new
        self.decisions.cut.clear()  # what was decided for shares that are none now is decided anew
        self.decisions.shortened.clear()
        raise _Again

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

    _OF_LEAVES: ClassVar[dict[str, Callable[[Inference, Node], Placed]]] = {
        LINEAR: _linear,
        NORM: _norm,
        ELEMENTWISE: _elementwise,
        DROPOUT: _elementwise,
        ATTENTION: _attention,
        EXPERTS: _experts,
        LAYER: _layer,
        LOOKUP: _lookup,
    }


def is_canonical(trace: Trace, node: Node) -> bool:
    """Returns whether a value can lie between operators: its tokens come first, as batch and sequence or as one."""
    if not is_tensor(node):
        return False
    shape = trace.shape(node)
    return shape[:2] == (BATCH, SEQUENCE) or shape[:1] == (BATCH * SEQUENCE,)


def is_sum(trace: Trace, node: Node) -> bool:
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


def _tensors(node: Node) -> list[Node]:
    """Returns the tensors that an operation takes, those in lists, too."""
    found: list[Node] = []
    torch.fx.map_arg((args_of(node), node.kwargs), lambda value: found.append(value) if has_value(value) else None)
    return found


def _seq(placed: Placed) -> str:
    """Returns where a value is when it is next computed with: a partial sum is summed up first."""
    return SHARD if placed.where == PARTIAL else placed.where


def _dim(placed: Placed) -> int:
    assert placed.dim is not None
    return placed.dim


def arguments_of_slice(node: Node) -> tuple[int, Any, Any, int]:
    """Returns dimension, begin, end and step."""
    args = list(args_of(node)[1:])
    dim, first, last, step = args + [0, None, None, 1][len(args) :]
    return dim, first, last, step


def bounds_of_slice(node: Node, length: int) -> tuple[int, int]:
    """Returns where a slice of a dimension begins and ends."""
    _, first, last, _ = arguments_of_slice(node)
    return _bound(first, length, 0), _bound(last, length, length)


def _as_list(value: Any) -> list[int]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _bound(value: Any, length: int, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int):
        raise Underivable("a slice depends on the sizes of the batch")
    return min(length, value + length if value < 0 else value)


_I = Inference
_SAME = (
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

_REDUCTIONS = (
    "softmax",
    "_softmax",
    "mean",
    "sum",
    "amax",
    "amin",
    "max",
    "topk",
    "sort",
    "cumsum",
    "logsumexp",
    "norm",
)
"""What computes along some dimensions only."""

_RULES: dict[str, Callable[[Inference, Node], Placed]] = {
    **dict.fromkeys(_SAME, _I._same),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as"), _I._view),
    **dict.fromkeys(("transpose", "permute", "t", "swapaxes"), _I._permute),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _I._split),
    **dict.fromkeys(("cat", "stack"), _I._cat),
    **dict.fromkeys(("matmul", "bmm"), _I._matmul),
    **dict.fromkeys(_REDUCTIONS, _I._reduce),
    "unsqueeze": _I._unsqueeze,
    "squeeze": _I._squeeze,
    "select": _I._select,
    "expand": _I._expand,
    "slice": _I._slice,
    "getitem": _I._getitem,
}
_MIXING = ("conv", "roll", "flip", "fft", "stft", "scaled_dot_product", "flex_attention", "cumprod", "logcumsumexp")
"""The beginnings of names of operations that, as models use them, mix tokens."""
