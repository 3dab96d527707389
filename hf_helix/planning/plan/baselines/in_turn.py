"""`sequential`: one strand at a time, the order that every other plan is measured against.

In:   the forward and the backward graph of a block (None: that strand is absent).
Out:  an order of their operators.
Must hold: a pure function, the same on all ranks.

It is what Megatron-LM does. It overlaps one thing, as Megatron-LM does: the weight gradient of a column-parallel linear
runs beside the reduce-scatter that follows its input gradient.
"""

from __future__ import annotations

from itertools import chain, zip_longest

from hf_helix.planning.graph.operator import Graph
from hf_helix.planning.plan.block_plan import BARRIER, Order, entries
from hf_helix.planning.timing.profile import Profile


def sequential(forward: Graph | None, backward: Graph | None, profile: Profile) -> Order:
    """The forward strand, a barrier, then the backward strand, a barrier; each strand in canonical order.

    Args:
        forward: the graph of the forward pass; None where the block has none.
        backward: the graph of backward, likewise.
        profile: is not needed for it.
    """
    strands = (entries(forward, None), entries(None, backward))
    return tuple(entry for strand in strands if strand for entry in (*strand, BARRIER))


def round_robin(forward: Graph | None, backward: Graph | None, profile: Profile) -> Order:
    """One operator of each strand in turn; what is left of the longer strand follows.

    Args:
        forward: the graph of the forward pass; None where the block has none.
        backward: the graph of backward, likewise.
        profile: is not needed for it.
    """
    turns = zip_longest(entries(forward, None), entries(None, backward))
    return tuple(entry for entry in chain.from_iterable(turns) if entry is not None)
