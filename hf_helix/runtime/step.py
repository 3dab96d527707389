"""Steps: the instructions of a program, each with the operator that it runs.

In:   an instruction, and the units that a rank holds.
Out:  everything about the instruction that is the same in every window, looked up once.
Must hold: nothing here belongs to a micro-batch of one window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_helix.operators.unit import Unit
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.instructions import Instruction

_METHODS = {
    Part.F: "forward",
    Part.B: "backward",
    Part.I: "input_gradient",
    Part.W: "weight_gradient",
    Part.R: "again",
}


class Step:
    """An instruction bound to its operator; attributes that are not listed are as of `Instruction`.

    Attributes:
        op: of the graph; None for a barrier.
        unit: that the operator belongs to.
        place: index of the unit, and name of the declared operator.
        method: of the operator: `prepare` of a communication, or the part of a computation.
        keeps: whether a forward may keep something for backward.
        sizes: the keys that say how much there is to move.
        lane: of pipeline communication.
    """

    __slots__ = (
        "adds",
        "communicates",
        "completes",
        "ends",
        "frees",
        "keeps",
        "lane",
        "method",
        "microbatch",
        "needs",
        "op",
        "place",
        "reads",
        "sends",
        "sizes",
        "unit",
        "writes",
    )

    def __init__(self, instruction: Instruction, units: Mapping[int, Unit]) -> None:
        self.op = op = instruction.operator
        if op is None:
            return
        self.microbatch = instruction.microbatch
        self.unit = units[instruction.unit]
        self.place = instruction.unit, op.of
        self.needs = instruction.needs
        self.reads = instruction.reads
        self.writes = instruction.writes
        self.adds = instruction.adds if any(instruction.adds) else ()
        self.frees = instruction.frees
        self.ends = instruction.ends
        self.completes = instruction.completes
        operator: Any = self.unit.operators[op.of]
        self.communicates = op.kind.communicates
        name = "prepare" if self.communicates else _METHODS[op.part]
        self.method: Callable[..., Any] = getattr(operator, name)
        self.keeps = not (op.again and op.part is Part.F)
        self.sends = op.sends
        self.sizes = [key for name, key in zip(op.reads, instruction.reads, strict=True) if name in op.sizes]
        self.lane: str = operator.lane(op.part) if op.kind is Kind.PIPELINE else ""
