"""Operator graphs.

In:   the operators of one unit (a decoder layer, the embedding, the head), declared once, in forward order.
Out:  a `Graph` of the forward pass and, by `derive_backward`, the `Graph` of its backward pass.
Must hold: a value is written once; every operator comes after what it reads; the gradient of a value read by
several operators is summed in one fixed order, so that results do not depend on the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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

    `reads` and `writes` name values; the gradient of value `v` is `d.v`. `adds[i]`, where it is not None, names a
    partial gradient that is added to the i-th output. `of` is the declared operator this one runs a part of.
    `split` declares a backward in two parts, I and W, of which W reads all that forward read; `trained` how much of W
    there is, from 1 (all of its weights are trained) to 0 (none: the backward has no W); `backward_kind` the kind
    of the backward operator (None: the same as the forward's). `after` names operators of the graph that come first
    although nothing of them is read: parts of one weight's gradient add up in order. `keeps` names values of the
    forward pass that its backward reads; `saves` says whether it also leaves something unnamed for that. `again`: in
    backward it runs once more, so that what it writes and leaves is not kept, and `waits` names values that must be
    there although nothing of them is read, so that it does so no earlier than needed. `cheap`: running it again costs
    little for what need not be kept. `plain` names values among `writes` that have no gradient (indices, counts);
    `sizes` those among `reads` that say how much there is to move: the host reads them when it issues the operator.
    `effort` is a rough relative time.
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

    `repeats`: units of this kind follow each other, what leaves one enters the next. `kept`: of a backward graph, the
    values of the forward pass that it reads.
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


def digest(graphs: Iterable[Graph]) -> str:
    """A short fingerprint of graphs; plans are stored with it, so that a plan for another model is recognised."""
    text = "\n".join(graph.describe() for graph in graphs)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def derive_backward(graph: Graph) -> Graph:
    """The backward graph of `graph`: edges reversed, communication replaced by its dual, linears split in I and W.

    The W of a linear follows its I; where communication follows the I, W comes after it, so that even a single
    strand computes W beside it (the paper's "self-overlap", section 4.2). A linear that trains nothing has no W, and
    its I is all of its B. Of tiles in a row (see `after`),
    communication comes as early as it can, and W's after the I's that communication follows. What runs again (R) stands
    where it is first needed, but communication that needs nothing else begins with the unit's backward; the value `v`
    that comes again is `r.v`, and an operator reads it behind its gradients. Where communication would have to sum
    gradients, a sum of its own, `v.sum`, does.
    """
    readers = _readers(graph)
    followers = _followers(graph)
    plain = _plain_values(graph)
    repeated = {value for op in graph.operators if op.again for value in op.writes} - plain
    operators: list[Operator] = []
    weights: dict[str, Operator] = {}
    for op in reversed(graph.operators):
        if not op.differentiable:
            continue
        with_gradient = [value for value in op.writes if value not in plain]
        gradients = tuple(f"d.{value}" for value in with_gradient if readers[value] or value in graph.outputs)
        writes, adds = _gradient_names(op, readers, plain)
        in_parts = op.split and op.trained > 0
        main = replace(
            op,
            name=f"{op.name}.I" if in_parts else op.name,
            of=op.name,
            part=Part.I if in_parts else Part.B,
            kind=op.backward_kind or op.kind,
            reads=(*gradients, *_seen_again(op.keeps, repeated)),
            writes=writes,
            adds=adds,
            after=() if op.split else (*followers.get(op.name, ()), *_left_by(op)),
            keeps=(),
            plain=(),
            sizes=tuple(value for value in op.sizes if value in op.keeps),
            # A segment's backward is about twice its forward; the parts of a split linear cost one forward each.
            effort=op.effort if op.split or op.kind.communicates else 2 * op.effort,
        )
        operators.append(main)
        operators += _sums(op, readers, plain)
        if in_parts:
            weights[main.name] = replace(
                main,
                name=f"{op.name}.W",
                part=Part.W,
                reads=(*gradients, *_seen_again(op.reads, repeated)),
                writes=(),
                adds=(),
                after=tuple(f"{name}.W" for name in followers.get(op.name, ())),
                effort=op.effort * op.trained,
            )
    operators = _with_repeats(_with_weights(_early(operators), weights), _repeats(graph, repeated))
    read = {value for op in operators for value in op.reads}
    return Graph(
        name=graph.name,
        operators=tuple(operators),
        inputs=tuple(f"d.{value}" for value in graph.outputs),
        outputs=tuple(f"d.{value}" for value in graph.inputs),
        repeats=graph.repeats,
        kept=tuple(value for value in readers if value in read),
    )


def _seen_again(values: Iterable[str], repeated: Collection[str]) -> tuple[str, ...]:
    """What backward calls values of the forward pass."""
    return tuple(f"r.{value}" if value in repeated else value for value in values)


def _left_by(op: Operator) -> tuple[str, ...]:
    """What leaves for its backward what forward did not keep."""
    return (f"{op.name}.again",) if op.again and op.saves else ()


def _repeats(graph: Graph, repeated: Collection[str]) -> list[Operator]:
    """What backward runs again, from the unit's gradients on. Indices and counts are kept; these come last."""
    return [
        replace(
            op,
            name=f"{op.name}.again",
            of=op.name,
            part=Part.R,
            split=False,
            reads=_seen_again(op.reads, repeated),
            writes=tuple(f"r.{value}" for value in op.writes if value in repeated),
            after=(),
            keeps=(),
            plain=(),
            waits=tuple(f"d.{value}" for value in graph.outputs),
        )
        for op in graph.operators
        if op.again
    ]


def _with_repeats(operators: Sequence[Operator], repeats: Sequence[Operator]) -> list[Operator]:
    """Each repeat before the first operator that needs it; what a W needs before its I, so that it comes beside it."""
    writers = {value: op for op in repeats for value in op.writes}
    named = {op.name: op for op in repeats}
    reads = {op.of: op.reads for op in operators if op.part is Part.W}
    found: dict[str, Operator] = {}

    def put(op: Operator) -> None:
        values = (*op.reads, *reads[op.of]) if op.part is Part.I else op.reads
        needed = [writers[value] for value in values if value in writers]
        for other in (*needed, *(named[name] for name in op.after if name in named)):
            if other.name not in found:
                put(other)
        found[op.name] = op

    for op in repeats:
        if op.kind.communicates and all(value not in writers or writers[value].name in found for value in op.reads):
            put(op)
    for op in operators:
        put(op)
    return list(found.values())


def _plain_values(graph: Graph) -> set[str]:
    """Those without a gradient."""
    return {value for op in graph.operators for value in op.plain}


def _sums(op: Operator, readers: Mapping[str, Sequence[Operator]], plain: Collection[str]) -> list[Operator]:
    """The sums of gradients that are complete once the backward of `op` has run and that no other operator can make."""
    return [
        Operator(
            name=f"{value}.sum",
            kind=Kind.COMPUTE,
            reads=tuple(f"d.{value}@{reader.name}" for reader in readers[value]),
            writes=(f"d.{value}",),
            part=Part.B,
        )
        for value in op.reads
        if value not in plain and _needs_sum(readers[value]) and readers[value][-1] is op
    ]


def _needs_sum(readers: Sequence[Operator]) -> bool:
    """Whether communication would have to add to another operator's gradient."""
    return any((op.backward_kind or op.kind).communicates for op in readers[1:])


def _early(operators: list[Operator]) -> list[Operator]:
    """Communication that is one of several in a row, or whose forward runs again, directly after what it needs."""
    in_row = {name for op in operators if op.kind.communicates and op.after for name in (op.name, *op.after)}
    in_row |= {op.name for op in operators if op.again and op.kind.communicates}
    found: list[Operator] = []
    for op in operators:
        place = len(found)
        while (
            op.name in in_row
            and place > 0
            and found[place - 1].name not in op.after
            and not set(found[place - 1].writes) & set(op.depends_on)
        ):
            place -= 1
        found.insert(place, op)
    return found


def _with_weights(operators: list[Operator], weights: dict[str, Operator]) -> list[Operator]:
    """Each W after its I, or after the communication that follows it and all further tiles of which this is true."""
    found: list[Operator] = []
    waiting: list[Operator] = []
    for op, following in zip_longest(operators, operators[1:]):
        found.append(op)
        if op.name in weights:
            waiting.append(weights[op.name])
            if following and following.kind.communicates and set(following.reads) & set(op.writes):
                continue
        further = weights.get(following.name) if following else None
        if op.kind.communicates and further and any(weight.name in further.after for weight in waiting):
            continue
        found += waiting
        waiting = []
    return found


def _hold_weights(graph: Graph) -> Graph:
    """Every weight gradient before the operators that stand behind it."""
    operators: list[Operator] = []
    held: str | None = None
    for op in graph.operators:
        operators.append(replace(op, after=(*op.after, held)) if held else op)
        held = op.name if op.part is Part.W else held
    return replace(graph, operators=tuple(operators))


def _followers(graph: Graph) -> dict[str, list[str]]:
    """Operator -> those that are declared to come after it; backward they come before."""
    found: dict[str, list[str]] = {}
    for op in graph.operators:
        for name in op.after:
            if graph[name].split is not op.split:
                raise ValueError(
                    f"graph {graph.name!r}: {op.name!r} is declared to come after {name!r}, but only one of the two "
                    "has a weight gradient apart; declare both with split, or none"
                )
            found.setdefault(name, []).append(op.name)
    return found


def _readers(graph: Graph) -> dict[str, list[Operator]]:
    """Value -> its readers in the order in which their gradients are summed, the order of backward."""
    readers: dict[str, list[Operator]] = {value: [] for op in graph.operators for value in op.writes}
    for op in reversed(graph.operators):
        for value in dict.fromkeys(op.reads):
            readers.setdefault(value, [])
            if op.differentiable:
                readers[value].append(op)
    kept = {value for op in graph.operators for value in (*op.keeps, *(() if op.differentiable else op.reads))}
    plain = _plain_values(graph)
    for op in graph.operators:
        stray = [value for value in op.plain if value not in op.writes or value in graph.outputs]
        stray += [value for value in op.sizes if value not in op.reads or value not in plain]
        if stray:
            raise ValueError(f"graph {graph.name!r}: operator {op.name!r} cannot have {stray} as plain values or sizes")
    for value, ops in readers.items():
        problem = None
        if ops and value in graph.outputs:
            problem = "leaves the unit and is read in it"
        elif not ops and value not in graph.outputs and value not in kept:
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
    op: Operator, readers: Mapping[str, Sequence[Operator]], plain: Collection[str]
) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """What the backward of `op` writes for each of its inputs, and the partial gradient that it adds."""
    writes: list[str] = []
    adds: list[str | None] = []
    for value in op.reads:
        if value in plain:
            continue
        chain = [reader.name for reader in readers[value]]
        if _needs_sum(readers[value]):
            writes.append(f"d.{value}@{op.name}")
            adds.append(None)
            continue
        place = chain.index(op.name)
        is_last = place == len(chain) - 1
        writes.append(f"d.{value}" if is_last else f"d.{value}@{op.name}")
        adds.append(f"d.{value}@{chain[place - 1]}" if place else None)
    return tuple(writes), tuple(adds)


def first_difference(mine: str, theirs: str) -> str:
    """The first line in which two texts differ, both versions; empty when they are equal."""
    left, right = mine.splitlines(), theirs.splitlines()
    for number in range(max(len(left), len(right))):
        a = left[number] if number < len(left) else "(nothing)"
        b = right[number] if number < len(right) else "(nothing)"
        if a != b:
            return f"line {number + 1}: {a.strip()!r} against {b.strip()!r}"
    return ""
