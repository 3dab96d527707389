"""The slot clock: costs of virtual stages, and when the slots of a schedule run.

In:   costs or a profile, the rank of every virtual stage, and a schedule.
Out:  a `Simulated`: start and end of every slot, and the activations of every rank.
Must hold: a rank runs its slots in order, each as soon as its inputs have arrived, as the runner does. F needs F of the
stage before; I needs F of its own stage and I of the stage after; W needs I. A result arrives on another rank
`transfer` seconds after its slot ends. An activation of a stage and micro-batch lives from the start of F to the end of
B, or of a separate W. (`planning.schedule.validate` has a dry run of its own, on purpose.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from hf_helix.planning.graph.backward import SEND
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.schedule.actions import PARTS, Action, Schedule, Slot, num_microbatches_of
from hf_helix.planning.timing.profile import Profile

USUAL_GAIN = 1.2  # of forward while backward runs, if nothing is measured
SLICE = 0.3  # the work of a slice of the vocabulary, as a part of a stage's layers, if nothing is measured
HOP = 0.7  # of a transfer, with slices of the vocabulary: much, since short waits are most punctual


@dataclass(frozen=True)
class Costs:
    """The seconds that the parts of each virtual stage take by themselves.

    Attributes:
        forward: seconds of F, of each virtual stage.
        input: seconds of I, of each virtual stage.
        weight: seconds of W, of each virtual stage; a B takes I and W.
        transfer: seconds from the end of an action to its arrival on another rank.
        gain: a fused slot takes the sum of its two actions divided by this, but no less than the longer of them.
    """

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    transfer: float = 0.0
    gain: float = 1.0

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        parts = (self.forward, self.input, self.weight)
        numbers = [self.transfer, *(seconds for part in parts for seconds in part)]
        if len({len(part) for part in parts}) != 1:
            raise ValueError(f"costs need a number for each virtual stage in every part; got {[len(p) for p in parts]}")
        if not all(0 <= seconds < math.inf for seconds in numbers) or sum(self.forward) <= 0:
            raise ValueError("costs need times of at least 0, and a forward that takes more; such as 1, 1 and 1")
        if not 0 < self.gain < math.inf:
            raise ValueError(f"gain={self.gain} must be more than 0, such as gain=1.0 where nothing is gained")

    @classmethod
    def of_layers(
        cls,
        counts: Sequence[float],
        forward: float = 1.0,
        input: float = 1.0,
        weight: float = 1.0,
        transfer: float = 0.0,
        gain: float = 1.0,
    ) -> Costs:
        """Returns the costs of stages of equal layers.

        Args:
            counts: layers of each virtual stage.
            forward, input, weight: seconds of a layer's F, I and W.
            transfer, gain: see `Costs`.
        """
        forwards, inputs, weights = ([count * seconds for count in counts] for seconds in (forward, input, weight))
        return cls(forwards, inputs, weights, transfer, gain)

    @classmethod
    def even(cls, num_stages: int, slices: int = 0) -> Costs:
        """The assumption without a measurement: all parts of all stages take equally long, but for the first and the
        last `slices` stages, which have a slice of the vocabulary each."""
        ends = [SLICE] * slices
        hop = HOP if slices else 0.0
        return cls.of_layers([*ends, *[1] * (num_stages - 2 * slices), *ends], transfer=hop, gain=USUAL_GAIN)

    def seconds(self, action: Action) -> float:
        """The seconds of an action by itself."""
        if action.computation_type == "F":
            return self.forward[action.stage]
        inputs = self.input[action.stage] if action.computation_type in "BI" else 0.0
        return inputs + (self.weight[action.stage] if action.computation_type in "BW" else 0.0)

    def slot_seconds(self, slot: Slot) -> float:
        """The seconds of a slot."""
        alone = [self.seconds(action) for action in slot.actions]
        return max(sum(alone) / self.gain, *alone) if slot.fused else sum(alone)


def stage_costs(profile: Profile) -> Costs:
    """The costs of the virtual stages of a profile: the times of their operators, one after the other.

    The gain is the most that two strands could gain: the time of all operators over the time of the busiest kind.
    """
    layout = profile.layout
    totals: dict[tuple[int, str], float] = {}
    loads = dict.fromkeys(Kind, 0.0)
    for stage, chunk in layout.chunks.items():
        for unit in chunk:
            if layout.transfers(unit):
                continue
            name = layout.units[unit]
            for entry, op in layout.graphs[name].entries():
                part = op.part.value if op.part in (Part.F, Part.W) else "I"
                seconds = profile.times[name, entry]
                totals[stage, part] = totals.get((stage, part), 0.0) + seconds
                loads[op.kind] += seconds
    forward, inputs, weights = ([totals.get((stage, part), 0.0) for stage in layout.chunks] for part in "FIW")
    transfer = profile.times.get((SEND, "F.transfer"), 0.0)
    return Costs(forward, inputs, weights, transfer, sum(loads.values()) / max(loads.values()))


class TimedSlot(NamedTuple):
    """A slot with its inputs, outputs, parts and seconds."""

    slot: Slot
    seconds: float
    needs: tuple[tuple[int, float], ...]  # the results that must have arrived, each with the seconds of its transfer
    gives: tuple[int, ...]  # the results that exist at its end
    parts: tuple[tuple[int, int], ...]  # of its actions: the number among all stages' parts, and the micro-batch


Row = list[TimedSlot]
"""The slots of a rank, in order."""


class SlotClock:
    """Runs slots. Results have numbers: F by stage and micro-batch, then I by stage and micro-batch.

    Args:
        ranks: the rank of every virtual stage.

    Attributes:
        needs: of every result, its inputs, each with the seconds of the transfer.
        timed: returns a slot with its inputs, outputs, parts and seconds.
    """

    def __init__(self, ranks: Sequence[int], costs: Costs, num_microbatches: int) -> None:
        self.ranks = tuple(ranks)
        self.costs = costs
        self.num_microbatches = num_microbatches
        self.needs = [
            tuple(self._needs(part, stage, microbatch))
            for part in "FI"
            for stage in range(len(ranks))
            for microbatch in range(num_microbatches)
        ]
        self.timed = cache(self._timed)

    def number(self, part: str, stage: int, microbatch: int) -> int:
        """The number of the result of an F or an I.

        Args:
            part: F or I.
            stage: the virtual stage.
            microbatch: of the window.
        """
        return ((part == "I") * len(self.ranks) + stage) * self.num_microbatches + microbatch

    def hop(self, stage: int, other: int) -> float:
        """The seconds of a transfer from one stage to another."""
        return self.costs.transfer if self.ranks[stage] != self.ranks[other] else 0.0

    def _needs(self, part: str, stage: int, microbatch: int) -> list[tuple[int, float]]:
        own = [(self.number("F", stage, microbatch), 0.0)] if part == "I" else []
        other = stage - 1 if part == "F" else stage + 1
        if not 0 <= other < len(self.ranks):
            return own
        return [*own, (self.number(part, other, microbatch), self.hop(other, stage))]

    def _timed(self, slot: Slot) -> TimedSlot:
        needs: list[tuple[int, float]] = []
        gives: list[int] = []
        parts: list[tuple[int, int]] = []
        for action in slot.actions:
            for part in PARTS[action.computation_type]:
                parts.append((3 * action.stage + "FIW".index(part), action.microbatch))
                number = self.number("F" if part == "F" else "I", action.stage, action.microbatch)
                if part != "W":
                    needs += self.needs[number]
                    gives.append(number)
                elif number not in gives:
                    needs.append((number, 0.0))
        return TimedSlot(slot, self.costs.slot_seconds(slot), tuple(needs), tuple(gives), tuple(parts))

    def no_results(self) -> list[float]:
        """When each result exists, in seconds: infinity, as nothing has run."""
        return [math.inf] * len(self.needs)

    def arrival(self, number: int, results: Sequence[float]) -> float:
        """When all inputs of a result have arrived; infinity if that is unknown."""
        latest = 0.0
        for need, hop in self.needs[number]:
            if results[need] + hop > latest:
                latest = results[need] + hop
        return latest

    def run(self, rows: Sequence[Row]) -> ClockRun | None:
        """Runs every slot as soon as possible; None for a deadlock."""
        results = self.no_results()
        starts: list[list[float]] = [[] for _ in rows]
        free = [0.0] * len(rows)
        left = sum(map(len, rows))
        progress = True
        while progress and left:
            progress = False
            for rank, row in enumerate(rows):
                done, now = starts[rank], free[rank]
                for place in range(len(done), len(row)):
                    _, seconds, needs, gives, _ = row[place]
                    start = now
                    for number, hop in needs:
                        arrival = results[number] + hop
                        if arrival > start:
                            start = arrival
                    if start == math.inf:
                        break
                    now = start + seconds
                    for number in gives:
                        results[number] = now
                    done.append(start)
                    left -= 1
                    progress = True
                free[rank] = now
        return None if left else ClockRun(rows, starts, free, results)


class ClockRun(NamedTuple):
    """A run of a schedule: the slots and their starts, rank by rank; the end of each rank; when each result exists."""

    rows: Sequence[Row]
    starts: list[list[float]]
    ends: list[float]
    results: list[float]

    def critical_path(self) -> list[tuple[int, int]]:
        """The critical path from the end to the start, as rank and place of its slots."""
        makers = {
            number: (rank, place)
            for rank, row in enumerate(self.rows)
            for place, timed in enumerate(row)
            for number in timed.gives
        }
        rank = max(range(len(self.ends)), key=lambda rank: self.ends[rank])
        place = len(self.rows[rank]) - 1
        path = []
        while place >= 0:
            path.append((rank, place))
            waited = self._waited_for(rank, place)
            rank, place = (rank, place - 1) if waited is None else makers[waited]
        return path

    def _waited_for(self, rank: int, place: int) -> int | None:
        """The result that a slot waited for; None if it waited for the slot before."""
        start = self.starts[rank][place - 1] + self.rows[rank][place - 1].seconds if place else 0.0
        waited = None
        for number, hop in self.rows[rank][place].needs:
            if self.results[number] + hop > start:
                start, waited = self.results[number] + hop, number
        return waited


@dataclass(frozen=True)
class Simulated:
    """A simulated schedule.

    Attributes:
        ranks: the rank of every virtual stage.
        costs: of its stages.
        starts, ends: of each slot of each rank, in seconds from the start of the window.
    """

    schedule: Schedule
    ranks: tuple[int, ...]
    costs: Costs
    starts: list[list[float]]
    ends: list[list[float]]

    @property
    def seconds(self) -> float:
        """The seconds of the whole window."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @property
    def bubbles(self) -> list[float]:
        """The idle part of the window on each rank."""
        busy = (
            sum(end - start for start, end in zip(*times, strict=True))
            for times in zip(self.starts, self.ends, strict=True)
        )
        return [(self.seconds - seconds) / self.seconds for seconds in busy]

    @property
    def bubble(self) -> float:
        """The idle part of all ranks' time."""
        return sum(self.bubbles) / len(self.bubbles)

    @property
    def fused(self) -> list[int]:
        """The number of fused slots of each rank."""
        return [sum(slot.fused for slot in slots) for slots in self.schedule]

    @property
    def live(self) -> list[int]:
        """Of each rank, the most activations, each of one stage and micro-batch, that are alive at once."""
        return [live for live, _ in self._peaks]

    @property
    def shares(self) -> list[float]:
        """The most live activations of each rank by size, in proportion to the F of a stage; 1 is a micro-batch on an
        average rank."""
        return [share for _, share in self._peaks]

    @cached_property
    def _peaks(self) -> list[tuple[int, float]]:
        return [_peaks_of(slots, self.costs, max(self.ranks) + 1) for slots in self.schedule]


