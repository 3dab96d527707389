"""List scheduling of a whole window, over all ranks of the pipeline at once.

In:   a schedule, seconds and priority of every operator, and how many layers' activations may be alive.
Out:  the order of issue.
Must hold: a pure function of its inputs, the same on every rank. Values are written before they are read. Micro-batches
go through every unit in the schedule's order, forward and backward, and every parameter's gradients accumulate in that
order. Forward is delayed while the memory limit is reached: activations, and the gradients that weight gradients read.
At most two layers hold recomputed activations at a time; a third is recomputed only if the rank would otherwise
deadlock. A strand leaves a layer only once all of it that weight gradients read has been recomputed.

Nothing is aligned to layers or slots: gaps that one layer leaves are filled by the next, and warm-up and cool-down are
scheduled like the steady state. Two micro-batches of a rank are under way at a time: a forward and a backward one, and
where the schedule runs one strand alone (warm-up and cool-down), two forward or two backward ones. Communication is
issued as soon as its input is; the next computation is the one with the smallest sum of start and priority.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hf_helix.planning.cost import COMPUTE, Times, work_of
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.instructions import Instruction, window_instructions
from hf_helix.planning.layout import Layout
from hf_helix.planning.pipeline.actions import Action, Schedule, Slot
from hf_helix.planning.plans.activation_memory import activation_memory, peak_layers, shares_of
from hf_helix.planning.profile import Name

Priority = Mapping[Name, float]
"""Seconds by operator, 0 where it has none; the smaller goes first. A computation with a priority of 2 ms goes before
one with 5 ms that could start less than 3 ms earlier."""

EXTRA_LIVE_LAYERS = 1
RECOMPUTED_LAYERS = 2 + 1e-6  # whose recomputed activations may be alive: a layer of each backward strand
SLACK = 1e-6


@dataclass(frozen=True)
class Priorities:
    """What list scheduling needs besides the window itself.

    Attributes:
        times: seconds of every operator alone.
        priority: see `Priority`.
        extra_live_layers: how many layers' activations may be alive beyond those of one strand.
    """

    times: Times
    priority: Priority
    extra_live_layers: int = EXTRA_LIVE_LAYERS


class ListScheduler:
    """The instructions of a window as numbers, ready to be ordered many times.

    Args:
        schedule: of the window.
        layout: what the ranks hold.
        times: seconds of every operator alone.
        extra_live_layers: see `Priorities`.

    Attributes:
        program: what all ranks run, rank by rank, before it is ordered.
        work: the same as numbers.
    """

    def __init__(self, schedule: Schedule, layout: Layout, times: Times, extra_live_layers: int) -> None:
        self.program = window_instructions(schedule, layout)
        self.work = work_of(self.program, layout, times)
        self.needs = [list(needs) for needs in self.work.needs]
        shares = {name: shares_of(pair) for name, pair in layout.graphs.items() if pair.forward.repeats}
        self.kept, self.recomputed = (
            activation_memory(self.program, layout, shares, recomputed) for recomputed in (False, True)
        )
        kept = {name: sum(share for share, source in parts.values() if not source) for name, parts in shares.items()}
        extra = extra_live_layers * max(kept.values(), default=0.0) + SLACK
        self.limits = [peak_layers(slots, layout, kept) + extra for slots in schedule]
        self._queues = self.work.queues()
        # The layers that each forward action allocates; the action of each instruction, and the one before it.
        self._layers: list[float] = []
        self._action, self._ahead = [-1] * len(self.program), [-1] * len(self.program)
        passes = self._keep_order(layout)
        for slots in schedule:
            strands = _without_weights(slots)
            for forward in (True, False):
                self._follow(_strand(strands, forward), layout, passes)
            self._keep_step(strands, layout, passes)
        self.readers: list[list[int]] = [[] for _ in self.program]
        for place, needs in enumerate(self.needs):
            for need in needs:
                self.readers[need].append(place)

    def programs(self, priority: Priority) -> list[list[Instruction]]:
        """The instructions of every rank in the order of issue."""
        programs: list[list[Instruction]] = [[] for _ in self.limits]
        for place in self.order(priority):
            programs[self.work.rank(place)].append(self.program[place])
        return programs

    def order(self, priority: Priority) -> list[int]:
        """The order of issue, as indices of the program; what counts is the order among the instructions of a rank."""
        known = [priority.get(name, 0.0) for name in self.work.names]
        weight = [known[entry] for entry in self.work.entries]
        waits = [len(needs) for needs in self.needs]
        arrives = [0.0] * len(self.work)
        free = [0.0] * (max(self._queues, default=0) + 1)
        ranks = [_Rank(limit) for limit in self.limits]
        left = [*self._layers, 0.0]  # what every forward action has still to allocate; the last stands for no action
        of, streams, seconds = self.work.ranks, self.work.streams, self.work.seconds
        for place, count in enumerate(waits):
            if not count:
                ranks[of[place]].add(place, streams[place] == COMPUTE)
        order: list[int] = []
        while len(order) < len(self.work):
            for rank in ranks:
                if rank.stale:
                    self._choose(rank, arrives, weight, left)
            rank = ranks[0] if len(ranks) == 1 else min(ranks, key=lambda rank: rank.start)
            chosen = rank.chosen
            if chosen < 0:  # every rank is at its limit for recomputed activations
                chosen = min(map(self._oldest_recomputation, ranks))
                assert chosen < len(self.program), "the oldest action of a valid schedule can always go on"
                rank = ranks[of[chosen]]
            if streams[chosen] == COMPUTE:
                rank.computing.remove(chosen)
                end = rank.now = max(rank.now, arrives[chosen]) + seconds[chosen]
            else:
                rank.moving.remove(chosen)
                queue = self._queues[chosen]
                end = free[queue] = max(rank.now, arrives[chosen], free[queue]) + seconds[chosen]
            rank.alive += self.kept.alloc[chosen] - self.kept.free[chosen]
            rank.recomputed += self.recomputed.alloc[chosen] - self.recomputed.free[chosen]
            if self.kept.alloc[chosen]:
                left[self._action[chosen]] -= self.kept.alloc[chosen]
            rank.stale = True
            order.append(chosen)
            for reader in self.readers[chosen]:
                if arrives[reader] < end:
                    arrives[reader] = end
                waits[reader] -= 1
                if not waits[reader]:
                    ranks[of[reader]].add(reader, streams[reader] == COMPUTE)
        return order

    def _choose(self, rank: _Rank, arrives: list[float], weight: list[float], left: list[float]) -> None:
        """Note what a rank issues next and when it can begin: nothing where all that it could issue must allocate."""
        rank.stale = False
        if rank.moving:
            few = rank.moving
            rank.chosen = min(few, key=lambda i: (arrives[i] + weight[i], i)) if len(few) > 1 else few[0]
            rank.start = rank.now
            return
        chosen, best, now = -1, 0.0, rank.now
        for place in rank.computing:
            alloc = self.kept.alloc[place]
            if alloc and rank.alive + alloc + left[self._ahead[place]] > rank.limit:
                continue  # the action before must always be able to allocate
            if self.recomputed.alloc[place] and rank.recomputed + self.recomputed.alloc[place] > RECOMPUTED_LAYERS:
                continue  # weight gradients will free some
            arrival = arrives[place]
            score = (arrival if arrival > now else now) + weight[place]
            if chosen < 0 or score < best or (score == best and place < chosen):
                chosen, best = place, score
        rank.chosen = chosen
        rank.start = math.inf if chosen < 0 else max(now, arrives[chosen])

    def _oldest_recomputation(self, rank: _Rank) -> int:
        """The first recomputation that a rank could issue, whatever it allocates; the program's length where there is
        none."""
        return min((place for place in rank.computing if self.recomputed.alloc[place]), default=len(self.program))

    def _keep_order(self, layout: Layout) -> dict[UnitPass, list[int]]:
        """Add ordering edges that are not data dependencies: gradient accumulation and transfers follow the schedule's
        order of micro-batches.

        Returns:
            The instructions of every pass through a unit, without weight gradients.
        """
        last: dict[tuple[bool, int, str], int] = {}
        rows = {each: row for row, found in enumerate(layout.shared) for each in found}
        added: dict[int, int] = {}
        named: dict[tuple[UnitPass, str], int] = {}
        passes: dict[UnitPass, list[int]] = {}
        waiting: dict[int, int] = {}
        for place, instruction in enumerate(self.program):
            op, unit = instruction.operator, instruction.unit
            assert op is not None
            unit_pass = forward, _, _ = (op.part is Part.F, instruction.microbatch, unit)
            if not forward or op.kind is Kind.PIPELINE:
                before = last.get((forward, unit, op.name))
                if before is not None:
                    self.needs[place].append(before)
                last[forward, unit, op.name] = place
            row = None if forward else rows.get((unit, op.name))
            if row is not None:
                self.needs[place] += [added[row]] if row in added else []
                added[row] = place
            if not layout.graphs[layout.units[unit]].forward.repeats:
                # Logits are large and no part of a layer: they are freed before the next micro-batch's are made.
                if op.part is Part.I and unit in waiting:
                    self.needs[place].append(waiting[unit])
                elif op.part is Part.W:
                    waiting[unit] = place
            named[unit_pass, op.name] = place
            self.needs[place] += [named[unit_pass, name] for name in op.after]
            if op.part is Part.W:
                self.needs[place].append(named[unit_pass, f"{op.of}.I"])  # others wait for the I
            elif op.kind is not Kind.PIPELINE:
                passes.setdefault(unit_pass, []).append(place)
        return passes

    def _follow(self, strand: Strand, layout: Layout, passes: Mapping[UnitPass, list[int]]) -> None:
        """Add the edges by which a strand goes from unit to unit.

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
                        self._enter_after(passes[whole[index]], passes[earlier])
            paths.append(path)
            if action.computation_type == "F":
                ahead, number = number, len(self._layers)
                inside = [instruction for each in path for instruction in passes[each]]
                self._layers.append(sum(self.kept.alloc[instruction] for instruction in inside))
                for instruction in inside:
                    self._action[instruction], self._ahead[instruction] = number, ahead

    def _keep_step(self, slots: Sequence[Slot], layout: Layout, passes: Mapping[UnitPass, list[int]]) -> None:
        """Add the edges by which a slot begins once all but the last one before it have ended."""
        for place, slot in enumerate(slots):
            for action in slot.actions:
                first = _unit_passes(action, layout)[:1]  # a rank by itself may have a chunk without units
                for before in slots[max(0, place - 3) : max(0, place - 1)]:
                    for last in (_unit_passes(earlier, layout)[-1:] for earlier in before.actions):
                        if first and last:
                            self._enter_after(passes[first[0]], passes[last[0]])

    def _enter_after(self, places: list[int], earlier: list[int]) -> None:
        """Add the edges by which a unit begins once the strand has left an earlier one and that is recomputed.

        Otherwise a deferred weight gradient and a new layer could each wait for memory held by the other.
        """
        inside = set(places)
        left = [place for place in earlier if self.recomputed.alloc[place] or place == earlier[-1]]
        for place in places:
            if not inside.intersection(self.needs[place]):
                self.needs[place] += left


