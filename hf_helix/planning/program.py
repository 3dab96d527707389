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
from hf_helix.planning.instructions import Instruction, window_instructions
from hf_helix.planning.layout import Key, Layout
from hf_helix.planning.pipeline.actions import Schedule, Slot
from hf_helix.planning.plans.plan import Plan


def build_programs(
    schedule: Schedule, layout: Layout, plan: Plan, keep: Collection[Key] = (), slots_ahead: int = 1
) -> list[list[Instruction]]:
    """The instructions of a window, rank by rank.

    Args:
        schedule: the window.
        layout: what the ranks hold, with the graphs that the plan orders.
        plan: the order of issue.
        keep: values that are never freed.
        slots_ahead: see `Plan.programs`.
    """
    return [_complete(_free(program, keep), layout) for program in plan.programs(schedule, layout, slots_ahead)]


def _free(program: list[Instruction], keep: Collection[Key]) -> list[Instruction]:
    """The program with, on each instruction, the values that nothing after it uses."""
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
    """The program with, on each instruction, the units whose gradients are complete with it."""
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
        program: of one rank.
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
            key = (instruction.unit, op.name, forward)
            if latest.get(key, -1) > instruction.microbatch:
                raise ValueError(f"{what} comes after a later micro-batch, so gradients would add up in another order")
            latest[key] = instruction.microbatch
        if not forward and (instruction.unit, op.name) in turns:
            expected = turns[instruction.unit, op.name]
            if expected.pop(0) != (instruction.microbatch, instruction.unit, op.name):
                raise ValueError(f"{what} adds to a shared gradient out of turn")
        values.update(instruction.writes)
        values.difference_update(instruction.frees)


def _turns(slots: Sequence[Slot], layout: Layout) -> dict[tuple[int, str], list[tuple[int, int, str]]]:
    """For every operator that shares a gradient, the turns in which operators add to it; one list for one gradient."""
    found: dict[tuple[int, str], list[tuple[int, int, str]]] = {}
    for row in layout.shared:
        turns: list[tuple[int, int, str]] = []
        found.update(dict.fromkeys(row, turns))
    for instruction in window_instructions([list(slots)], layout):
        op = instruction.operator
        if op is not None and op.part is not Part.F and (instruction.unit, op.name) in found:
            found[instruction.unit, op.name].append((instruction.microbatch, instruction.unit, op.name))
    return found
