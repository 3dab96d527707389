"""Candidate plans: rank 0 makes them from a profile, and every rank gets a runner for each.

In:   a runner, the names of rules, and a profile.
Out:  runners that share parameters and streams and differ in their plan; what the cost function predicts for one.
Must hold: every rank has the same plans; if rank 0 cannot make one, every rank raises.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hf_helix.measure.operators import measure_profile
from hf_helix.measure.overlap import Overlap, measure_overlap, time_steps
from hf_helix.measure.progress import Progress, StageProgress, stage_progress
from hf_helix.operators.communication.emulated_link import bare
from hf_helix.planning.plan.files import parse_plan
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.registry import make_plan
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.timing.predict import predict
from hf_helix.planning.timing.profile import Profile, rough_profile
from hf_helix.runtime.distributed.agreement import decide_on_rank_0
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.tuning.budget import BASELINE


def plan_runners(
    runner: Runner,
    rules: Sequence[str],
    profile: Profile,
    num_microbatches: int,
    progress: StageProgress | None = None,
    searching: float = 1.0,
) -> dict[str, Runner]:
    """Returns, by rule, a runner with the plan that the rule makes. Collective.

    Args:
        runner: the runner whose parameters, streams and schedule are used.
        rules: names of `hf_helix.planning.plan.registry`.
        profile: the operator times to plan with.
        num_microbatches: the number of micro-batches of the window to plan for.
        progress: called while plans are made.
        searching: the length of a search, see `make_plan`.
    """
    plans = make_plans(
        rules,
        profile,
        model=runner.plan.model,
        mesh=runner.plan.mesh,
        schedule=runner.scheduler(num_microbatches),
        progress=progress,
        searching=searching,
    )
    return {rule: runner.with_plan(plan) for rule, plan in plans.items()}


def baseline_runner(runner: Runner, num_microbatches: int) -> Runner:
    """Returns a runner with the plan `sequential`, which needs no measurement. Collective."""
    return plan_runners(runner, [BASELINE], rough_profile(runner.stage.layout), num_microbatches)[BASELINE]


def make_plans(
    rules: Sequence[str],
    profile: Profile,
    *,
    model: str,
    mesh: Mapping[str, int],
    schedule: Schedule | None = None,
    progress: StageProgress | None = None,
    searching: float = 1.0,
) -> dict[str, Plan]:
    """Returns the plan of each rule: rank 0 makes them, and every rank receives them. Collective.

    Args:
        rules: names of `hf_helix.planning.plan.registry`.
        profile: the operator times to plan with.
        model: the name of the model's class, for plan files.
        mesh: the sizes of the mesh by the names of the options, for plan files.
        schedule: the schedule of the window that searched plans are made for.
        progress: called while plans are made.
        searching: the length of a search, see `make_plan`.

    Raises:
        ValueError, RuntimeError: on every rank, if rank 0 could not make one; see `decide_on_rank_0`.
    """

    def make() -> dict[str, str]:
        texts = {}
        for place, rule in enumerate(rules):
            told = stage_progress(progress, "making plans", place, len(rules))
            if told is not None:
                told(0.0)
            plan = make_plan(
                rule, profile, model=model, mesh=mesh, schedule=schedule, progress=told, searching=searching
            )
            texts[rule] = plan.to_json()
        return texts

    texts = decide_on_rank_0(make)
    graphs = profile.layout.graphs
    return {rule: parse_plan(text, graphs, model=model, mesh=mesh) for rule, text in texts.items()}


def predict_window(runner: Runner, profile: Profile, num_microbatches: int) -> float:
    """Returns the seconds that the cost function predicts for a window, with its sums of gradients.

    Args:
        runner: with the plan and the schedule.
        profile: the times of the operators.
        num_microbatches: of the window.
    """
    return predict(runner.plan, profile, runner.scheduler(num_microbatches)).seconds


# -- compare -------------------------------------------------------------------------------------------------------
# Compares plans on the window that a run trains: what the plan in use gains over others.
#
# In:   a runner, the window, the names of rules, and the times of the operators if they are known.
# Out:  a `Comparison`, the same on every rank.
# Must hold: all plans are timed in alternation in one run and medians are taken (`measure.overlap`); on an
# emulated link they are timed without it, too; training is left as it was found.


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
        rules: the rules to compare with, see `hf_helix.planning.plan.registry`.
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
