"""How much measuring and searching a run is worth.

In:   how long a step takes, how many steps are left, and the share of that time that tuning may take.
Out:  the most thorough of the `TIERS` that fits, or none.
Must hold: a run of a few steps is never tuned, unless the share is 1. The estimates need no measurement but the time of
a window; they are rough (a factor of two), which is good enough to keep tuning in proportion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hf_helix.config import RULES
from hf_helix.measure.operators import TRAIN
from hf_helix.measure.timing import ISSUING, ISSUING_SLOWEST
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan import search
from hf_helix.planning.window.layout import Layout, named_operators

BASELINE = "sequential"
CANDIDATES = RULES  # baselines, too: which rule wins depends on model and link, and only the most promising are timed

# What the estimates go by; from Llama models of 4 and 8 layers on two ranks.
INSTRUCTION_SECONDS = 2e-6  # for an instruction of a search to be ordered and simulated, on one core
DHELIX_SECONDS = 5.0  # for the paper's pairing of two layers
PAIR_OPERATORS = 10  # operators that run for one repeat of a pair: its forwards, and the shorter one several times


@dataclass(frozen=True)
class Effort:
    """How thorough a tuning is.

    Attributes:
        name: what the cache knows it by.
        rules: the rules whose plans are made.
        timed: how many of these plans are timed in real windows besides the baseline, the most promising first.
        repeats: how often each is timed.
        searching: the length of a search, as a share of the longest.
    """

    name: str
    rules: tuple[str, ...]
    timed: int
    repeats: int
    searching: float


QUICK = Effort("quick", (BASELINE, "greedy", "search"), timed=1, repeats=1, searching=0.1)
SHORT = Effort("short", tuple(rule for rule in CANDIDATES if rule != "dhelix"), timed=2, repeats=1, searching=0.3)
FULL = Effort("full", CANDIDATES, timed=3, repeats=2, searching=1.0)
TIERS = (QUICK, SHORT, FULL)


def tuning_budget(steps_left: int, seconds_per_step: float, share: float) -> float:
    """Returns the seconds that tuning may take.

    Args:
        steps_left: how many optimizer steps the run has left.
        seconds_per_step: how long each takes.
        share: the share of that time that tuning may take, from 0 to 1.
    """
    return share * steps_left * seconds_per_step


def affordable(budget: float, cost: Callable[[Effort], float], done: str = "") -> Effort | None:
    """Returns the most thorough effort that costs no more than a budget; None if no better one than before does.

    Args:
        budget: the seconds that tuning may take.
        cost: returns an estimate of the seconds that an effort takes.
        done: the name of the effort that was made already; empty if none was.
    """
    names = [effort.name for effort in TIERS]
    better = TIERS[names.index(done) + 1 :] if done in names else TIERS
    return next((effort for effort in reversed(better) if cost(effort) <= budget), None)


def tuning_cost(
    effort: Effort,
    layout: Layout,
    window_seconds: float,
    num_instructions: int,
    schedules: int = 1,
    profiled: bool = True,
    on_gpu: bool = False,
) -> float:
    """Returns an estimate of the seconds that tuning takes.

    Args:
        effort: how thorough the tuning is.
        layout: the units of the model on the ranks of the pipeline.
        window_seconds: the seconds that the timed window takes.
        num_instructions: how many instructions a rank issues for it.
        schedules: how many schedules there are to choose from.
        profiled: whether operators are measured, which they are not if a profile is given.
        on_gpu: whether the device is held until the host has issued what is measured.
    """
    compared = min(effort.timed, len(effort.rules) * schedules - 1) + 1
    # In every round each plan runs once, and computation alone and communication alone take about as long. Then every
    # plan is traced once, and candidates that are close are timed again.
    windows = (effort.repeats + 1) * (compared + 1 + schedules) + compared + (2 * effort.repeats + 1) * compared
    seconds = windows * window_seconds
    if profiled:
        operators = PAIR_OPERATORS * TRAIN * num_pairs(layout)
        seconds += (4 + operators / num_instructions) * window_seconds
        seconds += ISSUING_SLOWEST * operators + 2 * ISSUING * num_instructions if on_gpu else 0.0
    if "search" in effort.rules:
        annealings = search.num_annealings(layout)
        seconds += annealings * search.EFFORT * effort.searching * INSTRUCTION_SECONDS
    return seconds + (DHELIX_SECONDS if "dhelix" in effort.rules else 0.0)


def num_pairs(layout: Layout) -> int:
    """Returns about how many pairs of operators of the layers the profiler measures."""
    operators = [op for (unit, _), op in named_operators(layout) if layout.graphs[unit].forward.repeats]
    computing = sum(op.kind is Kind.COMPUTE for op in operators)
    # Collectives that move the same are measured once: about one forward and one backward of each kind.
    kinds = {op.kind for op in operators} & {Kind.INTRA_NODE, Kind.INTER_NODE}
    return 2 * len(kinds) * (computing + 1)


class Pace:
    """Counts the steps of a run, and says how long one takes after 2, 4, 8, ... of them.

    The time of the first step does not count: it makes what is made on first use.

    Args:
        clock: returns seconds.

    Attributes:
        steps_done: how many steps were done before the one that has begun last.
        seconds_per_step: the mean over the steps since the last time that it was computed; 0 as long as it is unknown.
        seconds_paused: seconds that were spent in `paused`, which are part of no step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps_done = -1
        self.seconds_per_step = 0.0
        self.seconds_paused = 0.0
        self._clock = clock
        self._next = 2
        self._since = (0, 0.0)

    def begin_step(self, synchronize: Callable[[], object]) -> bool:
        """Returns whether `seconds_per_step` is new, on every rank after the same steps. Call it when a step begins.

        Args:
            synchronize: waits for the device; called before the clock is read.
        """
        self.steps_done += 1
        is_new = self.steps_done == self._next
        if is_new or self.steps_done == 1:
            synchronize()
            now, (steps, before) = self._clock(), self._since
            if is_new:
                self.seconds_per_step = (now - before) / (self.steps_done - steps)
                self._next *= 2
            self._since = (self.steps_done, now)
        return is_new

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does something else between two steps, which does not count as part of any."""
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            steps, before = self._since
            self._since = (steps, before + seconds)
            self.seconds_paused += seconds
