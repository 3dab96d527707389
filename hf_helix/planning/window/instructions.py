"""Windows: everything the ranks run for the micro-batches of an optimizer step, before a plan orders it.

In:   a schedule, and the units of every virtual stage.
Out:  instructions: which operator of which unit for which micro-batch, and what it reads and writes.
Must hold: every operator of every micro-batch once, each after what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from hf_helix.planning.graph.operator import Operator, Part
from hf_helix.planning.schedule.actions import Action, Schedule, Slot
from hf_helix.planning.window.layout import Key, Layout


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operator for one micro-batch; without an operator, a barrier.

    Attributes:
        unit: index among the layout's units; of a barrier, any unit of its rank (-1 where there is one rank).
        accumulates, control_deps, weights: as of `Operator`, by key.
        frees: values that nothing reads any more.
        ends: whether nothing of the micro-batch comes after but sums of gradients.
        gradient_sum: of a sum of gradients, its place among the layout's; of everything else -1.
        gather: of a gather of weights that happens once in a window, likewise.
    """

    microbatch: int
    unit: int
    operator: Operator | None
    reads: tuple[Key, ...] = ()
    accumulates: tuple[Key | None, ...] = ()
    writes: tuple[Key, ...] = ()
    frees: tuple[Key, ...] = ()
    ends: bool = False
    gradient_sum: int = -1
    control_deps: tuple[Key, ...] = ()
    weights: tuple[Key, ...] = ()
    gather: int = -1

    @property
    def is_of_window(self) -> bool:
        """Whether it belongs to the window and to no micro-batch: a sum of gradients, or a gather of weights."""
        return self.gradient_sum >= 0 or self.gather >= 0

    @property
    def needs(self) -> tuple[Key, ...]:
        """Every value that must exist."""
        added = tuple(key for key in self.accumulates if key is not None)
        return self.reads + added + self.control_deps + self.weights

    def of(self, microbatch: int) -> Instruction:
        """The same for another micro-batch."""
        return Instruction(
            microbatch,
            self.unit,
            self.operator,
            self.reads,
            self.accumulates,
            self.writes,
            self.frees,
            self.ends,
            self.gradient_sum,
            self.control_deps,
            self.weights,
            self.gather,
        )


BARRIER_INSTRUCTION = Instruction(-1, -1, None)


Place = tuple[int, int]
"""A micro-batch and a unit."""

Pass = tuple[Place, Action]
"""A micro-batch going through a unit, as a part of an action."""

PARTS_OF = {"F": {Part.F}, "B": set(Part) - {Part.F}, "I": set(Part) - {Part.F, Part.W}, "W": {Part.W}}
"""The parts of a unit's operators that each computation type runs."""


def blocks_of(slot: Slot, layout: Layout) -> Iterator[tuple[Place | None, Place | None]]:
    """The i-th unit of the forward action beside the i-th unit of the backward action; ways between ranks left out."""
    forward = _places(slot.forward, layout)
    backward = _places(slot.backward, layout)[::-1]
    yield from zip_longest(
        *([place for place in found if not layout.transfers(place[1])] for found in (forward, backward))
    )


def transfers_of(slot: Slot, layout: Layout, receives: bool) -> list[Pass]:
    """What a slot receives from other ranks before it begins, or sends to them when it has ended.

    Args:
        slot: of one rank.
        layout: what the ranks hold.
        receives: whether the receives are asked for; otherwise the sends.
    """
    found = []
    for action in slot.actions:
        for place in _places(action, layout):
            graph = layout.graph(place[1], action.computation_type == "F")
            if graph.transfers and any(op.receives is receives for op in graph.operators):
                found.append((place, action))
    return found


def _places(action: Action | None, layout: Layout) -> list[Place]:
    return [(action.microbatch, unit) for unit in layout.chunks[action.stage]] if action else []


def unit_instructions(layout: Layout, place: Place, forward: bool) -> list[Instruction]:
    """What a micro-batch runs in a unit, in canonical order.

    Args:
        layout: what the ranks hold, with the graphs of the units.
        place: the micro-batch and the unit.
        forward: whether its forward graph runs; otherwise the backward graph.
    """
    microbatch, unit = place

    def instruction(op: Operator) -> Instruction:
        def keys(names: Iterable[str]) -> tuple[Key, ...]:
            return tuple(layout.key(unit, name, forward) for name in names)

        adds = tuple(None if name is None else layout.key(unit, name, forward) for name in op.accumulates)
        return Instruction(
            microbatch,
            unit,
            op,
            keys(op.reads),
            adds,
            keys(op.writes),
            control_deps=keys(op.control_deps),
            weights=keys(op.weights),
        )

    return [instruction(op) for op in layout.graph(unit, forward).operators]


def pass_instructions(layout: Layout, place: Place, forward: bool) -> list[Instruction]:
    """What is issued while a micro-batch passes through a unit, in canonical order.

    These are the operators of the unit. But those that are issued ahead come with the unit that the micro-batch passes
    through before; the first unit of a pass has its own. This is where plans see them; they may be issued earlier, see
    `hf_helix.planning.window.passes`.

    Args:
        layout: what the ranks hold, with the graphs of the units.
        place: the micro-batch and the unit.
        forward: whether the micro-batch goes forward.
    """
    microbatch, unit = place
    made = unit_instructions(layout, place, forward)
    if layout.transfers(unit):
        return made
    before, behind = layout.neighbours(unit, forward)
    first = [each for each in made if _is_ahead(each.operator)] if before is None else []
    following = unit_instructions(layout, (microbatch, behind), forward) if behind is not None else []
    ahead = first + [each for each in following if _is_ahead(each.operator)]
    return ahead + [each for each in made if not _is_ahead(each.operator)]


def _is_ahead(op: Operator | None) -> bool:
    return op is not None and op.ahead > 0


def action_instructions(layout: Layout, place: Place, action: Action) -> list[Instruction]:
    """What an action runs in a unit: of a backward in two halves, only its half.

    Args:
        layout: what the ranks hold, with the graphs of the units.
        place: the micro-batch and the unit.
        action: the action, such as F, B, I or W of a virtual stage.
    """
    made = pass_instructions(layout, place, action.computation_type == "F")
    parts = PARTS_OF[action.computation_type]
    return [instruction for instruction in made if instruction.operator and instruction.operator.part in parts]


def slot_passes(slot: Slot, layout: Layout) -> list[Pass]:
    """The passes through units that a slot makes, unit by unit, one strand after the other."""
    found = transfers_of(slot, layout, receives=True)
    for places in blocks_of(slot, layout):
        for place, action in zip(places, (slot.forward, slot.backward), strict=True):
            if place is not None and action is not None:
                found.append((place, action))
    return found + transfers_of(slot, layout, receives=False)


def slot_instructions(slot: Slot, layout: Layout) -> list[Instruction]:
    """What a slot runs, in the order of its passes."""
    return [made for place, action in slot_passes(slot, layout) for made in action_instructions(layout, place, action)]


def window_instructions(schedule: Schedule, layout: Layout) -> list[Instruction]:
    """Everything the ranks run, rank by rank and slot by slot."""
    return [made for slots in schedule for slot in slots for made in slot_instructions(slot, layout)]
