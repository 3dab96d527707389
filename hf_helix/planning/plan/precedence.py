"""Precedence: what list scheduling issues only after what, besides what reads what.

In:   a window, its schedule, and the activations that its instructions allocate.
Out:  a `Precedence`: the needs of every instruction, and the layers that every forward action allocates.
Must hold: every edge goes from an instruction to a later one of the schedule, so some order keeps them all. Gradients
add up, and transfers follow each other, in the schedule's order of micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.schedule.actions import Action, Schedule, Slot
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.window import ABSENT, Pattern, Window, Work

UnitPass = tuple[bool, int, int]
"""A micro-batch going through a unit: whether forward, which micro-batch, which unit."""

Strand = Sequence[tuple[Action, bool]]
"""Actions of one direction, each with whether it may run beside the one before."""


class Precedence:
    """What each instruction of a window is issued after.

    Args:
        window: of all ranks.
        work: its numbers.
        schedule: of the window.
        layout: what the ranks hold.
        kept: what each call of the pattern allocates of activations that are kept.
        recomputed: what it allocates of those that backward recomputes.

    Attributes:
        needs: of each instruction, those that it is issued after.
        layers: of each forward action, the layers' activations that it allocates.
        action: of each instruction that allocates, its forward action; of the others -1.
        ahead: of each instruction that allocates, the forward action before that one; -1 where there is none.
    """

    def __init__(
        self,
        window: Window,
        work: Work,
        schedule: Schedule,
        layout: Layout,
        kept: ActivationMemory,
        recomputed: ActivationMemory,
    ) -> None:
        self.needs = [list(needs) for needs in work.needs]
        self.layers: list[float] = []
        self.action, self.ahead = [-1] * len(window), [-1] * len(window)
        self._window, self._kept = window, kept
        pattern = window.pattern
        self._chains = {key[::-1]: _Chain(span, pattern, kept, recomputed) for key, span in pattern.spans.items()}
        passes = self._keep_order(layout)
        for slots in schedule:
            strands = _without_weights(slots)
            for forward in (True, False):
                self._follow(_strand(strands, forward), layout, passes)
            self._keep_step(strands, layout, passes)

    def _keep_order(self, layout: Layout) -> set[UnitPass]:
        """Adds ordering edges that are not data dependencies: gradient accumulation and transfers follow the schedule's
        order of micro-batches.

        Returns:
            The passes through units, without those that have nothing but weight gradients.
        """
        window, needs = self._window, self.needs
        after = window.pattern.after
        turns = _turns(window.pattern, layout)
        last = [ABSENT] * len(after)  # where each call was for the micro-batch before
        added: dict[tuple[str, int], int] = {}
        passes: set[UnitPass] = set()
        for microbatch, unit, computation_type, start, calls in window.passes:
            forward = computation_type == "F"
            at, in_turn = window.at[microbatch], not forward or layout.transfers(unit)
            for place, call in enumerate(calls, start):
                if after[call]:
                    needs[place] += [at[each] for each in after[call]]
                if in_turn:
                    if last[call] != ABSENT:
                        needs[place].append(last[call])
                    last[call] = place
                for row, waits, waited_for in turns.get(call, ()):
                    if waits and row in added:
                        needs[place].append(added[row])
                    if waited_for:
                        added[row] = place
            if computation_type != "W" and self._chains[forward, unit].calls:
                passes.add((forward, microbatch, unit))
        return passes

    def _follow(self, strand: Strand, layout: Layout, passes: Collection[UnitPass]) -> None:
        """Adds the edges by which a strand goes from unit to unit.

        It enters a unit once it has left the last but one, a layer once it has left the layer before: the next
        micro-batch's embedding may begin beside the head, but two layers of a strand are never under way at once. Where
        the schedule gives the other strand nothing to do, every second action makes a strand of its own.
        """
        paths: list[list[UnitPass]] = []
        number = -1
        for place, (action, doubles) in enumerate(strand):
            path = [each for each in _unit_passes(action, layout) if each in passes]
            behind = (paths[place - 2] if place > 1 else []) if doubles else (paths[place - 1] if place else [])
            whole = behind + path
            for index in range(len(behind), len(whole)):
                for earlier in whole[max(0, index - 2) : index]:
                    if earlier is not whole[index - 1] or _both_repeat(layout, earlier, whole[index]):
                        self._enter_after(whole[index], earlier)
            paths.append(path)
            if action.computation_type == "F":
                ahead, number = number, len(self.layers)
                inside = [place for each in path for place in self._places(each, self._chains[each[::2]].allocates)]
                self.layers.append(sum(self._kept.alloc[self._window.calls[instruction]] for instruction in inside))
                for instruction in inside:
                    self.action[instruction], self.ahead[instruction] = number, ahead

    def _keep_step(self, slots: Sequence[Slot], layout: Layout, passes: Collection[UnitPass]) -> None:
        """Adds the edges by which a slot begins once all but the last one before it have ended."""
        for place, slot in enumerate(slots):
            for action in slot.actions:
                first = _unit_passes(action, layout)[:1]  # a rank by itself may have a chunk without units
                for before in slots[max(0, place - 3) : max(0, place - 1)]:
                    for last in (_unit_passes(earlier, layout)[-1:] for earlier in before.actions):
                        if first and last:
                            self._enter_after(first[0], last[0])

    def _enter_after(self, unit_pass: UnitPass, earlier: UnitPass) -> None:
        """Adds the edges by which a unit begins once the strand has left an earlier one and that is recomputed.

        Otherwise a deferred weight gradient and a new layer could each wait for memory held by the other.
        """
        left = self._places(earlier, self._chains[earlier[::2]].leaves)
        for place in self._places(unit_pass, self._chains[unit_pass[::2]].enters):
            self.needs[place] += left

    def _places(self, unit_pass: UnitPass, calls: Iterable[int]) -> list[int]:
        """The places of calls of a pass through a unit."""
        at = self._window.at[unit_pass[1]]
        return [at[call] for call in calls]


class _Chain:
    """The operators of a unit in one direction that its strand waits for, as calls of the pattern: all but weight
    gradients and transfers.

    Attributes:
        calls: all of them.
        enters: those with which the strand enters the unit.
        leaves: those after which it may enter another: the last one, and whatever recomputes.
        allocates: those that allocate activations which are kept.
    """

    def __init__(self, span: range, pattern: Pattern, kept: ActivationMemory, recomputed: ActivationMemory) -> None:
        self.calls = [
            call
            for call in span
            if (op := pattern.calls[call].operator) and op.part is not Part.W and op.kind is not Kind.PIPELINE
        ]
        inside = set(self.calls)
        self.enters = [
            call for call in self.calls if not inside.intersection(pattern.work.needs[call] + pattern.after[call])
        ]
        self.leaves = [call for call in self.calls if recomputed.alloc[call] or call == self.calls[-1]]
        self.allocates = [call for call in self.calls if kept.alloc[call]]


def _turns(pattern: Pattern, layout: Layout) -> dict[int, list[tuple[tuple[str, int], bool, bool]]]:
    """For every call of backward that takes turns with others: the row, whether it waits for the one before it there,
    and whether the next one waits for it."""
    turns: dict[int, list[tuple[tuple[str, int], bool, bool]]] = {}
    rows = {each: row for row, members in enumerate(layout.shared) for each in members}
    for call, instruction in enumerate(pattern.calls):
        op, unit = instruction.operator, instruction.unit
        if op is None or op.part is Part.F:
            continue
        if (unit, op.name) in rows:
            turns.setdefault(call, []).append((("shared", rows[unit, op.name]), True, True))
        if not layout.graphs[layout.units[unit]].forward.repeats and op.part in (Part.I, Part.W):
            # Logits are large and no part of a layer: they are freed before the next micro-batch's are made.
            turns.setdefault(call, []).append((("unit", unit), op.part is Part.I, op.part is Part.W))
    return turns


def _without_weights(slots: Sequence[Slot]) -> list[Slot]:
    """The slots without halves that compute weight gradients alone: list scheduling puts these where there is room."""
    kept = (
        Slot(slot.forward, None if slot.backward is None or slot.backward.computation_type == "W" else slot.backward)
        for slot in slots
    )
    return [slot for slot in kept if slot.actions]


def _strand(slots: Sequence[Slot], forward: bool) -> list[tuple[Action, bool]]:
    """The actions of a direction; two in a row run beside each other where the other strand has none."""
    actions = []
    alone = False
    for slot in slots:
        action, other = (slot.forward, slot.backward) if forward else (slot.backward, slot.forward)
        if action is not None:
            actions.append((action, alone and other is None))
        alone = action is not None and other is None
    return actions


def _unit_passes(action: Action, layout: Layout) -> list[UnitPass]:
    """The passes through units that an action makes, in its order; units between the ranks are left out."""
    forward = action.computation_type == "F"
    units = [unit for unit in layout.chunks[action.stage] if not layout.transfers(unit)]
    return [(forward, action.microbatch, unit) for unit in (units if forward else reversed(units))]


def _both_repeat(layout: Layout, *passes: UnitPass) -> bool:
    return all(layout.graphs[layout.units[unit]].forward.repeats for _, _, unit in passes)


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
