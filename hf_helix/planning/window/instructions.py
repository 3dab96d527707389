"""Instructions: one operator for one micro-batch, with the keys of its values; and the units that a slot runs.

In:   a layout, and slots of a schedule.
Out:  the instructions of a unit, and the passes through units of a slot.
Must hold: every operator of a unit once, each after the writers of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

from hf_helix.planning.graph.operator import Operator, Part
from hf_helix.planning.schedule.actions import Action, Slot
from hf_helix.planning.window.layout import Key, Layout, Name


class Instruction(NamedTuple):
    """One operator for one micro-batch; without an operator, a barrier.

    Attributes:
        unit: index among the layout's units, or of traffic; of a barrier, any unit of its rank (-1 for a single rank).
        accumulates, control_deps, weights: see `Operator`, by key.
        frees: values without a later reader.
        ends: whether nothing of the micro-batch follows but traffic.
    """

    microbatch: int
    unit: int
    operator: Operator | None
    reads: tuple[Key, ...] = ()
    accumulates: tuple[Key | None, ...] = ()
    writes: tuple[Key, ...] = ()
    frees: tuple[Key, ...] = ()
    ends: bool = False
    control_deps: tuple[Key, ...] = ()
    weights: tuple[Key, ...] = ()

    @property
    def is_traffic(self) -> bool:
        """Whether the instruction moves gradients or weights, for no value of a micro-batch."""
        return self.operator is not None and self.operator.is_traffic

    @property
    def needs(self) -> tuple[Key, ...]:
        """Every value that must exist."""
        added = tuple(key for key in self.accumulates if key is not None)
        return self.reads + added + self.control_deps + self.weights

    def of(self, microbatch: int) -> Instruction:
        """The instruction for another micro-batch."""
        return Instruction(microbatch, *self[1:])


BARRIER_INSTRUCTION = Instruction(-1, -1, None)


def entry_of(instruction: Instruction, layout: Layout) -> Name:
    """The name of the operator of an instruction, see `Name`."""
    op = instruction.operator
    assert op is not None
    return layout.name_of(instruction.unit), f"{'F' if op.part is Part.F else 'B'}.{op.name}"


def transfer_key(instruction: Instruction) -> tuple[int, bool, int]:
    """Identifies a message between ranks at both of its ends: micro-batch, whether forward, the unit that forward sends
    from."""
    op = instruction.operator
    assert op is not None
    forward = op.part is Part.F
    return instruction.microbatch, forward, instruction.unit - (op.receives if forward else op.sends)


UnitPass = tuple[int, int, bool]
"""A micro-batch going through a unit: the micro-batch, the unit, whether forward."""

Pass = tuple[UnitPass, Action]
"""A micro-batch in a unit, as a part of an action."""

PARTS_OF = {"F": {Part.F}, "B": set(Part) - {Part.F}, "I": set(Part) - {Part.F, Part.W}, "W": {Part.W}}
"""The parts of a unit's operators that each computation type runs."""


def unit_passes(action: Action | None, layout: Layout) -> list[UnitPass]:
    """The passes of an action through units, in its order, without transfers."""
    if action is None:
        return []
    forward = action.computation_type == "F"
    units = [unit for unit in layout.chunks[action.stage] if not layout.transfers(unit)]
    return [(action.microbatch, unit, forward) for unit in (units if forward else reversed(units))]


def blocks_of(slot: Slot, layout: Layout) -> Iterator[tuple[UnitPass | None, UnitPass | None]]:
    """The i-th unit of the forward action with the i-th unit of the backward action, without transfers."""
    yield from zip_longest(unit_passes(slot.forward, layout), unit_passes(slot.backward, layout))


def transfers_of(slot: Slot, layout: Layout, receives: bool) -> list[Pass]:
    """The receives of a slot, which precede its computations, or its sends, which follow them."""
    found = []
    for action in slot.actions:
        forward = action.computation_type == "F"
        for unit in layout.chunks[action.stage]:
            graph = layout.graph(unit, forward)
            if graph.transfers and any(op.receives is receives for op in graph.operators):
                found.append(((action.microbatch, unit, forward), action))
    return found


def slot_passes(slot: Slot, layout: Layout) -> list[Pass]:
    """The passes of a slot: receives, then block by block forward before backward, then sends. Slots of equal stages
    differ in their micro-batches only."""
    actions = slot.actions
    key = tuple([(action.stage, action.computation_type) for action in actions])
    known: Any = layout.derived.setdefault("passes", {})
    made = known.get(key)
    if made is None:
        passes = _slot_passes(slot, layout)
        made = known[key] = [(unit, forward, actions.index(action)) for (_, unit, forward), action in passes]
    return [((actions[number].microbatch, unit, forward), actions[number]) for unit, forward, number in made]


def _slot_passes(slot: Slot, layout: Layout) -> list[Pass]:
    found = transfers_of(slot, layout, receives=True)
    for block in blocks_of(slot, layout):
        for unit_pass, action in zip(block, (slot.forward, slot.backward), strict=True):
            if unit_pass is not None and action is not None:
                found.append((unit_pass, action))
    return found + transfers_of(slot, layout, receives=False)


def unit_instructions(layout: Layout, unit_pass: UnitPass) -> list[Instruction]:
    """The instructions of a micro-batch in a unit, in canonical order."""
    microbatch, unit, forward = unit_pass

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


def pass_instructions(layout: Layout, unit_pass: UnitPass) -> list[Instruction]:
    """The instructions issued while a micro-batch passes through a unit, in canonical order.

    A prefetched operator (`Operator.ahead`) is listed with the unit before its own; the first unit of a rank has its
    own as well. Plans order these lists; `planning.window.passes` may move prefetched operators further forward.
    """
    microbatch, unit, forward = unit_pass
    made = unit_instructions(layout, unit_pass)
    if layout.transfers(unit):
        return made
    before, after = layout.neighbours(unit, forward)
    first = [each for each in made if _is_prefetched(each)] if before is None else []
    following = unit_instructions(layout, (microbatch, after, forward)) if after is not None else []
    prefetched = first + [each for each in following if _is_prefetched(each)]
    return prefetched + [each for each in made if not _is_prefetched(each)]


def _is_prefetched(instruction: Instruction) -> bool:
    return instruction.operator is not None and instruction.operator.ahead > 0
