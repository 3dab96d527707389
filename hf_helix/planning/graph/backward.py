"""The backward graph of a unit, derived from its forward graph.

In:   a forward `Graph`.
Out:  the `Graph` of its backward pass: input gradients, weight gradients, communication by its dual, recomputation.
Must hold: the gradient of a value with several readers is summed in one fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part

KeepWaiting = Callable[[Operator, Operator | None, Sequence[Operator]], bool]
"""Whether waiting W's wait further, given an operator and the following one."""


def derive_backward(graph: Graph) -> Graph:
    """Returns the backward graph: edges reversed, communication replaced by its dual, linears split in I and W.

    Pseudo-code:

        for every operator of the forward graph, last one first:
            emit B: reads the gradients of its outputs (and its saved values), writes the gradients of its inputs;
            of a linear, emit I in its place and set W aside;
            if communication would have to sum gradients of several readers, emit the sum as a separate operator
        move recomputed communication to directly after its inputs
        insert every W after its I, or after the communication that reads the I's result
        insert every recomputed operator (R) before its first reader

    So even a single strand overlaps a W with communication (the paper's "self-overlap", section 4.2). A frozen linear
    has no W. The gradient of a value with several readers is summed in the order of backward: each reader adds to the
    sum of the readers before. The recomputed value `v` is `r.v`, and operators read it after their gradients;
    recomputed communication without other recomputed inputs begins with the unit's backward.

    Example: a norm, an all-gather, a linear and a residual, whose sum leaves the unit.

        forward                                backward
        norm    x -> norm                      add         d.add -> d.x@add d.up
        gather  norm -> gather                 up.I        d.up -> d.gather
        up      gather -> up    (split)        gather      d.gather -> d.norm      (a reduce-scatter)
        add     x up -> add                    up.W        d.up gather ->          (overlaps)
                                               norm        d.norm -> d.x           (+= d.x@add)

    Raises:
        ValueError: a value whose gradient cannot be derived.
    """
    parts = backward_parts(graph)
    recomputed = {op.name for op in parts.chain if op.recomputed and op.kind.communicates}
    operators = place_weights(advance(parts.chain, recomputed), parts.weights)
    return backward_graph(graph, place_recomputation(operators, parts.recomputation))


@dataclass(frozen=True)
class BackwardParts:
    """The operators of a backward graph before they are put in one order."""

    chain: list[Operator]  # I, B and sums, in the reverse order of forward
    weights: dict[str, Operator]  # the W of every I, by the I's name
    recomputation: list[Operator]  # recomputed operators, in the order of forward


def backward_parts(graph: Graph) -> BackwardParts:
    """The backward operators of a forward graph. Raises as `derive_backward`."""
    readers = _readers(graph)
    plain = graph.plain
    repeated = _repeated_values(graph)
    parts = BackwardParts([], {}, _repeats(graph, repeated))
    for op in reversed(differentiated(graph)):
        with_gradient = [value for value in op.writes if value not in plain]
        gradients = tuple(
            f"d.{value}" for value in with_gradient if readers[value] or value in graph.outputs + graph.shown
        )
        writes, adds = _gradient_names(op, readers, plain)
        in_parts = op.splits_dgrad_wgrad and op.wgrad_fraction > 0
        main = replace(
            op,
            name=f"{op.name}.I" if in_parts else op.name,
            forward_name=op.name,
            part=Part.I if in_parts else Part.B,
            kind=op.backward_kind or op.kind,
            reads=(*gradients, *_seen_again(op.saved_for_backward, repeated)),
            writes=writes,
            accumulates=adds,
            # after the recomputation that leaves the saved state
            ordered_after=(f"{op.name}.again",)
            if op.recomputed and op.has_saved_state and not op.splits_dgrad_wgrad
            else (),
            saved_for_backward=(),
            non_differentiable=(),
            host_read_sizes=tuple(value for value in op.host_read_sizes if value in op.saved_for_backward),
            weights=_seen_again(op.dgrad_weights, repeated),
            dgrad_weights=(),
            wgrad_weights=(),
            # A backward by autograd is about twice its forward; the parts of a split linear cost one forward each.
            relative_cost=op.relative_cost if op.splits_dgrad_wgrad or op.kind.communicates else 2 * op.relative_cost,
        )
        parts.chain.append(main)
        parts.chain.extend(_sums(op, readers, plain))
        if in_parts:
            parts.weights[main.name] = replace(
                main,
                name=f"{op.name}.W",
                part=Part.W,
                reads=(*gradients, *_seen_again(op.reads, repeated)),
                writes=(),
                accumulates=(),
                weights=_seen_again(op.wgrad_weights, repeated),
                relative_cost=op.relative_cost * op.wgrad_fraction,
            )
    return parts


