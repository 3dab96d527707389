"""Graph pairs: a forward graph with the backward graph that is derived from it, and the pairs of pipeline transfers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from hf_helix.planning.graph.backward import derive_backward
from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part


@dataclass(frozen=True)
class GraphPair:
    """A unit's forward graph and the backward graph derived from it."""

    forward: Graph
    backward: Graph

    @classmethod
    def of(cls, forward: Graph) -> GraphPair:
        """The pair of a declared graph."""
        return cls(forward, derive_backward(forward))

    def without(self, names: Collection[str]) -> GraphPair:
        """The pair with less freedom, for ablations (paper, figure 15).

        Args:
            names: `local`, `cross`: communication of that kind runs on the compute stream; `comm_beside_comm`: all
                communication shares one stream; `wgrad`: weight gradients stay at their canonical places.
        """
        kinds = {kind: Kind.COMPUTE for kind in (Kind.LOCAL, Kind.CROSS) if kind.value in names}
        if "comm_beside_comm" in names:
            kinds.setdefault(Kind.CROSS, Kind.LOCAL)
        forward, backward = (
            replace(graph, operators=tuple(replace(op, kind=kinds.get(op.kind, op.kind)) for op in graph.operators))
            for graph in (self.forward, self.backward)
        )
        return GraphPair(forward, _hold_weights(backward) if "wgrad" in names else backward)


SEND, RECEIVE = "send", "receive"


def transfer_graphs(values: int = 1) -> dict[str, GraphPair]:
    """The units between two virtual stages on different ranks: `send` ends the one, `receive` begins the other.

    Backward, derived like any other, the gradients come in at `send` and go out at `receive`.

    Args:
        values: how many leave a layer.
    """
    names = tuple(f"x{number}" for number in range(values))
    send = Operator(name="transfer", kind=Kind.PIPELINE, reads=names, writes=())
    receive = Operator(name="transfer", kind=Kind.PIPELINE, reads=(), writes=names)
    return {
        SEND: GraphPair.of(Graph(SEND, (send,), names, ())),
        RECEIVE: GraphPair.of(Graph(RECEIVE, (receive,), (), names)),
    }


def _hold_weights(graph: Graph) -> Graph:
    """Every weight gradient before the operators that stand behind it."""
    operators: list[Operator] = []
    held: str | None = None
    for op in graph.operators:
        operators.append(replace(op, after=(*op.after, held)) if held else op)
        held = op.name if op.part is Part.W else held
    return replace(graph, operators=tuple(operators))
