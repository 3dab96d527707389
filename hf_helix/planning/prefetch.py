"""Prefetch: operators that are issued ahead, such as gathers of weights, move forward in a plan's order of issue.

In:   a window, and the order in which a plan issues it.
Out:  the order with each of these `Operator.ahead` units before its own, or where the plan has it if that is earlier.
Must hold: everything else keeps its order, and what is issued ahead reads nothing, so the order stays valid. It follows
from the plan's order alone, so all ranks with copies of a weight gather it in the same turn.

Units count as a rank comes to compute in them, whichever micro-batch passes through them, and in which direction. So of
two strands each has the weights of its next unit brought while the other one computes, too; and those of the first
units of a micro-batch come behind the last units of another, where a strand would otherwise begin by waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_helix.planning.graph.operator import Part
from hf_helix.planning.window import ABSENT, Window

UnitPass = tuple[int, int, bool]
"""A micro-batch going through a unit, forward or not."""


def prefetched(window: Window, order: Sequence[int]) -> Sequence[int]:
    """Returns an order of issue with what is issued ahead as many units ahead as it says.

    Args:
        window: what the ranks run.
        order: places in the window, of one rank or of several; others stand for barriers.
    """
    ahead = window.pattern.ahead
    if not ahead:
        return order
    turns = _Turns(window, order)
    moved: dict[int, list[int]] = {}  # by position, what is issued in front of it
    for position, place in enumerate(order):
        earlier = turns.issued_at(place)
        if earlier is not None and earlier <= position:  # in its turn also where it does not move
            moved.setdefault(earlier, []).append(place)
    gone = {place for places in moved.values() for place in places}
    made: list[int] = []
    for position, place in enumerate(order):
        made += sorted(moved.get(position, ()), key=turns.of.__getitem__)
        if place not in gone:
            made.append(place)
    return made


class _Turns:
    """When a rank comes to what in an order of issue.

    Args:
        window, order: as of `prefetched`.

    Attributes:
        of: of each place of what is issued ahead, the turn of the unit that it is for.
    """

    def __init__(self, window: Window, order: Sequence[int]) -> None:
        self.of: dict[int, int] = {}
        self._window = window
        self._begins: list[list[int]] = [[] for _ in range(window.layout.num_ranks)]  # the position of each turn
        brings: dict[int, list[int]] = {}
        for call, readers in window.pattern.ahead.items():
            for reader in readers:
                brings.setdefault(reader, []).append(call)
        passes: dict[UnitPass, int] = {}
        for position, place in enumerate(order):
            for call in brings.get(window.calls[place], ()) if 0 <= place < len(window) else ():
                self._note(position, window.microbatches[place], call, passes)

    def _note(self, position: int, microbatch: int, call: int, passes: dict[UnitPass, int]) -> None:
        """Notes that what a call brings for a micro-batch is read at a position."""
        place = self._window.at[microbatch][call]
        if place == ABSENT or place in self.of:
            return
        op, unit = self._window.pattern.calls[call].operator, self._window.pattern.calls[call].unit
        assert op is not None
        begins = self._begins[self._window.layout.rank_of(unit)]
        unit_pass = microbatch, unit, op.part is Part.F
        if unit_pass not in passes:
            passes[unit_pass] = len(begins)
            begins.append(position)
        self.of[place] = passes[unit_pass]

    def issued_at(self, place: int) -> int | None:
        """The position in front of which something is issued at the latest; None of what is not issued ahead."""
        if place not in self.of:
            return None
        made = self._window.pattern.calls[self._window.calls[place]]
        assert made.operator is not None
        turn = self.of[place] - made.operator.ahead
        return self._begins[self._window.layout.rank_of(made.unit)][turn] if turn >= 0 else 0
