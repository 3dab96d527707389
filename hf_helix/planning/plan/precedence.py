"""Ordering constraints of list scheduling beyond data dependencies, and the activation memory of instructions.

In:   a window and its schedule.
Out:  a `Precedence`: the predecessors of every instruction; `ActivationMemory`: activations allocated and freed.
Must hold: every edge goes from an instruction to a later instruction of the schedule, so some order keeps all edges.
Gradients accumulate, and transfers follow each other, in the schedule's order of micro-batches. Every computation of a
layer counts as an equal part of the layer's activations; all activations of a micro-batch are freed.

    a strand runs         F0 of unit 0 -> unit 1 -> unit 2 -> F1 of unit 0 -> ...
    it enters unit n      after it has left unit n - 2; a layer also after it has left the layer n - 1
    it has left a unit    when the last operator, and every recomputation in the unit, was issued; W may follow
    slot n begins         after the end of all slots up to n - 2
    an idle strand        gives every second action of the other strand a strand of its own
    a unit's W            come after the Ws of two units before, if every micro-batch's gradients are reduced: full
                          gradients live from the first W of a unit to the last
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from hf_helix.planning.graph.backward import GraphPair, differentiated
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.schedule.actions import Action, Schedule, Slot
from hf_helix.planning.window.instructions import UnitPass, unit_passes
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.window import NONE, Pattern, Window, WindowArrays

Strand = Sequence[tuple[Action, bool]]
"""Actions of one direction, each with whether it may run concurrently with the one before."""


class Precedence:
    """The predecessors of every instruction of a window.

    Args:
        window: of all ranks.
        kept: the kept activations allocated by each instruction of the pattern.
        recomputed: the same for recomputed activations.

    Attributes:
        needs: of each place, its predecessors.
        layers: of each forward action, the layers' activations to allocate.
        action: of each place that allocates, its forward action; of all others -1.
        ahead: of each place that allocates, the forward action before its own; -1 for none.
    """

    def __init__(
        self,
        window: Window,
        arrays: WindowArrays,
        schedule: Schedule,
        layout: Layout,
        kept: ActivationMemory,
        recomputed: ActivationMemory,
    ) -> None:
        self.needs = [list(needs) for needs in arrays.needs]
        self.layers: list[float] = []
        self.action, self.ahead = [-1] * len(window), [-1] * len(window)
        self._window, self._kept = window, kept
        pattern = window.pattern
        self._chains = {key: _Chain(span, pattern, kept, recomputed) for key, span in pattern.spans.items()}
        self._keep_order(layout)
        for slots in schedule:
            strands = _without_weights(slots)
            for forward in (True, False):
                self._follow(_strand(strands, forward), layout)
            self._keep_step(strands, layout)

    def _keep_order(self, layout: Layout) -> None:
        """Adds edges for accumulation and transfers in the order of micro-batches, and for weight gradients."""
        window, needs = self._window, self.needs
        after = window.pattern.ordered_after
        turns = _turns(window.pattern, layout)
        operators = window.pattern.operators
        weights: list[list[list[int]]] = [[[], []] for _ in range(layout.num_ranks)]  # W of every unit in backward
        last = [NONE] * len(after)  # the place of each instruction for the micro-batch before
        added: dict[tuple[str, int], int] = {}
        for microbatch, unit, computation_type, start, indices in window.passes:
            forward = computation_type == "F"
            at, in_turn = window.at[microbatch], not forward or layout.transfers(unit)
            for place, index in enumerate(indices, start):
                if after[index]:
                    needs[place] += [at[each] for each in after[index]]
                if in_turn:
                    if last[index] != NONE:
                        needs[place].append(last[index])
                    last[index] = place
                for row, waits, waited_for in turns.get(index, ()):
                    if waits and row in added:
                        needs[place].append(added[row])
                    if waited_for:
                        added[row] = place
            if layout.reduces_often and not forward:
                mine, before = weights[layout.rank_of(unit)], weights[layout.rank_of(unit)][-2]
                mine.append([place for place, index in enumerate(indices, start) if operators[index].part is Part.W])
                for place in mine[-1]:
                    needs[place] += before

    def _follow(self, strand: Strand, layout: Layout) -> None:
        """Adds the edges from unit to unit of a strand, and notes the activations that its forward actions allocate.

            for every action of the strand:
                before = the action before; if both may run concurrently, the one before that
                for every unit of the action, in the order of the strand from `before` on:
                    it is entered after the strand has left the unit two places earlier,
                    and after the unit one place earlier if both are layers

        So the embedding of the next micro-batch may run concurrently with the head, but a strand never has two layers
        under way. Example: F0, then F1, through an embedding, two layers and a head.

            the strand enters   after it has left
            F0 layer 2          F0 embedding, F0 layer 1
            F0 head             F0 layer 1
            F1 embedding        F0 layer 2                    may run while F0 is in the head
            F1 layer 1          F0 head
            F1 layer 2          F1 embedding, F1 layer 1
        """
        paths: list[list[UnitPass]] = []
        number = -1
        for place, (action, doubles) in enumerate(strand):
            path = [each for each in unit_passes(action, layout) if self._chains[each[1:]].indices]
            earlier = (paths[place - 2] if place > 1 else []) if doubles else (paths[place - 1] if place else [])
            whole = earlier + path
            for index in range(len(earlier), len(whole)):
                for left in whole[max(0, index - 2) : index]:
                    if left is not whole[index - 1] or _both_repeat(layout, left, whole[index]):
                        self._enter_after(whole[index], left)
            paths.append(path)
            if action.computation_type == "F":
                ahead, number = number, len(self.layers)
                inside = [place for each in path for place in self._places(each, self._chains[each[1:]].allocates)]
                self.layers.append(sum(self._kept.alloc[self._window.indices[place]] for place in inside))
                for place in inside:
                    self.action[place], self.ahead[place] = number, ahead

    def _keep_step(self, slots: Sequence[Slot], layout: Layout) -> None:
        """Adds edges: a slot begins after the end of all earlier slots but the last."""
        for place, slot in enumerate(slots):
            for action in slot.actions:
                first = unit_passes(action, layout)[:1]  # a single rank may have a chunk without units
                for before in slots[max(0, place - 3) : max(0, place - 1)]:
                    for last in (unit_passes(earlier, layout)[-1:] for earlier in before.actions):
                        if first and last:
                            self._enter_after(first[0], last[0])

    def _enter_after(self, unit_pass: UnitPass, earlier: UnitPass) -> None:
        """Adds edges: a strand enters a unit after the end of an earlier unit.

        Recomputations are part of the earlier unit: otherwise a deferred weight gradient and a new layer could each
        wait for memory of the other.
        """
        left = self._places(earlier, self._chains[earlier[1:]].exits)
        for place in self._places(unit_pass, self._chains[unit_pass[1:]].entries):
            self.needs[place] += left

    def _places(self, unit_pass: UnitPass, indices: Iterable[int]) -> list[int]:
        """The places of pattern instructions in a pass through a unit."""
        at = self._window.at[unit_pass[0]]
        return [at[index] for index in indices]


class _Chain:
    """The operators of a unit in one direction without weight gradients and transfers, as indices into the pattern.

    Attributes:
        indices: all operators.
        entries: the first operators: those without a predecessor in the unit.
        exits: operators to be issued before the strand enters the next layer: the last operator and recomputations.
        allocates: operators that allocate kept activations.
    """

    def __init__(self, span: range, pattern: Pattern, kept: ActivationMemory, recomputed: ActivationMemory) -> None:
        operators, needs, after = pattern.operators, pattern.needs, pattern.ordered_after
        self.indices = [
            index
            for index in span
            if operators[index].part is not Part.W and operators[index].kind is not Kind.PIPELINE
        ]
        inside = set(self.indices)
        self.entries = [index for index in self.indices if not inside.intersection(needs[index] + after[index])]
        self.exits = [index for index in self.indices if recomputed.alloc[index] or index == self.indices[-1]]
        self.allocates = [index for index in self.indices if kept.alloc[index]]


def _turns(pattern: Pattern, layout: Layout) -> dict[int, list[tuple[tuple[str, int], bool, bool]]]:
    """Returns, for backward operators that take turns: the row, whether the operator waits for the last operator of the
    row, and whether the next operator of the row waits for it."""
    turns: dict[int, list[tuple[tuple[str, int], bool, bool]]] = {}
    rows = {each: row for row, members in enumerate(layout.shared) for each in members}
    for index, (instruction, op) in enumerate(zip(pattern.instructions, pattern.operators, strict=True)):
        unit = instruction.unit
        if op.part is Part.F:
            continue
        if (unit, op.name) in rows:
            turns.setdefault(index, []).append((("shared", rows[unit, op.name]), True, True))
        if not layout.graphs[layout.units[unit]].forward.repeats and op.part in (Part.I, Part.W):
            # Logits are large and no part of a layer: freed before the next micro-batch's logits are made.
            turns.setdefault(index, []).append((("unit", unit), op.part is Part.I, op.part is Part.W))
    return turns


def _without_weights(slots: Sequence[Slot]) -> list[Slot]:
    """The slots without W actions: list scheduling places weight gradients itself."""
    kept = (
        Slot(slot.forward, None if slot.backward is None or slot.backward.computation_type == "W" else slot.backward)
        for slot in slots
    )
    return [slot for slot in kept if slot.actions]


def _strand(slots: Sequence[Slot], forward: bool) -> list[tuple[Action, bool]]:
    """The actions of a direction; two in a row are concurrent if the other strand has none."""
    actions = []
    alone = False
    for slot in slots:
        action, other = (slot.forward, slot.backward) if forward else (slot.backward, slot.forward)
        if action is not None:
            actions.append((action, alone and other is None))
        alone = action is not None and other is None
    return actions


def _both_repeat(layout: Layout, *passes: UnitPass) -> bool:
    return all(layout.graphs[layout.units[unit]].forward.repeats for _, unit, _ in passes)


# -- activation memory -------------------------------------------------------------------------------------------------

Shares = Mapping[str, tuple[float, str]]
"""For every computation of a layer: its part of the activations, and the operator that is recomputed for it (empty for
kept activations)."""


def shares_of(pair: GraphPair) -> Shares:
    """Equal parts for all computations. A weight gradient may read the result of a recomputed operator."""
    writers = {value: op for op in pair.forward.operators for value in op.writes if value not in op.non_differentiable}

    def source(reads: Sequence[str]) -> str:
        """Returns the nearest recomputed computation."""
        for op in (writers[value] for value in reads if value in writers):
            if op.recomputed:
                return op.name if op.kind is Kind.COMPUTE else source(op.reads)
        return ""

    with_gradient = differentiated(pair.forward)
    computing = [op for op in with_gradient if op.kind is Kind.COMPUTE]
    share = 1 / max(1, len(computing))
    return {
        op.name: (share, op.name if op.recomputed else source(op.reads) if op.splits_dgrad_wgrad else "")
        for op in computing
    }


@dataclass(frozen=True)
class ActivationMemory:
    """The allocated and freed activations of a pattern's instructions, in layers' activations."""

    alloc: list[float]  # by instruction; an instruction that allocates is delayed while the limit is reached
    free: list[float]  # by instruction


def activation_memory(
    pattern: Pattern, layout: Layout, shares: Mapping[str, Shares]
) -> tuple[ActivationMemory, ActivationMemory]:
    """Returns the activations kept by forward, and the recomputed ones; `shares` are those of every repeating unit, see
    `shares_of`."""
    count = len(pattern.operators)
    kept, recomputed = (ActivationMemory([0.0] * count, [0.0] * count) for _ in range(2))
    for index, (instruction, op) in enumerate(zip(pattern.instructions, pattern.operators, strict=True)):
        held = shares.get(layout.units[instruction.unit], {})
        if op.kind is not Kind.COMPUTE or op.forward_name not in held:
            continue
        share, source = held[op.forward_name]
        if op.part is Part.R:
            recomputed.alloc[index] = sum(each for each, name in held.values() if name == op.forward_name)
        elif op.part is Part.F:
            kept.alloc[index] = 0.0 if source else share
        else:
            # An I leaves the gradients that its W reads, for example of gate and up: a negative `free`
            # and not as `alloc`: a delayed backward could deadlock.
            gradients = sum(value.startswith("d.") for value in op.reads)
            shares_freed = {Part.I: -gradients, Part.W: 1 + gradients}.get(op.part, 1)
            (recomputed if source else kept).free[index] = shares_freed * share
    return kept, recomputed


def peak_layers(slots: Sequence[Slot], layout: Layout, kept: Mapping[str, float]) -> float:
    """Returns the most layers whose activations are alive at once if the strands take turns, layer by layer."""

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
