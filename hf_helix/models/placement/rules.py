"""Rules of placement: from an operation and the placements of its operands to the placement of its result.

In:   an operation of a trace, and `Placements` with a placement for every operand.
Out:  the placement of the result; or a decision (a linear is demoted, a parameter is cut), which raises `Restart`.
Must hold: a rank's share consists of whole blocks; a slice inside a block asks for a block boundary at the slice. A
full operand meets a share only if the rank's part of the operand is known: a parameter that is cut with the heads,
or an entry that is repeated for the rank's share only. A decision is never taken back within the same demotions, so
inference ends.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.fx import Node

from hf_helix.models.placement.value_placement import (
    FREE,
    FULL,
    PARTIAL,
    SHARD,
    TOKENS,
    PlacementDecisions,
    Restart,
    ValuePlacement,
    argument,
    as_list,
    bounds_of_slice,
    dim_of,
    edges_of,
    is_canonical,
    is_sum,
    name_of,
    tensors_of,
    where_reduced,
)
from hf_helix.models.trace.opaque_calls import CallKind
from hf_helix.models.trace.trace import BATCH, SEQUENCE, ModuleTrace, Underivable, args_of, reached


class Placements:
    """The placements of a trace.

    Args:
        trace: the trace.
        tp_size: the number of tensor-parallel ranks.
        hidden: the placement of the value that enters.

    Attributes:
        values: the placement of every tensor, by node.
        shares: the placement of every gathered value before the gather.
        mixing: operations that mix tokens, outside of the attention interface and of mixers.
        decisions: see `PlacementDecisions`.
    """

    def __init__(self, trace: ModuleTrace, tp_size: int, hidden: ValuePlacement) -> None:
        self.trace = trace
        self.tp_size = tp_size
        self.hidden = hidden
        self.decisions = PlacementDecisions()
        self.values: dict[Node, ValuePlacement] = {}
        self.shares: dict[Node, ValuePlacement] = {}
        self.mixing: set[Node] = set()

    def of(self, value: Any) -> ValuePlacement:
        """Returns the placement of a value."""
        return self.values[value]

    def dims(self, value: Any) -> int:
        """Returns the number of dimensions of a value."""
        return len(self.trace.shape(value))

    def origins_of(self, operands: Iterable[Node]) -> frozenset[str]:
        """Returns the linears from which the shares of operands come."""
        return frozenset().union(*(self.of(value).origins for value in operands))

    def moved(self, given: ValuePlacement, dims: dict[int, int]) -> ValuePlacement:
        """Returns a placement after dimensions have moved from the keys to the values of `dims`."""
        dim = None if given.dim is None else dims[given.dim]
        is_same = given.expanded is not None and dims[given.expanded[1]] == given.expanded[1]
        return replace(given, dim=dim, expanded=given.expanded if is_same else None)

    def join(self, operands: Sequence[Node]) -> str:
        """Returns the place of a computation of several values: on the sequence shard or on the full sequence."""
        forms = {self.of(value).where for value in operands}
        if forms <= {FREE}:
            return FREE
        # A free value with an entry for every token, such as a rope, covers the full sequence.
        of_all = any(self.of(value).where == FREE and SEQUENCE in self.trace.shape(value) for value in operands)
        return FULL if FULL in forms or of_all else SHARD

    def join_mixing(self, node: Node, mixes: bool) -> str:
        """Returns the place of an operation: on the full sequence if it `mixes` tokens, or rows."""
        where = self.join(tensors_of(node))
        if not mixes:
            return where
        self.mixing.add(node)
        return FREE if where == FREE else FULL

    def goes_along_tokens(self, value: Node, dims: Iterable[int]) -> bool:
        """Returns whether some dimensions of a value are of tokens, or of rows: operators have these in another order
        than the code of a model."""
        shape = self.trace.shape(value)
        return any(shape[dim] in (BATCH, *TOKENS) for dim in dims)

    def cut(self, parameter: Node, dim: int = 0, blocks: tuple[int, ...] = ()) -> None:
        """Decides that a parameter or buffer is cut. A later decision may only add boundaries of blocks.

        Args:
            parameter: the node of the parameter or buffer.
            dim: the dimension of the cut.
            blocks: the lengths of blocks along the dimension, or numbers of heads with features each; by default a
                single block.
        """
        length = self.trace.shape(parameter)[dim]
        blocks = tuple(block * length // sum(blocks) for block in blocks) or (length,)
        before, known = self.decisions.cut.get(parameter, (dim, ()))
        if (before, known) == (dim, blocks):
            return
        if before != dim or not set(edges_of(known)) < set(edges_of(blocks)):
            name = {**self.trace.attributes, **self.trace.given}[parameter]
            raise Underivable(f"{name} would have to be cut in two ways")
        self.decisions.cut[parameter] = dim, blocks
        raise Restart

    def demote(self, origins: Iterable[str], node: Node) -> NoReturn:
        """Decides that linears run replicated on the sequence shard, because `node` cannot run on their shares."""
        new = set(origins) - self.decisions.demoted
        if not new:
            where = self.trace.path(node)
            raise Underivable(f"{name_of(node)} in {where or 'the layer'} cannot be computed on cut values")
        self.decisions.demoted |= new
        self.decisions.cut.clear()  # these decisions were made for shares that no longer exist
        self.decisions.shortened.clear()
        self.decisions.gathered.clear()
        raise Restart

    def follows_attention(self, node: Node) -> bool:
        """Returns whether a value comes from attention, without a linear between."""
        kind_of = self.trace.kind_of
        before = reached(
            node.all_input_nodes, lambda each: () if kind_of(each) is CallKind.LINEAR else each.all_input_nodes
        )
        return CallKind.ATTENTION in map(kind_of, before)

    def feeds_attention(self, node: Node) -> bool:
        """Returns whether a value reaches attention before any linear, on every path."""
        kind_of = self.trace.kind_of
        behind = reached(node.users, lambda each: () if kind_of(each) is CallKind.ATTENTION else each.users)
        return CallKind.LINEAR not in map(kind_of, behind)


# -- views ---------------------------------------------------------------------------------------------------------


def _view(p: Placements, node: Node) -> ValuePlacement:
    given = p.of(args_of(node)[0])
    if given.dim is None:
        return replace(given, expanded=None)
    if len(given.blocks) > 1:
        p.demote(given.origins, node)
    dim = _viewed(p, p.trace.shape(args_of(node)[0]), p.trace.shape(node), given.dim)
    if dim is None:
        p.demote(given.origins, node)
    return replace(given, dim=dim, blocks=(p.trace.shape(node)[dim],), start=None, expanded=None)


def _viewed(p: Placements, before: Sequence[int], after: Sequence[int], dim: int) -> int | None:
    """Returns the dimension of a view that is cut as dimension `dim` before the view; None without such a dimension.

    It is the dimension that begins at the same element: as many elements lie before it in the shape. The ranks must
    divide it, and one of the two lengths must divide the other. Examples, with tp_size=4:

        before              dim   after               result
        [2, 8, 64]          2     [2, 8, 4, 16]       2      features become heads: the heads are cut
        [2, 8, 4, 16]       2     [2, 8, 64]          2      heads become features
        [2, 8, 64]          2     [2, 8, 2, 32]       None   a rank would have half a head
        [2, 8, 64]          2     [1024]              None   the features begin inside of the new dimension
        [batch, seq, 64]    1     [batch * seq, 64]   0      tokens: their dimension is cut within every row
        [batch * seq, 64]   0     [batch, seq, 64]    1      and back
    """
    if dim == 1 and before[0] == BATCH and after[0] == BATCH * before[1]:
        return 0
    if dim == 0 and after[0] == BATCH and before[0] == BATCH * after[1]:
        return 1
    outer = math.prod(before[:dim])
    product = 1
    for index, size in enumerate(after):
        if product == outer and size > 1:
            inner = math.prod(before[dim:])
            if inner % size:
                return None
            full = before[dim]
            # A rank's features are the features of its heads only if the ranks divide the heads and the features.
            divides = size == full or not (size % p.tp_size or full % p.tp_size)
            return index if divides and (size % full == 0 or full % size == 0) else None
        product *= size
    return None


def _permute(p: Placements, node: Node) -> ValuePlacement:
    given = p.of(args_of(node)[0])
    dims = p.dims(node)
    if name_of(node) == "permute":
        order = [dim % dims for dim in args_of(node)[1]]
    else:
        order = list(range(dims))
        a, b = (-2, -1) if len(args_of(node)) < 3 else args_of(node)[1:3]
        order[a], order[b] = order[b], order[a]
    return p.moved(given, {old: new for new, old in enumerate(order)})


def _unsqueeze(p: Placements, node: Node) -> ValuePlacement:
    new = args_of(node)[1] % p.dims(node)
    given = p.of(args_of(node)[0])
    return p.moved(given, {dim: dim + (dim >= new) for dim in range(p.dims(args_of(node)[0]))})


def _squeeze(p: Placements, node: Node) -> ValuePlacement:
    value, *over = args_of(node)
    dims = p.dims(value)
    asked = {dim % dims for dim in (as_list(over[0]) if over else range(dims))}
    gone = {dim for dim in asked if p.trace.shape(value)[dim] == 1}
    return p.moved(p.of(value), {d: d - sum(g < d for g in gone) for d in range(dims)})


def _select(p: Placements, node: Node) -> ValuePlacement:
    given, gone = p.of(args_of(node)[0]), args_of(node)[1] % p.dims(args_of(node)[0])
    if given.dim == gone:
        p.demote(given.origins, node)
    if p.goes_along_tokens(args_of(node)[0], [gone]):
        given = replace(given, where=p.join_mixing(node, mixes=True))
    return p.moved(given, {d: d - (d > gone) for d in range(p.dims(args_of(node)[0]))})


def _expand(p: Placements, node: Node) -> ValuePlacement:
    given = p.of(args_of(node)[0])
    before, after = p.trace.shape(args_of(node)[0]), p.trace.shape(node)
    shift = len(after) - len(before)
    for index, size in enumerate(after):
        old = 1 if index < shift else before[index - shift]
        if old == 1 and size > 1 and (node, index) in p.decisions.shortened:
            return ValuePlacement(given.where, index, (size,), given.origins)
    dim = None if given.dim is None else given.dim + shift
    grown = [i for i, size in enumerate(after) if size > 1 and (i < shift or before[i - shift] == 1)]
    expanded = (node, grown[0]) if len(grown) == 1 and dim is None else None
    return replace(given, dim=dim, start=None, expanded=expanded)


def _slice(p: Placements, node: Node) -> ValuePlacement:
    value = args_of(node)[0]
    dim, step = argument(node, "dim"), argument(node, "step")
    given, length = p.of(value), p.trace.shape(value)[dim]
    if p.trace.shape(node)[dim] != length and any(p.goes_along_tokens(each, [dim]) for each in (value, node)):
        given = replace(given, where=p.join_mixing(node, mixes=True))
    if given.dim is None or given.dim != dim % p.dims(value):
        return replace(given, expanded=None) if given.dim is not None else given
    first, last = bounds_of_slice(node, length)
    if (first, last, step) == (0, length, 1):
        return given
    if step != 1:
        p.demote(given.origins, node)
    return _parts(p, node, given, [(first, last)])[0]


def like_operand(p: Placements, node: Node) -> ValuePlacement:
    """Places a result, or its parts, as the operand, whose partial sums are reduced first."""
    given = p.of(args_of(node)[0])
    return replace(given, where=where_reduced(given), expanded=None)


def _getitem(p: Placements, node: Node) -> ValuePlacement:
    source: Any = args_of(node)[0]
    given = p.of(source)
    if name_of(source) == "rope":
        heads = p.of(args_of(source)[args_of(node)[1]])
        return replace(heads, where=given.where, start=None, expanded=None)
    if given.dim is None or name_of(source) not in ("split", "split_with_sizes", "chunk", "unbind"):
        return given
    if name_of(source) == "unbind":
        gone = argument(source, "dim") % (p.dims(node) + 1)
        if gone == given.dim:
            p.demote(given.origins, node)
        return p.moved(given, {d: d - (d > gone) for d in range(p.dims(node) + 1)})
    dim = argument(source, "dim") % p.dims(node)
    if dim != given.dim:
        return given
    lengths = [p.trace.number(v.shape[dim]) for v in source.meta["val"]]
    parts = _parts(p, source, given, list(itertools.pairwise(edges_of(lengths))))
    return parts[args_of(node)[1]]


def _parts(p: Placements, node: Node, given: ValuePlacement, parts: Sequence[tuple[int, int]]) -> list[ValuePlacement]:
    """Returns the placements of parts of the cut dimension; each part consists of whole blocks."""
    edges = edges_of(given.blocks)
    wanted = {edge for part in parts for edge in part}
    if not wanted <= set(edges):
        if given.start is None or len(given.origins) != 1:
            p.demote(given.origins, node)
        (origin,) = given.origins
        p.decisions.boundaries.setdefault(origin, set()).update(given.start + edge for edge in wanted)
        raise Restart
    return [
        replace(
            given,
            blocks=given.blocks[edges.index(first) : edges.index(last)],
            start=None if given.start is None else given.start + first,
        )
        for first, last in parts
    ]


# -- arithmetic ----------------------------------------------------------------------------------------------------

SAME = {"clone", "contiguous", "detach", "alias", "to", "_to_copy", "type_as", "lift_fresh_copy", "float"}
SAME |= {"view_as_complex", "view_as_real"}
"""Operations that keep every dimension that may be cut; parts of complex numbers lie along the last dimension."""

MIXING: tuple[str, ...] = ("conv", "roll", "flip", "fft", "stft", "scaled_dot_product", "flex_attention")
MIXING += ("cumprod", "logcumsumexp", "batch_norm", "instance_norm")
"""Prefixes of operations that mix tokens as models use them."""


def _pointwise(p: Placements, node: Node) -> ValuePlacement:
    operands = tensors_of(node)
    dims = p.dims(node)
    shares = [(value, p.of(value)) for value in operands if p.of(value).dim is not None]
    if not shares and is_sum(p.trace, node) and all(p.of(value).where == PARTIAL for value in operands):
        return ValuePlacement(PARTIAL, origins=p.origins_of(operands))
    where = p.join(operands)
    if not shares:
        is_mixed = {p.of(value).where for value in operands} == {SHARD, FULL}
        if is_mixed and is_canonical(p.trace, node) and is_sum(p.trace, node):
            where = SHARD  # of a full term, this rank's part is added
        return ValuePlacement(where, origins=p.origins_of(operands))
    computed = [(value, other) for value, other in shares if other.where != FREE]
    first, share = (computed or shares)[0]
    dim = dims - p.dims(first) + dim_of(share)
    blocks = share.blocks
    for value in operands:
        other, its_dim = p.of(value), dim - dims + p.dims(value)
        if value is not first and (other.dim is None or other.where == FREE):
            _fit(p, node, value, its_dim, share)
        elif (other.dim, other.blocks) != (its_dim, blocks):
            p.demote(share.origins | other.origins, node)
    return ValuePlacement(where, dim, blocks, p.origins_of(operands), share.start if len(computed) == 1 else None)


def _fit(p: Placements, node: Node, value: Node, dim: int, share: ValuePlacement) -> None:
    """Cuts an operand that is full along a dimension to a share of the dimension."""
    if dim < 0 or p.trace.shape(value)[dim] == 1:
        return
    source, source_dim = parameter_of(p, value, dim)
    if source is not None:
        p.cut(source, source_dim, share.blocks)
        return
    expanded = p.of(value).expanded
    if expanded is not None and expanded[1] == dim:
        p.decisions.shortened.add(expanded)
        raise Restart
    p.demote(share.origins, node)


def parameter_of(p: Placements, value: Node, dim: int) -> tuple[Node | None, int]:
    """Returns the parameter, buffer or input of all layers whose elements lie along a dimension of a value, perhaps
    combined with values that are equal along the dimension; and the parameter's dimension. None for other values."""
    while value.op == "call_function":
        source, dims = args_of(value)[0], p.dims(value)
        is_pointwise = torch.Tag.pointwise in getattr(value.target, "tags", ())
        places = {each: dim - dims + p.dims(each) for each in tensors_of(value)} if is_pointwise else {}
        long = [each for each, place in places.items() if place >= 0 and p.trace.shape(each)[place] > 1]
        if len(long) == 1:  # others are the same along the dimension
            value, dim = long[0], places[long[0]]
            continue
        if name_of(value) in ("unsqueeze", "squeeze", "view", "reshape"):
            before, after = p.trace.shape(source), p.trace.shape(value)
            outer = math.prod(after[:dim])
            known = [i for i, size in enumerate(before) if size > 1 and math.prod(before[:i]) == outer]
            if not known or before[known[0]] % after[dim]:
                break
            dim = known[0]
        elif name_of(value) == "transpose":
            a, b = (each % p.dims(value) for each in args_of(value)[1:3])
            dim = {a: b, b: a}.get(dim, dim)
        elif name_of(value) == "matmul" and p.dims(source) == 2 and dim == p.dims(value) - 2:
            dim = 0
        elif name_of(value) not in SAME:
            break
        value = source
    return (value if value in p.trace.attributes or value in p.trace.given else None), dim


