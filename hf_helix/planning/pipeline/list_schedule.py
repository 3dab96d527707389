"""List scheduling: a schedule on the fold, made by running it: whenever a rank is free it takes what is best at hand.

In:   the number of ranks P and micro-batches M, costs, and a `Policy` that says what is best.
Out:  a `Schedule`, and the seconds it takes.
Must hold: never stuck, whatever the policy: a rank waits only for what is on its way. There is room for the second
chunk: F of the first chunk takes the last place only while an activation of the second lives, so a rank that is full
can always free a place, and the oldest micro-batch can always go on.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_helix.planning.pipeline.actions import Action, Schedule, Slot
from hf_helix.planning.pipeline.placement import FOLD, stage_ranks, stages_of_rank
from hf_helix.planning.pipeline.simulate import Costs


@dataclass(frozen=True)
class Policy:
    """What a rank prefers.

    Attributes:
        most_live: activations, each of one stage and micro-batch, that live at once on a rank; at least 2.
        pair: whether F and B that are both at hand run as one slot.
        early: whether the first backwards of the second chunk, P-1-r on rank r, run as I, alone: gradients get on fast.
        apart: of the backwards of a rank, how many of the last run as I, with W where nothing else is at hand.
        forward: which chunk's F goes first: 0 or 1, or 2 for the one that did not run last.
        backward: the same for B.
        delay: how much of a W may run on after something else is at hand; 1 fills every gap.
    """

    most_live: int
    pair: bool = True
    early: bool = False
    apart: int = 0
    forward: int = 1
    backward: int = 1
    delay: float = 1.0


def list_schedule(num_ranks: int, num_microbatches: int, costs: Costs, policy: Policy) -> tuple[Schedule, float]:
    """Run the window under a policy; what was run is the schedule."""
    state = _State(num_ranks, num_microbatches, costs, policy)
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
            free[rank] = now + costs.slot_seconds(slot)
            for wake in state.run(slot, rank, free[rank]):
                heapq.heappush(wakes, wake)
    return schedule, max(free)


class _State:
    """What has run and what is on its way. Micro-batches run in order, so counts and lists of ends say it all."""

    def __init__(self, num_ranks: int, num_microbatches: int, costs: Costs, policy: Policy) -> None:
        self.ranks = stage_ranks(FOLD, num_ranks)
        self.held = [stages_of_rank(rank, self.ranks) for rank in range(num_ranks)]
        self.num_microbatches = num_microbatches
        self.costs = costs
        self.policy = policy
        self.f_ends: list[list[float]] = [[] for _ in self.ranks]
        self.i_ends: list[list[float]] = [[] for _ in self.ranks]
        self.weights = [0 for _ in self.ranks]  # how many W have run
        self.last_chunk = {"F": [1] * num_ranks, "B": [0] * num_ranks}

    # -- what is at hand ---------------------------------------------------------------------------------------------

    def _hop(self, stage: int, other: int) -> float:
        return self.costs.transfer if self.ranks[stage] != self.ranks[other] else 0.0

    def _forward_time(self, stage: int) -> float:
        """When the next F of a stage can start; infinity if none is left, has room, or is on its way."""
        following = len(self.f_ends[stage])
        if following == self.num_microbatches or not self._room(stage):
            return math.inf
        if stage == 0:
            return 0.0
        before = self.f_ends[stage - 1]
        return before[following] + self._hop(stage - 1, stage) if following < len(before) else math.inf

    def _backward_time(self, stage: int) -> float:
        """The same for the next B or I."""
        following = len(self.i_ends[stage])
        if following == len(self.f_ends[stage]):
            return math.inf
        if stage == len(self.ranks) - 1:
            return self.f_ends[stage][following]
        after = self.i_ends[stage + 1]
        return after[following] + self._hop(stage, stage + 1) if following < len(after) else math.inf

    def _room(self, stage: int) -> bool:
        down, up = self.held[self.ranks[stage]]
        live, live_up = (len(self.f_ends[s]) - self.weights[s] for s in (down, up))
        live += live_up
        return live < self.policy.most_live - (stage == down and live_up == 0)

    def _order(self, rank: int, direction: str) -> Sequence[int]:
        """The stages of a rank, the preferred one first."""
        preferred = self.policy.forward if direction == "F" else self.policy.backward
        if preferred == 2:
            preferred = 1 - self.last_chunk[direction][rank]
        return self.held[rank][::-1] if preferred else self.held[rank]

    # -- what to run -------------------------------------------------------------------------------------------------

    def choose(self, rank: int, now: float) -> Slot | None:
        """The slot that a free rank starts now; None to wait for what is on its way."""
        forwards = {stage: self._forward_time(stage) for stage in self._order(rank, "F")}
        backwards = {stage: self._backward_time(stage) for stage in self._order(rank, "B")}
        forward = next((stage for stage, time in forwards.items() if time <= now), None)
        backward = next((stage for stage, time in backwards.items() if time <= now), None)
        if backward is not None:
            return self._backward_slot(rank, forward if self.policy.pair else None, backward)
        if forward is not None:
            return Slot(self._action(forward, "F"))
        return self._fill(rank, now, min(*forwards.values(), *backwards.values()))

    def _backward_slot(self, rank: int, forward: int | None, backward: int) -> Slot:
        done, (_, up) = len(self.i_ends[backward]), self.held[rank]
        early = self.policy.early and backward == up and done < len(self.held) - 1 - rank
        left = sum(self.num_microbatches - len(self.i_ends[stage]) for stage in self.held[rank])
        if early or (forward is None and left <= self.policy.apart):
            return Slot(backward=self._action(backward, "I"))
        direction = "W" if self.weights[backward] < done else "B"  # weight gradients add up in order
        return Slot(None if forward is None else self._action(forward, "F"), self._action(backward, direction))

    def _fill(self, rank: int, now: float, until: float) -> Slot | None:
        """The W that has waited longest, if it fits before something else is at hand."""
        waiting = [stage for stage in self.held[rank] if self.weights[stage] < len(self.i_ends[stage])]
        if not waiting:
            return None
        stage = min(waiting, key=lambda stage: self.i_ends[stage][self.weights[stage]])
        fits = now + self.costs.weight[stage] * (1 - self.policy.delay) <= until
        return Slot(backward=self._action(stage, "W")) if fits else None

    def _action(self, stage: int, direction: str) -> Action:
        done = {"F": len(self.f_ends[stage]), "W": self.weights[stage]}
        return Action(stage, direction, done.get(direction, len(self.i_ends[stage])))

    # -- what has run ------------------------------------------------------------------------------------------------

    def run(self, slot: Slot, rank: int, end: float) -> list[tuple[float, int]]:
        """Note a slot that ends then; gives when which ranks may go on."""
        wakes = [(end, rank)]
        for action in slot.actions:
            stage, direction = action.stage, action.direction
            if direction == "F":
                self.f_ends[stage].append(end)
            if direction in "BI":
                self.i_ends[stage].append(end)
            if direction in "BW":
                self.weights[stage] += 1
            if direction != "W":
                self.last_chunk["F" if direction == "F" else "B"][rank] = self.held[rank].index(stage)
            other = stage + 1 if direction == "F" else stage - 1
            if direction != "W" and 0 <= other < len(self.ranks):
                wakes.append((end + self._hop(stage, other), self.ranks[other]))
        return wakes
