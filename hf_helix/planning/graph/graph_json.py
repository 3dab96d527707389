"""Operator graphs as data for JSON, and back.

In:   a forward graph; or what a file holds of one.
Out:  mappings and lists of plain values; or the graph.
Must hold: `graph_from(name, graph_data(graph))` is the same graph; files of earlier versions, which lack what was added
later, are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part


def graph_data(graph: Graph) -> dict[str, Any]:
    """What a file holds of a graph."""
    operators = [
        {
            "name": op.name,
            "kind": op.kind.value,
            "reads": " ".join(op.reads),
            "writes": " ".join(op.writes),
            "split": op.split,
            "trained": op.trained,
            "backward_kind": op.backward_kind.value if op.backward_kind else None,
            "after": " ".join(op.after),
            "keeps": " ".join(op.keeps),
            "saves": op.saves,
            "again": op.again,
            "cheap": op.cheap,
            "plain": " ".join(op.plain),
            "sizes": " ".join(op.sizes),
            "effort": op.effort,
        }
        for op in graph.operators
    ]
    return {
        "inputs": " ".join(graph.inputs),
        "outputs": " ".join(graph.outputs),
        "repeats": graph.repeats,
        "operators": operators,
    }


def graph_from(name: str, data: Mapping[str, Any]) -> Graph:
    """The graph of a name.

    Raises:
        KeyError, TypeError, ValueError: the data lacks something or is of another sort.
    """
    operators = tuple(
        Operator(
            name=op["name"],
            kind=Kind(op["kind"]),
            reads=tuple(op["reads"].split()),
            writes=tuple(op["writes"].split()),
            part=Part.F,
            split=op["split"],
            trained=float(op.get("trained", 1.0)),
            backward_kind=Kind(op["backward_kind"]) if op["backward_kind"] else None,
            after=tuple(op["after"].split()),
            keeps=tuple(op.get("keeps", "").split()),
            saves=bool(op.get("saves", False)),
            again=bool(op.get("again", False)),
            cheap=bool(op.get("cheap", False)),
            plain=tuple(op.get("plain", "").split()),
            sizes=tuple(op.get("sizes", "").split()),
            effort=float(op["effort"]),
        )
        for op in data["operators"]
    )
    if not isinstance(data["repeats"], bool):
        raise ValueError(f"graph {name!r}: repeats must be true or false, got {data['repeats']!r}")
    return Graph(name, operators, tuple(data["inputs"].split()), tuple(data["outputs"].split()), data["repeats"])
