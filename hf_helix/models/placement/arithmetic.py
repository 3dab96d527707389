"""Placements of arithmetic: element by element, over a dimension, joined, or multiplied.

In:   an operation of glue, and the placements of what it takes.
Out:  the placement of what it gives.
Must hold: an operand that is whole meets a share only where this rank's part of it is known: a parameter that is cut
with the heads, or an entry that is repeated for this rank's share only.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from hf_helix.models.placement.nodes import as_list, is_sum, name_of, tensors_of
from hf_helix.models.placement.placed import FREE, PARTIAL, TOKENS, WHOLE, Again, Placed, dim_of
from hf_helix.models.placement.rules import Rules
from hf_helix.models.trace.trace import args_of

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

    def _pointwise(self, node: Node) -> Placed:
        operands = tensors_of(node)
        dims = self._dims(node)
        shares = [(value, self._of(value)) for value in operands if self._of(value).dim is not None]
        if not shares and is_sum(self.trace, node) and all(self._of(value).where == PARTIAL for value in operands):
            return Placed(PARTIAL, origins=self._origins(operands))
        where = self._join(operands)
        if not shares:
            return Placed(where, origins=self._origins(operands))
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
        return Placed(where, place, blocks, self._origins(operands), is_direct)

    def _fit(self, node: Node, value: Node, dim: int, share: Placed) -> None:
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

    def _cat(self, node: Node) -> Placed:
        operands = tensors_of(node)
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
                self._fit(node, value, dim_of(share), share)
        place = dim_of(share) + (is_stack and dim <= dim_of(share))
        return Placed(where, place, share.blocks, self._origins(operands))

    def _reduce(self, node: Node) -> Placed:
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
        where = self._join(tensors_of(node))
        if left.dim is None and right.dim is None:
            return Placed(where, origins=left.origins | right.origins)
        dims = self._dims(node)
        same = self._dims(args_of(node)[0]) == self._dims(args_of(node)[1]) == dims
        if same and left.dim == right.dim and left.blocks == right.blocks and dim_of(left) < dims - 2:
            return replace(left, where=where, is_direct=False, expanded=None)
        self._demote(left.origins | right.origins, node)

    def _rope(self, node: Node) -> Placed:
        """Queries and keys, each with its own share of heads: `_getitem` takes them apart."""
        q, k, cos, sin = operands = args_of(node)
        for value in operands:
            given = self._of(value)
            if given.dim is not None and (given.dim != 1 or value in (cos, sin)):
                self._demote(given.origins, node)
        return Placed(self._join(operands), origins=self._origins((q, k)))

    def _unknown(self, node: Node) -> Placed:
        operands = tensors_of(node)
        if name_of(node).startswith(MIXING) and any(self._of(value).where != FREE for value in operands):
            self._refuse_mixing(node)
        origins = frozenset().union(*(self._of(v).origins for v in operands if self._of(v).dim is not None))
        if any(self._of(value).dim is not None for value in operands):
            self._demote(origins, node)
        return Placed(self._join(operands) if operands else FREE, origins=self._origins(operands))
