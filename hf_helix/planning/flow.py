"""Flows: list scheduling of a whole window.

In:   the instructions of a window, seconds and bias of every operator, and how many layers' activations may be alive.
Out:  the order of issue.
Must hold: a pure function of its inputs, the same on every rank. Values are written before they are read; micro-batches
go through the forward strand in the schedule's order, and through the backward strand; every parameter's gradients
accumulate in micro-batch order. Forward goes on only while what waits for backward stays within the limit: activations,
and the gradients that weight gradients read.

Nothing is aligned to layers or slots: what one layer leaves open the next may fill, and the ends of a stage are
scheduled like its middle. Communication is issued as soon as its input is; the next computation is the one that can
start soonest, a more urgent one being waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_helix.planning.cost import COMPUTE, Times, work_of
from hf_helix.planning.graph import Kind, Part
from hf_helix.planning.schedule import Slot
from hf_helix.planning.window import Instruction, Layout

Bias = Mapping[tuple[str, str], float]
"""Seconds by operator: a computation with a bias of 2 ms goes before one with 5 ms that could start less than 3 ms
earlier."""

EXTRA_LAYERS = 1


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
    """The instructions of a window as numbers, ready to be ordered many times."""

    def __init__(
        self, program: Sequence[Instruction], slots: Sequence[Slot], layout: Layout, times: Times, extra_layers: int
    ) -> None:
        self.work = work_of(program, layout, times)
        self.needs = [list(needs) for needs in self.work.needs]
        self._keep_order(program, layout)
        self.takes, self.gives = _shares(program, layout)
        self.limit = _peak_layers(slots, layout) + extra_layers + 1e-6
        self.readers: list[list[int]] = [[] for _ in program]
        for place, needs in enumerate(self.needs):
            for need in needs:
                self.readers[need].append(place)

    def order(self, bias: Bias) -> list[int]:
        """The order of issue, as indices of the program."""
        work = self.work
        streams, seconds = work.streams, work.seconds
        known = [bias.get(name, 0.0) for name in work.names]
        weight = [known[entry] for entry in work.entries]
        waits = [len(needs) for needs in self.needs]
        arrives = [0.0] * len(work)
        free = [0.0] * (max(streams, default=0) + 1)
        computing = [i for i, count in enumerate(waits) if not count and streams[i] == COMPUTE]
        moving = [i for i, count in enumerate(waits) if not count and streams[i] != COMPUTE]
        order: list[int] = []
        now, alive = 0.0, 0.0
        while computing or moving:
            if moving:
                chosen = min(moving, key=lambda i: (arrives[i] + weight[i], i)) if len(moving) > 1 else moving[0]
                moving.remove(chosen)
                stream = streams[chosen]
                end = free[stream] = max(now, arrives[chosen], free[stream]) + seconds[chosen]
            else:
                chosen, best = -1, 0.0
                for place in computing:
                    if self.takes[place] and alive + self.takes[place] > self.limit:
                        continue
                    arrival = arrives[place]
                    score = (arrival if arrival > now else now) + weight[place]
                    if chosen < 0 or score < best or (score == best and place < chosen):
                        chosen, best = place, score
                assert chosen >= 0, "the backward strand can always go on"
                computing.remove(chosen)
                end = now = max(now, arrives[chosen]) + seconds[chosen]
            alive += self.takes[chosen] - self.gives[chosen]
            order.append(chosen)
            for reader in self.readers[chosen]:
                if arrives[reader] < end:
                    arrives[reader] = end
                waits[reader] -= 1
                if not waits[reader]:
                    (computing if streams[reader] == COMPUTE else moving).append(reader)
        return order

    def _keep_order(self, program: Sequence[Instruction], layout: Layout) -> None:
        """Needs beyond values: gradients add up in order, and a strand goes from unit to unit.

        A strand enters a unit once it has left the last but one, a layer once it has left the layer before: the next
        micro-batch's embedding may begin beside the head, but two layers of a strand are never under way at once.
        """
        last: dict[tuple[int, str], int] = {}
        rows = {each: row for row, found in enumerate(layout.shared) for each in found}
        added: dict[int, int] = {}
        named: dict[tuple[Visit, str], int] = {}
        visits: dict[Visit, list[int]] = {}
        for place, instruction in enumerate(program):
            op = instruction.operator
            assert op is not None
            visit = (op.part is Part.F, instruction.microbatch, instruction.unit)
            if not visit[0]:
                before = last.get((instruction.unit, op.name))
                if before is not None:
                    self.needs[place].append(before)
                for name in (op.name, *op.after):  # parts of one gradient, all of a micro-batch before the next
                    last[instruction.unit, name] = place
                row = rows.get((instruction.unit, op.name))
                if row is not None:
                    self.needs[place] += [added[row]] if row in added else []
                    added[row] = place
            named[visit, op.name] = place
            self.needs[place] += [named[visit, name] for name in op.after]
            if op.part is Part.W:
                self.needs[place].append(named[visit, f"{op.of}.I"])  # what is urgent goes first
            else:
                visits.setdefault(visit, []).append(place)
        for forward in (True, False):
            strand = [visit for visit in visits if visit[0] is forward]
            for number, visit in enumerate(strand):
                for earlier in strand[max(0, number - 2) : number]:
                    if earlier is not strand[number - 1] or _both_repeat(layout, earlier, visit):
                        self._enter_after(visits[visit], visits[earlier])

    def _enter_after(self, places: list[int], earlier: list[int]) -> None:
        """Nothing of a unit before the strand has left an earlier one."""
        inside = set(places)
        for place in places:
            if not inside.intersection(self.needs[place]):
                self.needs[place].append(earlier[-1])


Visit = tuple[bool, int, int]
"""Whether forward, which micro-batch, which unit."""


def _both_repeat(layout: Layout, *visits: Visit) -> bool:
    return all(layout.graphs[layout.units[unit]].forward.repeats for _, _, unit in visits)


def flow_order(program: Sequence[Instruction], slots: Sequence[Slot], layout: Layout, flow: Flow) -> list[int]:
    """The order in which a flow issues the instructions of a window."""
    return Window(program, slots, layout, flow.times, flow.extra_layers).order(flow.bias)


def _shares(program: Sequence[Instruction], layout: Layout) -> tuple[list[float], list[float]]:
    """By instruction: the share of a layer's activations that it takes, and that it gives back."""
    takes, gives = [0.0] * len(program), [0.0] * len(program)
    share = {
        name: 1 / sum(op.kind is Kind.COMPUTE for op in pair.forward.operators)
        for name, pair in layout.graphs.items()
        if pair.forward.repeats
    }
    for place, instruction in enumerate(program):
        op, name = instruction.operator, layout.units[instruction.unit]
        assert op is not None
        if name in share and op.kind is Kind.COMPUTE:
            if op.part is Part.F:
                takes[place] = share[name]
            elif op.part is Part.I:
                gives[place] = -share[name]  # keeps the gradient that W reads; not held up, or backward could stop
            elif op.part is Part.W:
                gives[place] = 2 * share[name]
            elif layout.graphs[name].forward[op.of].kind is Kind.COMPUTE:
                gives[place] = share[name]
    return takes, gives


def _peak_layers(slots: Sequence[Slot], layout: Layout) -> int:
    """Layers whose activations are alive at most where the strands take turns, layer by layer."""

    def layers(stage: int) -> int:
        return sum(layout.graphs[layout.units[unit]].forward.repeats for unit in layout.chunks[stage])

    alive = peak = 0
    for slot in slots:
        enter = layers(slot.forward.stage) if slot.forward else 0
        leave = layers(slot.backward.stage) if slot.backward else 0
        for place in range(max(enter, leave)):
            alive += (place < enter) - (place < leave)
            peak = max(peak, alive)
    return peak
