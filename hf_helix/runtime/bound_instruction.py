"""An instruction of a program, bound to the operator that it runs.

In:   an instruction, and the units that a rank holds.
Out:  everything about the instruction that is the same in every window, looked up once.
Must hold: it holds nothing of the micro-batches of one window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from hf_helix.operators.base import Communication, Method, Tensors, Work
from hf_helix.operators.unit import Unit
from hf_helix.operators.zero.flat_parameter import Flat
from hf_helix.operators.zero.lending import lending
from hf_helix.operators.zero.zero1 import KeptFlat, kept_flats
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.instructions import Instruction
from hf_helix.planning.layout import Key


class BoundInstruction:
    """An instruction bound to its operator. Attributes that are not listed are those of `Instruction`.

    Attributes:
        op: the operator of the graph; None for a barrier, which has no other attribute.
        gradient_sum: as of `Instruction`; a sum of gradients has no further attribute.
        gathers: the flat that it gathers for the window; None of anything else. A gather has no further attribute but
            its unit.
        awaited: the flats of the unit that are gathered once in a window; only of an instruction that does not
            communicate.
        unit: the unit that the operator belongs to.
        place: index of the unit, and name of the declared operator.
        communicates: whether the instruction goes to a communication stream.
        run: the method that runs it on the compute stream; only of an instruction that does not communicate.
        prepare, lane: what issues it, and the queue that it goes to; only of one that communicates.
        keeps: whether a forward may keep something for backward.
        sizes: the keys of the values that say how much there is to move; the host reads them.
        weights: the gathered weights that it reads, as flats and keys.
        returns: those that nothing reads after it, likewise.
    """

    __slots__ = (
        "adds",
        "awaited",
        "communicates",
        "ends",
        "frees",
        "gathers",
        "gradient_sum",
        "keeps",
        "lane",
        "microbatch",
        "needs",
        "op",
        "place",
        "prepare",
        "reads",
        "returns",
        "run",
        "sends",
        "sizes",
        "unit",
        "weights",
        "writes",
    )

    def __init__(self, instruction: Instruction, units: Mapping[int, Unit]) -> None:
        self.op = op = instruction.operator
        self.gradient_sum = instruction.gradient_sum
        self.gathers: KeptFlat | None = None
        if op is None or self.gradient_sum >= 0:
            return
        self.microbatch = instruction.microbatch
        self.unit = units[instruction.unit]
        self.place = instruction.unit, op.forward_name
        if instruction.gather >= 0:
            flat = self.unit.flats[op.forward_name]
            assert isinstance(flat, KeptFlat)
            self.gathers = flat
            return
        self.needs = instruction.needs
        self.reads = instruction.reads
        self.writes = instruction.writes
        self.adds = instruction.accumulates if any(instruction.accumulates) else ()
        self.frees = instruction.frees
        self.ends = instruction.ends
        operator = self.unit.operators[op.forward_name]
        self.communicates = op.kind.communicates
        if not self.communicates:
            self.run: Method = operator.method_of(op.part)
            self.awaited = tuple(kept_flats(self.unit.flats.values()))
        else:
            assert isinstance(operator, Communication), f"{op.name} is issued, and computes"
            self.prepare: Callable[..., tuple[Tensors, Work]] = operator.prepare
            self.lane = operator.lane(op.part)
        self.keeps = not (op.recomputed and op.part is Part.F)
        self.sends = op.sends
        flats = {name: self.unit.flats[name] for name in op.weights}
        self.weights = list(zip(flats.values(), instruction.weights, strict=True))
        self.returns = _flats_of(self.frees, units)
        self.sizes = [key for name, key in zip(op.reads, instruction.reads, strict=True) if name in op.host_read_sizes]

    def method(self, values: Mapping[Key, Tensor]) -> Method:
        """Returns the method that runs it on the compute stream, with the weights that were gathered for it."""
        return lending(self.run, [(flat, values[key]) for flat, key in self.weights]) if self.weights else self.run


def _flats_of(keys: Sequence[Key], units: Mapping[int, Unit]) -> list[tuple[Flat, Key]]:
    """Those of several values that hold gathered weights, with their flats."""
    named = ((units[unit].flats.get(name), (unit, name)) for unit, name in keys if unit in units)
    return [(flat, key) for flat, key in named if flat is not None]
