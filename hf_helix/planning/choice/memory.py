"""The memory of a schedule: the peak of each rank, by the memory of single operators.

In:   the memory that each operator leaves and takes, measured or counted; a layout; a schedule.
Out:  `Peak`s, and whether a schedule fits.
Must hold: one computation for the doctor, which counts operators, and for a run, which measures them. Weight gradients
that are put off keep what they read. Without a program, two strands take turns layer by layer: plans need at most one
layer's activations more. A value sent to another stage is freed when the next transfer begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

from hf_helix.planning.graph.backward import RECEIVE
from hf_helix.planning.schedule.actions import Schedule, Slot
from hf_helix.planning.timing.profile import OperatorMemory
from hf_helix.planning.window.instructions import PARTS_OF
from hf_helix.planning.window.layout import Layout, Name


@dataclass(frozen=True)
class Peak:
    """Peak bytes of a window, besides the memory held between windows."""

    activations: int = 0  # activations and workspace of operators
    weights: int = 0  # gathered weights, and copies of gathered weights
    gradients: int = 0  # full gradients before their reduction, with sharded weights

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.activations + self.weights + self.gradients


@dataclass(frozen=True)
class MemoryLimit:
    """What the windows of a run may hold.

    Attributes:
        passes: the memory of the passes through units; None before a measurement. Then a window puts off no more
            weight gradients than the named schedules do.
        room: bytes of each pipeline rank, besides the memory held between windows.
    """

    passes: Passes | None = None
    room: Sequence[float] = ()

    def excess(self, schedule: Schedule) -> float:
        """Returns the bytes by which the fullest rank exceeds its room; at most 0 if the schedule fits."""
        return max((self.excess_of(rank, slots) for rank, slots in enumerate(schedule)), default=0.0)

    def excess_of(self, rank: int, slots: Iterable[Slot]) -> float:
        """Returns the same for one rank with these slots."""
        return 0.0 if self.passes is None else self.passes.peak(slots).total - self.room[rank]


@dataclass(frozen=True)
class _Pass:
    """The change of live memory by one pass of a micro-batch through a unit."""

    delta: int = 0  # change of live bytes, including the release of `gathered`
    peak: int = 0  # largest increase of live bytes during the pass
    weights: int = 0  # the part of `delta` in gathered weights or copies of gathered weights
    weights_then: int = 0  # the increase of the bytes of gathered weights at the peak
    gathered: int = 0  # bytes of weights gathered before the pass begins
    # whether the unit sends to or receives from another stage; the next transfer frees sent values
    is_transfer: bool = False

    def then(self, other: _Pass) -> _Pass:
        """Returns the sequential composition of two passes, with the weights of both gathered first."""
        peak, weights_then = self.peak, self.weights_then
        if self.delta + other.peak > peak:
            peak, weights_then = self.delta + other.peak, self.weights + other.weights_then
        delta, weights = self.delta + other.delta, self.weights + other.weights
        return _Pass(delta, peak, weights, weights_then, self.gathered + other.gathered, self.is_transfer)


class Passes:
    """The passes of micro-batches through the units of a layout.

    Args:
        operators: the memory of each operator, in the order of one strand.
        handed_on: bytes of the values handed from a unit to the next.
        two_strands: whether plans may hold one layer's activations more.
    """

    def __init__(
        self, operators: Mapping[Name, OperatorMemory], layout: Layout, handed_on: int, two_strands: bool = True
    ) -> None:
        self._operators, self._layout, self._handed_on = operators, layout, handed_on
        self._turns = {name: turn for turn, name in enumerate(operators)}
        self._through, self._of_stages = cache(self._counted), cache(self._merged)
        entries = (op for pair in layout.graphs.values() for _, op in pair.entries())
        self._ahead = max((op.ahead for op in entries), default=0)  # units
        self._more = self._largest_layer() if two_strands else 0
        self._begins_forward = two_strands or layout.num_ranks > 1  # see `planning.plan.block_plan.sequential`

    def peak(self, slots: Iterable[Slot]) -> Peak:
        """Returns the peak of a rank's slots, gradients apart."""
        turns: list[_Pass] = []
        for slot in slots:
            turns += self._of_stages(slot.forward and slot.forward.stage, slot.backward and slot.backward[:2])
        coming = deque(change.gathered for change in turns if change.gathered)
        alive = weights = sum(coming.popleft() for _ in range(min(self._ahead, len(coming))))
        sent = most = then = 0
        for change in turns:
            if change.gathered and coming:
                gathered = coming.popleft()
                alive, weights = alive + gathered, weights + gathered
            delta = change.delta
            if change.is_transfer:
                alive -= sent
                sent, delta = max(0, -delta), max(0, delta)
            if alive + change.peak > most:
                most, then = alive + change.peak, weights + change.weights_then
            alive += delta
            weights += change.weights
        return Peak(most - then + self._more, then)

    def _largest_layer(self) -> int:
        """Returns the largest peak of a pass through a layer."""
        layers = [name for name in self._layout.units if self._layout.graphs[name].forward.repeats]
        return max((self._through(name, part).peak for name in layers for part in PARTS_OF), default=0)

    def _counted(self, name: str, computation_type: str) -> _Pass:
        """The pass through a unit of a name."""
        pair, forward = self._layout.graphs[name], computation_type == "F"
        if pair.forward.transfers:
            if computation_type == "W":
                return _Pass()
            passed = self._handed_on
            taken = forward == name.startswith(RECEIVE)
            return _Pass(passed, passed, is_transfer=True) if taken else _Pass(-passed, is_transfer=True)
        parts = PARTS_OF[computation_type]
        ops = {(name, entry): op for entry, op in pair.entries() if op.part in parts}
        whole = _Pass()
        for each in sorted(ops, key=self._turns.__getitem__):
            usage = self._operators[each]
            if ops[each].ahead:
                whole = whole.then(_Pass(gathered=usage.delta))
            else:
                whole = whole.then(_Pass(usage.delta, usage.peak, usage.weights))
        return whole

    def _merged(self, forward: int | None, backward: tuple[int, str] | None) -> list[_Pass]:
        """The passes of a slot with a forward and a backward action, as stage and computation type; strands take turns.
        Adjacent passes are composed unless a transfer or a gather separates them."""
        units, chunks = self._layout.units, self._layout.chunks
        entering = [(units[unit], "F") for unit in chunks[forward]] if forward is not None else []
        leaving = [(units[unit], backward[1]) for unit in chunks[backward[0]]][::-1] if backward is not None else []
        pairs = zip_longest(entering, leaving) if self._begins_forward else zip_longest(leaving, entering)
        found: list[_Pass] = []
        for turn in (each for pair in pairs for each in pair if each):
            change = self._through(*turn)
            if found and not (found[-1].is_transfer or change.is_transfer or change.gathered):
                found[-1] = found[-1].then(change)
            else:
                found.append(change)
        return found
