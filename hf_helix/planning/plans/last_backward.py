"""The last backward of a window: what list scheduling prefers there, where gradients are summed over ranks.

In:   a window as numbers, and for how many units weight gradients are held back.
Out:  a priority for every instruction of the last backward.
Must hold: priorities only, so orders stay valid; they are small beside the times of operators, so what can start is
never kept waiting for what cannot.

Within a unit, input gradients and communication go first, and weight gradients fill the gaps, as `greedy` has it
everywhere. But a unit's weight gradients go before all of the next unit, so that its gradients are complete and their
sum can begin. Weight gradients that are held back go behind everything else, unit by unit in the order of backward.
"""

from __future__ import annotations

from collections.abc import Iterator

from hf_helix.planning.cost import Work
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.window import NumberedPass, Window

SMALL = 1e-3
"""Priorities in parts of the times of operators: they decide between what can start at the same time."""


def last_backward_weights(window: Window, work: Work, held_units: int) -> Iterator[tuple[int, float]]:
    """Yields the places of the last backward of every unit, each with its priority in seconds.

    Args:
        window: of all ranks.
        work: its numbers.
        held_units: see `hf_helix.planning.plans.list_scheduler.Priorities`.
    """
    layout, calls = window.layout, window.pattern.calls
    longest = max(work.seconds, default=0.0)
    step = 3 * SMALL * longest  # more than anything within a unit
    for rank in range(layout.num_ranks):
        units = [unit for unit in layout.units_of(rank) if not layout.transfers(unit)]
        behind = {unit: len(units) - 1 - place for place, unit in enumerate(units)}
        held = set(units[:held_units])
        for made in _last_passes(window):
            if made.unit not in behind:
                continue
            for place, call in enumerate(made.calls, made.start):
                op = calls[call].operator
                is_weight = op is not None and op.part is Part.W
                units_before = behind[made.unit] + (len(units) if is_weight and made.unit in held else 0)
                own = work.seconds[place] + (longest if is_weight else 0.0)
                yield place, SMALL * own + step * units_before


def _last_passes(window: Window) -> list[NumberedPass]:
    """The passes backward through every unit for its last micro-batch; of backwards in two halves, both."""
    last: dict[tuple[int, str], NumberedPass] = {}
    for made in window.passes:
        if made.computation_type != "F":
            last[made.unit, made.computation_type] = made
    return list(last.values())
