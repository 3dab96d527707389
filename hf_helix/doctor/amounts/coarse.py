"""Coarse amounts: computations between two communications count as one operator.

In:   the amounts of a rank.
Out:  equal amounts with fewer operators, for a search of layouts.
Must hold: every operator of the given amounts is in one coarse operator, with its kernels, its transfers and its
memory. Backward is derived from the coarse forward graph, as for declared operators. A coarse computation begins with
the first value that communication brings, and ends with the first value that communication waits for, so
communication is overlapped with as much computation as before.

    layer      norm  gather  qkv  attention  out  scatter  add  norm  gather  up  act  down  scatter  add
    coarse     norm  gather  out                  scatter  norm       gather  down           scatter  add
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hf_helix.doctor.amounts.records import Amounts, Lifetimes, OperatorAmounts, Storage
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part
from hf_helix.planning.parameters import Parameter
from hf_helix.planning.window.layout import Name

Names = Mapping[Name, str]
"""The coarse entry of every entry, by the name of its unit and its own."""


def coarse_amounts(amounts: Amounts) -> Amounts:
    """Returns the amounts with the computations between two communications as one operator; the given amounts if their
    backward has operators that no forward operator has."""
    pairs, names = dict(amounts.layout.graphs), dict[Name, str]()
    for unit, pair in amounts.layout.graphs.items():
        groups = list(_groups(pair.forward))
        made = GraphPair.of(_merged_graph(pair.forward, groups))
        entries = _entries(pair, made, groups)
        if {*entries.values()} != {entry for entry, _ in made.entries()}:
            made, entries = pair, {entry: entry for entry, _ in pair.entries()}
        pairs[unit] = made
        names |= {(unit, entry): coarse for entry, coarse in entries.items()}
    return replace(
        amounts,
        layout=replace(amounts.layout, graphs=pairs),
        operators=_operators(amounts, names),
        parameters=[_parameter(row, amounts.layout.units, names) for row in amounts.parameters],
        lifetimes=_lifetimes(amounts.lifetimes, pairs, names),
    )


# -- graphs ------------------------------------------------------------------------------------------------------------


def _groups(graph: Graph) -> Iterator[list[Operator]]:
    """Yields the operators of a forward graph in groups, in their order."""
    sent = {value for op in graph.operators if op.kind.communicates for value in op.depends_on}
    brought: set[str] = set()  # by communication
    group: list[Operator] = []
    for op in graph.operators:
        waits = brought.intersection(op.depends_on).difference(*(each.depends_on for each in group[:1]))
        fits = group and _is_merged(op) and _is_merged(group[-1]) and op.recomputed == group[-1].recomputed
        if group and (not fits or waits or sent.intersection(group[-1].writes)):
            yield group
            group = []
        group.append(op)
        brought.update(op.writes if op.kind.communicates else ())
    yield group


def _is_merged(op: Operator) -> bool:
    ordered = op.ordered_after or op.control_deps or op.host_read_sizes or op.ahead
    return op.kind is Kind.COMPUTE and op.backward_kind in (None, Kind.COMPUTE) and op.differentiable and not ordered


def _merged_graph(graph: Graph, groups: Sequence[Sequence[Operator]]) -> Graph:
    readers: Counter[str] = Counter(
        value for op in graph.operators for value in {*op.depends_on, *op.saved_for_backward}
    )
    leaving = {*graph.outputs, *graph.shown}
    return replace(graph, operators=tuple(_merged(group, readers, leaving) for group in groups))


def _merged(group: Sequence[Operator], readers: Mapping[str, int], leaving: Iterable[str]) -> Operator:
    """Returns a group as one operator, under the name of its last.

    Args:
        group: the operators.
        readers: how many operators of the graph have something to do with each value.
        leaving: the values that leave the unit.
    """
    if len(group) == 1:
        return group[0]
    inside = Counter(value for op in group for value in {*op.depends_on, *op.saved_for_backward})
    written = {value for op in group for value in op.writes}
    kept = {value for value in written if value in leaving or readers[value] > inside[value]}
    return replace(
        group[-1],
        reads=_distinct(value for op in group for value in op.reads if value not in written),
        writes=tuple(value for op in group for value in op.writes if value in kept),
        splits_dgrad_wgrad=any(op.splits_dgrad_wgrad for op in group),
        wgrad_fraction=max((op.wgrad_fraction for op in group if op.splits_dgrad_wgrad), default=1.0),
        saved_for_backward=_distinct(v for op in group for v in op.saved_for_backward if v not in written - kept),
        has_saved_state=any(op.has_saved_state for op in group),
        non_differentiable=tuple(value for op in group for value in op.non_differentiable if value in kept),
        weights=_distinct(value for op in group for value in op.weights),
        dgrad_weights=_distinct(value for op in group for value in op.dgrad_weights),
        wgrad_weights=_distinct(value for op in group for value in op.wgrad_weights),
        relative_cost=sum(op.relative_cost for op in group),
    )


def _distinct(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _entries(pair: GraphPair, made: GraphPair, groups: Sequence[Sequence[Operator]]) -> dict[str, str]:
    """Returns the coarse entry of every entry of a unit; none for an entry without one."""
    last = {op.name: group[-1].name for group in groups for op in group}
    coarse = {_key(entry, op, op.forward_name): entry for entry, op in made.entries()}
    found = {}
    for entry, op in pair.entries():
        key = _key(entry, op, last.get(op.forward_name, op.forward_name))
        found[entry] = coarse.get(key, entry)
    return found


def _key(entry: str, op: Operator, group: str) -> tuple[str, str, str]:
    """Returns what an entry and its coarse one have in common: direction, part, and the name of the group."""
    return entry[0], "B" if op.part is Part.I else op.part.value, group


# -- amounts -----------------------------------------------------------------------------------------------------------


def _operators(amounts: Amounts, names: Names) -> dict[Name, OperatorAmounts]:
    """Returns the amounts of coarse operators, in the order of their first operators."""
    members: dict[Name, list[OperatorAmounts]] = {}
    for name, counted in amounts.operators.items():
        members.setdefault((name[0], names[name]), []).append(counted)
    return {name: _sum(made) for name, made in members.items()}


def _sum(members: Sequence[OperatorAmounts]) -> OperatorAmounts:
    delta = peak = 0
    for each in members:
        delta, peak = delta + each.delta, max(peak, delta + each.peak)
    return OperatorAmounts(
        delta,
        peak,
        sum(each.weights for each in members),
        [kernel for each in members for kernel in each.kernels],
        tuple(transfer for each in members for transfer in each.transfers),
        sum(each.calls for each in members),
    )


def _parameter(row: Parameter, units: Sequence[str], names: Names) -> Parameter:
    adders = ((unit, names[units[unit], f"B.{op}"].removeprefix("B.")) for unit, op in row.adders)
    return replace(row, adders=tuple(dict.fromkeys(adders)))


def _lifetimes(lifetimes: Lifetimes, pairs: Mapping[str, GraphPair], names: Names) -> Lifetimes:
    """Returns the lifetimes of memory that coarse operators leave."""
    known = {unit: {value for _, op in pair.entries() for value in op.writes} for unit, pair in pairs.items()}
    left: dict[Name, list[Storage]] = {}
    for (unit, entry), storages in lifetimes.left.items():
        coarse = names[unit, entry]
        for each in storages:
            last = names[unit, each.last] if each.last else ""
            if last != coarse:
                values = tuple(value for value in each.values if value in known[unit])
                left.setdefault((unit, coarse), []).append(replace(each, values=values, last=last))
    entering = {key: names.get((key[0], entry), entry) for key, entry in lifetimes.entering.items()}
    return Lifetimes(left, entering)
