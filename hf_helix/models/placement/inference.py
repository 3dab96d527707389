"""Infers how the values of a trace lie on tensor-parallel ranks.

In:   the trace of a decoder layer, of the embedding or of the head.
Out:  `Placements`: the placement of every value, with the decisions on linears and parameters.
Must hold: every linear is tried column-parallel first. If an operation after the linear cannot run on a share of
the outputs, the linear runs replicated on the rank's sequence shard, and inference restarts. Every restart adds a
decision, so inference ends:

    until a round ends: place every node in order; a rule without a placement adds a decision and restarts

A mixer runs on the full sequence, over this rank's share of heads or channels, with the parameters along these (decay,
time steps, kernels of convolutions) cut alike; what all heads share (a single group of state features) is gathered. A
mixer without a share runs in full on every rank.
"""

import itertools
from dataclasses import replace

from torch.fx import Node

from hf_helix.models.placement.rules import Placements, Rule, like_operand, parameter_of, rule_of
from hf_helix.models.placement.value_placement import (
    COLUMN,
    FREE,
    FULL,
    PARTIAL,
    REPLICATED,
    ROW,
    SHARD,
    NeedsInlining,
    Restart,
    ValuePlacement,
    dim_of,
    is_canonical,
    where_reduced,
)
from hf_helix.models.trace.opaque_calls import MASK, CallKind
from hf_helix.models.trace.trace import HANDED, TOKEN_POSITIONS, ModuleTrace, Underivable, args_of, has_value


def infer_placements(trace: ModuleTrace, tp_size: int, hidden: ValuePlacement) -> Placements:
    """Returns the placements of a trace; see `Placements` for the arguments.

    Raises:
        Underivable: the computation cannot be cut.
        NeedsInlining: a norm must be traced through first.
    """
    placements = Placements(trace, tp_size, hidden)
    while True:
        try:
            _run_round(placements)
            return placements
        except Restart:
            placements.values.clear()
            placements.shares.clear()
            placements.mixing.clear()
            placements.decisions.styles.clear()


def _run_round(p: Placements) -> None:
    trace = p.trace
    p.values[trace.hidden] = p.hidden
    for node in (*trace.attributes, *trace.constants, *trace.given):
        p.values[node] = ValuePlacement(FREE)
    for node, (dim, blocks) in p.decisions.cut.items():
        p.values[node] = ValuePlacement(FREE, dim=dim, blocks=blocks)
    for node, name in trace.given.items():
        if name in (TOKEN_POSITIONS, HANDED):
            p.values[node] = ValuePlacement(SHARD if name == TOKEN_POSITIONS else FULL)
    for node in trace.nodes:
        if has_value(node):
            kind = trace.kind_of(node)
            rule = rule_of(node) if kind is None else _OPAQUE_RULES[kind]
            with trace.following(node):
                p.values[node] = rule(p, node)
            if node in p.decisions.gathered:
                p.shares[node] = p.values[node]
                p.values[node] = ValuePlacement(FULL, origins=p.values[node].origins)
    logits = p.values.get(trace.result)
    if p.hidden.where == FREE and logits is not None and logits.where == PARTIAL and logits.origins:
        p.demote(logits.origins, trace.result)  # ranks share the vocabulary, not the features before the head
    _gather_early(p)
    _gather_once(p)


def _gather_early(p: Placements) -> None:
    """Moves the gather before operations on a shard whose results cannot lie between operators."""
    for node in reversed(p.trace.nodes):
        placement, kind = p.values.get(node), p.trace.kind_of(node)
        if placement is None or placement.where != SHARD or is_canonical(p.trace, node):
            continue
        if kind not in (None, CallKind.NORM, CallKind.ELEMENTWISE):
            continue
        if any(user in p.values and p.values[user].where == FULL for user in node.users):
            p.values[node] = replace(placement, where=FULL)


def _gather_once(p: Placements) -> None:
    """Makes norms of one value read one gather of the value, if all readers of the norms need the full sequence."""
    for node in (p.trace.hidden, *p.trace.nodes):
        norms = [user for user in node.users if _is_gathered(p, user)]
        if len(norms) > 1:
            p.values.update((norm, replace(p.values[norm], where=FULL)) for norm in norms)


