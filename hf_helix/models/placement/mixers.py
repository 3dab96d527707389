"""Rules of placement for recurrent mixers and their gated norms.

In:   a call of a mixer or of a gated norm, and `Placements` with a placement for every operand.
Out:  the placement of the result; or a decision, as in `hf_helix.models.placement.rules`.
Must hold: a mixer runs on the full sequence, over this rank's share of heads or channels; parameters along these
(decay, time steps, kernels of convolutions) are cut with them. What all heads share (a single group of state features)
is gathered. A mixer without a share runs in full on every rank.
"""

from dataclasses import replace

from torch.fx import Node

from hf_helix.models.placement.rules import Placements, parameter_of
from hf_helix.models.placement.value_placement import FREE, FULL, NeedsInlining, Restart, ValuePlacement, dim_of
from hf_helix.models.trace.trace import args_of


def place_gated_norm(p: Placements, node: Node) -> ValuePlacement:
    """Places a norm over the last dimension with a gate of its value's shape."""
    value, gate = args_of(node)[:2]
    given, other = p.of(value), p.of(gate)
    if given.dim is not None and given.dim == p.dims(node) - 1:
        raise NeedsInlining(p.trace.path_of(node))
    if (given.dim, given.blocks) != (other.dim, other.blocks):
        in_full = [placement.origins for placement in (given, other) if placement.dim is None and placement.origins]
        p.demote(in_full[0] if in_full else given.origins | other.origins, node)
    return replace(given, where=p.join((value, gate)), origins=given.origins | other.origins, start=None, expanded=None)


def place_mixer(p: Placements, node: Node) -> ValuePlacement:
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
    """Lets an operand of a mixer meet the share of heads or channels that decides the result."""
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