@dataclass(slots=True)
class _Rank:
    """A rank while a window is ordered.

    Attributes:
        limit: how many layers' activations may be alive.
        computing: the computations that it could issue.
        moving: the communication that it could issue.
        now: when its compute stream is free.
        alive: layers whose activations, kept by forward, are alive.
        recomputed: layers whose recomputed activations are alive.
        chosen: what it issues next; -1 for nothing.
        start: when that begins.
        stale: whether `chosen` must be chosen anew.
    """

    limit: float
    computing: list[int] = field(default_factory=list)
    moving: list[int] = field(default_factory=list)
    now: float = 0.0
    alive: float = 0.0
    recomputed: float = 0.0
    chosen: int = -1
    start: float = math.inf
    stale: bool = True

    def add(self, place: int, computes: bool) -> None:
        """Note an instruction that it could issue from now on."""
        (self.computing if computes else self.moving).append(place)
        self.stale = True


UnitPass = tuple[bool, int, int]
"""A micro-batch going through a unit: whether forward, which micro-batch, which unit."""

Strand = Sequence[tuple[Action, bool]]
"""Actions of one direction, each with whether it may run beside the one before."""


def _without_weights(slots: Sequence[Slot]) -> list[Slot]:
    """The slots without halves that compute weight gradients alone: list scheduling puts these where there is room."""
    kept = (
        Slot(slot.forward, None if slot.backward is None or slot.backward.computation_type == "W" else slot.backward)
        for slot in slots
    )
    return [slot for slot in kept if slot.actions]


def _strand(slots: Sequence[Slot], forward: bool) -> list[tuple[Action, bool]]:
    """The actions of a direction; two in a row run beside each other where the other strand has none."""
    found = []
    alone = False
    for slot in slots:
        action, other = (slot.forward, slot.backward) if forward else (slot.backward, slot.forward)
        if action is not None:
            found.append((action, alone and other is None))
        alone = action is not None and other is None
    return found


def _unit_passes(action: Action, layout: Layout) -> list[UnitPass]:
    """The passes through units that an action makes, in its order; units between the ranks are left out."""
    forward = action.computation_type == "F"
    units = [unit for unit in layout.chunks[action.stage] if not layout.transfers(unit)]
    return [(forward, action.microbatch, unit) for unit in (units if forward else reversed(units))]


def _both_repeat(layout: Layout, *passes: UnitPass) -> bool:
    return all(layout.graphs[layout.units[unit]].forward.repeats for _, _, unit in passes)
