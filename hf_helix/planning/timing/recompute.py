"""Recomputation (activation checkpointing): operators that backward runs again, to keep fewer activations.

In:   the forward graph of a layer and a mode; or a profile.
Out:  the graph with recomputed operators marked, for `derive_backward`; the profile of such graphs.
Must hold: operators whose outputs no backward operator reads are not recomputed (the last linear, its reduce-scatter,
the residual). Indices and counts are kept: both are small, and the recomputation must route rows as before.
"""

from dataclasses import replace

from hf_helix.config import OFFLOAD, RECOMPUTE
from hf_helix.planning.graph.backward import GraphPair, differentiated
from hf_helix.planning.graph.operator import Graph, Kind, Operator
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.layout import named_operators, named_traffic

NONE, SELECTIVE, FULL = RECOMPUTE


def recomputed(graph: Graph, mode: str) -> Graph:
    """Returns the forward graph with the operators of a mode marked as recomputed."""
    if mode == NONE:
        return graph
    plain = {value for op in graph.operators for value in op.non_differentiable}
    needed = {
        value
        for op in graph.operators
        for value in (*op.saved_for_backward, *(op.reads if op.splits_dgrad_wgrad and op.wgrad_fraction else ()))
    }
    marked: set[str] = set()
    with_gradient = differentiated(graph)
    for op in reversed(graph.operators):
        may = op in with_gradient and (mode in (FULL, OFFLOAD) or op.recompute_when_selective or op.recomputed)
        if may and (op.has_saved_state or needed.intersection(op.writes) - plain):
            marked.add(op.name)
            needed.update(op.reads)
        elif op.recomputed and not op.differentiable:  # weights: gathered again in every mode
            marked.add(op.name)
    return replace(graph, operators=tuple(replace(op, recomputed=op.name in marked) for op in graph.operators))


def with_copies_down(graph: Graph) -> Graph:
    """Returns a recomputed graph with a copy to the host of every input that backward reads. Derived backward graphs
    bring these up again, see `backward_graph`."""
    read = {value for op in GraphPair.of(graph).backward.operators for value in op.reads}
    downs = [
        Operator(
            name=f"{value}.down",
            kind=Kind.DOWN,
            reads=(value,),
            writes=(f"host.{value}",),
            saved_for_backward=(f"host.{value}",),
            non_differentiable=(f"host.{value}",),
        )
        for value in graph.inputs
        if value in read
    ]
    return replace(graph, operators=(*downs, *graph.operators))


def recompute_profile(profile: Profile, mode: str) -> Profile:
    """Returns the profile with recomputed layers: a recomputed operator takes as long as in forward."""
    old = profile.layout
    graphs = {
        name: GraphPair.of(recomputed(pair.forward, mode)) if pair.forward.repeats else pair
        for name, pair in old.graphs.items()
    }
    layout = replace(old, graphs=graphs)
    sources = {
        name: name if name in profile.times else (name[0], f"F.{op.forward_name}")
        for name, op in named_operators(layout)
    }
    sources |= {name: name for name, _ in named_traffic(layout)}
    like = {name: profile.like.get(source, source) for name, source in sources.items()}
    return replace(
        profile,
        about={**profile.about, "recompute": f"{mode}, derived"},
        layout=layout,
        times={name: profile.times[source] for name, source in sources.items()},
        spread={name: profile.spread.get(source, 0.0) for name, source in sources.items()},
        like={name: other for name, other in like.items() if other != name},
        bytes={name: profile.bytes[source] for name, source in sources.items() if source in profile.bytes},
    )
