"""The backward graph of a unit, derived from its forward graph.

In:   a forward `Graph`.
Out:  the `Graph` of its backward pass: input gradients, weight gradients, communication by its dual, recomputation.
Must hold: the gradient of a value that several operators read is summed in one fixed order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part


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
