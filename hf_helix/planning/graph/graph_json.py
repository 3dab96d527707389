"""Operator graphs as data for JSON, and back.

In:   a forward graph; or the data of one in a file.
Out:  mappings and lists of plain values; or the graph.
Must hold: `graph_from(name, graph_data(graph))` is the same graph. The keys are the names of the fields of `Operator`,
and a field that has its default is left out: what is added later with a default needs no other format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from hf_helix.planning.graph.operator import Graph, Kind, Operator

FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "str": (str, str),
    "bool": (bool, bool),
    "int": (int, int),
    "float": (float, float),
    "tuple[str, ...]": (" ".join, lambda text: tuple(text.split())),
    "Kind": (lambda kind: kind.value, Kind),
    "Kind | None": (lambda kind: kind and kind.value, lambda text: Kind(text) if text else None),
}
"""For the type of a field, how its value is written and how it is read."""


def graph_data(graph: Graph) -> dict[str, Any]:
    """Returns what a file holds of a graph."""
    return {
        "inputs": " ".join(graph.inputs),
        "outputs": " ".join(graph.outputs),
        "repeats": graph.repeats,
        "operators": [_operator_data(operator) for operator in graph.operators],
    }


def graph_from(name: str, data: Mapping[str, Any]) -> Graph:
    """Returns the graph of a name.

    Raises:
        KeyError, TypeError, ValueError: the data lacks something or is of another sort.
    """
    operators = tuple(_operator_from(operator) for operator in data["operators"])
    if not isinstance(data["repeats"], bool):
        raise ValueError(f"graph {name!r}: repeats must be true or false, got {data['repeats']!r}")
    return Graph(name, operators, tuple(data["inputs"].split()), tuple(data["outputs"].split()), data["repeats"])


def _operator_data(operator: Operator) -> dict[str, Any]:
    plain = Operator(name=operator.name, kind=operator.kind, reads=operator.reads, writes=operator.writes)
    written = {}
    for field in fields(Operator):
        value = getattr(operator, field.name)
        if field.default is MISSING or value != getattr(plain, field.name):
            write, _ = FORMS[str(field.type)]
            written[field.name] = write(value)
    return written


def _operator_from(data: Mapping[str, Any]) -> Operator:
    known = {field.name: FORMS[str(field.type)][1] for field in fields(Operator) if field.name in data}
    if unknown := data.keys() - known.keys():
        raise ValueError(f"operator {data.get('name')!r} has {', '.join(sorted(unknown))}, which this version lacks")
    return Operator(**{name: read(data[name]) for name, read in known.items()})
