"""Programs: everything one rank issues for a window, in one flat list.

In:   a schedule, the units of every virtual stage, and a plan.
Out:  per rank the instructions in the order of issue, with what may be freed after each.
Must hold: every operator of every micro-batch once, each after what it reads; a value is freed with its last reader,
so what is alive follows from the program alone; what is sent over one way between two ranks arrives in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.instructions import (
    BARRIER_INSTRUCTION,
    Instruction,
    action_instructions,
    blocks_of,
    transfers_of,
    window_instructions,
)
from hf_helix.planning.layout import Key, Layout
from hf_helix.planning.pipeline.actions import Schedule, Slot
from hf_helix.planning.plans.list_scheduler import flow_order
from hf_helix.planning.plans.plan import BARRIER, Plan


def build_programs(
    schedule: Schedule, layout: Layout, plan: Plan, keep: Collection[Key] = (), slots_ahead: int = 1
) -> list[list[Instruction]]:
    """The instructions of a window, rank by rank.

    Args:
        keep: values that are never freed.
        slots_ahead: how long before the slot that reads it a receive is issued, under a plan of blocks. A flow issues
            it when, by its times, the other rank has sent.
    """
    if plan.flow is None:
        programs = [_by_blocks(slots, layout, plan, slots_ahead) for slots in schedule]
    else:
        programs = flow_order(schedule, layout, plan.flow)
    return [_complete(_free(program, keep), layout) for program in programs]


def _by_blocks(slots: Sequence[Slot], layout: Layout, plan: Plan, slots_ahead: int) -> list[Instruction]:
    """Slot by slot; what a slot receives is awaited from `slots_ahead` slots before on, what it sends leaves at its
    end."""
    program: list[Instruction] = []
    issued = 0
    for number, slot in enumerate(slots):
        for coming in slots[issued : number + 1 + slots_ahead]:
            program += transfers_of(coming, layout, receives=True)
        issued = number + 1 + slots_ahead
        for forward, backward in blocks_of(slot, layout):
            made: dict[str, Instruction] = {}
            for letter, place, action in (("F", forward, slot.forward), ("B", backward, slot.backward)):
                for instruction in action_instructions(layout, place, action) if place and action else ():
                    assert instruction.operator is not None
                    made[f"{letter}.{instruction.operator.name}"] = instruction
            unit = (forward or backward or (0, -1))[1]
            made[BARRIER] = replace(BARRIER_INSTRUCTION, unit=unit)
            names = (layout.units[place[1]] if place else None for place in (forward, backward))
            # Of a backward in two halves, only one is there.
            program += [made[entry] for entry in plan.order(*names) if entry in made]
        program += transfers_of(slot, layout, receives=False)
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


def _complete(program: list[Instruction], layout: Layout) -> list[Instruction]:
    """Note on each instruction the units that have all their gradients with it."""
    last: dict[int, int] = {}
    for place, instruction in enumerate(program):
        op = instruction.operator
        if op is not None and op.part is not Part.F and op.kind is not Kind.PIPELINE:
            last[instruction.unit] = place
    units: dict[int, list[int]] = {}
    for unit, place in last.items():
        units.setdefault(place, []).append(unit)
    return [replace(made, completes=tuple(units[i])) if i in units else made for i, made in enumerate(program)]


def validate_program(
    program: Sequence[Instruction],
    sources: Collection[Key],
    layout: Layout | None = None,
    slots: Sequence[Slot] = (),
) -> None:
    """Check a rank's program by itself: nothing is read before it is written or after it is freed, nothing runs twice,
    and gradients add up, and transfers follow each other, in the order of the micro-batches.

    Args:
        sources: values that exist from the start, such as the gradient of the loss.
        layout: says which operators share a gradient; None where none do.
        slots: of the rank; gradients that operators share add up in their order.

    Raises:
        ValueError: names the first instruction that is wrong.
    """
    alive: dict[int, set[Key]] = {}
    latest: dict[tuple[int, str, bool], int] = {}
    turns = _turns(slots, layout) if layout and slots else {}
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
        forward = op.part is Part.F
        if not forward or op.kind is Kind.PIPELINE:
            parts = (op.name, *op.after)
            if any(latest.get((instruction.unit, name, forward), -1) > instruction.microbatch for name in parts):
                raise ValueError(f"{what} comes after a later micro-batch, so gradients would add up in another order")
            latest[instruction.unit, op.name, forward] = instruction.microbatch
        if not forward and (instruction.unit, op.name) in turns:
            expected = turns[instruction.unit, op.name]
            if expected.pop(0) != (instruction.microbatch, instruction.unit, op.name):
                raise ValueError(f"{what} adds to a shared gradient out of turn")
        values.update(instruction.writes)
        values.difference_update(instruction.frees)


def _turns(slots: Sequence[Slot], layout: Layout) -> dict[tuple[int, str], list[tuple[int, int, str]]]:
    """Operators that share a gradient -> who adds to it in turn; one list for those of one gradient."""
    found: dict[tuple[int, str], list[tuple[int, int, str]]] = {}
    for row in layout.shared:
        turns: list[tuple[int, int, str]] = []
        found.update(dict.fromkeys(row, turns))
    for instruction in window_instructions([list(slots)], layout):
        op = instruction.operator
        if op is not None and op.part is not Part.F and (instruction.unit, op.name) in found:
            found[instruction.unit, op.name].append((instruction.microbatch, instruction.unit, op.name))
    return found
