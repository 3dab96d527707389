"""The budget of a tuning: a share of the time that a run has left.

In:   the seconds of an optimizer step, the number of steps left, and the share of their time that tuning may take.
Out:  the most thorough of `TIERS` within the budget, or none.
Must hold: a run of a few steps is never tuned, unless the share is 1. Estimates of costs need no measurement but the
seconds of a window; a factor of two, as they have, keeps tuning in proportion.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hf_helix.config import RULES
from hf_helix.measure.operators import IN_A_ROW
from hf_helix.measure.timing import ISSUING, ISSUING_SLOWEST
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan import search
from hf_helix.planning.window.layout import Layout, named_operators

BASELINE = "sequential"
CANDIDATES = RULES  # baselines included: the best rule depends on model and link; only the most promising are timed

# Estimates, from Llama models of 4 and 8 layers on two ranks.
INSTRUCTION_SECONDS = 7e-7  # for an instruction of a search to be ordered and simulated, on one core
DHELIX_SECONDS = 2.0  # for the paper's pairing of two layers
PAIR_OPERATORS = 10  # operators that run for a repeat of a pair: its forwards, and the shorter one several times


REPEATS = 2  # of a timed plan; plans that are not close to the fastest after the first are not repeated


@dataclass(frozen=True)
class Tier:
    """The thoroughness of a tuning."""

    name: str
    rules: tuple[str, ...]
    timed: int  # the number of plans that are timed in real windows besides the baseline, the most promising first
    search_share: float  # the length of a search, as a share of the longest


QUICK = Tier("quick", (BASELINE, "greedy", "search"), timed=1, search_share=0.1)
SHORT = Tier("short", tuple(rule for rule in CANDIDATES if rule != "dhelix"), timed=2, search_share=0.3)
FULL = Tier("full", CANDIDATES, timed=2, search_share=1.0)
TIERS = (QUICK, SHORT, FULL)


def affordable(budget: float, cost: Callable[[Tier], float], done: str = "") -> Tier | None:
    """Returns the most thorough tier within a budget of seconds, more thorough than the tier done; else None."""
    names = [tier.name for tier in TIERS]
    better = TIERS[names.index(done) + 1 :] if done in names else TIERS
    return next((tier for tier in reversed(better) if cost(tier) <= budget), None)


def tuning_cost(
    tier: Tier,
    layout: Layout,
    window_seconds: float,
    num_instructions: int,
    schedules: int = 1,
    profiled: bool = True,
    on_gpu: bool = False,
    captured: bool = False,
) -> float:
    """Returns an estimate of the seconds of a tuning.

    Args:
        window_seconds: the seconds of the timed window.
        profiled: whether operators are measured; False with a given profile.
        on_gpu: whether the device is held until the host has issued the measured operators.
        captured: whether windows are timed as CUDA graphs, each issued twice before.
    """
    compared = min(tier.timed, len(tier.rules) * schedules - 1) + 1
    windows = _num_windows(compared, schedules, captured)
    seconds = windows * window_seconds
    if profiled:
        operators = PAIR_OPERATORS * IN_A_ROW * _num_pairs(layout)
        seconds += (3 + operators / num_instructions) * window_seconds
        seconds += ISSUING_SLOWEST * operators + 2 * ISSUING * num_instructions if on_gpu else 0.0
    if "search" in tier.rules:
        seconds += search.num_annealings(layout) * search.EFFORT * tier.search_share * INSTRUCTION_SECONDS
    return seconds + (DHELIX_SECONDS if "dhelix" in tier.rules else 0.0)


def _num_windows(compared: int, schedules: int, captured: bool) -> int:
    """The windows of a measurement. Every plan is traced once. Then in every round each plan runs once, and computation
    and communication by themselves take about as long; a captured plan is issued twice before, and warmed up once."""
    return compared + REPEATS * (compared + 1 + schedules) + 3 * (compared + schedules) * captured


def _num_pairs(layout: Layout) -> int:
    """About the number of pairs of operators that a profile has."""
    operators = [op for (unit, _), op in named_operators(layout) if layout.graphs[unit].forward.repeats]
    computing = sum(op.kind is Kind.COMPUTE for op in operators)
    # Equal collectives are measured once: about one forward and one backward of each kind.
    kinds = {op.kind for op in operators} & {Kind.INTRA_NODE, Kind.INTER_NODE}
    return 2 * len(kinds) * (computing + 1)


class StepTimer:
    """A count of the steps of a run, with the seconds of a step after 2, 4, 8, ... of them.

    The first step does not count: it includes compilation and allocation.

    Args:
        uncounted: how many first steps do not count; with CUDA graphs 2, since the second is captured. The seconds are
            then new after 4, 8, ... steps.

    Attributes:
        steps_done: the number of steps before the current step.
        step_time: the mean seconds of a step since the previous reading; 0 before the first reading.
        seconds_paused: seconds within `paused`, which belong to no step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, uncounted: int = 1) -> None:
        self.steps_done = -1
        self.step_time = 0.0
        self.seconds_paused = 0.0
        self._clock = clock
        self._uncounted = uncounted
        self._next = 2 * uncounted
        self._since = (0, 0.0)

    def begin_step(self, synchronize: Callable[[], object]) -> bool:
        """Returns whether `step_time` is new, on every rank after the same steps. Called when a step begins;
        `synchronize` waits for the device before the clock is read."""
        self.steps_done += 1
        is_new = self.steps_done == self._next
        if is_new or self.steps_done == self._uncounted:
            synchronize()
            now, (steps, before) = self._clock(), self._since
            if is_new:
                self.step_time = (now - before) / (self.steps_done - steps)
                self._next *= 2
            self._since = (self.steps_done, now)
        return is_new

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time of the context out of all steps."""
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            steps, before = self._since
            self._since = (steps, before + seconds)
            self.seconds_paused += seconds

    def budget(self, steps_left: int, share: float) -> float:
        """Returns the seconds left for tuning: a share of the time of the steps left, less the pauses so far."""
        return share * steps_left * self.step_time - self.seconds_paused