def _is_gathered(p: Placements, node: Node) -> bool:
    """Returns whether a node is a norm of a sequence shard whose readers all need the full sequence."""
    placement, styles = p.values.get(node), p.decisions.styles
    if p.trace.kind_of(node) is not CallKind.NORM or placement is None:
        return False
    if placement.where != SHARD or placement.dim is not None:
        return False
    readers = [(styles.get(user), p.values.get(user)) for user in node.users]
    return all(style == COLUMN or (reader is not None and reader.where == FULL) for style, reader in readers)


# -- opaque calls --------------------------------------------------------------------------------------------------


def _linear(p: Placements, node: Node) -> ValuePlacement:
    path, given = p.trace.path_of(node), p.of(args_of(node)[0])
    styles = p.decisions.styles
    if path in p.decisions.demoted:
        if given.dim is not None:
            p.demote(given.origins, node)
        styles[node] = REPLICATED
        return ValuePlacement(where_reduced(given))
    if given.dim is not None:
        if given.dim != p.dims(args_of(node)[0]) - 1 or len(given.blocks) > 1:
            p.demote(given.origins, node)
        styles[node] = ROW
        return ValuePlacement(PARTIAL, origins=given.origins)
    styles[node] = COLUMN
    features = p.trace.shape(node)[-1]
    if features < p.tp_size:
        p.demote({path}, node)
    edges = sorted({0, features, *p.decisions.boundaries.get(path, ())})
    blocks = tuple(last - first for first, last in itertools.pairwise(edges))
    return ValuePlacement(FULL, dim=p.dims(node) - 1, blocks=blocks, origins=frozenset({path}), start=0)


def _norm(p: Placements, node: Node) -> ValuePlacement:
    given = p.of(args_of(node)[0])
    if given.dim is not None and given.dim == p.dims(node) - 1:
        is_of_heads = p.dims(node) == 4  # of a single head then, whose features no rank needs a share of
        if not is_of_heads and (p.feeds_attention(node) or p.follows_attention(node)):
            raise NeedsInlining(p.trace.path_of(node))
        p.demote(given.origins, node)
    return replace(given, where=where_reduced(given), start=None, expanded=None)


def _attention(p: Placements, node: Node) -> ValuePlacement:
    q, k, v, more = args_of(node)[:4]
    heads = [p.of(value) for value in (q, k, v)]
    shares = [value for value in heads if value.dim is not None]
    if is_shared(p, k):  # keys and values are in full on every rank, and queries keep their share
        alone = [value.origins for value in heads[1:] if value.dim is not None]
        if alone:
            p.demote(frozenset().union(*alone), node)
    if not shares and p.tp_size == 1:
        return ValuePlacement(FULL, dim=2, blocks=(p.trace.shape(q)[1],))
    if not shares:
        raise Underivable(
            "no projection of its attention can be cut by heads; use tp_size=1 with pp_size or shard_parameters"
        )
    kept = heads[:1] if is_shared(p, k) and heads[1].dim is None and heads[2].dim is None else heads
    if any(value.dim != 1 or len(value.blocks) > 1 for value in kept):
        p.demote(frozenset().union(*(value.origins for value in shares)), node)
    for name, value in zip(p.trace.call_of(node).details["tensors"], more, strict=True):
        if name == MASK:
            _place_mask(p, node, value, heads[0])
        elif value not in p.trace.attributes or p.trace.shape(value)[0] != heads[0].size:
            raise Underivable("its attention takes a tensor that is not a parameter of its heads")
        else:
            p.cut(value)
    return ValuePlacement(FULL, dim=2, blocks=heads[0].blocks, origins=frozenset().union(*(h.origins for h in heads)))


def _place_mask(p: Placements, node: Node, mask: Node, heads: ValuePlacement) -> None:
    """Cuts a mask [batch, heads or 1, sequence, sequence] for the heads of a rank."""
    given = p.of(mask)
    if p.trace.shape(mask)[1] == 1 and given.dim is None:
        return
    if (given.dim, given.blocks) != (1, heads.blocks):
        p.demote(given.origins | heads.origins, node)


def is_shared(p: Placements, k: Node) -> bool:
    """Returns whether several ranks share each key-value head: ranks then have all heads, and use one. So with the only
    head of a single rank."""
    count = p.trace.shape(k)[1]
    return (count < p.tp_size or count == 1) and p.tp_size % count == 0


def _experts(p: Placements, node: Node) -> ValuePlacement:
    for value in args_of(node)[:3]:
        given = p.of(value)
        if given.dim is not None:
            p.demote(given.origins, node)
        if where_reduced(given) != SHARD:
            raise Underivable("its experts read values of the whole sequence")
    return ValuePlacement(SHARD)


