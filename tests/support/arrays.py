"""Windows from instructions: an oracle for `Window`, which repeats the instructions of one micro-batch as numbers."""

from collections.abc import Sequence

from hf_helix.planning.graph.operator import Kind, Operator, Part
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.window.instructions import (
    PARTS_OF,
    Instruction,
    entry_of,
    pass_instructions,
    slot_passes,
    transfer_key,
)
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.window import COMPUTE, NONE, STREAMS, Times, WindowArrays


def window_instructions(schedule: Schedule, layout: Layout) -> list[Instruction]:
    """The instructions of a window, rank by rank and slot by slot, in the order of passes."""
    return [
        made
        for slots in schedule
        for slot in slots
        for unit_pass, action in slot_passes(slot, layout)
        for made in pass_instructions(layout, unit_pass)
        if made.operator and made.operator.part in PARTS_OF[action.computation_type]
    ]


def arrays_of(program: Sequence[Instruction], layout: Layout, times: Times) -> WindowArrays:
    """The arrays of a program, or of several ranks' programs one after the other, instruction by instruction.

    Raises:
        KeyError: `times` lacks an operator.
    """
    numbers: dict[tuple[str, str], int] = {}
    arrays = WindowArrays([], [], [], [], [], [], [], [])
    writers: dict[tuple[int, object], int] = {}
    forwards: dict[tuple[int, int, str], int] = {}
    pending: dict[int, list[int]] = {}
    sent = {
        transfer_key(each): place
        for place, each in enumerate(program)
        if each.operator is not None and each.operator.sends
    }
    arriving: dict[int, list[int]] = {}  # weight gathers that nothing has waited for yet, by unit
    for place, instruction in enumerate(program):
        op, rank = instruction.operator, layout.rank_of(instruction.unit)
        if op is None:
            arrays.append_barrier(pending.pop(rank, []), rank)
            continue
        name = entry_of(instruction, layout)
        microbatch = instruction.microbatch
        needs = [writers[microbatch, key] for key in instruction.needs if (microbatch, key) in writers]
        if instruction.is_traffic:
            for unit in layout.traffic_at(instruction.unit).readers:
                arriving.setdefault(unit, []).append(place)
        elif op.kind is Kind.COMPUTE:
            needs += arriving.pop(instruction.unit, [])
        operator_key = (microbatch, instruction.unit, op.forward_name)
        if op.part is Part.F:
            forwards[operator_key] = place
        elif operator_key in forwards and op.kind is not Kind.PIPELINE:
            needs.append(forwards[operator_key])  # what forward kept for backward
        for key in instruction.writes:
            writers[microbatch, key] = place
        if op.kind in (Kind.INTRA_NODE, Kind.INTER_NODE) and not op.ahead:
            pending.setdefault(rank, []).append(place)
        if op.receives:
            needs += [sent[key] for key in [transfer_key(instruction)] if key in sent]
        keys = [key for name, key in zip(op.reads, instruction.reads, strict=True) if name in op.host_read_sizes]
        brought = [writers[microbatch, key] for key in keys if (microbatch, key) in writers]
        arrays.ranks.append(rank)
        arrays.streams.append(STREAMS.index(op.kind))
        arrays.lanes.append(_lane(instruction, op, layout))
        arrays.seconds.append(0.0 if op.receives else times[name])
        arrays.needs.append(list(dict.fromkeys(needs)))
        arrays.size_sources.append(max((each for each in brought if arrays.streams[each] != COMPUTE), default=NONE))
        arrays.entries.append(numbers.setdefault(name, len(numbers)))
    arrays.names.extend(numbers)
    return arrays


def _lane(instruction: Instruction, op: Operator, layout: Layout) -> int:
    """A lane for each neighbour that is sent to, and one for each receive."""
    if op.kind is not Kind.PIPELINE:
        return 0
    forward = op.part is Part.F
    if op.sends:
        return 1 + layout.rank_of(instruction.unit + (1 if forward else -1))
    return -1 - 2 * instruction.unit - forward
