"""Graph pairs: a forward graph with the backward graph that is derived from it, and the pairs of pipeline transfers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_helix.planning.graph.backward import derive_backward
from hf_helix.planning.graph.operator import Graph, Kind, Operator


@dataclass(frozen=True)
class GraphPair:
    """A unit's forward graph and the backward graph derived from it."""

    forward: Graph
    backward: Graph

    @classmethod
    def of(cls, forward: Graph) -> GraphPair:
        """Returns a declared graph with its derived backward."""
        return cls(forward, derive_backward(forward))

    def entries(self) -> Iterator[tuple[str, Operator]]:
        """Yields every operator with its entry in a plan, such as "B.mlp.down.W"."""
        for letter, graph in (("F", self.forward), ("B", self.backward)):
            for op in graph.operators:
                yield f"{letter}.{op.name}", op


SEND, RECEIVE = "send", "receive"


def transfer_graphs(values: int = 1) -> dict[str, GraphPair]:
    """Returns the units between two virtual stages on different ranks: `send` ends one, `receive` begins the next.

    Their backward is derived like any other: gradients come in at `send` and go out at `receive`.

    Args:
        values: how many values leave a layer.
    """
    names = tuple(f"x{number}" for number in range(values))
    send = Operator(name="transfer", kind=Kind.PIPELINE, reads=names, writes=())
    receive = Operator(name="transfer", kind=Kind.PIPELINE, reads=(), writes=names)
    return {
        SEND: GraphPair.of(Graph(SEND, (send,), names, ())),
        RECEIVE: GraphPair.of(Graph(RECEIVE, (receive,), (), names)),
    }