def _cat(p: Placements, node: Node) -> ValuePlacement:
    operands = tensors_of(node)
    dim = argument(node, "dim") % p.dims(node)
    shares = [p.of(value) for value in operands if p.of(value).dim is not None]
    is_stack = name_of(node) == "stack"
    where = p.join_mixing(node, not is_stack and p.goes_along_tokens(node, [dim]))
    if not shares:
        return ValuePlacement(where, origins=p.origins_of(operands))
    share = shares[0]
    if not is_stack and all(p.of(value).dim == dim for value in operands):
        blocks = tuple(block for value in operands for block in p.of(value).blocks)
        return ValuePlacement(where, dim, blocks, p.origins_of(operands))
    if (not is_stack and share.dim == dim) or any((s.dim, s.blocks) != (share.dim, share.blocks) for s in shares):
        p.demote(p.origins_of(operands), node)
    for value in operands:
        if p.of(value).dim is None:
            _fit(p, node, value, dim_of(share), share)
    share_dim = dim_of(share) + (is_stack and dim <= dim_of(share))
    return ValuePlacement(where, share_dim, share.blocks, p.origins_of(operands))


def _reduce(p: Placements, node: Node) -> ValuePlacement:
    if len(tensors_of(node)) > 1:  # the larger of two values
        return _pointwise(p, node)
    given = p.of(args_of(node)[0])
    dims = p.dims(args_of(node)[0])
    over = argument(node, "dim")
    reduced = {dim % dims for dim in (range(dims) if over in (None, []) else as_list(over))}
    where = p.join_mixing(node, p.goes_along_tokens(args_of(node)[0], reduced))
    if given.dim is None:
        return ValuePlacement(where, origins=given.origins)
    if given.dim in reduced:
        if name_of(node) == "mean" and reduced == {given.dim} and p.dims(node) == dims and len(given.blocks) == 1:
            return ValuePlacement(FULL, origins=given.origins, is_summand=True)
        p.demote(given.origins, node)
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    lost = 0 if first.dim() == dims else sum(dim < given.dim for dim in reduced)
    return replace(given, where=where, dim=given.dim - lost, start=None, expanded=None)


