"""Simulation: when every slot of a schedule runs, how long ranks idle, and what they hold.

In:   a schedule, the rank of every virtual stage, and what the stages cost.
Out:  a `Simulated`.
Must hold: times are those of the slot clock. An activation of a stage and micro-batch lives from the start of F to the
end of B, or of W where it is apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_helix.planning.pipeline.actions import Schedule, Slot, num_microbatches_of
from hf_helix.planning.pipeline.clock import SlotClock
from hf_helix.planning.pipeline.costs import Costs


@dataclass(frozen=True)
class Simulated:
    """When each slot runs, and what each rank holds at most.

    Attributes:
        schedule: what was run.
        ranks: the rank of every virtual stage.
        starts: when each slot of each rank starts, in seconds from the start of the window.
        ends: when each slot of each rank ends.
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
        """Returns the seconds of the whole window."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @property
    def num_microbatches(self) -> int:
        """Returns the number of micro-batches of the window."""
        return len({action.microbatch for slots in self.schedule for slot in slots for action in slot.actions})

    @property
    def busy(self) -> list[float]:
        """Returns the seconds in which each rank runs something."""
        return [
            sum(end - start for start, end in zip(*times, strict=True))
            for times in zip(self.starts, self.ends, strict=True)
        ]

    @property
    def idle(self) -> list[float]:
        """Returns the seconds in which each rank waits: the bubble."""
        return [self.seconds - busy for busy in self.busy]

    @property
    def bubbles(self) -> list[float]:
        """Returns the part of the window in which each rank waits."""
        return [idle / self.seconds for idle in self.idle]

    @property
    def bubble(self) -> float:
        """Returns the part of all ranks' time that is waiting."""
        return sum(self.bubbles) / len(self.bubbles)

    @property
    def fused(self) -> list[int]:
        """Returns the number of fused slots of each rank."""
        return [sum(slot.fused for slot in slots) for slots in self.schedule]


def simulate_schedule(schedule: Schedule, ranks: Sequence[int], costs: Costs) -> Simulated:
    """Runs a schedule on the slot clock.

    Args:
        schedule: of every rank.
        ranks: the rank of every virtual stage.
        costs: of every virtual stage.

    Raises:
        ValueError: it can never end (`planning.pipeline.validate` says why), or costs are of other stages.
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
    held = [_peaks(slots, costs, max(ranks) + 1) for slots in schedule]
    return Simulated(schedule, tuple(ranks), run.starts, ends, [live for live, _ in held], [share for _, share in held])


def _peaks(slots: Sequence[Slot], costs: Costs, num_ranks: int) -> tuple[int, float]:
    """Returns the most activations that live at once on a rank, counted and by size."""
    size = [seconds * num_ranks / sum(costs.forward) for seconds in costs.forward]
    live, share, max_live, max_share = 0, 0.0, 0, 0.0
    for slot in slots:
        if slot.forward:
            live, share = live + 1, share + size[slot.forward.stage]
            max_live, max_share = max(max_live, live), max(max_share, share)
        if slot.backward and slot.backward.computation_type != "I":
            live, share = live - 1, share - size[slot.backward.stage]
    return max_live, max_share
