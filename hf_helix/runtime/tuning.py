"""Tuning: measures this machine, makes plans from the measurement, and keeps the one that is fastest in real steps.

In:   a runner, a window of micro-batches, what makes plans, and the names of the rules to choose from.
Out:  the runner with the chosen plan, and what was measured.
Must hold: `sequential` is always among the candidates of `auto`, so overlap is never slower than none beyond noise;
every rank chooses the same; training is left as it was found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_helix.planning.plan import Plan, Times
from hf_helix.runtime.agreement import agree_on_text
from hf_helix.runtime.measure import Overlap, measure_overlap
from hf_helix.runtime.profiler import measure_times
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.strand import MicroBatch

BASELINE = "sequential"
CANDIDATES = (BASELINE, "round_robin", "greedy", "search")

PlanMaker = Callable[[str, Times | None], Plan]


@dataclass(frozen=True)
class Tuning:
    """What was measured: by rule, a window under each candidate's plan; and the rule that was kept."""

    kept: str
    overlaps: Mapping[str, Overlap]


def tune(
    runner: Runner,
    window: Sequence[MicroBatch],
    make: PlanMaker,
    rules: Sequence[str] = CANDIDATES,
    repeats: int = 2,
) -> Tuning:
    """Give the runner the fastest of the rules' plans. Collective; call it when there are no gradients."""
    runner.use(make(BASELINE, None))
    times = measure_times(runner, window)
    plans = {rule: make(rule, times) for rule in rules}
    agree_on_text("\n".join(plan.to_json() for plan in plans.values()), "plans")
    runners = {rule: runner.with_plan(plan) for rule, plan in plans.items()}
    overlaps = measure_overlap(runners, window, repeats)
    kept = min(overlaps, key=lambda rule: overlaps[rule].step)
    runner.use(plans[kept])
    return Tuning(kept, overlaps)
