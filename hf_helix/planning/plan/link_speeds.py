"""Predictions for slower and faster links, from one measured profile.

In:   a profile with the bytes of its collectives, and the speeds of links.
Out:  profiles of the same operators on these links, and the predicted times of plans for each.
Must hold: a collective takes its time without a link, or latency + bytes / rate, whichever is more, as the emulation
does (`operators.communication.emulated_link`). Collectives and computations slow each other down by the real work of
the machine, which no link changes: by the same seconds, however long the collective takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hf_helix.config import LinkSpeed, parse_link
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.list_scheduler import PriorityPlan
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.registry import make_plan
from hf_helix.planning.schedule.actions import Schedule, num_microbatches_of, without_microbatches
from hf_helix.planning.timing.predict import predict
from hf_helix.planning.timing.profile import EMULATED_LINK, Pair, Profile, seconds_per_step
from hf_helix.planning.window.layout import Name
from hf_helix.planning.window.window import Window

NO_LINK = LinkSpeed(None)
"""No emulated link."""


@dataclass(frozen=True)
class Predicted:
    """Predicted times of a window on a link."""

    speed: LinkSpeed  # of the link; `NO_LINK` for none
    computation: float  # seconds of computation alone
    communication: float  # seconds of communication alone
    plans: Mapping[str, float]  # by rule, seconds of a window under the plan that the rule makes for this link


def link_of(profile: Profile) -> LinkSpeed:
    """The emulated link that a profile was measured on; `NO_LINK` for none."""
    text = profile.about.get(EMULATED_LINK)
    return parse_link(text) if text else NO_LINK


def on_link(profile: Profile, speed: LinkSpeed) -> Profile:
    """The profile for another link.

    Raises:
        ValueError: the profile lacks the bytes of its collectives.
    """
    moving = [name for name, seconds in profile.times.items() if profile.kind(name).communicates and seconds]
    if not profile.bytes and moving:
        raise ValueError(
            "the profile does not say how many bytes its collectives move, so there is no telling what they would take "
            "on another link; measure anew with `hf-helix profile`"
        )
    times = dict(profile.times)
    for name, count in profile.bytes.items():
        times[name] = max(profile.bare.get(name, times[name]), speed.seconds(count))
    pairs = {names: _pair(profile, times, names) for names in profile.pairs}
    about = {**profile.about, EMULATED_LINK: speed.text if speed.rate else ""}
    return replace(profile, about={key: value for key, value in about.items() if value}, times=times, pairs=pairs)


def _pair(profile: Profile, times: Mapping[Name, float], names: tuple[Name, Name]) -> Pair:
    """The times of two concurrent operators on another link."""
    a, b = names
    stretched = 1.0
    for name in names:
        stretched *= times[name] / profile.times[name]
    slow = [1 + (profile.slowdown(*pair) - 1) / stretched for pair in ((a, b), (b, a))]
    if all(profile.kind(name).communicates for name in names):  # they share the link, whatever its speed
        slow = [profile.slowdown(a, b), profile.slowdown(b, a)]
    return Pair.of(times[a], times[b], *slow)


def predict_speeds(
    profile: Profile, schedule: Schedule, speeds: Sequence[LinkSpeed], plans: Mapping[str, Plan]
) -> list[Predicted]:
    """Returns the predicted times of a window on each link, under plans of these rules.

    Rules without a search make a new plan for each link. For a searched plan, the better of it and of a new `greedy`
    plan counts: a new search could only find a better one.
    """
    return [_predict(on_link(profile, speed), schedule, plans) for speed in speeds]


def _predict(profile: Profile, schedule: Schedule, plans: Mapping[str, Plan]) -> Predicted:
    """The predicted times of a window on the link of a profile."""
    seconds = {}
    for rule, plan in plans.items():
        searched = isinstance(plan, PriorityPlan)
        anew = make_plan("greedy" if searched else rule, profile, model=plan.model, mesh=plan.mesh)
        candidates = [anew, plan] if searched else [anew]
        seconds[rule] = min(predict(each, profile, schedule).seconds for each in candidates)
    layout = profile.layout
    loads = Window(without_microbatches(schedule, 1), layout).arrays(profile.times).loads()
    computing, count = loads.pop(Kind.COMPUTE), num_microbatches_of(schedule)
    sums = max(seconds_per_step(profile, rank, count) for rank in range(layout.num_ranks))
    return Predicted(link_of(profile), count * computing, count * sum(loads.values()) + sums, seconds)