def backward_graph(graph: Graph, operators: Sequence[Operator]) -> Graph:
    """The graph of ordered backward operators; values that forward copied to the host are copied up first."""
    away = {op.reads[0]: op.writes[0] for op in graph.operators if op.kind is Kind.DOWN}
    if away:
        operators = [*_copies_up(away), *(replace(op, reads=_seen_again(op.reads, away)) for op in operators)]
    read = {value for op in operators for value in (*op.reads, *op.weights)}
    return Graph(
        name=graph.name,
        operators=tuple(operators),
        inputs=_gradients_of(graph.outputs, graph),
        outputs=_gradients_of(graph.inputs, graph),
        repeats=graph.repeats,
        saved_values=(
            *(value for value in _readers(graph) if value in read),
            *(f"d.{value}" for value in graph.shown),
        ),
    )


def _copies_up(away: Mapping[str, str]) -> Iterator[Operator]:
    """Yields the copies from the host, prefetched, of values that forward copied there under other names."""
    for value, on_host in away.items():
        yield Operator(name=f"{value}.up", kind=Kind.UP, part=Part.R, reads=(on_host,), writes=(f"r.{value}",), ahead=1)


def _seen_again(values: Iterable[str], repeated: Collection[str]) -> tuple[str, ...]:
    """The names of forward values in backward: `r.v` for recomputed ones."""
    return tuple(f"r.{value}" if value in repeated else value for value in values)


def _repeats(graph: Graph, repeated: Collection[str]) -> list[Operator]:
    """The recomputed operators, in the order of forward; all but prefetched ones wait for the unit's gradients."""
    return [
        replace(
            op,
            name=f"{op.name}.again",
            forward_name=op.name,
            part=Part.R,
            splits_dgrad_wgrad=False,
            reads=_seen_again(op.reads, repeated),
            writes=tuple(f"r.{value}" for value in op.writes if value in repeated),
            ordered_after=(),
            saved_for_backward=(),
            non_differentiable=(),
            control_deps=() if op.ahead else _gradients_of(graph.outputs, graph),
            weights=_seen_again(op.weights, repeated),
            dgrad_weights=(),
            wgrad_weights=(),
        )
        for op in graph.operators
        if op.recomputed
    ]


def place_recomputation(operators: Sequence[Operator], repeats: Sequence[Operator]) -> list[Operator]:
    """Returns the operators with each recomputed operator before its first reader; the inputs of a W come before its I,
    so that the W can overlap the communication after the I."""
    writers = {value: op for op in repeats for value in op.writes}
    named = {op.name: op for op in repeats}
    reads = {op.forward_name: op.reads for op in operators if op.part is Part.W}
    placed: dict[str, Operator] = {}

    def put(op: Operator) -> None:
        values = (*op.reads, *op.weights, *(reads[op.forward_name] if op.part is Part.I else ()))
        needed = [writers[value] for value in values if value in writers]
        for other in (*needed, *(named[name] for name in op.ordered_after if name in named)):
            if other.name not in placed:
                put(other)
        placed[op.name] = op

    for op in repeats:
        if op.kind.communicates and all(value not in writers or writers[value].name in placed for value in op.reads):
            put(op)
    for op in operators:
        put(op)
    return list(placed.values())


def _repeated_values(graph: Graph) -> set[str]:
    """Returns the results of recomputed operators; indices and counts returned with differentiable values are kept."""
    return {
        value
        for op in graph.operators
        if op.recomputed
        for value in op.writes
        if value not in op.non_differentiable or not op.differentiable
    }


def _gradients_of(values: Iterable[str], graph: Graph) -> tuple[str, ...]:
    """Returns the names of the gradients of values that have one."""
    return tuple(f"d.{value}" for value in values if value not in graph.plain)


def differentiated(graph: Graph) -> list[Operator]:
    """Returns the operators whose results have gradients: not those that only indices depend on."""
    known, found = {*graph.outputs, *graph.shown} - graph.plain, list[Operator]()
    for op in reversed(graph.operators):
        if op.differentiable and (not op.writes or known.intersection(op.writes)):
            known.update(op.reads)
            found.insert(0, op)
    return found


