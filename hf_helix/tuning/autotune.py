"""Tuning: measures this machine, makes plans from the measurement, and keeps the one that is fastest in real steps.

In:   a runner, a window of micro-batches, the names of the rules to choose from, and on a pipeline the schedules.
Out:  the runner with the chosen plan and schedule, and what was measured and predicted.
Must hold: `sequential` is always among the candidates of `auto`, so overlap is never slower than none beyond noise;
every rank has the same plans, which rank 0 makes; training is left as it was found.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from hf_helix.config import AUTO
from hf_helix.planning.pipeline.actions import Schedule
from hf_helix.planning.pipeline.scheduler import Scheduler
from hf_helix.planning.plans.files import parse_plan
from hf_helix.planning.plans.plan import Plan
from hf_helix.planning.plans.registry import make_plan, predict_plan
from hf_helix.planning.plans.search import lower_bound
from hf_helix.planning.profile import Profile, rough_profile
from hf_helix.runtime.distributed.groups import control_group
from hf_helix.runtime.distributed.mesh import rank
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.tuning.effort import BASELINE, FULL, Effort
from hf_helix.tuning.measure.overlap import Overlap, measure_overlap, time_steps
from hf_helix.tuning.measure.profiler import measure_profile

CLOSE = 1.05  # times that differ by less than this may have changed places

Progress = Callable[[str, float], object]
"""Told what is being done, and how much of it is done, from 0 to 1."""


@dataclass(frozen=True)
class Tuning:
    """What was found.

    Attributes:
        kept: the candidate that is in use: the rule of its plan and, where there was a choice, its schedule.
        overlaps: by candidate, a window of each that was timed.
        predicted: by candidate, what the cost function said of the same window, in seconds.
        bound: what no plan can beat by the measured operator times.
        profile: the measurement.
        measured: the day, as text.
        gradient_bytes: of the whole model, what data parallelism would sum at the end of a step.
        ranks: that share the layers, the experts or the sequences of a rank of the pipeline.
        schedule: the name of the schedule that is in use.
        effort: the name of the effort that was made, see `hf_helix.tuning.effort`.
        verdict: the choice and its reason in a sentence.
        report: all figures in a paragraph.
    """

    kept: str
    overlaps: Mapping[str, Overlap]
    predicted: Mapping[str, float] = field(default_factory=dict)
    bound: float = 0.0
    profile: Profile | None = None
    measured: str = ""
    gradient_bytes: int = 0
    ranks: int = 1
    schedule: str = AUTO
    effort: str = FULL.name
    verdict: str = ""
    report: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}\n{self.report}"

    @property
    def gradient_seconds(self) -> float:
        """An estimate: one sum of all gradients over the group, at the speed of the measured collectives."""
        kept = self.overlaps[self.kept]
        sent = 2 * self.gradient_bytes * (self.ranks - 1) / self.ranks
        return sent * kept.communication / kept.bytes_moved if kept.bytes_moved else 0.0


def tune(
    runner: Runner,
    window: Sequence[MicroBatch],
    effort: Effort = FULL,
    *,
    about: Mapping[str, str] | None = None,
    profile: Profile | None = None,
    schedules: Callable[[Profile], Sequence[Scheduler]] | None = None,
    microbatches: int | None = None,
    progress: Progress | None = None,
) -> tuple[Runner, Tuning]:
    """The runner of the fastest of the rules' plans. Collective; call it when there are no gradients.

    Args:
        runner: of the parameters and streams that are measured with.
        window: the micro-batches that are measured with.
        effort: the rules to choose from, and how thoroughly.
        about: what the measurement is for, see `Profile`.
        profile: what to plan with; None to measure.
        schedules: to choose from, given the profile; None for the runner's own.
        microbatches: of the windows that plans are for; by default as many as `window` has.
    """
    if profile is None:
        base = baseline_runner(runner, len(window))
        profile = measure_profile(base, window, about, progress=_tell(progress, "measuring operators"))
    schedulers = schedules(profile) if schedules else [runner.scheduler]
    planned_runners = planned(runner, effort.rules, profile, microbatches or len(window), progress, effort.searching)
    runners = {
        _label(rule, scheduler, schedulers): found.with_plan(found.plan, scheduler)
        for scheduler in schedulers
        for rule, found in planned_runners.items()
    }
    predicted = {name: predict_window(found, profile, len(window)) for name, found in runners.items()}
    baseline = _label(BASELINE, schedulers[0], schedulers)
    shortlist = sorted(predicted, key=lambda name: (name != baseline, predicted[name]))[: effort.timed + 1]
    chosen = {name: found for name, found in runners.items() if name in shortlist}
    overlaps = measure_overlap(chosen, window, effort.repeats, _tell(progress, "timing plans"))
    overlaps = _settle(overlaps, chosen, window, effort.repeats)
    kept = min(overlaps, key=lambda name: overlaps[name].step)
    limit = min(lower_bound(profile, scheduler(len(window))) for scheduler in schedulers)
    whole = sum(
        parameter.nbytes
        if placement.dim is None
        else parameter.nbytes // max(1, parameter.shape[placement.dim]) * placement.length
        for parameter, placement in runner.stage.placements.items()
        if parameter.requires_grad
    )
    tuning = Tuning(
        kept,
        overlaps,
        predicted,
        limit,
        profile,
        gradient_bytes=whole,
        ranks=runner.mesh.experts.size * runner.mesh.cp.size,
        schedule=runners[kept].scheduler.name,
        effort=effort.name,
    )
    return runners[kept], tuning


def _settle(
    overlaps: Mapping[str, Overlap], runners: Mapping[str, Runner], window: Sequence[MicroBatch], repeats: int
) -> dict[str, Overlap]:
    """Candidates that are too close to call are timed again, longer."""
    best = min(found.step for found in overlaps.values())
    close = {name: runners[name] for name, found in overlaps.items() if found.step <= CLOSE * best}
    if len(close) == 1:
        return dict(overlaps)
    steps = {name: statistics.median(found) for name, found in time_steps(close, window, 2 * repeats).items()}
    return {name: replace(found, step=steps.get(name, found.step)) for name, found in overlaps.items()}


def _label(rule: str, scheduler: Scheduler, among: Sequence[Scheduler]) -> str:
    return rule if len(among) == 1 else f"{rule} on {scheduler.name}"


def planned(
    runner: Runner,
    rules: Sequence[str],
    profile: Profile,
    microbatches: int,
    progress: Progress | None = None,
    searching: float = 1.0,
) -> dict[str, Runner]:
    """A runner with the plan of each rule for windows of so many micro-batches. Collective.

    Args:
        runner: to take the parameters and the schedule from.
        rules: by name.
        profile: what to plan with.
        microbatches: of a window.
        progress: told what is being done.
        searching: see `make_plan`.
    """
    schedule = runner.scheduler(microbatches)
    about = {"model": runner.plan.model, "mesh": runner.plan.mesh}
    plans = make_plans(rules, profile, **about, schedule=schedule, progress=progress, searching=searching)  # type: ignore[arg-type]
    return {rule: runner.with_plan(plan) for rule, plan in plans.items()}


def baseline_runner(runner: Runner, microbatches: int) -> Runner:
    """A runner with the plan of one strand at a time, which needs no measurement. Collective."""
    return planned(runner, [BASELINE], rough_profile(runner.stage.layout), microbatches)[BASELINE]


def make_plans(
    rules: Sequence[str],
    profile: Profile,
    *,
    model: str,
    mesh: Mapping[str, int],
    schedule: Schedule | None = None,
    progress: Progress | None = None,
    searching: float = 1.0,
) -> dict[str, Plan]:
    """The plan of each rule: rank 0 makes them, every rank takes them over. Collective.

    Raises:
        RuntimeError: on every rank, if rank 0 could not make one.
    """
    texts: dict[str, str] = {}
    error = ""
    if rank() == 0:
        try:
            for place, rule in enumerate(rules):
                told = _tell(progress, "making plans", place, len(rules))
                if told is not None:
                    told(0.0)
                plan = make_plan(
                    rule, profile, model=model, mesh=mesh, schedule=schedule, progress=told, searching=searching
                )
                texts[rule] = plan.to_json()
        except Exception as problem:  # every rank must hear of it
            error = f"rank 0 could not make a plan: {type(problem).__name__}: {problem}"
    if dist.is_initialized():
        box = [texts, error]
        dist.broadcast_object_list(box, src=0, group=control_group())
        texts, error = box  # type: ignore[assignment]
    if error:
        raise RuntimeError(error)
    graphs = profile.layout.graphs
    return {rule: parse_plan(text, graphs, model=model, mesh=mesh) for rule, text in texts.items()}


def predict_window(runner: Runner, profile: Profile, num_microbatches: int) -> float:
    """Seconds of a window by the cost function, without the sums of gradients at its end."""
    return predict_plan(runner.plan, profile, runner.scheduler(num_microbatches))[1].seconds


def _tell(progress: Progress | None, what: str, place: int = 0, count: int = 1) -> Callable[[float], object] | None:
    """What a part of the work is told by: the part number `place` of `count` that are as long."""
    return None if progress is None else lambda share: progress(what, (place + share) / count)
