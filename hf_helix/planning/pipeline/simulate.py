"""Simulation: when every slot of a schedule runs, how long ranks idle, and what they hold.

In:   a schedule, the rank of every virtual stage, and what the parts of every stage take.
Out:  a `Simulated`.
Must hold: a rank runs its slots in order, each as soon as what it needs has arrived; the same rules as the runner's. An
activation of a stage and micro-batch lives from the start of F to the end of B, or of W where it is apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_helix.planning.pipeline.actions import Action, Schedule, Slot


@dataclass(frozen=True)
class Costs:
    """What each virtual stage takes, alone.

    Attributes:
        forward: seconds of F, of each virtual stage.
        input: seconds of I, the same.
        weight: seconds of W, the same; a B takes I and W.
        transfer: seconds from the end of an action to its arrival on another rank.
        gain: a fused slot takes the sum of its two divided by this, but no less than the longer of them.
    """

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    transfer: float = 0.0
    gain: float = 1.0

    def __post_init__(self) -> None:
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
        counts: Sequence[int],
        forward: float = 1.0,
        input: float = 1.0,
        weight: float = 1.0,
        transfer: float = 0.0,
        gain: float = 1.0,
    ) -> Costs:
        """Of stages that hold so many equal layers each."""
        forwards, inputs, weights = ([count * seconds for count in counts] for seconds in (forward, input, weight))
        return cls(forwards, inputs, weights, transfer, gain)

    def seconds(self, action: Action) -> float:
        """Of an action alone."""
        if action.direction == "F":
            return self.forward[action.stage]
        inputs = self.input[action.stage] if action.direction in "BI" else 0.0
        return inputs + (self.weight[action.stage] if action.direction in "BW" else 0.0)

    def slot_seconds(self, slot: Slot) -> float:
        """Of a slot."""
        alone = [self.seconds(action) for action in slot.actions]
        return max(sum(alone) / self.gain, *alone) if slot.fused else sum(alone)


@dataclass(frozen=True)
class Simulated:
    """When each slot runs, and what each rank holds at most.

    Attributes:
        starts: seconds from the start, of each rank and slot; as `ends`.
        live: of each rank, how many activations, each of one stage and micro-batch, live at once at most.
        shares: the same by size, which goes with the F of a stage; 1 is what a micro-batch leaves on an average rank.
    """

    schedule: Schedule
    ranks: tuple[int, ...]
    starts: list[list[float]]
    ends: list[list[float]]
    live: list[int]
    shares: list[float]

    @property
    def seconds(self) -> float:
        """Of the whole window."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @property
    def num_microbatches(self) -> int:
        """Of the window."""
        return len({action.microbatch for slots in self.schedule for slot in slots for action in slot.actions})

    @property
    def busy(self) -> list[float]:
        """Of each rank, the seconds in which it runs something."""
        return [
            sum(end - start for start, end in zip(*times, strict=True))
            for times in zip(self.starts, self.ends, strict=True)
        ]

    @property
    def idle(self) -> list[float]:
        """Of each rank, the seconds in which it waits: the bubble."""
        return [self.seconds - busy for busy in self.busy]

    @property
    def bubbles(self) -> list[float]:
        """Of each rank, the part of the window in which it waits."""
        return [idle / self.seconds for idle in self.idle]

    @property
    def bubble(self) -> float:
        """The part of all ranks' time that is waiting."""
        return sum(self.bubbles) / len(self.bubbles)

    @property
    def fused(self) -> list[int]:
        """Of each rank, the number of fused slots."""
        return [sum(slot.fused for slot in slots) for slots in self.schedule]

    @property
    def without_bubble(self) -> float:
        """The seconds of the busiest rank's work: no order of the same slots is faster."""
        return max(self.busy)


def simulate_schedule(schedule: Schedule, ranks: Sequence[int], costs: Costs) -> Simulated:
    """Run a schedule on a clock.

    Raises:
        ValueError: it can never end (`planning.pipeline.validate` says why), or costs are of other stages.
    """
    if len(costs.forward) != len(ranks):
        raise ValueError(f"costs are of {len(costs.forward)} virtual stages and the placement has {len(ranks)}")
    arrivals = _Arrivals(ranks, costs.transfer)
    starts: list[list[float]] = [[] for _ in schedule]
    ends: list[list[float]] = [[] for _ in schedule]
    progress = True
    while progress:
        progress = False
        for rank, slots in enumerate(schedule):
            free = ends[rank][-1] if ends[rank] else 0.0
            for slot in slots[len(ends[rank]) :]:
                start = max(free, *(arrivals.ready(action) for action in slot.actions))
                if start == math.inf:
                    break
                free = start + costs.slot_seconds(slot)
                arrivals.done(slot, free)
                starts[rank].append(start)
                ends[rank].append(free)
                progress = True
    if [len(done) for done in ends] != [len(slots) for slots in schedule]:
        raise ValueError("the schedule cannot run to its end")
    held = [_peaks(slots, costs, max(ranks) + 1) for slots in schedule]
    return Simulated(schedule, tuple(ranks), starts, ends, [live for live, _ in held], [share for _, share in held])


class _Arrivals:
    """When what a stage passes on has ended, by (stage, micro-batch): F to the next, I to the one before."""

    def __init__(self, ranks: Sequence[int], transfer: float) -> None:
        last = len(ranks) - 1
        self.before = [transfer * (s > 0 and ranks[s - 1] != ranks[s]) for s in range(len(ranks))]
        self.after = [transfer * (s < last and ranks[s + 1] != ranks[s]) for s in range(len(ranks))]
        self.last = last
        self.forward: dict[tuple[int, int], float] = {}
        self.input: dict[tuple[int, int], float] = {}

    def ready(self, action: Action) -> float:
        """When everything that an action needs has arrived; infinity as long as that is not known."""
        stage, microbatch = action.stage, action.microbatch
        if action.direction == "F":
            return self.forward.get((stage - 1, microbatch), math.inf) + self.before[stage] if stage else 0.0
        if action.direction == "W":
            return self.input.get((stage, microbatch), math.inf)
        own = self.forward.get((stage, microbatch), math.inf)
        if stage == self.last:
            return own
        return max(own, self.input.get((stage + 1, microbatch), math.inf) + self.after[stage])

    def done(self, slot: Slot, end: float) -> None:
        """Note when a slot ends."""
        for action in slot.actions:
            if action.direction == "F":
                self.forward[action.stage, action.microbatch] = end
            elif action.direction != "W":
                self.input[action.stage, action.microbatch] = end


def _peaks(slots: Sequence[Slot], costs: Costs, num_ranks: int) -> tuple[int, float]:
    """The most activations that live at once on a rank, counted and by size."""
    size = [seconds * num_ranks / sum(costs.forward) for seconds in costs.forward]
    live, share, most_live, most_share = 0, 0.0, 0, 0.0
    for slot in slots:
        if slot.forward:
            live, share = live + 1, share + size[slot.forward.stage]
            most_live, most_share = max(most_live, live), max(most_share, share)
        if slot.backward and slot.backward.direction != "I":
            live, share = live - 1, share - size[slot.backward.stage]
    return most_live, most_share
