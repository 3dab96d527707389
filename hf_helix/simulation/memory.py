"""The memory of a rank: by part, in bytes.

In:   what its operators keep, what it holds of the model, and its schedule.
Out:  `Memory`.
Must hold: counted from the bytes that the operators really allocate; two strands take turns layer by layer, which is
what plans promise to need no more than (one layer's activations apart). What is sent to another stage of the pipeline
is freed when the next transfer begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest

from hf_helix.planning.cost import entry_of
from hf_helix.planning.gradient_sums import BUCKET_BYTES
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.graph.pair import RECEIVE, SEND
from hf_helix.planning.instructions import Instruction
from hf_helix.planning.layout import Layout
from hf_helix.planning.pipeline.actions import Action, Schedule, Slot
from hf_helix.planning.profile import named_operators
from hf_helix.simulation.amounts import Amounts, Weights

PARAMETER, GRADIENT, STATES = 4, 4, 8
"""Bytes of an element: weights and gradients in fp32, and the two states of Adam."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank.

    Attributes:
        weights: parameters.
        gradients: of the trained ones.
        states: of the optimizer.
        copies: of weights in the type of matrix products, during a window.
        activations: the most that a window keeps and works with.
        buffers: of sums of gradients.
    """

    weights: float
    gradients: float
    states: float
    copies: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """Returns the sum of all parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Returns the bytes by part."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def bytes_text(count: float) -> str:
    """Returns bytes in a unit in which they can be read, such as "43.7 GB"."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def held_weights(amounts: Amounts, layout: Layout, rank: int) -> Weights:
    """Returns the parameters of a pipeline rank. Weights that embedding and head share count once."""
    names = [layout.units[unit] for unit in layout.units_of(rank)]
    found = [amounts.weights[name] for name in names if name in amounts.weights]
    trained = sum(each.trained for each in found)
    if amounts.model.tied and amounts.model.units[-1] in names:
        trained -= min(amounts.weights[amounts.model.units[0]].trained, amounts.weights[names[-1]].trained)
    return Weights(trained, sum(each.experts for each in found), sum(each.frozen for each in found))


def memory_of(amounts: Amounts, layout: Layout, rank: int, activations: float, shares: int, sums: bool) -> Memory:
    """Returns the memory of a pipeline rank.

    Args:
        amounts: of a rank of this layout.
        layout: of all ranks.
        rank: in the pipeline.
        activations: bytes that a window keeps and works with at most.
        shares: data-parallel ranks that share the optimizer's states (ZeRO-1); 1 where each has all of them.
        sums: whether gradients are summed over ranks.
    """
    held = held_weights(amounts, layout, rank)
    trained = held.trained + held.experts
    names = [layout.units[unit] for unit in layout.units_of(rank)]
    return Memory(
        weights=PARAMETER * (trained + held.frozen),
        gradients=GRADIENT * trained,
        states=STATES * trained / shares,
        copies=sum(amounts.copies.get(name, 0) for name in names),
        activations=activations,
        buffers=min(BUCKET_BYTES, GRADIENT * trained) if sums else 0,
    )


def peak_of_program(amounts: Amounts, layout: Layout, program: Sequence[Instruction]) -> int:
    """Returns the most bytes alive while a rank runs a program, beside the model, its gradients and the batches.

    Args:
        amounts: of a rank of this layout.
        layout: of all ranks.
        program: the instructions of the rank.
    """
    passed = amounts.handed_on
    alive = peak = sent = 0
    for instruction in program:
        op = instruction.operator
        if op is None or op.kind is Kind.GRADIENTS:
            continue
        if op.kind is Kind.PIPELINE:
            alive -= sent
            sent, delta, above = (0, passed, passed) if op.receives else (passed, 0, 0)
        else:
            found = amounts.operators[entry_of(instruction, layout)]
            delta, above = found.delta, found.peak
        peak = max(peak, alive + above)
        alive += delta
    return peak


def peaks_of_schedule(amounts: Amounts, layout: Layout, schedule: Schedule, two_strands: bool) -> list[int]:
    """Returns the same for every rank of a schedule, before there are programs: strands take turns, layer by layer.

    Args:
        amounts: of a rank of this layout.
        layout: of all ranks.
        schedule: of a window.
        two_strands: whether the plan may keep one layer more.
    """
    passes = {key: _pass(found) for key, found in _changes(amounts, layout).items()}
    layers = {name for name, pair in layout.graphs.items() if pair.forward.repeats}
    more = max((above for (unit, _), (_, above) in passes.items() if unit in layers), default=0)
    return [_peak_of_slots(layout, slots, passes) + (more if two_strands else 0) for slots in schedule]


def _peak_of_slots(layout: Layout, slots: Sequence[Slot], passes: Mapping[tuple[str, str], tuple[int, int]]) -> int:
    alive = peak = sent = 0
    for slot in slots:
        entering = _units(layout, slot.forward) if slot.forward else []
        leaving = _units(layout, slot.backward)[::-1] if slot.backward else []
        for unit in (unit for pair in zip_longest(entering, leaving) for unit in pair):
            if unit is None or unit not in passes:
                continue
            delta, above = passes[unit]
            if unit[0] in (RECEIVE, SEND):
                alive -= sent
                sent, delta = max(0, -delta), max(0, delta)
            peak = max(peak, alive + above)
            alive += delta
    return peak


def _pass(changes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the change of live bytes of several operators in a row, and the most alive above those before."""
    alive = peak = 0
    for delta, above in changes:
        peak = max(peak, alive + above)
        alive += delta
    return alive, peak


def _units(layout: Layout, action: Action) -> list[tuple[str, str]]:
    return [(layout.units[unit], action.computation_type) for unit in layout.chunks[action.stage]]


def _changes(amounts: Amounts, layout: Layout) -> Mapping[tuple[str, str], list[tuple[int, int]]]:
    """Returns, for every unit and type of computation, the change of live bytes and the peak of each operator."""
    parts = {name: op.part for name, op in named_operators(layout)}
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for (unit, entry), each in amounts.operators.items():
        letter = "F" if entry.startswith("F.") else "W" if parts[unit, entry] is Part.W else "I"
        for key in dict.fromkeys((letter, "F" if letter == "F" else "B")):
            found.setdefault((unit, key), []).append((each.delta, each.peak))
    passed = amounts.handed_on
    arrives, leaves = [(passed, passed)], [(-passed, 0)]
    for letter in "BI":
        found |= {(RECEIVE, letter): leaves, (SEND, letter): arrives}
    return found | {(RECEIVE, "F"): arrives, (SEND, "F"): leaves}