def _matmul(p: Placements, node: Node) -> ValuePlacement:
    factors = args_of(node)[:2] if name_of(node) != "baddbmm" else args_of(node)[1:3]
    left, right = (p.of(value) for value in factors)
    rows, columns = (p.trace.shape(value)[-2:] for value in factors)
    where = p.join_mixing(node, rows[-1] in TOKENS or columns[-1] in TOKENS)
    if left.dim is None and right.dim is None:
        return ValuePlacement(where, origins=left.origins | right.origins)
    dims = p.dims(node)
    if left.where == FREE and left.dim == 0 and right.dim is None and p.dims(factors[0]) == 2:
        return ValuePlacement(FULL, dims - 2, left.blocks, right.origins)
    same = p.dims(factors[0]) == p.dims(factors[1]) == dims
    if same and name_of(node) == "baddbmm" and p.of(args_of(node)[0]).dim is None:
        _fit(p, node, args_of(node)[0], dim_of(left), left)
    if same and left.dim == right.dim and left.blocks == right.blocks and dim_of(left) < dims - 2:
        return replace(left, where=where, start=None, expanded=None)
    p.demote(left.origins | right.origins, node)


def _scaled_dot_product(p: Placements, node: Node) -> ValuePlacement:
    """Places attention that the code computes by torch, over this rank's heads or in full."""
    heads, where = [p.of(value) for value in args_of(node)[:3]], p.join_mixing(node, mixes=True)
    if {(value.dim, value.blocks) for value in heads} - {(None, ()), (1, heads[0].blocks)} or (
        heads[0].dim is not None and any(value.dim is None for value in heads)
    ):
        p.demote(p.origins_of(args_of(node)[:3]), node)
    mask = argument(node, "attn_mask")
    if mask is not None and heads[0].dim is not None:
        dim = p.dims(mask) - 3  # of heads
        if p.of(mask).dim is None:
            _fit(p, node, mask, dim, heads[0])
        elif (p.of(mask).dim, p.of(mask).blocks) != (dim, heads[0].blocks):
            p.demote(p.of(mask).origins | heads[0].origins, node)
    return replace(heads[0], where=where, start=None, expanded=None)


