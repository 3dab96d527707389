"""A window that is ordered and predicted whole, operator by operator.

In:   a plan, and a profile that knows the sums of gradients and the gathers of weights of a window.
Out:  a `Whole`.
Must hold: the programs are those that the ranks would run, and their times those of the cost function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.timing.clock import Timeline
from hf_helix.planning.timing.predict import predict
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.instructions import Instruction


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
    window = predict(plan, profile, schedule, timeline=drawn)
    found = (window.instructions, window.drawn) if window.drawn else None
    if waits is None:
        without = replace(profile, layout=replace(profile.layout, gathers=()))
        waits = window.seconds - predict(plan, without, schedule).seconds if profile.layout.gathers else 0.0
    return Whole(window.seconds - window.reduction_seconds, window.reduction_seconds, waits, found)
