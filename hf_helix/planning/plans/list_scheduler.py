"""Flows: list scheduling of a whole window, over all ranks of the pipeline at once.

In:   a schedule, seconds and bias of every operator, and how many layers' activations may be alive.
Out:  the order of issue.
Must hold: a pure function of its inputs, the same on every rank. Values are written before they are read; micro-batches
go through every unit in the schedule's order, forward and backward; every parameter's gradients accumulate in that
order. Forward goes on only while what waits for backward stays within the limit: activations, and the gradients that
weight gradients read. Nothing runs again for one more layer while what ran again for others is still held, unless
nothing else is left to do; and no layer is left before all of it has run again that weight gradients read.

Nothing is aligned to layers or slots: what one layer leaves open the next may fill, and the ends of a stage are
scheduled like its middle. Two micro-batches of a rank are under way at a time: a forward and a backward one, and where
the schedule runs one strand alone (warm-up and cool-down), two forward or two backward ones. Communication is issued as
soon as its input is; the next computation is the one that can start soonest, a more urgent one being waited for.
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
from hf_helix.planning.plans.activation_memory import held, peak_layers, shares_of

Bias = Mapping[tuple[str, str], float]
"""Seconds by operator: a computation with a bias of 2 ms goes before one with 5 ms that could start less than 3 ms
earlier."""

EXTRA_LAYERS = 1
LAYERS_AGAIN = 2 + 1e-6  # whose recomputed activations may be alive: of two backward strands, a layer each
SLACK = 1e-6


@dataclass(frozen=True)
class Flow:
    """A plan for whole windows: what `flow_order` needs besides the window itself.

    Attributes:
        times: seconds of every operator alone.
        bias: see `Bias`; an operator without one has 0.
        extra_layers: how many layers' activations may be alive beyond those of one strand.
    """

    times: Times
    bias: Bias
    extra_layers: int = EXTRA_LAYERS


class Window:
    """The instructions of a window as numbers, ready to be ordered many times.

    Attributes:
        program: what all ranks run, rank by rank.
    """

    def __init__(self, schedule: Schedule, layout: Layout, times: Times, extra_layers: int) -> None:
        self.program = window_instructions(schedule, layout)
        self.work = work_of(self.program, layout, times)
        self.needs = [list(needs) for needs in self.work.needs]
        shares = {name: shares_of(pair) for name, pair in layout.graphs.items() if pair.forward.repeats}
        self.kept, self.again = (held(self.program, layout, shares, again) for again in (False, True))
        kept = {name: sum(share for share, again in found.values() if not again) for name, found in shares.items()}
        extra = extra_layers * max(kept.values(), default=0.0) + SLACK
        self.limits = [peak_layers(slots, layout, kept) + extra for slots in schedule]
        self._queues = self.work.queues()
        # Of every forward action, the layers that it takes; of every instruction, its action and the one before.
        self._layers: list[float] = []
        self._action, self._ahead = [-1] * len(self.program), [-1] * len(self.program)
        visits = self._keep_order(layout)
        for slots in schedule:
            strands = _without_weights(slots)
            for forward in (True, False):
                self._follow(_strand(strands, forward), layout, visits)
            self._keep_step(strands, layout, visits)
        self.readers: list[list[int]] = [[] for _ in self.program]
        for place, needs in enumerate(self.needs):
            for need in needs:
                self.readers[need].append(place)

    def order(self, bias: Bias) -> list[int]:
        """The order of issue, as indices of the program; what counts is the order among the instructions of a rank."""
        known = [bias.get(name, 0.0) for name in self.work.names]
        weight = [known[entry] for entry in self.work.entries]
        waits = [len(needs) for needs in self.needs]
        arrives = [0.0] * len(self.work)
        free = [0.0] * (max(self._queues, default=0) + 1)
        ranks = [_Rank(limit) for limit in self.limits]
        left = [*self._layers, 0.0]  # what every forward action has still to take; the last stands for none
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
            if chosen < 0:  # gradients that wait for their weights' have filled the room of what these read
                chosen = min(map(self._oldest_again, ranks))
                assert chosen < len(self.program), "the oldest action of a valid schedule can always go on"
                rank = ranks[of[chosen]]
            if streams[chosen] == COMPUTE:
                rank.computing.remove(chosen)
                end = rank.now = max(rank.now, arrives[chosen]) + seconds[chosen]
            else:
                rank.moving.remove(chosen)
                queue = self._queues[chosen]
                end = free[queue] = max(rank.now, arrives[chosen], free[queue]) + seconds[chosen]
            rank.alive += self.kept.takes[chosen] - self.kept.gives[chosen]
            rank.again += self.again.takes[chosen] - self.again.gives[chosen]
            if self.kept.takes[chosen]:
                left[self._action[chosen]] -= self.kept.takes[chosen]
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
        """What a rank issues next, and when it can begin; nothing where all that it could do needs memory."""
        rank.stale = False
        if rank.moving:
            few = rank.moving
            rank.chosen = min(few, key=lambda i: (arrives[i] + weight[i], i)) if len(few) > 1 else few[0]
            rank.start = rank.now
            return
        chosen, best, now = -1, 0.0, rank.now
        for place in rank.computing:
            takes = self.kept.takes[place]
            if takes and rank.alive + takes + left[self._ahead[place]] > rank.limit:
                continue  # the action before must always find room
            if self.again.takes[place] and rank.again + self.again.takes[place] > LAYERS_AGAIN:
                continue  # weight gradients make room
            arrival = arrives[place]
            score = (arrival if arrival > now else now) + weight[place]
            if chosen < 0 or score < best or (score == best and place < chosen):
                chosen, best = place, score
        rank.chosen = chosen
        rank.start = math.inf if chosen < 0 else max(now, arrives[chosen])

    def _oldest_again(self, rank: _Rank) -> int:
        """What would run again first, whatever room it needs; behind everything where nothing waits to."""
        return min((place for place in rank.computing if self.again.takes[place]), default=len(self.program))

    def _keep_order(self, layout: Layout) -> dict[Visit, list[int]]:
        """Needs beyond values: what must keep the schedule's order although nothing of it is read.

        Returns:
            The instructions of every visit, without weight gradients.
        """
        last: dict[tuple[bool, int, str], int] = {}
        rows = {each: row for row, found in enumerate(layout.shared) for each in found}
        added: dict[int, int] = {}
        named: dict[tuple[Visit, str], int] = {}
        visits: dict[Visit, list[int]] = {}
        waiting: dict[int, int] = {}
        for place, instruction in enumerate(self.program):
            op, unit = instruction.operator, instruction.unit
            assert op is not None
            visit = forward, _, _ = (op.part is Part.F, instruction.microbatch, unit)
            if not forward or op.kind is Kind.PIPELINE:  # gradients add up in order, and what is sent arrives in order
                before = last.get((forward, unit, op.name))
                if before is not None:
                    self.needs[place].append(before)
                for name in (op.name, *op.after):  # parts of one gradient, all of a micro-batch before the next
                    last[forward, unit, name] = place
            row = None if forward else rows.get((unit, op.name))
            if row is not None:
                self.needs[place] += [added[row]] if row in added else []
                added[row] = place
            if not layout.graphs[layout.units[unit]].forward.repeats:
                # Logits are large and in no layer's share: they go before those of the next micro-batch come.
                if op.part is Part.I and unit in waiting:
                    self.needs[place].append(waiting[unit])
                elif op.part is Part.W:
                    waiting[unit] = place
            named[visit, op.name] = place
            self.needs[place] += [named[visit, name] for name in op.after]
            if op.part is Part.W:
                self.needs[place].append(named[visit, f"{op.of}.I"])  # what is urgent goes first
            elif op.kind is not Kind.PIPELINE:
                visits.setdefault(visit, []).append(place)
        return visits

    def _follow(self, strand: Strand, layout: Layout, visits: Mapping[Visit, list[int]]) -> None:
        """A strand goes from unit to unit.

        It enters a unit once it has left the last but one, a layer once it has left the layer before: the next
        micro-batch's embedding may begin beside the head, but two layers of a strand are never under way at once. Where
        the schedule gives the other strand nothing to do, every second action makes a strand of its own.
        """
        ways: list[list[Visit]] = []
        number = -1
        for place, (action, doubles) in enumerate(strand):
            way = [visit for visit in _way(action, layout) if visit in visits]
            behind = (ways[place - 2] if place > 1 else []) if doubles else (ways[place - 1] if place else [])
            whole = behind + way
            for index in range(len(behind), len(whole)):
                for earlier in whole[max(0, index - 2) : index]:
                    if earlier is not whole[index - 1] or _both_repeat(layout, earlier, whole[index]):
                        self._enter_after(visits[whole[index]], visits[earlier])
            ways.append(way)
            if action.computation_type == "F":
                ahead, number = number, len(self._layers)
                inside = [instruction for visit in way for instruction in visits[visit]]
                self._layers.append(sum(self.kept.takes[instruction] for instruction in inside))
                for instruction in inside:
                    self._action[instruction], self._ahead[instruction] = number, ahead

    def _keep_step(self, slots: Sequence[Slot], layout: Layout, visits: Mapping[Visit, list[int]]) -> None:
        """A slot begins once all before the last have ended."""
        for place, slot in enumerate(slots):
            for action in slot.actions:
                first = _way(action, layout)[:1]  # a rank by itself may have a chunk without units
                for before in slots[max(0, place - 3) : max(0, place - 1)]:
                    for last in (_way(earlier, layout)[-1:] for earlier in before.actions):
                        if first and last:
                            self._enter_after(visits[first[0]], visits[last[0]])

    def _enter_after(self, places: list[int], earlier: list[int]) -> None:
        """Nothing of a unit before the strand has left an earlier one, and that has run again.

        Else what only weight gradients read could wait for room that these take up, and they for it.
        """
        inside = set(places)
        left = [place for place in earlier if self.again.takes[place] or place == earlier[-1]]
        for place in places:
            if not inside.intersection(self.needs[place]):
                self.needs[place] += left


@dataclass(slots=True)
class _Rank:
    """A rank while a window is ordered.

    Attributes:
        limit: of the layers whose activations may be alive.
        alive, again: layers whose activations are, kept by forward and recomputed.
        computing, moving: what it could issue: computations and communication.
        now: when its compute stream is free.
        chosen, start: what it issues next, and when that begins; `stale`: to be chosen anew.
    """

    limit: float
    computing: list[int] = field(default_factory=list)
    moving: list[int] = field(default_factory=list)
    now: float = 0.0
    alive: float = 0.0
    again: float = 0.0
    chosen: int = -1
    start: float = math.inf
    stale: bool = True

    def add(self, place: int, computes: bool) -> None:
        """Something more that it could issue."""
        (self.computing if computes else self.moving).append(place)
        self.stale = True


Visit = tuple[bool, int, int]
"""Whether forward, which micro-batch, which unit."""

Strand = Sequence[tuple[Action, bool]]
"""Actions of one direction, each with whether it may run beside the one before."""


def _without_weights(slots: Sequence[Slot]) -> list[Slot]:
    """The slots without halves that compute weight gradients alone: in a flow these go where there is room."""
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


def _way(action: Action, layout: Layout) -> list[Visit]:
    """The units that an action visits, in its order; those between the ranks left out."""
    forward = action.computation_type == "F"
    units = [unit for unit in layout.chunks[action.stage] if not layout.transfers(unit)]
    return [(forward, action.microbatch, unit) for unit in (units if forward else reversed(units))]


def _both_repeat(layout: Layout, *visits: Visit) -> bool:
    return all(layout.graphs[layout.units[unit]].forward.repeats for _, _, unit in visits)


def flow_order(schedule: Schedule, layout: Layout, flow: Flow) -> list[list[Instruction]]:
    """The instructions of every rank in the order in which a flow issues them."""
    window = Window(schedule, layout, flow.times, flow.extra_layers)
    programs: list[list[Instruction]] = [[] for _ in schedule]
    for place in window.order(flow.bias):
        programs[window.work.rank(place)].append(window.program[place])
    return programs
