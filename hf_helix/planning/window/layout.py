"""Layouts: the units of every pipeline rank, the graphs of the units, and the names of all operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hf_helix.planning.graph.backward import OF_SLICES, RECEIVE, SEND, GraphPair, transfer_graphs
from hf_helix.planning.graph.operator import Graph, Operator
from hf_helix.planning.parameters import Adder
from hf_helix.planning.traffic import GRADIENTS, WEIGHTS, Bucket, FlatWeights, Traffic, traffic_of

Key = tuple[int, str]
"""A value of a micro-batch: the unit that names the value, and the name. A value that leaves a unit keeps its key."""

Name = tuple[str, str]
"""An operator: the name of its unit and its entry in a plan, such as ("layer", "B.mlp.down.W"). For traffic, see
`Traffic.named_operators`: ("gradients", "B.sum.0"), ("weights", "F.gather.0") and so on."""


@dataclass(frozen=True)
class Layout:
    """The units of all pipeline ranks.

    Attributes:
        units: names of all units in forward order, transfers between ranks included.
        chunks: the units of each virtual stage, as indices.
        graphs: the graphs of each name.
        ranks: the pipeline rank of each virtual stage; empty for a single rank.
        shared: backward operators, as (unit, name), that add to one gradient, for example the gradient of tied
            embeddings; each row in the order of a micro-batch's backward.
        traffic: gradient reductions of all pipeline ranks, then weight gathers, see `planning.traffic`. Reductions
            of a rank are in the order in which a micro-batch would complete the gradients, gathers of a rank in the
            order in which a micro-batch first reads the weights.
    """

    units: Sequence[str]
    chunks: Mapping[int, Sequence[int]]
    graphs: Mapping[str, GraphPair]
    shared: Sequence[Sequence[tuple[int, str]]] = ()
    ranks: Sequence[int] = ()
    traffic: Sequence[Traffic] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", tuple(tuple((unit, name) for unit, name in row) for row in self.shared))
        for name in ("ranks", "traffic"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @cached_property
    def _homes(self) -> dict[int, int]:
        """The pipeline rank of each unit."""
        return {unit: self.ranks[stage] if self.ranks else 0 for stage, chunk in self.chunks.items() for unit in chunk}

    @cached_property
    def derived(self) -> dict[str, object]:
        """A cache for results derived from the layout only."""
        return {}

    @cached_property
    def reductions(self) -> tuple[Traffic, ...]:
        """The gradient reductions."""
        return tuple(each for each in self.traffic if each.adders)

    @cached_property
    def gathers(self) -> tuple[Traffic, ...]:
        """The weight gathers."""
        return tuple(each for each in self.traffic if each.readers)

    @cached_property
    def without_gathers(self) -> Layout:
        """The layout without weight gathers."""
        return replace(self, traffic=self.reductions) if self.gathers else self

    @cached_property
    def without_reductions(self) -> Layout:
        """The layout without gradient reductions."""
        return replace(self, traffic=self.gathers) if self.reductions else self

    @cached_property
    def is_on_host(self) -> bool:
        """Whether traffic is copied to the host and back."""
        return any(op.kind.copies for each in self.traffic for op in each.operators)

    @cached_property
    def reduces_often(self) -> bool:
        """Whether there are gradient reductions of every micro-batch."""
        return any(each.every_microbatch for each in self.traffic)

    @cached_property
    def often_adding(self) -> dict[Adder, list[int]]:
        """The gradient reductions of every micro-batch that each operator adds to, by unit."""
        found: dict[Adder, list[int]] = {}
        for traffic in self.traffic:
            for adder in traffic.adders if traffic.every_microbatch else ():
                found.setdefault(adder, []).append(traffic.unit)
        return found

    @cached_property
    def _traffic(self) -> dict[int, Traffic]:
        return {each.unit: each for each in self.traffic}

    @property
    def is_spread(self) -> bool:
        """Whether every pipeline rank has slices of the vocabulary."""
        return SEND + OF_SLICES in self.graphs

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return max(self.ranks, default=0) + 1

    def rank_of(self, unit: int) -> int:
        """Returns the pipeline rank of a unit, or of traffic."""
        traffic = self._traffic.get(unit)
        return self._homes.get(unit if traffic is None else traffic.home, 0)

    def name_of(self, unit: int) -> str:
        """Returns the name of a unit, or of traffic."""
        return self.units[unit] if unit < len(self.units) else self._traffic[unit].name

    def units_of(self, rank: int) -> list[int]:
        """The units of a pipeline rank in forward order."""
        return [unit for unit, home in sorted(self._homes.items()) if home == rank]

    def neighbours(self, unit: int, forward: bool) -> tuple[int | None, int | None]:
        """The units before and after a unit on the path of a micro-batch, forward or backward; None on another rank."""
        before, after = (
            other if self._homes.get(other) == self.rank_of(unit) and not self.transfers(other) else None
            for other in (unit - 1, unit + 1)
        )
        return (before, after) if forward else (after, before)

    def graph(self, unit: int, forward: bool) -> Graph:
        """The operators of a unit, forward or backward."""
        pair = self.graphs[self.units[unit]]
        return pair.forward if forward else pair.backward

    def traffic_at(self, unit: int) -> Traffic:
        """The traffic with an index of `Traffic.unit`."""
        return self._traffic[unit]

    def traffic_of(self, rank: int) -> list[Traffic]:
        """The traffic of a pipeline rank."""
        return [each for each in self.traffic if self.rank_of(each.unit) == rank]

    def transfers(self, unit: int) -> bool:
        """Whether a unit is a transfer between ranks."""
        return self.graphs[self.units[unit]].forward.transfers

    def describe(self) -> str:
        """Returns a line for each virtual stage; equal text means equal placement."""
        lines = []
        for stage, chunk in self.chunks.items():
            names = " ".join(self.units[unit] for unit in chunk)
            lines.append(f"stage {stage} on rank {self.ranks[stage] if self.ranks else 0}: {names}")
        often = [number for number, each in enumerate(self.reductions) if each.every_microbatch]
        if self.reductions:
            lines.append(f"{len(self.reductions)} gradient sums of {[each.bytes for each in self.reductions]} bytes")
        if often:
            lines.append(f"gradient sums {often} in every micro-batch")
        if self.gathers:
            lines.append(f"{len(self.gathers)} gathers of weights of {[each.bytes for each in self.gathers]} bytes")
        lines += ["copies to the host and back"] if self.is_on_host else []
        return "\n".join(lines)

    def key(self, unit: int, value: str, forward: bool) -> Key:
        """Returns the key of a value: the unit that writes the value, and a name.

        Args:
            unit: the index of a unit that reads or writes the value.
            forward: whether the value is in the unit's forward graph.
        """
        pair = self.graphs[self.units[unit]]
        forward = forward or value in pair.backward.saved_values
        if forward and value in pair.forward.inputs and unit > 0:
            before = self.graphs[self.units[unit - 1]].forward
            return unit - 1, before.outputs[pair.forward.inputs.index(value)]
        if not forward and value in pair.backward.inputs and unit < len(self.units) - 1:
            after = self.graphs[self.units[unit + 1]].backward
            return unit + 1, after.outputs[pair.backward.inputs.index(value)]
        return unit, value


def place_names(
    units: Sequence[str], ranks: Sequence[int], ranges: Sequence[range]
) -> tuple[list[str], dict[int, list[int]]]:
    """Returns the names of all units, transfers between the ranks included, and the unit indices of each virtual stage.

    The embedding goes with the first layers, the head with the last. Where more virtual stages are than `ranges`, the
    embedding and the head have a slice for each of these, and one with the layers.

    Args:
        units: the names of the embedding, the layers and the head.
        ranks: the pipeline rank of each virtual stage.
        ranges: the layers of each virtual stage with layers.
    """
    before = (len(ranks) - len(ranges)) // 2  # stages without layers, at the begin and at the end
    last = len(units) - 1 - before
    members = [[index] for index in range(before)]
    members += [[before + 1 + layer for layer in layers] for layers in ranges]
    members += [[index] for index in range(last + 1, len(units))]
    members[before].insert(0, before)
    members[-1 - before].append(last)
    # From a boundary on, values go from slice to slice of the head.
    of_slices = [""] * (len(ranks) - 1 - before) + [OF_SLICES] * before
    names: list[str] = []
    chunks: dict[int, list[int]] = {}
    for stage, indices in enumerate(members):
        chunk = [units[index] for index in indices]
        if stage > 0 and ranks[stage - 1] != ranks[stage]:
            chunk.insert(0, RECEIVE + of_slices[stage - 1])
        if stage < len(ranks) - 1 and ranks[stage + 1] != ranks[stage]:
            chunk.append(SEND + of_slices[stage])
        chunks[stage] = list(range(len(names), len(names) + len(chunk)))
        names += chunk
    return names, chunks


def staged_layout(
    names: Sequence[str],
    graphs: Mapping[str, GraphPair],
    ranks: Sequence[int],
    ranges: Sequence[range],
) -> Layout:
    """Returns the layout of a model on the stages of a pipeline, with transfers between the ranks.

    Args:
        names: of the embedding, the layers and the head, or of their slices; see `place_names`.
        graphs: the graphs of each name.
        ranks: the pipeline rank of each virtual stage.
        ranges: the layers of each virtual stage with layers.
    """
    units, chunks = place_names(names, ranks, ranges)
    embedding = (len(ranks) - len(ranges)) // 2
    transfers = transfer_graphs(graphs[names[embedding]].forward.passing, embedding > 0) if max(ranks) else {}
    return Layout(units, chunks, {**graphs, **transfers}, ranks=ranks)


def sub_layout(layout: Layout, stages: Sequence[Sequence[int]], ranks: Sequence[int] = ()) -> Layout:
    """Returns the layout of some units, given by virtual stage, without traffic.

    Args:
        layout: the layout of all units.
        stages: the units of each virtual stage.
        ranks: the pipeline rank of each virtual stage; empty for a single rank.
    """
    units = [unit for stage in stages for unit in stage]
    numbers = {unit: number for number, unit in enumerate(units)}
    chunks = {stage: [numbers[unit] for unit in chunk] for stage, chunk in enumerate(stages)}
    shared = [[(numbers[unit], name) for unit, name in row if unit in numbers] for row in layout.shared]
    return Layout([layout.units[unit] for unit in units], chunks, layout.graphs, shared, ranks)


def with_traffic(
    layout: Layout,
    buckets: Sequence[Bucket],
    weights: Sequence[FlatWeights],
    on_host: bool = False,
    often: bool = False,
) -> Layout:
    """Returns a layout with the traffic of its trained parameters.

    Args:
        layout: without traffic.
        buckets, weights, on_host, often: see `hf_helix.planning.traffic.traffic_of`.
    """
    costs = [sum(layout.graph(unit, False)[name].relative_cost for unit, name in each.adders) for each in buckets]
    return replace(layout, traffic=traffic_of(buckets, weights, len(layout.units), costs, on_host, often))


def named_operators(layout: Layout) -> Iterator[tuple[Name, Operator]]:
    """Every operator of the units, once."""
    for unit, pair in layout.graphs.items():
        for entry, op in pair.entries():
            yield (unit, entry), op


def named_traffic(layout: Layout) -> list[tuple[Name, Operator]]:
    """Every operator of the traffic."""
    return [pair for each in layout.traffic for pair in each.named_operators]


def is_traffic(name: Name) -> bool:
    """Returns whether a name is the name of an operator of traffic."""
    return name[0] in (GRADIENTS, WEIGHTS)