def _rope(p: Placements, node: Node) -> ValuePlacement:
    """Places queries and keys, each with its own share of heads; `_getitem` takes the pair apart."""
    q, k, cos, sin = operands = args_of(node)
    for value in operands:
        given = p.of(value)
        if given.dim is not None and (given.dim != 1 or value in (cos, sin)):
            p.demote(given.origins, node)
    return ValuePlacement(p.join(operands), origins=p.origins_of((q, k)))


def _arange(p: Placements, node: Node) -> ValuePlacement:
    """Places numbers made by the code; of all tokens, such as their places in the sequence, they belong to these."""
    if any(size in TOKENS for size in p.trace.shape(node)):
        p.mixing.add(node)
    return ValuePlacement(FREE)


def _unknown(p: Placements, node: Node) -> ValuePlacement:
    operands = tensors_of(node)
    if name_of(node).startswith(MIXING) and any(p.of(value).where != FREE for value in operands):
        raise Underivable(f"{name_of(node)} in {p.trace.path(node) or 'the layer'} mixes tokens outside of attention")
    origins = frozenset().union(*(p.of(v).origins for v in operands if p.of(v).dim is not None))
    if any(p.of(value).dim is not None for value in operands):
        p.demote(origins, node)
    return ValuePlacement(p.join_mixing(node, _mixes(p, node)) if operands else FREE, origins=p.origins_of(operands))


