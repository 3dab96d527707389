"""The memory of a schedule: the peak of each rank, by the memory of single operators.

In:   the memory that each operator leaves and takes, measured or counted; a layout; a schedule.
Out:  `Peak`s, and whether a schedule fits.
Must hold: one computation for the doctor, which counts operators, and for a run, which measures them. Weight gradients
that are put off keep what they read. Without a program, two strands take turns layer by layer: plans need at most one
layer's activations more. A value sent to another stage is freed when the next transfer begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
        self._known: dict[tuple[str, str], _Pass] = {}
        self._of_slots: dict[tuple[object, ...], list[_Pass]] = {}
        entries = (op for pair in layout.graphs.values() for _, op in pair.entries())
        self._ahead = max((op.ahead for op in entries), default=0)  # units
        self._more = self._largest_layer() if two_strands else 0

    def peak(self, slots: Iterable[Slot]) -> Peak:
        """Returns the peak of a rank's slots, gradients apart."""
        turns = [change for slot in slots for change in self._of_slot(slot)]
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

    def _through(self, unit: int, computation_type: str) -> _Pass:
        """Returns the pass through a unit, shared by all units of its name."""
        key = self._layout.units[unit], computation_type
        if key not in self._known:
            self._known[key] = self._counted(unit, computation_type)
        return self._known[key]

    def _of_slot(self, slot: Slot) -> list[_Pass]:
        """Returns the passes of a slot, equal for all micro-batches."""
        forward, backward = slot.forward, slot.backward
        key = forward and forward.stage, backward and (backward.stage, backward.computation_type)
        if key not in self._of_slots:
            self._of_slots[key] = _merged(self._through(*turn) for turn in _turns(self._layout, slot))
        return self._of_slots[key]

    def _largest_layer(self) -> int:
        """Returns the largest peak of a pass through a layer."""
        layers = [unit for unit, name in enumerate(self._layout.units) if self._layout.graphs[name].forward.repeats]
        return max((self._through(unit, part).peak for unit in layers for part in PARTS_OF), default=0)

    def _counted(self, unit: int, computation_type: str) -> _Pass:
        layout, forward = self._layout, computation_type == "F"
        if layout.transfers(unit):
            if computation_type == "W":
                return _Pass()
            passed = self._handed_on
            taken = forward == layout.units[unit].startswith(RECEIVE)
            return _Pass(passed, passed, is_transfer=True) if taken else _Pass(-passed, is_transfer=True)
        parts, name = PARTS_OF[computation_type], layout.units[unit]
        ops = {(name, entry): op for entry, op in layout.graphs[name].entries() if op.part in parts}
        whole = _Pass()
        for each in sorted(ops, key=self._turns.__getitem__):
            usage = self._operators[each]
            if ops[each].ahead:
                whole = whole.then(_Pass(gathered=usage.delta))
            else:
                whole = whole.then(_Pass(usage.delta, usage.peak, usage.weights))
        return whole


def _merged(passes: Iterable[_Pass]) -> list[_Pass]:
    """Returns the fewest equivalent passes: adjacent passes are composed unless a transfer or a gather separates."""
    found: list[_Pass] = []
    for change in passes:
        if found and not (found[-1].is_transfer or change.is_transfer or change.gathered):
            found[-1] = found[-1].then(change)
        else:
            found.append(change)
    return found


def _turns(layout: Layout, slot: Slot) -> Iterator[tuple[int, str]]:
    """Yields the units visited by a rank in a slot, as (unit, computation type); strands take turns."""
    entering, leaving = (
        [(unit, action.computation_type) for unit in layout.chunks[action.stage]] if action else []
        for action in (slot.forward, slot.backward)
    )
    yield from (each for pair in zip_longest(entering, leaving[::-1]) for each in pair if each)
