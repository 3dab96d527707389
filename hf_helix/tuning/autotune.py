"""One tuning: measures operators, makes plans from the measurement, and keeps the one that is fastest in real windows.

In:   a runner, a window of micro-batches, the names of the rules to choose from, and on a pipeline the schedules.
Out:  the runner with the chosen plan and schedule, and a `TuningResult`.
Must hold: `sequential` is always among the candidates of `auto`, so overlap is never slower than none beyond noise;
every rank has the same plans, which rank 0 makes; training is left as it was found.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hf_helix.measure.overlap import Overlap, measure_overlap, time_steps
from hf_helix.measure.profiler import measure_profile
from hf_helix.measure.progress import StageProgress, stage_progress
from hf_helix.planning.pipeline.scheduler import Scheduler
from hf_helix.planning.plans.search import lower_bound
from hf_helix.planning.profile import Profile
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.tuning.candidates import baseline_runner, plan_runners, predict_window
from hf_helix.tuning.effort import BASELINE, FULL, Effort
from hf_helix.tuning.result import TuningResult

CLOSE = 1.05  # times that differ by less than this may have changed places


def tune(
    runner: Runner,
    window: Sequence[MicroBatch],
    effort: Effort = FULL,
    *,
    about: Mapping[str, str] | None = None,
    profile: Profile | None = None,
    schedules: Callable[[Profile], Sequence[Scheduler]] | None = None,
    num_microbatches: int | None = None,
    progress: StageProgress | None = None,
) -> tuple[Runner, TuningResult]:
    """Returns the runner of the fastest plan, and what was measured. Collective; call it when there are no gradients.

    Args:
        runner: the runner whose parameters and streams are measured with.
        window: the micro-batches that are measured with.
        effort: the rules to choose from, and how thoroughly they are compared.
        about: what the measurement is for, see `Profile`.
        profile: the operator times to plan with; None to measure them.
        schedules: returns the schedules to choose from, given the profile; None for the runner's own.
        num_microbatches: the number of micro-batches of the windows to plan for; None for that of `window`.
        progress: called while operators are measured, plans are made and plans are timed.
    """
    if profile is None:
        base = baseline_runner(runner, len(window))
        profile = measure_profile(base, window, about, progress=stage_progress(progress, "measuring operators"))
    schedulers = schedules(profile) if schedules else [runner.scheduler]
    by_rule = plan_runners(runner, effort.rules, profile, num_microbatches or len(window), progress, effort.searching)
    runners = {
        _label(rule, scheduler, schedulers): planned.with_plan(planned.plan, scheduler)
        for scheduler in schedulers
        for rule, planned in by_rule.items()
    }
    predicted = {name: predict_window(candidate, profile, len(window)) for name, candidate in runners.items()}
    baseline = _label(BASELINE, schedulers[0], schedulers)
    shortlist = sorted(predicted, key=lambda name: (name != baseline, predicted[name]))[: effort.timed + 1]
    timed = {name: candidate for name, candidate in runners.items() if name in shortlist}
    overlaps = measure_overlap(timed, window, effort.repeats, stage_progress(progress, "timing plans"))
    overlaps = _time_close_ones_again(overlaps, timed, window, effort.repeats)
    kept = min(overlaps, key=lambda name: overlaps[name].step)
    result = TuningResult(
        kept,
        overlaps,
        predicted,
        min(lower_bound(profile, scheduler(len(window))) for scheduler in schedulers),
        profile,
        gradient_bytes=_gradient_bytes(runner),
        ranks=runner.mesh.experts.size * runner.mesh.cp.size,
        schedule=runners[kept].scheduler.name,
        effort=effort.name,
    )
    return runners[kept], result


def _time_close_ones_again(
    overlaps: Mapping[str, Overlap], runners: Mapping[str, Runner], window: Sequence[MicroBatch], repeats: int
) -> dict[str, Overlap]:
    """The measurements, with the candidates whose steps are too close to call timed again, longer."""
    best = min(overlap.step for overlap in overlaps.values())
    close = {name: runners[name] for name, overlap in overlaps.items() if overlap.step <= CLOSE * best}
    if len(close) == 1:
        return dict(overlaps)
    steps = {name: statistics.median(times) for name, times in time_steps(close, window, 2 * repeats).items()}
    return {name: replace(overlap, step=steps.get(name, overlap.step)) for name, overlap in overlaps.items()}


def _gradient_bytes(runner: Runner) -> int:
    """Bytes of the gradients of the uncut parameters that this rank holds a part of."""
    return sum(
        parameter.nbytes
        if placement.dim is None
        else parameter.nbytes // max(1, parameter.shape[placement.dim]) * placement.length
        for parameter, placement in runner.stage.placements.items()
        if parameter.requires_grad
    )


def _label(rule: str, scheduler: Scheduler, among: Sequence[Scheduler]) -> str:
    return rule if len(among) == 1 else f"{rule} on {scheduler.name}"
