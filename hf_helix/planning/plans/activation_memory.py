"""Activation memory: how much of a layer's activations each instruction of a window allocates and frees.

In:   a program, and what its ranks hold.
Out:  parts of a layer, instruction by instruction, for the activations that forward keeps and for those that backward
      recomputes; and how many layers' activations a schedule has alive at once.
Must hold: every computation of a layer counts as an equal part; whatever is allocated for a micro-batch is freed.
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
"""For every computation of a layer: its part of the activations, and the operator that is recomputed for it (empty
where its activations are kept)."""


def shares_of(pair: GraphPair) -> Shares:
    """Returns equal parts for all computations. A weight gradient may read what an operator before it recomputes."""
    writers = {value: op for op in pair.forward.operators for value in op.writes if value not in op.non_differentiable}

    def source(reads: Sequence[str]) -> str:
        """The nearest computation that is recomputed."""
        for op in (writers[value] for value in reads if value in writers):
            if op.recomputed:
                return op.name if op.kind is Kind.COMPUTE else source(op.reads)
        return ""

    computing = [op for op in pair.forward.operators if op.kind is Kind.COMPUTE]
    share = 1 / max(1, len(computing))
    return {
        op.name: (share, op.name if op.recomputed else source(op.reads) if op.splits_dgrad_wgrad else "")
        for op in computing
    }


@dataclass(frozen=True)
class ActivationMemory:
    """What every instruction of a program allocates and frees.

    Attributes:
        alloc: parts of a layer's activations; instructions that allocate are delayed while the limit is reached.
        free: likewise.
    """

    alloc: list[float]
    free: list[float]


def activation_memory(
    program: Sequence[Instruction], layout: Layout, shares: Mapping[str, Shares], recomputed: bool
) -> ActivationMemory:
    """What the instructions of a program allocate and free.

    Args:
        program: of all ranks, one after the other.
        layout: what they hold.
        shares: of every repeating unit, see `shares_of`.
        recomputed: whether to count the activations that backward recomputes, or those that forward keeps.
    """
    alloc, free = [0.0] * len(program), [0.0] * len(program)
    for place, instruction in enumerate(program):
        op, held = instruction.operator, shares.get(layout.units[instruction.unit], {})
        assert op is not None
        if op.kind is not Kind.COMPUTE or op.forward_name not in held:  # such as a sum of gradients
            continue
        share, source = held[op.forward_name]
        if op.part is Part.R:
            alloc[place] = sum(each for each, name in held.values() if name == op.forward_name) if recomputed else 0.0
        elif bool(source) is not recomputed:
            continue
        elif op.part is Part.F:
            alloc[place] = 0.0 if recomputed else share
        elif op.part in (Part.I, Part.W):
            # An I leaves the gradients that its W reads, such as those of gate and up. They count as a negative `free`
            # and not as `alloc`: backward must never be delayed, or it could stop.
            gradients = sum(value.startswith("d.") for value in op.reads)
            free[place] = (1 + gradients if op.part is Part.W else -gradients) * share
        else:
            free[place] = share
    return ActivationMemory(alloc, free)


def peak_layers(slots: Sequence[Slot], layout: Layout, kept: Mapping[str, float]) -> float:
    """Returns the most layers whose activations are alive at once where the strands take turns, layer by layer.

    Args:
        slots: of a rank.
        layout: what it holds.
        kept: the part of a layer's activations that forward keeps, by the layer's name.
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
