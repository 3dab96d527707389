"""How the values of a trace lie on tensor-parallel ranks.

In:   the trace of a decoder layer, of the embedding or of the head.
Out:  the placement of every value, and what was decided for linears and parameters on the way.
Must hold: every linear is tried column-parallel first. Where what follows cannot be computed on a share of its outputs,
the linear that the share comes from is run whole, on this rank's part of the sequence, and inference begins anew; so it
ends, since every round decides something more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from torch.fx import Node

from hf_helix.models.placement.placed import (
    COLUMN,
    FREE,
    PARTIAL,
    REPLICATED,
    ROW,
    SHARD,
    WHOLE,
    Again,
    NeedsInlining,
    ValuePlacement,
    is_canonical,
    name_of,
    where_reduced,
)
from hf_helix.models.placement.rules import SAME, ArithmeticRules, ViewRules
from hf_helix.models.trace.leaves import (
    ATTENTION,
    DROPOUT,
    ELEMENTWISE,
    EXPERTS,
    LAYER,
    LINEAR,
    LOOKUP,
    NORM,
)
from hf_helix.models.trace.trace import PLACES, ModuleTrace, Underivable, args_of, has_value


class Inference(ViewRules, ArithmeticRules):
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

    def __init__(self, trace: ModuleTrace, tp_size: int, hidden: ValuePlacement) -> None:
        super().__init__(trace, tp_size, hidden)
        while True:
            try:
                self._infer()
                return
            except Again:
                self.placed.clear()
                self.decisions.ways.clear()

    def _infer(self) -> None:
        trace = self.trace
        self.placed[trace.hidden] = self.hidden
        for node in (*trace.attributes, *trace.constants, *trace.given):
            self.placed[node] = ValuePlacement(FREE)
        for node in self.decisions.cut:
            self.placed[node] = ValuePlacement(FREE, dim=0, blocks=(trace.shape(node)[0],))
        for node, name in trace.given.items():
            if name == PLACES:
                self.placed[node] = ValuePlacement(SHARD)
        for node in trace.nodes:
            if has_value(node):
                self.placed[node] = self._place(node)
        self._gather_early()
        self._gather_once()

    def _gather_early(self) -> None:
        """Lets what cannot lie between operators be computed where it is used: what it comes from is gathered."""
        for node in reversed(self.trace.nodes):
            placed = self.placed.get(node)
            if placed is None or placed.where != SHARD or self.trace.leaf(node) or is_canonical(self.trace, node):
                continue
            if any(user in self.placed and self.placed[user].where == WHOLE for user in node.users):
                self.placed[node] = replace(placed, where=WHOLE)

    def _gather_once(self) -> None:
        """Lets norms of one value read one gather of it, where all that reads them needs the whole sequence."""
        for node in (self.trace.hidden, *self.trace.nodes):
            norms = [user for user in node.users if self._is_gathered(user)]
            if len(norms) > 1:
                self.placed.update((norm, replace(self.placed[norm], where=WHOLE)) for norm in norms)

    def _is_gathered(self, node: Node) -> bool:
        """Returns whether a node is a norm of a shard, and all that reads it needs the whole sequence."""
        leaf, placed, ways = self.trace.leaf(node), self.placed.get(node), self.decisions.ways
        if leaf is None or leaf.kind != NORM or placed is None or placed.where != SHARD or placed.dim is not None:
            return False
        readers = [(ways.get(user), self.placed.get(user)) for user in node.users]
        return all(way == COLUMN or (reader is not None and reader.where == WHOLE) for way, reader in readers)

    def _place(self, node: Node) -> ValuePlacement:
        leaf = self.trace.leaf(node)
        if leaf is not None:
            return self._OF_LEAVES[leaf.kind](self, node)
        rule = _RULES.get(name_of(node))
        if rule is not None:
            return rule(self, node)
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        return self._pointwise(node) if is_pointwise else self._unknown(node)

    def _linear(self, node: Node) -> ValuePlacement:
        leaf, given = self._leaf(node), self._of(args_of(node)[0])
        ways = self.decisions.ways
        if leaf.path in self.decisions.demoted:
            if given.dim is not None:
                self._demote(given.origins, node)
            ways[node] = REPLICATED
            return ValuePlacement(where_reduced(given))
        if given.dim is not None:
            if given.dim != self._dims(args_of(node)[0]) - 1 or len(given.blocks) > 1:
                self._demote(given.origins, node)
            ways[node] = ROW
            return ValuePlacement(PARTIAL, origins=given.origins)
        ways[node] = COLUMN
        features = self.trace.shape(node)[-1]
        if features < self.tp_size:
            self._demote({leaf.path}, node)
        edges = sorted({0, features, *self.decisions.boundaries.get(leaf.path, ())})
        blocks = tuple(last - first for first, last in itertools.pairwise(edges))
        return ValuePlacement(WHOLE, dim=self._dims(node) - 1, blocks=blocks, origins=frozenset({leaf.path}), is_direct=True)

    def _norm(self, node: Node) -> ValuePlacement:
        given = self._of(args_of(node)[0])
        if given.dim is not None and given.dim == self._dims(node) - 1:
            if self._feeds_attention(node):
                raise NeedsInlining(self._leaf(node).path)
            self._demote(given.origins, node)
        return replace(given, where=where_reduced(given), is_direct=False, expanded=None)

    def _elementwise(self, node: Node) -> ValuePlacement:
        given = self._of(args_of(node)[0])
        return replace(given, where=where_reduced(given), expanded=None)

    def _attention(self, node: Node) -> ValuePlacement:
        q, k, v, more = args_of(node)[:4]
        heads = [self._of(value) for value in (q, k, v)]
        shares = [value for value in heads if value.dim is not None]
        if not shares and self.tp_size == 1:  # a single head of keys, for one
            return ValuePlacement(WHOLE, dim=2, blocks=(self.trace.shape(q)[1],))
        if not shares:
            raise Underivable("no projection of its attention can be cut by heads")
        if any(value.dim != 1 or len(value.blocks) > 1 for value in heads):
            self._demote(frozenset().union(*(value.origins for value in shares)), node)
        for value in more:
            if value not in self.trace.attributes or self.trace.shape(value)[0] != heads[0].size:
                raise Underivable("its attention takes a tensor that is not a parameter of its heads")
            self._cut(value)
        return ValuePlacement(WHOLE, dim=2, blocks=heads[0].blocks, origins=frozenset().union(*(h.origins for h in heads)))

    def _experts(self, node: Node) -> ValuePlacement:
        for value in args_of(node)[:3]:
            given = self._of(value)
            if given.dim is not None:
                self._demote(given.origins, node)
            if where_reduced(given) != SHARD:
                raise Underivable("its experts read values of the whole sequence")
        return ValuePlacement(SHARD)

    def _layer(self, node: Node) -> ValuePlacement:
        given = self._of(args_of(node)[0])
        if given.dim is not None:
            self._demote(given.origins, node)
        return ValuePlacement(SHARD)

    def _lookup(self, node: Node) -> ValuePlacement:
        return ValuePlacement(PARTIAL)

    _OF_LEAVES: ClassVar[dict[str, Callable[[Inference, Node], ValuePlacement]]] = {
        LINEAR: _linear,
        NORM: _norm,
        ELEMENTWISE: _elementwise,
        DROPOUT: _elementwise,
        ATTENTION: _attention,
        EXPERTS: _experts,
        LAYER: _layer,
        LOOKUP: _lookup,
    }


_I = Inference
REDUCTIONS = (
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

_RULES: dict[str, Callable[[Inference, Node], ValuePlacement]] = {
    **dict.fromkeys(SAME, _I._same),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as"), _I._view),
    **dict.fromkeys(("transpose", "permute", "t", "swapaxes"), _I._permute),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _I._split),
    **dict.fromkeys(("cat", "stack"), _I._cat),
    **dict.fromkeys(("matmul", "bmm"), _I._matmul),
    **dict.fromkeys(REDUCTIONS, _I._reduce),
    "unsqueeze": _I._unsqueeze,
    "squeeze": _I._squeeze,
    "select": _I._select,
    "expand": _I._expand,
    "slice": _I._slice,
    "getitem": _I._getitem,
    "rope": _I._rope,
}
