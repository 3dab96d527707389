"""Predictions: the seconds of a window under a plan, and the times of its instructions.

In:   a plan, a profile, and the schedule of a window.
Out:  a `Prediction`.
Must hold: seconds equal `simulate`, but for a millionth, if the window becomes periodic: all ranks take as long for
some repetitions as for the same number before. Otherwise a further repetition of a long window takes the mean of the
last half of the simulated repetitions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

from hf_helix.planning.collection import without_collection
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.program import free_values
from hf_helix.planning.plan.repetition import RepeatedWindow, order_window
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.timing.operator_clock import Timeline, simulate
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.passes import OrderedWindow

COPIES = (1, 3, 7, 15, 31)  # repetitions to simulate; more while the times are not periodic
AT_FIRST = 3  # of these on several ranks: one sufficed in 2 of 25 windows
MICROBATCHES = 48  # in all repetitions, unless there are only `COPIES[0]`
NEAR = 1e-6  # times that differ by a smaller part are equal


@dataclass(frozen=True)
class Prediction:
    """The predicted times of a window."""

    seconds: float  # of the full window
    reduction_seconds: float  # at its end, with gradient reductions and copies to the host only
    copy_seconds: float = 0.0  # at its end, with copies to the host only
    further_seconds: float = 0.0  # of a further micro-batch, if the window repeats itself and was not simulated whole
    drawn: Timeline | None = field(default=None, repr=False)  # the timeline, if requested
    # of the timeline, in the order of issue, rank by rank
    instructions: Sequence[Instruction] = field(default=(), repr=False)

    @property
    def timeline(self) -> Timeline:
        """The requested timeline."""
        assert self.drawn is not None, "the timeline is kept by predict(..., timeline=True)"
        return self.drawn


@without_collection
def predict(plan: Plan, profile: Profile, schedule: Schedule, timeline: bool = False) -> Prediction:
    """Returns the predicted times of a window; of a long window only some repetitions are simulated.

    Args:
        profile: the times of the operators.
        timeline: whether to simulate the whole window and to keep its timeline and instructions.
    """
    if timeline:
        ordered = plan.issue(schedule, profile.layout)
        drawn = timeline_of(ordered, profile)
        programs = (free_values(ordered.program(rank)) for rank in range(len(ordered.orders)))
        return replace(_prediction(drawn), drawn=drawn, instructions=list(chain.from_iterable(programs)))
    window = order_window(plan, schedule, profile.layout)
    if not window.repeats:
        return _simulated(window, 0, profile)[0]
    first = AT_FIRST if len(schedule) > 1 and AT_FIRST * window.shift <= MICROBATCHES else COPIES[0]
    for copies in (min(copies, window.repeats) for copies in COPIES if copies >= first):
        if copies > first and copies * window.shift > MICROBATCHES:
            break
        made, gaps = _simulated(window, copies, profile)
        left, period = window.repeats - copies, _period(gaps)
        if not left:
            return _extended(made, 0, sum(gaps[0][-period:]) / period, window.shift) if period else made
        if period:
            if left % period:  # the end of the window depends on the phase of the period
                made, gaps = _simulated(window, copies + left % period, profile)
            further = sum(gaps[0][-period:]) / period
            return _extended(made, left // period * period, further, window.shift)
    half = len(gaps[0]) // 2
    return _extended(made, left, max(sum(each[-half:]) / half for each in gaps), window.shift)


def timeline_of(ordered: OrderedWindow, profile: Profile) -> Timeline:
    """Returns the timeline of a window whose order is known, operator by operator."""
    arrays, order = ordered.arrays(profile.times)
    return simulate(arrays.permuted(order), profile.contention)


def _extended(made: Prediction, left: int, seconds: float, shift: int) -> Prediction:
    """The prediction with further repetitions of so many seconds, of `shift` micro-batches each."""
    return replace(made, seconds=made.seconds + left * seconds, further_seconds=seconds / shift)


def _simulated(window: RepeatedWindow, copies: int, profile: Profile) -> tuple[Prediction, list[list[float]]]:
    """The prediction with `copies` repetitions, and the seconds between repetitions on each rank."""
    made = window.lengthened(copies)
    arrays, order = made.ordered.arrays(profile.times)
    timeline = simulate(arrays, profile.contention, order)
    gaps = []
    for places, (begin, end) in zip(made.ordered.orders, window.stretches, strict=False):
        times = [timeline.ends[places[begin + number * (end - begin)]] for number in range(copies + 2)]
        gaps.append([later - time for time, later in pairwise(times)])
    return _prediction(timeline), gaps


def _prediction(timeline: Timeline) -> Prediction:
    seconds = timeline.seconds
    reducing = seconds - timeline.seconds_without(Kind.GRADIENTS, Kind.DOWN)
    return Prediction(seconds, reducing, seconds - timeline.seconds_without(Kind.DOWN))


def _period(gaps: list[list[float]]) -> int:
    """Returns the number of repetitions after which the times of all ranks recur; 0 for no recurrence."""
    for count in range(1, len(gaps[0]) // 2 + 1):
        total = sum(gaps[0][-count:])
        pairs = [(each[-number], each[-number - count]) for each in gaps for number in range(1, count + 1)]
        pairs += [(sum(each[-count:]), total) for each in gaps]
        if all(abs(one - other) <= NEAR * total for one, other in pairs):
            return count
    return 0