def _mixes(p: Placements, node: Node) -> bool:
    """Returns whether an operation without a rule of its own goes along tokens or rows."""
    operands, value = tensors_of(node), args_of(node)[0]
    if operands and max(_count_tokens(p, each) for each in operands) != _count_tokens(p, node):
        return True
    if value not in operands:
        return False
    name, last = name_of(node), p.dims(value) - 1
    over: list[int] = []
    if name.startswith(("index", "_unsafe_index")) and isinstance(args_of(node)[1], (tuple, list)):
        over = [dim for dim, index in enumerate(args_of(node)[1]) if index is not None]
    elif name in ("pad", "constant_pad_nd"):
        over = [last - place // 2 for place, count in enumerate(args_of(node)[1]) if count != 0]
    elif name in ("tril", "triu", "group_norm"):
        over = [*range(1, last + 1)]
    elif (dims := argument(node, "dim")) is not None:
        over = as_list(dims)
    return p.goes_along_tokens(value, over)


def _count_tokens(p: Placements, node: Node) -> int:
    """Returns how many dimensions of tokens a value has."""
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return sum(p.trace.number(size) in TOKENS for size in first.shape)


# -- table ---------------------------------------------------------------------------------------------------------

Rule = Callable[[Placements, Node], ValuePlacement]

REDUCTIONS = {"softmax", "_softmax", "mean", "sum", "prod", "std", "var", "amax", "amin", "max", "min", "argmax"}
REDUCTIONS |= {"argmin", "topk", "sort", "cumsum", "logsumexp", "norm", "linalg_vector_norm"}
"""Operations along some dimensions only."""

_RULES: dict[str, Rule] = {
    **dict.fromkeys(SAME, lambda p, node: p.of(args_of(node)[0])),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as"), _view),
    **dict.fromkeys(("transpose", "permute", "t", "swapaxes"), _permute),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), like_operand),
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("matmul", "bmm", "baddbmm"), _matmul),
    **dict.fromkeys(REDUCTIONS, _reduce),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "select": _select,
    "expand": _expand,
    "slice": _slice,
    "getitem": _getitem,
    "rope": _rope,
    "arange": _arange,
    "scaled_dot_product_attention": _scaled_dot_product,
}


def rule_of(node: Node) -> Rule:
    """Returns the rule of an operation that is no opaque call."""
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return _RULES.get(name_of(node), _pointwise if is_pointwise else _unknown)
