"""Ablations: graphs that leave plans less freedom, to see what a freedom is worth (the paper's figure 15).

In:   the graphs of a unit, or a profile, and the names of what plans must not use.
Out:  the same with less freedom.
Must hold: results stay the same. No option of a run asks for this; benchmarks apply it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part
from hf_helix.planning.graph.pair import GraphPair
from hf_helix.planning.profile import Profile

ABLATIONS = ("intra_node", "inter_node", "comm_beside_comm", "wgrad")


def ablate(pair: GraphPair, names: Collection[str]) -> GraphPair:
    """The graphs of a unit with less freedom.

    Args:
        pair: the graphs.
        names: `intra_node`, `inter_node`: communication of that kind runs on the compute stream; `comm_beside_comm`:
            all communication shares one stream; `wgrad`: weight gradients stay at their canonical places.
    """
    kinds = {kind: Kind.COMPUTE for kind in (Kind.INTRA_NODE, Kind.INTER_NODE) if kind.value in names}
    if "comm_beside_comm" in names:
        kinds.setdefault(Kind.INTER_NODE, Kind.INTRA_NODE)
    forward, backward = (
        replace(graph, operators=tuple(replace(op, kind=kinds.get(op.kind, op.kind)) for op in graph.operators))
        for graph in (pair.forward, pair.backward)
    )
    return GraphPair(forward, _hold_weights(backward) if "wgrad" in names else backward)


def ablate_profile(profile: Profile, names: Collection[str]) -> Profile:
    """Returns the profile with graphs that have less freedom, see `ablate`; times stay."""
    graphs = {unit: ablate(pair, names) for unit, pair in profile.layout.graphs.items()}
    return replace(profile, layout=replace(profile.layout, graphs=graphs)) if names else profile


def _hold_weights(graph: Graph) -> Graph:
    """The graph with every weight gradient before the operators that stand behind it."""
    operators: list[Operator] = []
    held: str | None = None
    for op in graph.operators:
        operators.append(replace(op, ordered_after=(*op.ordered_after, held)) if held else op)
        held = op.name if op.part is Part.W else held
    return replace(graph, operators=tuple(operators))
