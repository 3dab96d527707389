"""Operator graphs.

In:   the operators of one unit (a decoder layer, the embedding, the head), declared once, in forward order.
Out:  a `Graph` of the forward pass and, by `derive_backward`, the `Graph` of its backward pass.
Must hold: a value is written once; every operator comes after what it reads; the gradient of a value read by
several operators is summed in one fixed order, so that results do not depend on the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest


class Kind(Enum):
    """Which stream an operator runs on: computation, or one of the kinds of communication.

    Local and cross-node communication are collectives inside a layer, `PIPELINE` takes a value from one virtual stage
    to the next, and `GRADIENTS` are the sums over data-parallel ranks (no operators, but a stream of their own).
    """

    COMPUTE = "compute"
    LOCAL = "local"
    CROSS = "cross"
    PIPELINE = "pipeline"
    GRADIENTS = "gradients"

    @property
    def communicates(self) -> bool:
        return self is not Kind.COMPUTE


class Part(Enum):
    """What an operator does: forward, whole backward, input gradient (dgrad), weight gradient (wgrad), or forward again
    in backward (R).
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  (the field's own letter)
    W = "W"
    R = "R"


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The smallest schedulable piece.

    Attributes:
        name: unique in its graph.
        kind: the stream that it runs on.
        reads: the values that it takes; the gradient of value `v` is `d.v`.
        writes: the values that it makes.
        part: what it does.
        of: the declared operator that this one runs a part of; by default its own name.
        split: whether its backward has two parts, I and W; W reads all that forward read.
        trained: how much of W there is, from 1 (all of its weights are trained) to 0 (none: its backward has no W).
        backward_kind: the kind of its backward; None for the same.
        adds: for each output, the partial gradient that is added to it, or None.
        after: operators of the graph that come first although nothing of them is read. It orders this graph alone; what
            is declared forward says nothing of backward.
        keeps: values of the forward pass that its backward reads.
        saves: whether it also leaves something unnamed for its backward, such as what autograd saves.
        again: whether backward runs it once more, so that what it writes and leaves is not kept.
        cheap: whether running it again costs little for what need not be kept.
        waits: values that must be there although nothing of them is read, so that it runs no earlier than needed.
        plain: those of `writes` that have no gradient (indices, counts).
        sizes: those of `reads` that say how much there is to move: the host reads them when it issues the operator.
        effort: a rough relative time.
    """

    name: str
    kind: Kind
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    part: Part = Part.F
    of: str = ""
    split: bool = False
    trained: float = 1.0
    backward_kind: Kind | None = None
    adds: tuple[str | None, ...] = ()
    after: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    saves: bool = False
    again: bool = False
    cheap: bool = False
    waits: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    effort: float = 1.0

    def __post_init__(self) -> None:
        if not self.of:
            object.__setattr__(self, "of", self.name)

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Every value that must exist before this operator runs."""
        return self.reads + tuple(name for name in self.adds if name is not None) + self.waits

    @property
    def differentiable(self) -> bool:
        """Whether there is anything to run backward."""
        return not self.writes or set(self.writes) != set(self.plain)

    @property
    def receives(self) -> bool:
        """Whether what it writes comes from another pipeline rank."""
        return self.kind is Kind.PIPELINE and bool(self.writes)

    @property
    def sends(self) -> bool:
        """Whether what it reads goes to another pipeline rank."""
        return self.kind is Kind.PIPELINE and bool(self.reads)


@dataclass(frozen=True)
class Graph:
    """Operators in their canonical order, with the values that enter and leave the unit.

    Attributes:
        name: of the unit; units of the same name have equal graphs.
        operators: in canonical order.
        inputs: values that enter the unit.
        outputs: values that leave it.
        repeats: whether units of this kind follow each other, so that what leaves one enters the next.
        kept: of a backward graph, the values of the forward pass that it reads.
    """

    name: str
    operators: tuple[Operator, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    repeats: bool = False
    kept: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known: set[str] = set()
        names: set[str] = set()
        self._declare("the inputs list", self.inputs + self.kept, known)
        for operator in self.operators:
            self._declare("there are two operators called", (operator.name,), names)
            missing = [value for value in operator.depends_on if value not in known]
            missing += [name for name in operator.after if name not in names]
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

    @property
    def transfers(self) -> bool:
        """Whether the unit is no part of the model, but a way between pipeline ranks."""
        return any(op.kind is Kind.PIPELINE for op in self.operators)

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
            trained = "" if op.trained == 1 else f" trained {op.trained:g}"
            traits = f"{op.kind.value}{' split' * op.split}{trained}{' again' * op.again}, effort {op.effort:g}"
            after = f" after {' '.join(op.after)}" if op.after else ""
            keeps = f" keeps {' '.join(op.keeps)}" if op.keeps else ""
            plain = f" plain {' '.join(op.plain)}" if op.plain else ""
            lines.append(f"  {op.name} [{traits}] {' '.join(op.reads)} -> {writes}{after}{keeps}{plain}")
        return "\n".join(lines)


def digest(graphs: Iterable[Graph]) -> str:
    """A short fingerprint of graphs; plans are stored with it, so that a plan for another model is recognised."""
    text = "\n".join(graph.describe() for graph in graphs)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
