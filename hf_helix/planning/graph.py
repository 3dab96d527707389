"""Operator graphs.

In:   the operators of one unit (a decoder layer, the embedding, the head), declared once, in forward order.
Out:  a `Graph` of the forward pass and, by `derive_backward`, the `Graph` of its backward pass.
Must hold: a value is written once; every operator comes after what it reads; the gradient of a value read by
several operators is summed in one fixed order, so that results do not depend on the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import zip_longest


class Kind(Enum):
    """Which stream an operator runs on: computation, or one of the two kinds of communication."""

    COMPUTE = "compute"
    LOCAL = "local"
    CROSS = "cross"

    @property
    def communicates(self) -> bool:
        return self is not Kind.COMPUTE


class Part(Enum):
    """What an operator does: forward, whole backward, input gradient (dgrad), weight gradient (wgrad)."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  (the field's own letter)
    W = "W"


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The smallest schedulable piece.

    `reads` and `writes` name values; the gradient of value `v` is `d.v`. `adds[i]`, where it is not None, names a
    partial gradient that is added to the i-th output. `of` is the declared operator this one runs a part of.
    `split` declares a backward in two parts, I and W; `backward_kind` the kind of the backward operator
    (None: the same as the forward's). `effort` is a rough relative time, or the measured one
    where there is a measurement.
    """

    name: str
    kind: Kind
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    part: Part = Part.F
    of: str = ""
    split: bool = False
    backward_kind: Kind | None = None
    adds: tuple[str | None, ...] = ()
    effort: float = 1.0

    def __post_init__(self) -> None:
        if not self.of:
            object.__setattr__(self, "of", self.name)

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Every value that must exist before this operator runs."""
        return self.reads + tuple(name for name in self.adds if name is not None)


@dataclass(frozen=True)
class Graph:
    """Operators in their canonical order, with the values that enter and leave the unit.

    `repeats`: units of this kind follow each other, what leaves one enters the next.
    """

    name: str
    operators: tuple[Operator, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    repeats: bool = False

    def __post_init__(self) -> None:
        known: set[str] = set()
        names: set[str] = set()
        self._declare("the inputs list", self.inputs, known)
        for operator in self.operators:
            self._declare("there are two operators called", (operator.name,), names)
            missing = [value for value in operator.depends_on if value not in known]
            if missing:
                raise ValueError(f"graph {self.name!r}: operator {operator.name!r} reads {missing}, not yet written")
            self._declare(f"operator {operator.name!r} writes", operator.writes, known)
        missing = [value for value in self.outputs if value not in known]
        if missing:
            raise ValueError(f"graph {self.name!r}: outputs {missing} are never written")
        if self.repeats and len(self.inputs) != len(self.outputs):
            raise ValueError(f"graph {self.name!r} repeats, so as many values must leave it as enter it")

    def _declare(self, what: str, new: Iterable[str], known: set[str]) -> None:
        for name in new:
            if name in known:
                raise ValueError(f"graph {self.name!r}: {what} {name!r} a second time")
            known.add(name)

    def __getitem__(self, name: str) -> Operator:
        for operator in self.operators:
            if operator.name == name:
                return operator
        raise KeyError(name)

    def describe(self) -> str:
        """One line per operator; equal text means equal graphs."""
        repeats = " (repeats)" if self.repeats else ""
        lines = [f"{self.name}{repeats}: {' '.join(self.inputs)} -> {' '.join(self.outputs)}"]
        for op in self.operators:
            writes = " ".join(
                f"{name}+={add}" if add else name for name, add in zip_longest(op.writes, op.adds) if name
            )
            traits = f"{op.kind.value}{' split' if op.split else ''}, effort {op.effort:g}"
            lines.append(f"  {op.name} [{traits}] {' '.join(op.reads)} -> {writes}")
        return "\n".join(lines)


def digest(graphs: Iterable[Graph]) -> str:
    """A short fingerprint of graphs; plans are stored with it, so that a plan for another model is recognised."""
    text = "\n".join(graph.describe() for graph in graphs)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def derive_backward(graph: Graph) -> Graph:
    """The backward graph of `graph`: edges reversed, communication replaced by its dual, linears split in I and W.

    The W of a linear follows its I; where communication follows the I, W comes after it, so that even a single
    strand computes W beside it (the paper's "self-overlap", section 4.2).
    """
    readers = _readers(graph)
    operators: list[Operator] = []
    waiting: Operator | None = None  # the W of the linear just passed
    for op in reversed(graph.operators):
        gradients = tuple(f"d.{value}" for value in op.writes)
        writes, adds = _gradient_names(op, readers, graph)
        main = replace(
            op,
            name=f"{op.name}.I" if op.split else op.name,
            of=op.name,
            part=Part.I if op.split else Part.B,
            kind=op.backward_kind or op.kind,
            reads=gradients,
            writes=writes,
            adds=adds,
            # A segment's backward is about twice its forward; the parts of a split linear cost one forward each.
            effort=op.effort if op.split or op.kind.communicates else 2 * op.effort,
        )
        operators.append(main)
        if waiting is not None:
            operators.append(waiting)
            waiting = None
        if op.split:
            waiting = replace(main, name=f"{op.name}.W", part=Part.W, writes=(), adds=())
            if not _next_communicates(graph, op):
                operators.append(waiting)
                waiting = None
    if waiting is not None:
        operators.append(waiting)
    return Graph(
        name=graph.name,
        operators=tuple(operators),
        inputs=tuple(f"d.{value}" for value in graph.outputs),
        outputs=tuple(f"d.{value}" for value in graph.inputs),
        repeats=graph.repeats,
    )


def _readers(graph: Graph) -> dict[str, list[Operator]]:
    """Value -> its readers in the order in which their gradients are summed, the order of backward."""
    readers: dict[str, list[Operator]] = {value: [] for op in graph.operators for value in op.writes}
    for op in reversed(graph.operators):
        for value in dict.fromkeys(op.reads):
            readers.setdefault(value, []).append(op)
    for value, ops in readers.items():
        problem = None
        if any((op.backward_kind or op.kind).communicates for op in ops[1:]):
            problem = "is read by a collective and after it by another operator, and a collective cannot sum gradients"
        elif ops and value in graph.outputs:
            problem = "leaves the unit and is read in it"
        elif not ops and value not in graph.outputs:
            problem = "is written and never read"
        elif any(op.reads.count(value) > 1 for op in ops):
            problem = "is read twice by one operator"
        if problem:
            raise ValueError(
                f"graph {graph.name!r}: value {value!r} {problem}, so its gradient cannot be derived; "
                "let a local operator copy the value, or leave it out"
            )
    return readers


def _gradient_names(
    op: Operator, readers: dict[str, list[Operator]], graph: Graph
) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """What the backward of `op` writes for each of its inputs, and the partial gradient that it adds."""
    writes, adds = [], []
    for value in op.reads:
        chain = [reader.name for reader in readers[value]]
        place = chain.index(op.name)
        is_last = place == len(chain) - 1
        writes.append(f"d.{value}" if is_last else f"d.{value}@{op.name}")
        adds.append(f"d.{value}@{chain[place - 1]}" if place else None)
    return tuple(writes), tuple(adds)


def _next_communicates(graph: Graph, op: Operator) -> bool:
    """Whether the operator that backward runs after `op` is communication that reads `op`'s input gradient."""
    place = graph.operators.index(op)
    if place == 0:
        return False
    before = graph.operators[place - 1]
    return (before.backward_kind or before.kind).communicates and bool(set(before.writes) & set(op.reads))