def simulate_schedule(schedule: Schedule, ranks: Sequence[int], costs: Costs) -> Simulated:
    """Runs a schedule on the slot clock.

    Args:
        ranks: the rank of every virtual stage.

    Raises:
        ValueError: it can never end (`validate` gives the reason), or costs are of other stages.
    """
    if len(costs.forward) != len(ranks):
        raise ValueError(f"costs are of {len(costs.forward)} virtual stages and the placement has {len(ranks)}")
    clock = SlotClock(ranks, costs, num_microbatches_of(schedule))
    rows = [[clock.timed(slot) for slot in slots] for slots in schedule]
    run = clock.run(rows)
    if run is None:
        raise ValueError("the schedule cannot run to its end")
    ends = [
        [start + timed.seconds for start, timed in zip(starts, row, strict=True)]
        for starts, row in zip(run.starts, rows, strict=True)
    ]
    return Simulated(schedule, tuple(ranks), costs, run.starts, ends)


def _peaks_of(slots: Sequence[Slot], costs: Costs, num_ranks: int) -> tuple[int, float]:
    """The most activations that are alive at once on a rank, counted and by size."""
    size = [seconds * num_ranks / sum(costs.forward) for seconds in costs.forward]
    live, share, max_live, max_share = 0, 0.0, 0, 0.0
    for slot in slots:
        if slot.forward:
            live, share = live + 1, share + size[slot.forward.stage]
            max_live, max_share = max(max_live, live), max(max_share, share)
        if slot.backward and slot.backward.computation_type != "I":
            live, share = live - 1, share - size[slot.backward.stage]
    return max_live, max_share
