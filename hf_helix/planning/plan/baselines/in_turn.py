"""Orders of a block without times: `sequential`, the baseline of all plans, and the paper's Wavelet+
(`round_robin`).

Each function takes the forward and the backward graph of a block (None: the strand is absent) and returns an order.
"""

from __future__ import annotations

from itertools import chain, zip_longest

from hf_helix.planning.graph.operator import Graph
from hf_helix.planning.plan.block_plan import BARRIER, Order, entries
from hf_helix.planning.timing.profile import Profile


def sequential(forward: Graph | None, backward: Graph | None, profile: Profile) -> Order:
    """Returns an order with a strand at a time, in canonical order, each with a barrier at its end.

    As in Megatron-LM, a single overlap: the weight gradient of a column-parallel linear with the reduce-scatter after
    its input gradient.

    Args:
        forward, backward: the graphs of the block; None where a strand is absent.
        profile: unused.
    """
    strands = (entries(forward, None), entries(None, backward))
    return tuple(entry for strand in strands if strand for entry in (*strand, BARRIER))


def round_robin(forward: Graph | None, backward: Graph | None, profile: Profile) -> Order:
    """Returns the operators of the strands in turn; the rest of the longer strand follows."""
    turns = zip_longest(entries(forward, None), entries(None, backward))
    return tuple(entry for entry in chain.from_iterable(turns) if entry is not None)
