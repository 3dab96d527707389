"""A window that is ordered and predicted whole, operator by operator.

In:   a plan, and a profile that knows the sums of gradients and the gathers of weights of a window.
Out:  a `Whole`.
Must hold: the programs are those that the ranks would run, and their times those of the cost function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_helix.planning.cost import STREAMS, Timeline
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.instructions import Instruction
from hf_helix.planning.layout import Layout
from hf_helix.planning.pipeline.actions import Schedule
from hf_helix.planning.plans.plan import Plan
from hf_helix.planning.plans.registry import predict_plan
from hf_helix.planning.predict import predict_seconds
from hf_helix.planning.profile import Profile


@dataclass(frozen=True)
class Whole:
    """What a window takes.

    Attributes:
        seconds: but for sums of gradients behind it.
        sums: seconds of these.
        waits: those of `seconds` that gathers of weights add which happen once in a window.
        drawn: the programs and the timeline, if all of it was simulated.
    """

    seconds: float
    sums: float
    waits: float
    drawn: tuple[Sequence[Instruction], Timeline] | None


def predict_whole(plan: Plan, profile: Profile, schedule: Schedule, drawn: bool, waits: float | None = None) -> Whole:
    """Returns what a window takes.

    Args:
        plan: the order of issue.
        profile: the times of the operators.
        schedule: of the window.
        drawn: whether all of it is simulated, so that it can be drawn; else a long one by its steady state.
        waits: as of `Whole`, where they are known; None to predict the window without gathers, too.
    """
    found = predict_plan(plan, profile, schedule) if drawn else None
    seconds = found[1].seconds if found else predict_seconds(plan, profile, schedule)
    bare, layout = seconds, profile.layout
    if layout.sums:
        bare = _without_sums(found[1]) if found else _seconds_of(plan, profile, replace(layout, sums=()), schedule)
    if waits is None:
        waits = seconds - _seconds_of(plan, profile, replace(layout, gathers=()), schedule) if layout.gathers else 0.0
    return Whole(bare, seconds - bare, waits, found)


def _without_sums(timeline: Timeline) -> float:
    """Returns when the last of a window ends but sums of gradients; behind gathers of weights there is computation."""
    streams = timeline.work.streams
    return max(end for end, stream in zip(timeline.ends, streams, strict=True) if STREAMS[stream] is not Kind.GRADIENTS)


def _seconds_of(plan: Plan, profile: Profile, layout: Layout, schedule: Schedule) -> float:
    """Returns the seconds of a window of another layout, which the profile covers."""
    return predict_seconds(plan, replace(profile, layout=layout), schedule)
