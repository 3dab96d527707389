"""Windows: everything one rank runs for the micro-batches of an optimizer step, before a plan orders it.

In:   the rank's slots and the units of its chunks.
Out:  instructions: which operator of which unit for which micro-batch, and what it reads and writes.
Must hold: every operator of every micro-batch once, each after what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from hf_helix.planning.graph import GraphPair, Operator
from hf_helix.planning.schedule import Action, Slot

Key = tuple[int, str]
"""A value of a micro-batch: the unit it is named in, and its name. What leaves a unit keeps its key in the next."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operator for one micro-batch; without an operator, a barrier.

    Attributes:
        unit: index among the rank's units, in forward order.
        adds: as `Operator.adds`, by key.
        frees: values that nothing reads any more.
        ends: whether nothing of the micro-batch comes after.
    """

    microbatch: int
    unit: int
    operator: Operator | None
    reads: tuple[Key, ...] = ()
    adds: tuple[Key | None, ...] = ()
    writes: tuple[Key, ...] = ()
    frees: tuple[Key, ...] = ()
    ends: bool = False

    @property
    def needs(self) -> tuple[Key, ...]:
        """Every value that must exist."""
        return self.reads + tuple(key for key in self.adds if key is not None)


BARRIER_INSTRUCTION = Instruction(-1, -1, None)


@dataclass(frozen=True)
class Layout:
    """What a rank holds, by name.

    Attributes:
        units: names of its units in forward order.
        chunks: the units of each virtual stage, as indices.
        graphs: of each name.
        shared: operators of backward, as (unit, name), that add to one gradient, such as that of tied embeddings; each
            row in the order in which a micro-batch runs them.
    """

    units: Sequence[str]
    chunks: Mapping[int, Sequence[int]]
    graphs: Mapping[str, GraphPair]
    shared: Sequence[Sequence[tuple[int, str]]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", tuple(tuple((unit, name) for unit, name in row) for row in self.shared))

    def key(self, unit: int, value: str, forward: bool) -> Key:
        """The key of a value: of the unit that writes it."""
        pair = self.graphs[self.units[unit]]
        if forward and value in pair.forward.inputs and unit > 0:
            before = self.graphs[self.units[unit - 1]].forward
            return unit - 1, before.outputs[pair.forward.inputs.index(value)]
        if not forward and value in pair.backward.inputs and unit < len(self.units) - 1:
            after = self.graphs[self.units[unit + 1]].backward
            return unit + 1, after.outputs[pair.backward.inputs.index(value)]
        return unit, value


Place = tuple[int, int]
"""A micro-batch and a unit."""


def blocks_of(slot: Slot, layout: Layout) -> Iterator[tuple[Place | None, Place | None]]:
    """The i-th unit of the forward action beside the i-th unit of the backward action."""

    def places(action: Action | None) -> list[Place]:
        return [(action.microbatch, unit) for unit in layout.chunks[action.stage]] if action else []

    yield from zip_longest(places(slot.forward), places(slot.backward)[::-1])


def unit_instructions(layout: Layout, place: Place, forward: bool) -> list[Instruction]:
    """What a micro-batch runs in a unit, in canonical order."""
    microbatch, unit = place
    pair = layout.graphs[layout.units[unit]]

    def instruction(op: Operator) -> Instruction:
        def keys(names: Iterable[str]) -> tuple[Key, ...]:
            return tuple(layout.key(unit, name, forward) for name in names)

        adds = tuple(None if name is None else layout.key(unit, name, forward) for name in op.adds)
        return Instruction(microbatch, unit, op, keys(op.reads), adds, keys(op.writes))

    return [instruction(op) for op in (pair.forward if forward else pair.backward).operators]


def window_instructions(slots: Iterable[Slot], layout: Layout) -> list[Instruction]:
    """Everything the slots run, one strand after the other."""
    found: list[Instruction] = []
    for slot in slots:
        for places in blocks_of(slot, layout):
            for place, forward in zip(places, (True, False), strict=True):
                if place is not None:
                    found += unit_instructions(layout, place, forward)
    return found
