"""Room: how much of their layers' activations the instructions of a window take and give back.

In:   a program, and what its ranks hold.
Out:  shares of a layer, instruction by instruction: of what forward keeps, and of what backward has run again; and how
      many layers a schedule needs at once.
Must hold: every computation of a layer has an equal share; whatever is taken for a micro-batch is given back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.graph.pair import GraphPair
from hf_helix.planning.instructions import Instruction
from hf_helix.planning.layout import Layout
from hf_helix.planning.pipeline.actions import Slot

Shares = Mapping[str, tuple[float, str]]
"""Of every computation of a layer: its share of the activations, and what runs again for it; empty if they are kept."""


def shares_of(pair: GraphPair) -> Shares:
    """Equal shares. What a weight gradient reads may come from what runs again before it."""
    writers = {value: op for op in pair.forward.operators for value in op.writes if value not in op.plain}

    def source(reads: Sequence[str]) -> str:
        """The nearest computation that runs again."""
        for op in (writers[value] for value in reads if value in writers):
            if op.again:
                return op.name if op.kind is Kind.COMPUTE else source(op.reads)
        return ""

    computing = [op for op in pair.forward.operators if op.kind is Kind.COMPUTE]
    share = 1 / max(1, len(computing))
    return {op.name: (share, op.name if op.again else source(op.reads) if op.split else "") for op in computing}


@dataclass(frozen=True)
class Held:
    """By instruction, the share of a layer's activations that it takes and that it gives back. What takes is held up
    where there is no room."""

    takes: list[float]
    gives: list[float]


def held(program: Sequence[Instruction], layout: Layout, shares: Mapping[str, Shares], again: bool) -> Held:
    """Of the activations that forward keeps, or of those that are recomputed."""
    takes, gives = [0.0] * len(program), [0.0] * len(program)
    for place, instruction in enumerate(program):
        op, found = instruction.operator, shares.get(layout.units[instruction.unit], {})
        assert op is not None
        if op.kind is not Kind.COMPUTE or op.of not in found:  # a sum of gradients, too
            continue
        share, source = found[op.of]
        if op.part is Part.R:
            takes[place] = sum(each for each, name in found.values() if name == op.of) if again else 0.0
        elif bool(source) is not again:
            continue
        elif op.part is Part.F:
            takes[place] = 0.0 if again else share
        elif op.part in (Part.I, Part.W):
            # Keeps the gradients that W reads, such as those of gate and up; not held up, or backward could stop.
            gradients = sum(value.startswith("d.") for value in op.reads)
            gives[place] = (1 + gradients if op.part is Part.W else -gradients) * share
        else:
            gives[place] = share
    return Held(takes, gives)


def peak_layers(slots: Sequence[Slot], layout: Layout, kept: Mapping[str, float]) -> float:
    """Layers whose activations are alive at most where the strands take turns, layer by layer.

    Args:
        kept: how much of a layer's activations forward keeps, by its name.
    """

    def layers(stage: int) -> list[float]:
        names = (layout.units[unit] for unit in layout.chunks[stage])
        return [kept[name] for name in names if name in kept]

    alive = peak = 0.0
    for slot in slots:
        enter = layers(slot.forward.stage) if slot.forward else []
        leave = layers(slot.backward.stage)[::-1] if slot.backward and slot.backward.computation_type != "I" else []
        for entering, leaving in zip_longest(enter, leave, fillvalue=0.0):
            alive += entering - leaving
            peak = max(peak, alive)
    return peak
