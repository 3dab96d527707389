"""The paper's Wavelet+: the operators of the two strands in turn, whatever they take.

In:   the forward and the backward graph of a block (None: that strand is absent).
Out:  an order of their operators.
Must hold: a pure function, the same on all ranks.
"""

from __future__ import annotations

from itertools import chain, zip_longest

from hf_helix.planning.graph.operator import Graph
from hf_helix.planning.plans.block_plan import Order, entries
from hf_helix.planning.profile import Profile


def round_robin(forward: Graph | None, backward: Graph | None, profile: Profile) -> Order:
    """One operator of each strand in turn; what is left of the longer strand follows.

    Args:
        forward: the graph of the forward pass; None where the block has none.
        backward: the graph of backward, likewise.
        profile: is not needed for it.
    """
    turns = zip_longest(entries(forward, None), entries(None, backward))
    return tuple(entry for entry in chain.from_iterable(turns) if entry is not None)
