"""Holding weight gradients back, so that sums of gradients end soon after the last computation of a window.

In:   priorities, a profile whose layout has sums of gradients, and the schedule of a window.
Out:  the priorities, with how many units hold their weight gradients back in the last backward.
Must hold: no more activations are alive than without it, or than the memory limit allows; by the cost function the
window is never longer; where no gradients are summed, nothing changes.

What can be gained. A gradient is complete with the weight gradient (W) of the last micro-batch, so all sums, of S
seconds together, fall into the last backward, of B seconds, and behind it. They and the computations are a flow shop of
two machines: bucket k is computed for a_k seconds, then summed for b_k, and the window ends with the last sum.

1.  Where S is well below B, the last bucket to be complete is exposed, and whatever the link had not got to before. The
    bucket that comes last by itself is that of the embedding, often the largest of all, because the chain of input
    gradients ends there. By Johnson's rule (1954), jobs with a_k < b_k go first, those with the shortest a_k before
    the others: the embedding's gradient costs next to no computation. So the chain should end early. What can wait are
    the W of the first layers: held back behind the chain, they run beside the sum of the embedding, and beside that
    of the layers before them. All W held back would be too many: nothing would be summed before the chain ends. How
    many are best depends on all times and on what the link carries besides, so it is found by trying with the cost
    function. What is exposed then is the last bucket, and buckets get smaller towards the end (see
    `hf_helix.runtime.gradients.buckets`).
2.  Where S is above B, at least S less the computation behind the first complete gradients is exposed under every plan.
    Then W are computed as soon as they can be, which is holding back none. Two ways look as if they could do more:

    - Summing what the earlier micro-batches contributed early. It leaves as much to do: the last micro-batch adds to
      every element of a gradient, so its share is as many bytes as the whole. It would add bytes, hide none, and change
      the bits of the sums.
    - Running the last two backwards beside each other, layer by layer, so that 2 B hide S. Forward of the last
      micro-batch would run with all activations of the one before alive: twice the activations of a stage, where
      plans promise one layer more. A schedule that has the memory may say so; plans do not take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_helix.planning.cost import simulate
from hf_helix.planning.gradient_sums import add_sums, order_with_sums
from hf_helix.planning.pipeline.actions import Schedule, num_microbatches_of, without_microbatches
from hf_helix.planning.plans.list_scheduler import SLACK, ListScheduler, Priorities
from hf_helix.planning.prefetch import prefetched
from hf_helix.planning.profile import Profile

MICROBATCHES = 2
"""Micro-batches, for each rank of the pipeline, of the window on which numbers of units are compared."""

PARTS = 8
"""Numbers of units that are tried at first: so many parts of all units, then those between the best ones."""

GAIN = 1e-4
"""A number of units is taken if it makes the window shorter by more than this part."""


def hold_weights(priorities: Priorities, profile: Profile, schedule: Schedule) -> Priorities:
    """Returns the priorities with the best number of units that hold weight gradients back.

    Args:
        priorities: from which windows are ordered.
        profile: the times of the operators, sums included.
        schedule: of the window.
    """
    layout = profile.layout
    if not layout.sums:
        return priorities
    trial = _Trial(priorities, profile, schedule)
    count = max(len([u for u in layout.units_of(rank) if not layout.transfers(u)]) for rank in range(layout.num_ranks))
    seconds = {held: trial.seconds(held) for held in _spread(0, count)}
    best = min(seconds, key=lambda held: seconds[held])
    near = -(-count // PARTS)
    seconds |= {held: trial.seconds(held) for held in _spread(max(0, best - near), min(count, best + near))}
    best = min(seconds, key=lambda held: seconds[held])
    gains = seconds[best] < (1 - GAIN) * trial.seconds(None)
    return replace(priorities, held_units=best if gains else None)


def _spread(first: int, last: int) -> list[int]:
    return sorted({first + round((last - first) * part / PARTS) for part in range(PARTS + 1)})


class _Trial:
    """A window as short as shows how its last backward ends."""

    def __init__(self, priorities: Priorities, profile: Profile, schedule: Schedule) -> None:
        layout = profile.layout
        few = min(num_microbatches_of(schedule), MICROBATCHES * layout.num_ranks)
        short = without_microbatches(schedule, few)
        self._priority = priorities.priority
        self._scheduler = ListScheduler(short, layout, priorities.times, priorities.extra_live_layers)
        work = self._scheduler.window.work(profile.times)
        self._first = len(work)
        self._work = add_sums(work, self._scheduler.window, profile.times)
        self._slowdown = profile.slowdown if profile.pairs else None
        plain = self._scheduler.peaks(self._scheduler.order(self._priority))
        self._limits = [max(pair) + SLACK for pair in zip(plain, self._scheduler.limits, strict=True)]

    def seconds(self, held_units: int | None) -> float:
        """Returns the seconds of the window; more than any window takes where too many activations would be alive."""
        order = self._scheduler.order(self._priority, held_units=held_units)
        if self._exceeds(order):
            return float("inf")
        order = order_with_sums(self._scheduler.window, prefetched(self._scheduler.window, order), self._first)
        return simulate(self._work, self._slowdown, order).seconds

    def _exceeds(self, order: Sequence[int]) -> bool:
        return any(peak > limit for peak, limit in zip(self._scheduler.peaks(order), self._limits, strict=True))
