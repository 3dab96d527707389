"""Operator graphs.

In:   the operators of one unit (a decoder layer, the embedding, the head), declared once, in forward order.
Out:  a `Graph` of the forward pass and, by `derive_backward`, the `Graph` of its backward pass.
Must hold: a value is written once; every operator comes after the writers of its inputs; the gradient of a value with
several readers is summed in one fixed order, so that results do not depend on the plan.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import zip_longest


class Kind(Enum):
    """The stream of an operator: computation, or one of the kinds of communication.

    Intra-node and inter-node communication (the paper's local and cross-node) are collectives inside a layer;
    `PIPELINE` transfers a value to the next virtual stage; `GRADIENTS` are gradient reductions over replicas (dp, cp)
    and ZeRO-1 weight gathers, which run once a step and belong to no unit; `UP` copies from the memory of the host to a
    device, and `DOWN` back.
    """

    COMPUTE = "compute"
    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"
    PIPELINE = "pipeline"
    GRADIENTS = "gradients"
    UP = "host_up"
    DOWN = "host_down"

    @property
    def communicates(self) -> bool:
        return self is not Kind.COMPUTE

    @property
    def copies(self) -> bool:
        return self in (Kind.UP, Kind.DOWN)

    @property
    def is_awaited(self) -> bool:
        """Whether barriers wait for it: collectives and copies up, but neither transfers nor copies to the host."""
        return self not in (Kind.COMPUTE, Kind.PIPELINE, Kind.DOWN)


class Part(Enum):
    """Forward, full backward, input gradient (dgrad), weight gradient (wgrad), or recomputed forward (R)."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  (the field's own letter)
    W = "W"
    R = "R"


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The smallest schedulable unit of work.

    Attributes:
        name: unique in its graph.
        kind: its stream.
        reads: the values of its inputs; the gradient of value `v` is `d.v`.
        writes: the values of its outputs.
        part: see `Part`.
        forward_name: the declared operator that contains this operator; by default its own name.
        splits_dgrad_wgrad: whether its backward has two parts, I and W; W reads all inputs of forward.
        wgrad_fraction: the part of W to compute, from 1 (all weights are trained) to 0 (none: its backward has no W).
        backward_kind: the kind of its backward; None for the same.
        accumulates: for each output, the partial gradient to add, or None.
        ordered_after: predecessors only by order, in this graph and not in the derived backward.
        saved_for_backward: values of the forward pass read by its backward.
        has_saved_state: whether unnamed state is left for its backward, for example tensors saved by autograd.
        recomputed: whether backward runs the operator again instead of keeping results and state.
        recompute_when_selective: whether recomputing is cheap for the saved memory.
        control_deps: values to wait for without reading, so that the operator does not run too early.
        non_differentiable: outputs without a gradient (indices, counts).
        host_read_sizes: inputs with sizes, read by the host to issue the operator.
        weights: values with unsharded parameters (ZeRO-3); the executor sets them in the model's modules: no arguments
            of the operator.
        dgrad_weights: the part of `weights` that its backward, or its input gradient, also reads.
        wgrad_weights: the part of `weights` that its weight gradient also reads.
        ahead: the number of units by which it is prefetched, see `planning.window.passes`; 0 for none. A prefetched
            operator reads what another, prefetched as far or farther, writes, or what forward has written.
        relative_cost: a rough relative time.
    """

    name: str
    kind: Kind
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    part: Part = Part.F
    forward_name: str = ""
    splits_dgrad_wgrad: bool = False
    wgrad_fraction: float = 1.0
    backward_kind: Kind | None = None
    accumulates: tuple[str | None, ...] = ()
    ordered_after: tuple[str, ...] = ()
    saved_for_backward: tuple[str, ...] = ()
    has_saved_state: bool = False
    recomputed: bool = False
    recompute_when_selective: bool = False
    control_deps: tuple[str, ...] = ()
    non_differentiable: tuple[str, ...] = ()
    host_read_sizes: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    dgrad_weights: tuple[str, ...] = ()
    wgrad_weights: tuple[str, ...] = ()
    ahead: int = 0
    relative_cost: float = 1.0

    def __post_init__(self) -> None:
        if not self.forward_name:
            object.__setattr__(self, "forward_name", self.name)

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Every value that must exist before this operator runs."""
        added = tuple(name for name in self.accumulates if name is not None)
        return self.reads + added + self.control_deps + self.weights

    @property
    def differentiable(self) -> bool:
        """Whether there is anything to run backward."""
        return not self.writes or set(self.writes) != set(self.non_differentiable)

    @property
    def is_traffic(self) -> bool:
        """Whether it moves gradients or weights, and no values of a micro-batch, see `planning.traffic`."""
        return not self.reads and not self.writes

    @property
    def receives(self) -> bool:
        """Whether its results come from another pipeline rank."""
        return self.kind is Kind.PIPELINE and bool(self.writes)

    @property
    def sends(self) -> bool:
        """Whether its inputs go to another pipeline rank."""
        return self.kind is Kind.PIPELINE and bool(self.reads)


@dataclass(frozen=True)
class Graph:
    """Operators in their canonical order, with the values that enter and leave the unit.

    Attributes:
        name: of the unit; units of the same name have equal graphs.
        operators: in canonical order.
        inputs: values that enter the unit.
        outputs: values that leave the unit.
        repeats: whether units of this kind follow each other: the outputs of one are the inputs of the next.
        saved_values: of a backward graph, the inputs that no other unit gives: values of the forward pass, and
            gradients of `shown` values.
        shown: further values that a caller of the decoder may read, and give gradients for.
        plain_inputs: inputs without a gradient (indices).
    """

    name: str
    operators: tuple[Operator, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    repeats: bool = False
    saved_values: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    plain_inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known: set[str] = set()
        names: set[str] = set()
        self._declare("the inputs list", self.inputs + self.saved_values, known)
        for operator in self.operators:
            self._declare("there are two operators called", (operator.name,), names)
            if operator.is_traffic:
                raise ValueError(f"graph {self.name!r}: operator {operator.name!r} reads and writes nothing")
            missing = [value for value in operator.depends_on if value not in known]
            missing += [name for name in operator.ordered_after if name not in names]
            if missing:
                raise ValueError(f"graph {self.name!r}: operator {operator.name!r} reads {missing}, not yet written")
            self._declare(f"operator {operator.name!r} writes", operator.writes, known)
        missing = [value for value in self.outputs + self.shown if value not in known]
        if missing:
            raise ValueError(f"graph {self.name!r}: outputs {missing} are never written")
        if self.repeats and len(self.inputs) != len(self.outputs):
            raise ValueError(f"graph {self.name!r} repeats, so as many values must leave it as enter it")

    def _declare(self, what: str, new: Iterable[str], known: set[str]) -> None:
        for name in new:
            if name in known:
                raise ValueError(f"graph {self.name!r}: {what} {name!r} a second time")
            known.add(name)

    @cached_property
    def plain(self) -> frozenset[str]:
        """The values without a gradient."""
        return frozenset({*self.plain_inputs, *(value for op in self.operators for value in op.non_differentiable)})

    @property
    def passing(self) -> tuple[bool, ...]:
        """Of each output, whether it has no gradient, see `transfer_graphs`."""
        return tuple(value in self.plain for value in self.outputs)

    @cached_property
    def transfers(self) -> bool:
        """Whether the unit is a transfer between pipeline ranks, and no part of the model."""
        return any(op.kind is Kind.PIPELINE for op in self.operators)

    def __getitem__(self, name: str) -> Operator:
        for operator in self.operators:
            if operator.name == name:
                return operator
        raise KeyError(name)

    def describe(self) -> str:
        """Returns a line for each operator, with all facts that plans depend on."""
        repeats = " (repeats)" if self.repeats else ""
        shown = f" shows {' '.join(self.shown)}" if self.shown else ""
        plain = f" without gradient {' '.join(self.plain_inputs)}" if self.plain_inputs else ""
        lines = [f"{self.name}{repeats}: {' '.join(self.inputs)} -> {' '.join(self.outputs)}{shown}{plain}"]
        for op in self.operators:
            writes = " ".join(
                f"{name}+={add}" if add else name for name, add in zip_longest(op.writes, op.accumulates) if name
            )
            traits = op.kind.value + " split" * op.splits_dgrad_wgrad + " recomputed" * op.recomputed
            traits += f" ahead {op.ahead}" if op.ahead else ""
            if op.wgrad_fraction != 1:
                traits += f" wgrad_fraction {op.wgrad_fraction:g}"
            lists = {
                "after": op.ordered_after,
                "and": op.control_deps,
                "reads sizes": op.host_read_sizes,
                "saves": op.saved_for_backward,
                "without gradient": op.non_differentiable,
                "with": op.weights,
            }
            rest = "".join(f" {what} {' '.join(values)}" for what, values in lists.items() if values)
            lines.append(f"  {op.name} [{traits}, cost {op.relative_cost:g}] {' '.join(op.reads)} -> {writes}{rest}")
        return "\n".join(lines)


def digest(graphs: Iterable[Graph]) -> str:
    """Returns a short fingerprint of graphs; plan files hold the fingerprint, to reject a plan for another model."""
    text = "\n".join(graph.describe() for graph in graphs)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
