"""The orders that every other plan is measured against.

In:   the forward and the backward graph of a block (None: that strand is absent).
Out:  an order of their operators.
Must hold: pure functions, the same on all ranks.

`sequential` is Megatron-style: one strand at a time, in canonical order, with a barrier between. It overlaps one thing,
as Megatron does: the weight gradient of a column-parallel linear runs beside the reduce-scatter that follows its I.
On graphs whose collectives are cut into tiles it is the paper's intra-batch baseline (`intra_batch`).
`round_robin` is the paper's Wavelet+: operators of the two strands in turn.
"""

from __future__ import annotations

from itertools import chain, zip_longest

from hf_helix.planning.graph.operator import Graph
from hf_helix.planning.plans.block_plan import BARRIER, Order, entries
from hf_helix.planning.profile import Profile


def sequential(forward: Graph | None, backward: Graph | None, profile: Profile) -> Order:
    """The forward strand, a barrier, then the backward strand, a barrier; each strand in canonical order."""
    strands = (entries(forward, None), entries(None, backward))
    return tuple(entry for strand in strands if strand for entry in (*strand, BARRIER))


def round_robin(forward: Graph | None, backward: Graph | None, profile: Profile) -> Order:
    """One operator of each strand in turn; what is left of the longer strand follows."""
    turns = zip_longest(entries(forward, None), entries(None, backward))
    return tuple(entry for entry in chain.from_iterable(turns) if entry is not None)