def _sums(op: Operator, readers: Mapping[str, Sequence[Operator]], plain: Collection[str]) -> list[Operator]:
    """Returns the sums of gradients that are complete after the backward of `op` and need a separate operator."""
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
    """Whether communication would have to add to a gradient."""
    return any((op.backward_kind or op.kind).communicates for op in readers[1:])


def advance(operators: Iterable[Operator], names: Collection[str]) -> list[Operator]:
    """The operators, some of them (by name) moved to directly after their inputs."""
    result: list[Operator] = []
    for op in operators:
        place = len(result)
        while (
            op.name in names
            and place > 0
            and result[place - 1].name not in op.ordered_after
            and not set(result[place - 1].writes) & set(op.depends_on)
        ):
            place -= 1
        result.insert(place, op)
    return result


def place_weights(
    operators: Sequence[Operator], weights: Mapping[str, Operator], keep_waiting: KeepWaiting | None = None
) -> list[Operator]:
    """Returns the operators with each W after its I, or after communication that follows the I and reads its result."""
    result: list[Operator] = []
    waiting: list[Operator] = []
    for op, following in zip_longest(operators, operators[1:]):
        result.append(op)
        if op.name in weights:
            waiting.append(weights[op.name])
            if following is not None and following.kind.communicates and set(following.reads) & set(op.writes):
                continue
        if keep_waiting is not None and keep_waiting(op, following, waiting):
            continue
        result += waiting
        waiting = []
    return result


def _readers(graph: Graph) -> dict[str, list[Operator]]:
    """Returns the readers of each value in the order of backward, the order of summing their gradients."""
    readers: dict[str, list[Operator]] = {value: [] for op in graph.operators for value in op.writes}
    with_gradient, plain = differentiated(graph), graph.plain
    for op in reversed(graph.operators):
        for value in dict.fromkeys(op.reads):
            readers.setdefault(value, [])
            if op in with_gradient:
                readers[value].append(op)
    kept = {
        value
        for op in graph.operators
        for value in (*op.saved_for_backward, *op.weights, *(() if op in with_gradient else op.reads))
    }
    for op in graph.operators:
        stray = [value for value in op.non_differentiable if value not in op.writes]
        stray += [value for value in op.host_read_sizes if value not in op.reads or value not in plain]
        if stray:
            raise ValueError(f"graph {graph.name!r}: operator {op.name!r} cannot have {stray} as plain values or sizes")
    for value, ops in readers.items():
        problem = None
        if ops and value in graph.outputs + graph.shown and value not in plain:
            problem = "leaves the unit and is read in it"
        elif not ops and value not in graph.outputs + graph.shown and value not in kept:
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
    """Returns the results of the backward of `op`, one for each input, and the partial gradients to add."""
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
OF_SLICES = ".slices"
"""Ends the names of transfers between slices of the head."""

FIRST, NEXT = ".first", ".next"
"""End the names of the units of slices before the last, which keeps its name."""


def slice_names(name: str, size: int) -> list[str]:
    """Returns the names of the units of a number of slices, in their order."""
    return [name + FIRST, *[name + NEXT] * (size - 2), name]


def transfer_graphs(plain: Sequence[bool] = (False,), has_slices: bool = False) -> dict[str, GraphPair]:
    """Returns the units between two virtual stages on different ranks: `send` ends a stage, `receive` begins the next.

    Their backward is derived as well: gradients come in at `send` and go out at `receive`. `plain` says of each value
    handed on whether it has no gradient. With `has_slices`, there are further units between slices of the head, which
    hand on its input and statistics.
    """
    return _ends(plain, "") | (_ends((False, False), OF_SLICES) if has_slices else {})


def _ends(plain: Sequence[bool], suffix: str) -> dict[str, GraphPair]:
    names = tuple(f"x{number}" for number in range(len(plain)))
    without = tuple(name for name, is_plain in zip(names, plain, strict=True) if is_plain)
    send = Operator(name="transfer", kind=Kind.PIPELINE, reads=names, writes=())
    receive = Operator(name="transfer", kind=Kind.PIPELINE, reads=(), writes=names, non_differentiable=without)
    return {
        SEND + suffix: GraphPair.of(Graph(SEND + suffix, (send,), names, (), plain_inputs=without)),
        RECEIVE + suffix: GraphPair.of(Graph(RECEIVE + suffix, (receive,), (), names)),
    }
