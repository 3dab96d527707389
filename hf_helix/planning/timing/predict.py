"""Predictions of whole windows: their seconds, and when each instruction runs, under a plan.

In:   a plan, a profile, and the schedule of a window.
Out:  seconds, a `WindowParts`, or a `Timeline`.
Must hold: seconds are those of `simulate`, but for the rounding of floats, where the window falls into a
rhythm: all ranks take as long for some stretches as for as many before them. Where it does not, a further stretch of a
long window takes what the last half of those that were simulated took on average.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from hf_helix.planning.collection import without_collection
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.timing.clock import Timeline, simulate
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.passes import Issued
from hf_helix.planning.window.program import build_programs
from hf_helix.planning.window.repetition import Ordered, order_window
from hf_helix.planning.window.window import STREAMS, work_of

COPIES = (3, 7, 15, 31)  # of a stretch that are simulated; more where fewer do not fall into a rhythm
MICROBATCHES = 48  # in all copies, unless they are the fewest
NEAR = 1e-9  # two times that differ by a smaller part are equal


@dataclass(frozen=True)
class WindowParts:
    """What a window takes.

    Attributes:
        whole: seconds of all of it.
        sums: those at its end in which gradients are summed and nothing else runs.
    """

    whole: float
    sums: float


def predict_seconds(plan: Plan, profile: Profile, schedule: Schedule) -> float:
    """The predicted seconds of a window under a plan.

    Args:
        plan, profile, schedule: as of `predict_parts`.
    """
    return predict_parts(plan, profile, schedule).whole


@without_collection
def predict_parts(plan: Plan, profile: Profile, schedule: Schedule) -> WindowParts:
    """What a window takes under a plan; of a long window the steady state is predicted once.

    Args:
        plan: the order of issue.
        profile: the times of the operators of the model's own graphs.
        schedule: of the window.
    """
    profile = plan.profile_for(profile)
    ordered = order_window(plan, schedule, profile.layout)
    if not ordered.repeats:
        return _simulated(ordered, 0, profile)[0]
    for copies in (min(copies, ordered.repeats) for copies in COPIES):
        if copies > COPIES[0] and copies * ordered.shift > MICROBATCHES:
            break
        window, stretches = _simulated(ordered, copies, profile)
        left, rhythm = ordered.repeats - copies, _rhythm(stretches)
        if not left:
            return window
        if rhythm:
            if left % rhythm:  # where in the rhythm the window ends decides how long its end takes
                window, stretches = _simulated(ordered, copies + left % rhythm, profile)
            return replace(window, whole=window.whole + left // rhythm * sum(stretches[0][-rhythm:]))
    half = len(stretches[0]) // 2
    return replace(window, whole=window.whole + left * max(sum(each[-half:]) / half for each in stretches))


def predict_timeline(plan: Plan, profile: Profile, schedule: Schedule) -> Timeline:
    """The predicted timeline of a window under a plan, its instructions rank by rank in the order of the schedule.

    Args:
        plan: the order of issue.
        profile: the times of the operators of the model's own graphs.
        schedule: of the window.
    """
    profile = plan.profile_for(profile)
    return _timeline(plan.issue(schedule, profile.layout), profile)


def _timeline(issued: Issued, profile: Profile) -> Timeline:
    work, order = issued.work(profile.times)
    return simulate(work, profile.slowdown if profile.pairs else None, order)


def parts_of(timeline: Timeline) -> WindowParts:
    """Returns what a window takes whose timeline is known."""
    ends = zip(timeline.ends, timeline.work.streams, strict=True)
    bare = max((end for end, stream in ends if STREAMS[stream] is not Kind.GRADIENTS), default=0.0)
    return WindowParts(timeline.seconds, timeline.seconds - bare)


def _simulated(ordered: Ordered, copies: int, profile: Profile) -> tuple[WindowParts, list[list[float]]]:
    """Returns what a window takes that has so many copies of its stretch, and of each rank those that it takes from
    each to the next."""
    made = ordered.lengthened(copies)
    timeline = _timeline(made.issued, profile)
    gaps = []
    for places, (begin, end) in zip(made.issued.orders, ordered.stretches, strict=False):
        times = [timeline.ends[places[begin + number * (end - begin)]] for number in range(copies + 2)]
        gaps.append([later - time for time, later in pairwise(times)])
    return parts_of(timeline), gaps


def _rhythm(stretches: list[list[float]]) -> int:
    """After how many stretches all ranks take the same again; 0 where they do not."""
    for count in range(1, len(stretches[0]) // 2 + 1):
        total = sum(stretches[0][-count:])
        pairs = [(each[-number], each[-number - count]) for each in stretches for number in range(1, count + 1)]
        pairs += [(sum(each[-count:]), total) for each in stretches]
        if all(abs(one - other) <= NEAR * total for one, other in pairs):
            return count
    return 0


def predict_plan(plan: Plan, profile: Profile, schedule: Schedule) -> tuple[list[Instruction], Timeline]:
    """The programs of a plan, rank by rank in one list, and their predicted timeline.

    Args:
        plan: the order of issue.
        profile: the times of the operators of the model's own graphs.
        schedule: of the window.
    """
    profile = plan.profile_for(profile)
    program = [made for of_rank in build_programs(schedule, profile.layout, plan) for made in of_rank]
    work = work_of(program, profile.layout, profile.times)
    return program, simulate(work, profile.slowdown if profile.pairs else None)
