"""List scheduling: a schedule on the fold, made by running it: a rank that is free takes what its policy prefers.

In:   a slot clock of the fold, and a `Policy`.
Out:  a `Schedule`, and the seconds it takes.
Must hold: it is never stuck, whatever the policy: a rank waits only for results that are on their way. The second chunk
always has room: F of the first chunk takes the last place only while an activation of the second lives, so a rank that
is full can always free a place, and the oldest micro-batch can always go on.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_helix.planning.pipeline.actions import PARTS, Action, Schedule, Slot
from hf_helix.planning.pipeline.clock import SlotClock
from hf_helix.planning.pipeline.placement import stages_of_rank


@dataclass(frozen=True)
class Policy:
    """What a rank prefers.

    Attributes:
        max_live: activations, each of one stage and micro-batch, that may live at once on a rank; at least 2.
        pair: whether F and B that can both start run as one slot.
        early: whether the first backwards of the second chunk, P-1-r on rank r, run as I alone, so that gradients
            travel on sooner.
        apart: how many of a rank's last backwards run as I, with W where nothing else can start.
        forward: which chunk's F goes first: 0 or 1, or 2 for the chunk that did not run last.
        backward: which chunk's B goes first, in the same numbers.
        delay: which part of a W may run on after something else could start; 1 fills every gap.
    """

    max_live: int
    pair: bool = True
    early: bool = False
    apart: int = 0
    forward: int = 1
    backward: int = 1
    delay: float = 1.0


def list_schedule(clock: SlotClock, policy: Policy) -> tuple[Schedule, float]:
    """Returns the schedule of a window that runs under a policy, and the seconds it takes.

    Args:
        clock: of the fold, with the costs of its stages.
        policy: what every rank prefers.
    """
    num_ranks = max(clock.ranks) + 1
    state = _State(clock, policy)
    schedule: Schedule = [[] for _ in range(num_ranks)]
    free = [0.0] * num_ranks
    wakes = [(0.0, rank) for rank in range(num_ranks)]
    while wakes:
        now, rank = heapq.heappop(wakes)
        if now < free[rank]:
            continue
        slot = state.choose(rank, now)
        if slot is not None:
            schedule[rank].append(slot)
            free[rank] = now + clock.timed(slot).seconds
            for wake in state.run(slot, rank, free[rank]):
                heapq.heappush(wakes, wake)
    return schedule, max(free)


class _State:
    """What has run, and when its results exist. Every stage takes micro-batches in order, so counts say the rest."""

    def __init__(self, clock: SlotClock, policy: Policy) -> None:
        self.clock = clock
        self.policy = policy
        self.num_microbatches = clock.num_microbatches
        self.chunks = [stages_of_rank(rank, clock.ranks) for rank in range(max(clock.ranks) + 1)]
        self.results = clock.no_results()
        self.done = {part: [0] * len(clock.ranks) for part in "FIW"}  # of each stage, how many have run
        self.last_chunk = {"F": [1] * len(self.chunks), "B": [0] * len(self.chunks)}

    # -- what can start ----------------------------------------------------------------------------------------------

    def _forward_time(self, stage: int) -> float:
        """Returns when the next F of a stage can start; infinity if none is left, has room, or is on its way."""
        following = self.done["F"][stage]
        if following == self.num_microbatches or not self._has_room(stage):
            return math.inf
        return self.clock.arrival(self.clock.number("F", stage, following), self.results)

    def _backward_time(self, stage: int) -> float:
        """Returns when the next B or I of a stage can start; infinity if none is left or on its way."""
        following = self.done["I"][stage]
        if following == self.num_microbatches:
            return math.inf
        return self.clock.arrival(self.clock.number("I", stage, following), self.results)

    def _has_room(self, stage: int) -> bool:
        down, up = self.chunks[self.clock.ranks[stage]]
        ran, freed = self.done["F"], self.done["W"]
        live_up = ran[up] - freed[up]
        live = ran[down] - freed[down] + live_up
        return live < self.policy.max_live - (stage == down and live_up == 0)

    def _preferred(self, rank: int, part: str) -> Sequence[int]:
        """Returns the stages of a rank, the preferred one first."""
        preferred = self.policy.forward if part == "F" else self.policy.backward
        if preferred == 2:
            preferred = 1 - self.last_chunk[part][rank]
        return self.chunks[rank][::-1] if preferred else self.chunks[rank]

    # -- what to run -------------------------------------------------------------------------------------------------

    def choose(self, rank: int, now: float) -> Slot | None:
        """Returns the slot that a free rank starts now; None to wait for a result that is on its way."""
        backward = next((stage for stage in self._preferred(rank, "B") if self._backward_time(stage) <= now), None)
        forward = None
        if backward is None or self.policy.pair:
            forward = next((stage for stage in self._preferred(rank, "F") if self._forward_time(stage) <= now), None)
        if backward is not None:
            return self._backward_slot(rank, forward, backward)
        if forward is not None:
            return Slot(self._next(forward, "F"))
        return self._fill(rank, now)

    def _backward_slot(self, rank: int, forward: int | None, backward: int) -> Slot:
        done, (_, up) = self.done["I"][backward], self.chunks[rank]
        early = self.policy.early and backward == up and done < len(self.chunks) - 1 - rank
        left = sum(self.num_microbatches - self.done["I"][stage] for stage in self.chunks[rank])
        if early or (forward is None and left <= self.policy.apart):
            return Slot(backward=self._next(backward, "I"))
        kind = "W" if self.done["W"][backward] < done else "B"  # weight gradients add up in order
        return Slot(None if forward is None else self._next(forward, "F"), self._next(backward, kind))

    def _fill(self, rank: int, now: float) -> Slot | None:
        """Returns the W that has waited longest, if it fits before something else can start."""
        waiting = [stage for stage in self.chunks[rank] if self.done["W"][stage] < self.done["I"][stage]]
        if not waiting:
            return None
        stage = min(waiting, key=lambda stage: self.results[self.clock.number("I", stage, self.done["W"][stage])])
        until = min(time(each) for time in (self._forward_time, self._backward_time) for each in self.chunks[rank])
        fits = now + self.clock.costs.weight[stage] * (1 - self.policy.delay) <= until
        return Slot(backward=self._next(stage, "W")) if fits else None

    def _next(self, stage: int, computation_type: str) -> Action:
        part = "I" if computation_type == "B" else computation_type
        return Action(stage, computation_type, self.done[part][stage])

    # -- what has run ------------------------------------------------------------------------------------------------

    def run(self, slot: Slot, rank: int, end: float) -> list[tuple[float, int]]:
        """Counts a slot; returns when which ranks may go on.

        Args:
            slot: that runs.
            rank: that runs it.
            end: when it ends.
        """
        wakes = [(end, rank)]
        for action in slot.actions:
            stage = action.stage
            for part in PARTS[action.computation_type]:
                self.done[part][stage] += 1
                if part != "W":
                    self.results[self.clock.number(part, stage, action.microbatch)] = end
                    self.last_chunk["F" if part == "F" else "B"][rank] = self.chunks[rank].index(stage)
                    other = stage + 1 if part == "F" else stage - 1
                    if 0 <= other < len(self.clock.ranks):
                        wakes.append((end + self.clock.hop(stage, other), self.clock.ranks[other]))
        return wakes
