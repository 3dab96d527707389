"""Predictions of whole windows: the seconds of a window under a plan.

In:   a plan, a profile, and the schedule of a window.
Out:  seconds.
Must hold: those of `planning.cost.simulate`, but for the rounding of floats, where the window falls into a rhythm.
Where it does not, a further stretch of a long window takes what the last one took of those that were simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_helix.planning.cost import simulate
from hf_helix.planning.pipeline.actions import Schedule
from hf_helix.planning.plans.plan import Plan
from hf_helix.planning.profile import Profile
from hf_helix.planning.steady_state import Ordered, order_window

COPIES = (2, 6)  # of a stretch that are simulated; more where fewer do not fall into a rhythm
NEAR = 1e-4  # two times of a stretch that differ by a smaller part are equal


def predict_seconds(plan: Plan, profile: Profile, schedule: Schedule) -> float:
    """The predicted seconds of a window under a plan; of a long window the steady state is predicted once.

    Args:
        plan: the order of issue.
        profile: the times of the operators of the model's own graphs.
        schedule: of the window.
    """
    profile = plan.profile_for(profile)
    ordered = order_window(plan, schedule, profile.layout)
    for copies in COPIES:
        made = ordered.lengthened(min(copies, ordered.repeats))
        work, order = made.issued.work(profile.times)
        timeline = simulate(work, profile.slowdown if profile.pairs else None, order)
        before, last = _seconds_of_stretches(ordered, made, timeline.ends) if made.repeats else (0.0, 0.0)
        if abs(last - before) <= NEAR * last:
            break
    return timeline.seconds + made.repeats * last


def _seconds_of_stretches(ordered: Ordered, made: Ordered, ends: Sequence[float]) -> tuple[float, float]:
    """Seconds from one stretch to the next, for the last two: of the rank that is slowest."""
    found = []
    copies = ordered.repeats - made.repeats
    for order, (begin, end) in zip(made.issued.orders, ordered.stretches, strict=True):
        last = begin + copies * (end - begin)
        times = [ends[order[place]] for place in (last - end + begin, last, last + end - begin)]
        found.append((times[1] - times[0], times[2] - times[1]))
    return max(before for before, _ in found), max(last for _, last in found)
