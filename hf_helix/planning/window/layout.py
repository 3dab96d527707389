"""Layouts: the units of every pipeline rank, the graphs of the units, and the names of all operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hf_helix.planning.graph.backward import OF_SLICES, RECEIVE, SEND, GraphPair
from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part

Key = tuple[int, str]
"""A value of a micro-batch: the unit that names the value, and the name. A value that leaves a unit keeps its key."""

Name = tuple[str, str]
"""An operator: the name of its unit and its entry in a plan, such as ("layer", "B.mlp.down.W"). Operators of a step
belong to no unit: ("gradients", "B.sum.0"), ("weights", "F.gather.0") and so on, as the layout numbers them."""

REDUCTIONS, GATHERS = "gradients", "weights"
"""The first part of the names of operators of a step: gradient reductions and weight gathers."""

GATHER_COST = 8.0
"""A rough relative time of a weight gather, until the gather is measured; a norm has 1."""


@dataclass(frozen=True)
class GradientReduction:
    """A bucket: gradients that replicas (dp, cp) reduce together, once the last micro-batch has added to all."""

    # the backward operators that add to the gradients, as (unit, name), all on one pipeline rank
    adders: tuple[tuple[int, str], ...]
    bytes: int  # of the gradients, on the rank with most bytes
    every_microbatch: bool = False  # whether every micro-batch's gradients are reduced, and summed in shards


@dataclass(frozen=True)
class WeightGather:
    """ZeRO-1 weights: replicated on every rank, with a shard stepped by each replica (`shard_optimizer`).

    A window gathers the weights once, from its start on, in the order of the layout. The first computation of a unit
    waits for all gathers of the unit.
    """

    units: tuple[int, ...]  # the units with these weights, all on one pipeline rank
    name: str  # unique among the gathers of these units
    bytes: int  # of the weights, on the rank with most bytes


@dataclass(frozen=True)
class StepOperator:
    """A gradient reduction, a weight gather, or a copy of either between host and device."""

    name: Name
    op: Operator
    rank: int  # of the pipeline
    reduction: int = -1  # its index among the layout's; of all others -1
    gather: int = -1  # its index among the layout's; of all others -1


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
        reductions: gradient reductions of all pipeline ranks; reductions of a rank in the order in which a micro-batch
            would complete the gradients; empty without replicas.
        gathers: weight gathers of all pipeline ranks; gathers of a rank in the order in which a micro-batch first reads
            the weights.
        on_host: whether weights and optimizer states lie on the host: a copy to the host follows each reduction,
            and a copy to the device precedes each gather.
    """

    units: Sequence[str]
    chunks: Mapping[int, Sequence[int]]
    graphs: Mapping[str, GraphPair]
    shared: Sequence[Sequence[tuple[int, str]]] = ()
    ranks: Sequence[int] = ()
    reductions: Sequence[GradientReduction] = ()
    gathers: Sequence[WeightGather] = ()
    on_host: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", tuple(tuple((unit, name) for unit, name in row) for row in self.shared))
        for name in ("ranks", "reductions", "gathers"):
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
    def without_gathers(self) -> Layout:
        """The layout without weight gathers."""
        return replace(self, gathers=()) if self.gathers else self

    @cached_property
    def reduced_often(self) -> dict[int, int]:
        """The gradient reductions of every micro-batch, as indices into `reductions`, numbered from 0."""
        often = (number for number, each in enumerate(self.reductions) if each.every_microbatch)
        return {number: place for place, number in enumerate(often)}

    @cached_property
    def often_adding(self) -> dict[tuple[int, str], list[int]]:
        """The gradient reductions of `reduced_often` that each adder adds to."""
        found: dict[tuple[int, str], list[int]] = {}
        for number in self.reduced_often:
            for adder in self.reductions[number].adders:
                found.setdefault(adder, []).append(number)
        return found

    @cached_property
    def per_step(self) -> list[StepOperator]:
        """The gradient reductions, the weight gathers, and the copies of both in the same order: a copy to the host
        after each reduction, a copy to the device before each gather."""
        made = []
        for number, reduction in enumerate(self.reductions):
            adders = (self.graphs[self.units[unit]].backward[name] for unit, name in reduction.adders)
            cost = sum(adder.relative_cost for adder in adders)  # a rough guess
            op = Operator(
                name=f"sum.{number}", kind=Kind.GRADIENTS, reads=(), writes=(), part=Part.B, relative_cost=cost
            )
            rank = self.rank_of(reduction.adders[0][0])
            made.append(StepOperator((REDUCTIONS, f"B.{op.name}"), op, rank, reduction=number))
        for number, gather in enumerate(self.gathers):
            op = Operator(
                name=f"gather.{number}",
                kind=Kind.GRADIENTS,
                reads=(),
                writes=(),
                forward_name=gather.name,
                relative_cost=GATHER_COST,
            )
            made.append(StepOperator((GATHERS, f"F.{op.name}"), op, self.rank_of(gather.units[0]), gather=number))
        for each in [*made] if self.on_host else ():
            kind, number = (Kind.DOWN, each.reduction) if each.reduction >= 0 else (Kind.UP, each.gather)
            op = replace(each.op, name=f"{kind.name.lower()}.{number}", kind=kind)
            made.append(replace(each, name=(each.name[0], f"{each.name[1][0]}.{op.name}"), op=op))
        return made

    @property
    def reduction_names(self) -> list[Name]:
        """The names of the gradient reductions in the order of `reductions`."""
        return [each.name for each in self.per_step[: len(self.reductions)]]

    @property
    def gather_names(self) -> list[Name]:
        """The names of the weight gathers in the order of `gathers`."""
        return [each.name for each in self.per_step[len(self.reductions) :][: len(self.gathers)]]

    def copy_names(self, kind: Kind) -> list[Name]:
        """The names of the copies to the host after each reduction (`DOWN`), or to the device before each gather."""
        return [each.name for each in self.per_step if each.op.kind is kind]

    @property
    def is_spread(self) -> bool:
        """Whether every pipeline rank has slices of the vocabulary."""
        return SEND + OF_SLICES in self.graphs

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return max(self.ranks, default=0) + 1

    def rank_of(self, unit: int) -> int:
        """Returns the pipeline rank of a unit."""
        return self._homes.get(unit, 0)

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

    def reductions_of(self, rank: int) -> list[int]:
        """The gradient reductions of a pipeline rank, as indices into `reductions`."""
        return [number for number, each in enumerate(self.reductions) if self.rank_of(each.adders[0][0]) == rank]

    def gathers_of(self, rank: int) -> list[int]:
        """The weight gathers of a pipeline rank, as indices into `gathers`."""
        return [number for number, gather in enumerate(self.gathers) if self.rank_of(gather.units[0]) == rank]

    def transfers(self, unit: int) -> bool:
        """Whether a unit is a transfer between ranks."""
        return self.graphs[self.units[unit]].forward.transfers

    def describe(self) -> str:
        """Returns a line for each virtual stage; equal text means equal placement."""
        lines = []
        for stage, chunk in self.chunks.items():
            names = " ".join(self.units[unit] for unit in chunk)
            lines.append(f"stage {stage} on rank {self.ranks[stage] if self.ranks else 0}: {names}")
        if self.reductions:
            lines.append(f"{len(self.reductions)} gradient sums of {[each.bytes for each in self.reductions]} bytes")
        if self.reduced_often:
            lines.append(f"gradient sums {[*self.reduced_often]} in every micro-batch")
        if self.gathers:
            lines.append(f"{len(self.gathers)} gathers of weights of {[each.bytes for each in self.gathers]} bytes")
        lines += ["copies to the host and back"] if self.on_host else []
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


def sub_layout(layout: Layout, stages: Sequence[Sequence[int]], ranks: Sequence[int] = ()) -> Layout:
    """Returns the layout of some units, given by virtual stage, without gradient reductions and gathers of weights.

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


def named_operators(layout: Layout) -> Iterator[tuple[Name, Operator]]:
    """Every operator of the units, once."""
    for unit, pair in layout.graphs.items():
        for entry, op in pair.entries():
            yield (unit, entry), op


def named_per_step(layout: Layout) -> list[tuple[Name, Operator]]:
    """The operators that run once a step: gradient reductions, weight gathers, and copies of both."""
    return [(each.name, each.op) for each in layout.per_step]


def is_per_step(name: Name) -> bool:
    """Returns whether a name is the name of a weight gather, a gradient reduction, or a copy of either."""
    return name[0] in (REDUCTIONS, GATHERS)
