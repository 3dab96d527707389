"""Programs: everything one rank issues for a window, in one flat list.

In:   the rank's slots, the units of its chunks, and a plan.
Out:  the instructions in the order of issue, with what may be freed after each.
Must hold: every operator of every micro-batch once, each after what it reads; a value is freed with its last reader,
so what is alive follows from the program alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hf_helix.planning.flow import flow_order
from hf_helix.planning.graph import Part
from hf_helix.planning.plan import BARRIER, Plan
from hf_helix.planning.schedule import Slot
from hf_helix.planning.window import (
    BARRIER_INSTRUCTION,
    Instruction,
    Key,
    Layout,
    blocks_of,
    unit_instructions,
    window_instructions,
)


def build_program(slots: Sequence[Slot], layout: Layout, plan: Plan, keep: Collection[Key] = ()) -> list[Instruction]:
    """The instructions of a window.

    Args:
        keep: values that are never freed.
    """
    if plan.flow is None:
        program = _by_blocks(slots, layout, plan)
    else:
        made = window_instructions(slots, layout)
        program = [made[place] for place in flow_order(made, slots, layout, plan.flow)]
    return _free(program, keep)


def _by_blocks(slots: Sequence[Slot], layout: Layout, plan: Plan) -> list[Instruction]:
    program: list[Instruction] = []
    for slot in slots:
        for forward, backward in blocks_of(slot, layout):
            made: dict[str, Instruction] = {BARRIER: BARRIER_INSTRUCTION}
            for letter, place in (("F", forward), ("B", backward)):
                for instruction in unit_instructions(layout, place, letter == "F") if place else ():
                    assert instruction.operator is not None
                    made[f"{letter}.{instruction.operator.name}"] = instruction
            names = (layout.units[place[1]] if place else None for place in (forward, backward))
            program += [made[entry] for entry in plan.order(*names)]
    return program


def _free(program: list[Instruction], keep: Collection[Key]) -> list[Instruction]:
    """Note on each instruction what it is the last to touch."""
    last: dict[tuple[int, Key], int] = {}
    end: dict[int, int] = {}
    for place, instruction in enumerate(program):
        if instruction.operator is not None:
            end[instruction.microbatch] = place
            for key in (*instruction.writes, *instruction.needs):
                last[instruction.microbatch, key] = place
    frees: dict[int, list[Key]] = {}
    for (_, key), place in last.items():
        if key not in keep:
            frees.setdefault(place, []).append(key)
    return [
        replace(instruction, frees=tuple(frees.get(place, ())), ends=end.get(instruction.microbatch) == place)
        for place, instruction in enumerate(program)
    ]


def validate_program(program: Sequence[Instruction], sources: Collection[Key], layout: Layout | None = None) -> None:
    """Check a program by itself: nothing is read before it is written or after it is freed, nothing runs twice, and
    gradients add up in the order of the micro-batches.

    Args:
        sources: values that exist from the start, such as the gradient of the loss.
        layout: says which operators share a gradient; None where none do.

    Raises:
        ValueError: names the first instruction that is wrong.
    """
    alive: dict[int, set[Key]] = {}
    latest: dict[tuple[int, str], int] = {}
    rows = {
        each: (row, place)
        for row, found in enumerate(layout.shared if layout else ())
        for place, each in enumerate(found)
    }
    added: dict[int, tuple[int, int]] = {}
    seen: set[tuple[int, int, str, bool]] = set()
    for place, instruction in enumerate(program):
        op = instruction.operator
        if op is None:
            continue
        values = alive.setdefault(instruction.microbatch, set(sources))
        what = f"instruction {place} ({op.part.value}{instruction.microbatch} unit {instruction.unit} {op.name})"
        missing = [key for key in instruction.needs if key not in values]
        if missing:
            raise ValueError(f"{what} reads {missing}, which is not there")
        name = (instruction.microbatch, instruction.unit, op.name, op.part is Part.F)
        if name in seen:
            raise ValueError(f"{what} runs a second time")
        seen.add(name)
        if op.part is not Part.F:
            parts = (op.name, *op.after)
            if any(latest.get((instruction.unit, name), -1) > instruction.microbatch for name in parts):
                raise ValueError(f"{what} comes after a later micro-batch, so gradients would add up in another order")
            latest[instruction.unit, op.name] = instruction.microbatch
            row, turn = rows.get((instruction.unit, op.name), (-1, 0))
            if row >= 0 and added.get(row, (-1, -1)) > (instruction.microbatch, turn):
                raise ValueError(f"{what} adds to a shared gradient out of turn")
            added[row] = (instruction.microbatch, turn)
        values.update(instruction.writes)
        values.difference_update(instruction.frees)
