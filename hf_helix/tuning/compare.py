"""Compares plans on the window that a run trains: what the plan in use gains over others.

In:   a runner, the window, the names of rules, and the times of the operators if they are known.
Out:  a `Comparison`, the same on every rank.
Must hold: all plans are timed in alternation in one run and medians are taken (`measure.overlap`); on an
emulated link they are timed without it, too; training is left as it was found.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hf_helix.measure.overlap import Overlap, measure_overlap, time_steps
from hf_helix.measure.profiler import measure_profile
from hf_helix.measure.progress import Progress
from hf_helix.operators.communication.emulated_link import bare
from hf_helix.planning.pipeline.actions import Schedule
from hf_helix.planning.plans.plan import Plan
from hf_helix.planning.profile import Profile
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.tuning.candidates import baseline_runner, plan_runners
from hf_helix.tuning.effort import BASELINE

PAPER = "dhelix"


@dataclass(frozen=True)
class Comparison:
    """What was measured of several plans on one window.

    Attributes:
        kept: the rule of the plan in use.
        overlaps: by rule, the measurement of a window under its plan.
        plans: the plans by rule.
        profile: the operator times that the plans were made with.
        schedule: the schedule of the window.
        bare: by rule, the seconds of a window without the emulated link; empty where there is none.
    """

    kept: str
    overlaps: Mapping[str, Overlap]
    plans: Mapping[str, Plan]
    profile: Profile
    schedule: Schedule
    bare: Mapping[str, float] = field(default_factory=dict)

    def gain(self, rule: str = BASELINE) -> float:
        """Returns how many times as fast the plan in use is as that of another rule."""
        return self.overlaps[rule].step / self.overlaps[self.kept].step


def compare(
    runner: Runner,
    window: Sequence[MicroBatch],
    rules: Sequence[str] = (BASELINE, PAPER),
    profile: Profile | None = None,
    repeats: int = 5,
    progress: Progress | None = None,
) -> Comparison:
    """Times a window under the plan of every rule and under the runner's own. Collective; call it without gradients.

    Args:
        runner: a runner under the plan in use.
        window: the micro-batches that are timed.
        rules: the rules to compare with, see `hf_helix.planning.plans.registry`.
        profile: the operator times to plan with; None to measure them.
        repeats: how often each plan is timed.
        progress: called while plans are timed.
    """
    if profile is None:
        profile = measure_profile(baseline_runner(runner, len(window)), window)
    kept = runner.plan.rule
    others = [rule for rule in dict.fromkeys(rules) if rule != kept]
    runners = {**plan_runners(runner, others, profile, len(window)), kept: runner}
    overlaps = measure_overlap(runners, window, repeats, progress)
    without: dict[str, float] = {}
    if runner.mesh.link is not None:
        with bare(runner.mesh.link):
            without = {rule: statistics.median(times) for rule, times in time_steps(runners, window, repeats).items()}
    plans = {rule: its_runner.plan for rule, its_runner in runners.items()}
    return Comparison(kept, overlaps, plans, profile, runner.scheduler(len(window)), without)
