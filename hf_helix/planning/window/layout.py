"""Layouts: which rank of the pipeline holds which units of the model, and which graph each unit runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_helix.planning.graph.backward import RECEIVE, SEND, GraphPair
from hf_helix.planning.graph.operator import Graph

Key = tuple[int, str]
"""A value of a micro-batch: the unit it is named in, and its name. What leaves a unit keeps its key in the next."""


SUMS, GATHERS = "gradients", "weights"
"""What stands for the unit in the names of sums of gradients and of gathers of weights, which belong to no unit."""


@dataclass(frozen=True)
class GradientSum:
    """Gradients that ranks with other tokens (dp, cp) sum in one piece: a bucket.

    They are complete with the last of their `adders` for the last micro-batch; then the sum is issued.

    Attributes:
        adders: the operators of backward, as (unit, name), that add to them, all on one rank of the pipeline.
        bytes: of the gradients, on the rank that holds most of them.
    """

    adders: tuple[tuple[int, str], ...]
    bytes: int


@dataclass(frozen=True)
class WeightGather:
    """Weights that every rank keeps whole, and that ranks with copies have each stepped a part of (`shard_optimizer`).

    They are gathered once in a window, from its start on, in the order of the layout. The first computation of a unit
    waits for those of the unit.

    Attributes:
        units: those that read them, all on one rank of the pipeline.
        name: what tells them from other weights of these units.
        bytes: of the weights, on the rank that holds most of them.
    """

    units: tuple[int, ...]
    name: str
    bytes: int


@dataclass(frozen=True)
class Layout:
    """What the pipeline ranks hold, by name.

    Attributes:
        units: names of all units in forward order, those between the ranks included.
        chunks: the units of each virtual stage, as indices.
        graphs: of each name.
        ranks: the pipeline rank of each virtual stage; empty where one rank holds them all.
        shared: operators of backward, as (unit, name), that add to one gradient, such as that of tied embeddings; each
            row in the order in which a micro-batch runs them.
        sums: the sums of gradients of all ranks of the pipeline, those of one rank in the order in which a micro-batch
            by itself would complete them; empty where no other rank sees other tokens.
        gathers: the weights that are gathered once in a window, of all ranks of the pipeline, those of one rank in the
            order in which a micro-batch first reads them.
    """

    units: Sequence[str]
    chunks: Mapping[int, Sequence[int]]
    graphs: Mapping[str, GraphPair]
    shared: Sequence[Sequence[tuple[int, str]]] = ()
    ranks: Sequence[int] = ()
    sums: Sequence[GradientSum] = ()
    gathers: Sequence[WeightGather] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", tuple(tuple((unit, name) for unit, name in row) for row in self.shared))
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "sums", tuple(self.sums))
        object.__setattr__(self, "gathers", tuple(self.gathers))

    @cached_property
    def _homes(self) -> dict[int, int]:
        """Returns the pipeline rank of each unit that a rank holds."""
        return {unit: self.ranks[stage] if self.ranks else 0 for stage, chunk in self.chunks.items() for unit in chunk}

    @cached_property
    def derived(self) -> dict[str, object]:
        """Returns what others derive from the layout alone and keep here, so that it is derived once."""
        return {}

    @property
    def num_ranks(self) -> int:
        """Returns the number of pipeline ranks."""
        return max(self.ranks, default=0) + 1

    def rank_of(self, unit: int) -> int:
        """The pipeline rank that holds a unit."""
        return self._homes.get(unit, 0)

    def units_of(self, rank: int) -> list[int]:
        """The units of a pipeline rank in forward order."""
        return [unit for unit, home in sorted(self._homes.items()) if home == rank]

    def neighbours(self, unit: int, forward: bool) -> tuple[int | None, int | None]:
        """Returns the units that a micro-batch passes through before a unit and behind it, in forward or in backward;
        None where that is on another rank."""
        before, behind = (
            other if self._homes.get(other) == self.rank_of(unit) and not self.transfers(other) else None
            for other in (unit - 1, unit + 1)
        )
        return (before, behind) if forward else (behind, before)

    def graph(self, unit: int, forward: bool) -> Graph:
        """The operators of a unit, forward or backward."""
        pair = self.graphs[self.units[unit]]
        return pair.forward if forward else pair.backward

    def sums_of(self, rank: int) -> list[int]:
        """The sums of gradients of a pipeline rank, as indices into `sums`."""
        return [
            number for number, gradient_sum in enumerate(self.sums) if self.rank_of(gradient_sum.adders[0][0]) == rank
        ]

    def gathers_of(self, rank: int) -> list[int]:
        """The gathers of weights of a pipeline rank, as indices into `gathers`."""
        return [number for number, gather in enumerate(self.gathers) if self.rank_of(gather.units[0]) == rank]

    def transfers(self, unit: int) -> bool:
        """Whether a unit is a way between ranks."""
        return self.graphs[self.units[unit]].forward.transfers

    def describe(self) -> str:
        """One line per virtual stage; equal text means equal placement."""
        lines = []
        for stage, chunk in self.chunks.items():
            names = " ".join(self.units[unit] for unit in chunk)
            lines.append(f"stage {stage} on rank {self.ranks[stage] if self.ranks else 0}: {names}")
        if self.sums:
            lines.append(f"{len(self.sums)} gradient sums of {[each.bytes for each in self.sums]} bytes")
        if self.gathers:
            lines.append(f"{len(self.gathers)} gathers of weights of {[each.bytes for each in self.gathers]} bytes")
        return "\n".join(lines)

    def key(self, unit: int, value: str, forward: bool) -> Key:
        """The key of a value, which names the unit that writes it.

        Args:
            unit: the unit that reads or writes the value, by its number.
            value: the name of the value in that unit's graph.
            forward: whether the graph is that of forward.
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
    """Returns the names of all units, those between the ranks included, and the units of each virtual stage as indices.

    The embedding goes with the first layers, the head with the last.

    Args:
        units: the names of the embedding, the layers and the head.
        ranks: the pipeline rank of each virtual stage.
        ranges: the layers of each virtual stage.
    """
    embedding, *layers, head = units
    names: list[str] = []
    chunks: dict[int, list[int]] = {}
    for stage, members in enumerate(ranges):
        chunk = [layers[index] for index in members]
        if stage == 0:
            chunk.insert(0, embedding)
        elif ranks[stage - 1] != ranks[stage]:
            chunk.insert(0, RECEIVE)
        if stage == len(ranges) - 1:
            chunk.append(head)
        elif ranks[stage + 1] != ranks[stage]:
            chunk.append(SEND)
        chunks[stage] = list(range(len(names), len(names) + len(chunk)))
        names += chunk
    return names, chunks