def _block(p: Placements, node: Node) -> ValuePlacement:
    """Places the result of a block, which runs on the full sequence and is equal on every rank, with all of its
    parameters: whatever it does, a rank's gradient is then the part of its own tokens."""
    operands, path = args_of(node)[0], p.trace.path_of(node)
    is_read = node is p.trace.result or bool(node.users)
    is_free = all(p.of(value).where == FREE for value in operands)
    if is_free or (is_read and not is_canonical(p.trace, node)):
        raise Underivable(f"{path or 'the layer'} takes or returns values that are not laid out by tokens", path)
    for value in operands:
        if p.of(value).dim is not None:
            p.demote(p.of(value).origins, node)
    return ValuePlacement(FULL, origins=p.origins_of(operands))


def _layer(p: Placements, node: Node) -> ValuePlacement:
    given = p.of(args_of(node)[0])
    if given.dim is not None:
        p.demote(given.origins, node)
    return ValuePlacement(SHARD)


# -- mixers ----------------------------------------------------------------------------------------------------------


def _gated_norm(p: Placements, node: Node) -> ValuePlacement:
    """Places a norm over the last dimension with a gate of its value's shape."""
    value, gate = args_of(node)[:2]
    given, other = p.of(value), p.of(gate)
    if given.dim is not None and given.dim == p.dims(node) - 1:
        raise NeedsInlining(p.trace.path_of(node))
    if (given.dim, given.blocks) != (other.dim, other.blocks):
        in_full = [placement.origins for placement in (given, other) if placement.dim is None and placement.origins]
        p.demote(in_full[0] if in_full else given.origins | other.origins, node)
    return replace(given, where=p.join((value, gate)), origins=given.origins | other.origins, start=None, expanded=None)


def _mixer(p: Placements, node: Node) -> ValuePlacement:
    """Places a mixer, whose result lies as the operand with the result's shape."""
    values, like = args_of(node)[:2]
    call = p.trace.call_of(node).details["call"]
    share = p.of(values[like])
    shared = [value for value in values if p.of(value).dim is not None]
    if share.dim is None:
        if shared:
            p.demote(p.origins_of(shared), node)
        return ValuePlacement(FULL, origins=p.origins_of(values))
    is_even = not any(block % p.tp_size for block in share.blocks)
    if share.dim != call.dims[like] or not is_even or (len(share.blocks) > 1 and not call.mixer.by_channel):
        p.demote(share.origins, node)
    for value, dim in zip(values, call.dims, strict=True):
        if value is not values[like] and value not in p.decisions.gathered:
            _meet(p, node, value, dim, share)
    start = share.start if call.mixer.by_channel else None
    return replace(share, where=FULL, origins=p.origins_of(shared), start=start, expanded=None)


def _meet(p: Placements, node: Node, value: Node, dim: int | None, share: ValuePlacement) -> None:
    """Cuts an operand of a mixer to the share of heads or channels that decides the result."""
    given = p.of(value)
    if dim is None:
        if given.dim is not None:
            p.demote(given.origins, node)
        return
    if given.where == FREE or given.dim is None:
        source, source_dim = parameter_of(p, value, dim)
        if source is None:
            p.demote(given.origins or share.origins, node)
        p.cut(source, source_dim, share.blocks)
        if given.dim != dim:
            p.demote(share.origins, node)
        return
    is_even = len(given.blocks) == 1 and given.size % p.tp_size == 0
    if is_even and dim_of(given) != dim and p.trace.shape(value)[dim] == 1:
        p.decisions.gathered.add(value)
        raise Restart
    if given.dim != dim or not is_even:
        p.demote(given.origins | share.origins, node)


# -- rules by kind of call ----------------------------------------------------------------------------------------

_OPAQUE_RULES: dict[CallKind, Rule] = {
    CallKind.LINEAR: _linear,
    CallKind.NORM: _norm,
    CallKind.ELEMENTWISE: like_operand,
    CallKind.DROPOUT: like_operand,
    CallKind.ATTENTION: _attention,
    CallKind.EXPERTS: _experts,
    CallKind.LAYER: _layer,
    CallKind.LOOKUP: lambda p, node: ValuePlacement(PARTIAL),
    CallKind.MIXER: _mixer,
    CallKind.GATED_NORM: _gated_norm,
    CallKind.HIDE: like_operand,
    CallKind.TOWERS: _layer,
    CallKind.BLOCK: _block,
}
