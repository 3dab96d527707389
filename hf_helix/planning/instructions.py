"""Windows: everything the ranks run for the micro-batches of an optimizer step, before a plan orders it.

In:   a schedule, and the units of every virtual stage.
Out:  instructions: which operator of which unit for which micro-batch, and what it reads and writes.
Must hold: every operator of every micro-batch once, each after what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from hf_helix.planning.graph.operator import GraphPair, Operator, Part
from hf_helix.planning.pipeline.schedule_file import Action, Schedule, Slot

Key = tuple[int, str]
"""A value of a micro-batch: the unit it is named in, and its name. What leaves a unit keeps its key in the next."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operator for one micro-batch; without an operator, a barrier.

    Attributes:
        unit: index among the layout's units; of a barrier, any unit of its rank (-1 where there is one rank).
        adds, waits: as of `Operator`, by key.
        frees: values that nothing reads any more.
        ends: whether nothing of the micro-batch comes after.
        completes: units whose gradients are complete.
    """

    microbatch: int
    unit: int
    operator: Operator | None
    reads: tuple[Key, ...] = ()
    adds: tuple[Key | None, ...] = ()
    writes: tuple[Key, ...] = ()
    frees: tuple[Key, ...] = ()
    ends: bool = False
    completes: tuple[int, ...] = ()
    waits: tuple[Key, ...] = ()

    @property
    def needs(self) -> tuple[Key, ...]:
        """Every value that must exist."""
        return self.reads + tuple(key for key in self.adds if key is not None) + self.waits


BARRIER_INSTRUCTION = Instruction(-1, -1, None)


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
    """

    units: Sequence[str]
    chunks: Mapping[int, Sequence[int]]
    graphs: Mapping[str, GraphPair]
    shared: Sequence[Sequence[tuple[int, str]]] = ()
    ranks: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", tuple(tuple((unit, name) for unit, name in row) for row in self.shared))
        object.__setattr__(self, "ranks", tuple(self.ranks))
        homes = {unit: self.ranks[stage] if self.ranks else 0 for stage, chunk in self.chunks.items() for unit in chunk}
        object.__setattr__(self, "_homes", homes)

    @property
    def num_ranks(self) -> int:
        """Of the pipeline."""
        return max(self.ranks, default=0) + 1

    def rank_of(self, unit: int) -> int:
        """The pipeline rank that holds a unit."""
        return self._homes.get(unit, 0)  # type: ignore[attr-defined]

    def units_of(self, rank: int) -> list[int]:
        """The units of a pipeline rank in forward order."""
        return [unit for unit, home in sorted(self._homes.items()) if home == rank]  # type: ignore[attr-defined]

    def transfers(self, unit: int) -> bool:
        """Whether a unit is a way between ranks."""
        return self.graphs[self.units[unit]].forward.transfers

    def describe(self) -> str:
        """One line per virtual stage; equal text means equal placement."""
        lines = []
        for stage, chunk in self.chunks.items():
            names = " ".join(self.units[unit] for unit in chunk)
            lines.append(f"stage {stage} on rank {self.ranks[stage] if self.ranks else 0}: {names}")
        return "\n".join(lines)

    def key(self, unit: int, value: str, forward: bool) -> Key:
        """The key of a value: of the unit that writes it."""
        pair = self.graphs[self.units[unit]]
        forward = forward or value in pair.backward.kept
        if forward and value in pair.forward.inputs and unit > 0:
            before = self.graphs[self.units[unit - 1]].forward
            return unit - 1, before.outputs[pair.forward.inputs.index(value)]
        if not forward and value in pair.backward.inputs and unit < len(self.units) - 1:
            after = self.graphs[self.units[unit + 1]].backward
            return unit + 1, after.outputs[pair.backward.inputs.index(value)]
        return unit, value


Place = tuple[int, int]
"""A micro-batch and a unit."""

_PARTS = {"F": {Part.F}, "B": set(Part) - {Part.F}, "I": set(Part) - {Part.F, Part.W}, "W": {Part.W}}


def blocks_of(slot: Slot, layout: Layout) -> Iterator[tuple[Place | None, Place | None]]:
    """The i-th unit of the forward action beside the i-th unit of the backward action; ways between ranks left out."""
    forward = _places(slot.forward, layout)
    backward = _places(slot.backward, layout)[::-1]
    yield from zip_longest(
        *([place for place in found if not layout.transfers(place[1])] for found in (forward, backward))
    )


def transfers_of(slot: Slot, layout: Layout, receives: bool) -> list[Instruction]:
    """What a slot receives from other ranks before it begins, or sends to them when it has ended."""
    found = []
    for action in slot.actions:
        for place in _places(action, layout):
            if layout.transfers(place[1]):
                made = action_instructions(layout, place, action)
                found += [each for each in made if each.operator is not None and each.operator.receives is receives]
    return found


def _places(action: Action | None, layout: Layout) -> list[Place]:
    return [(action.microbatch, unit) for unit in layout.chunks[action.stage]] if action else []


def unit_instructions(layout: Layout, place: Place, forward: bool) -> list[Instruction]:
    """What a micro-batch runs in a unit, in canonical order."""
    microbatch, unit = place
    pair = layout.graphs[layout.units[unit]]

    def instruction(op: Operator) -> Instruction:
        def keys(names: Iterable[str]) -> tuple[Key, ...]:
            return tuple(layout.key(unit, name, forward) for name in names)

        adds = tuple(None if name is None else layout.key(unit, name, forward) for name in op.adds)
        return Instruction(microbatch, unit, op, keys(op.reads), adds, keys(op.writes), waits=keys(op.waits))

    return [instruction(op) for op in (pair.forward if forward else pair.backward).operators]


def action_instructions(layout: Layout, place: Place, action: Action) -> list[Instruction]:
    """What an action runs in a unit: of a backward in two halves, only its half."""
    made = unit_instructions(layout, place, action.direction == "F")
    parts = _PARTS[action.direction]
    return [instruction for instruction in made if instruction.operator and instruction.operator.part in parts]


def slot_instructions(slot: Slot, layout: Layout) -> list[Instruction]:
    """What a slot runs, unit by unit, one strand after the other."""
    found = transfers_of(slot, layout, receives=True)
    for places in blocks_of(slot, layout):
        for place, action in zip(places, (slot.forward, slot.backward), strict=True):
            if place is not None and action is not None:
                found += action_instructions(layout, place, action)
    return found + transfers_of(slot, layout, receives=False)


def window_instructions(schedule: Schedule, layout: Layout) -> list[Instruction]:
    """Everything the ranks run, rank by rank and slot by slot."""
    return [made for slots in schedule for slot in slots for made in slot_instructions(slot, layout)]
