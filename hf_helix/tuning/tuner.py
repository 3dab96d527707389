"""Tuning: the plan of a run, and the time at which it is chosen.

In:   the options of a run, its case, the first window, and the number of steps left.
Out:  a plan that needs no measurement before anything runs; once the run is worth it, the plan that is measured to be
      the fastest, with its schedule and a `TuningResult`.
Must hold: every rank decides the same, and has the plans that rank 0 makes. `sequential` is always among the candidates
of a tuning, so from then on overlap is never slower than none beyond noise. Ranks exchange something before the first
window of two micro-batches or more and after 2, 4, 8, ... steps only. Measuring and searching take at most
`tuning_share` of the run, say beforehand how long they take, and leave training as it was; results are kept on disk.

The integrations call `Session.tune`, and so `Tuner.update`, before every step:

    first window of two or more:  result of an earlier run in the cache?  -> its plan
    after 2, 4, 8, ... steps:     rank 0: tuning_share x time left >= cost of a tier?  -> tune
    tune:                         time operators -> make plans -> predict -> time the most promising -> the fastest
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence

from hf_helix.config import AUTO, RULES, HelixConfig
from hf_helix.measure.machine import machine
from hf_helix.measure.memory import memory_limit
from hf_helix.measure.operators import measure_profile
from hf_helix.measure.overlap import measure_overlap, time_steps
from hf_helix.measure.progress import StageProgress, progress_bar, stage_progress
from hf_helix.planning.choice.memory import MemoryLimit
from hf_helix.planning.choice.scheduler import Scheduler, candidates, schedule_names, scheduler_of
from hf_helix.planning.choice.slot_clock import stage_costs
from hf_helix.planning.plan.bounds import lower_bound
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.rules.registry import NEED_PROFILE, load_plan, parse_plan, runs_one_strand
from hf_helix.planning.timing.profile import Profile, rough_profile
from hf_helix.planning.timing.profile_file import load_profile
from hf_helix.planning.window.layout import Layout
from hf_helix.runtime.cuda_graphs import WindowGraphs
from hf_helix.runtime.distributed.agreement import check_same_on_all_ranks, decide_on_rank_0
from hf_helix.runtime.distributed.mesh import rank
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.notices import about_time, say
from hf_helix.runtime.runner import Runner
from hf_helix.tuning import cache
from hf_helix.tuning.budget import BASELINE, CANDIDATES, FULL, QUICK, REPEATS, StepTimer, Tier, affordable, tuning_cost
from hf_helix.tuning.cache import file_digest
from hf_helix.tuning.candidates import baseline_runner, make_plans, plan_runners, predict_window
from hf_helix.tuning.result_text import TuningResult, contention_of, format_summary, format_tuning

CLOSE = 1.1  # times that differ by less than this may have changed places
MEASURED = {AUTO: CANDIDATES} | {rule: (rule,) for rule in NEED_PROFILE}
"""The rules of plans that wait for a measurement."""

UNMEASURED = "greedy"  # the rule until then
TUNED_MICROBATCHES = 4  # the timed micro-batches for each rank of the pipeline: enough to see the steady state


def tune(
    runner: Runner,
    window: Sequence[MicroBatch],
    tier: Tier = FULL,
    *,
    about: Mapping[str, str] | None = None,
    profile: Profile | None = None,
    schedules: Callable[[Profile], Sequence[Scheduler]] | None = None,
    num_microbatches: int | None = None,
    progress: StageProgress | None = None,
    graphs: WindowGraphs | None = None,
) -> tuple[Runner, TuningResult]:
    """Returns the runner of the fastest plan, and the measurement. Collective; there must be no gradients.

    Args:
        window: the timed micro-batches.
        profile: the operator times; None to measure them.
        schedules: returns the schedules to choose from, given the profile; None for the runner's own.
        num_microbatches: the number of micro-batches of the windows to plan for; None for the number of `window`.
        graphs: the CUDA graphs of the run, which time candidates as replays; see `measure_overlap`.
    """
    if profile is None:
        profile = measure_profile(
            baseline_runner(runner), window, about, progress=stage_progress(progress, "measuring operators")
        )
    schedulers = schedules(profile) if schedules else [runner.scheduler]
    by_rule = plan_runners(runner, tier.rules, profile, num_microbatches or len(window), progress, tier.search_share)
    runners = {
        _label(rule, scheduler, schedulers): planned.with_plan(planned.plan, scheduler)
        for scheduler in schedulers
        for rule, planned in by_rule.items()
    }
    predicted = {name: predict_window(candidate, profile, len(window)) for name, candidate in runners.items()}
    baseline = _label(BASELINE, schedulers[0], schedulers)
    shortlist = _never_slower_than(baseline, predicted, tier.timed)
    timed = {name: candidate for name, candidate in runners.items() if name in shortlist}
    overlaps = measure_overlap(timed, window, REPEATS, stage_progress(progress, "timing plans"), graphs, CLOSE)
    chosen = min(overlaps, key=lambda name: overlaps[name].step)
    result = TuningResult(
        chosen,
        overlaps,
        predicted,
        min(lower_bound(profile, scheduler(len(window))) for scheduler in schedulers),
        profile,
        gradient_bytes=_gradient_bytes(runner),
        ranks=runner.mesh.experts.size * runner.mesh.cp.size,
        schedule=runners[chosen].scheduler.name,
        tier=tier.name,
    )
    return runners[chosen], result


def _never_slower_than(baseline: str, predicted: Mapping[str, float], num_others: int) -> list[str]:
    """Returns the candidates to time, by the shortest predictions. The baseline (`sequential`), if a candidate, is
    always among them, and the fastest step wins: the chosen plan is never slower than the baseline, beyond noise."""
    return sorted(predicted, key=lambda name: (name != baseline, predicted[name]))[: num_others + 1]


def _gradient_bytes(runner: Runner) -> int:
    """The bytes of the full gradients of the parameters that this rank has a part of."""
    rows = runner.rank_units.own_rows
    return sum(row.nbytes for parameter, row in rows.items() if parameter.requires_grad)


def _label(rule: str, scheduler: Scheduler, among: Sequence[Scheduler]) -> str:
    return rule if len(among) == 1 else f"{rule} on {scheduler.name}"


# -- the tuner of a run ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _TimedWindow:
    """The micro-batches that plans are timed with, the first of a window of `num_microbatches`; the case of its
    profile, the key of its result in the cache, and the profile if it is known."""

    microbatches: Sequence[MicroBatch]
    num_microbatches: int
    about: Mapping[str, str]
    cache_key: Mapping[str, str]
    profile: Profile | None = None

    @property
    def share(self) -> float:
        """The timed share of a step's micro-batches."""
        return len(self.microbatches) / self.num_microbatches


class Tuner:
    """The choice of the plan of a run.

    Attributes:
        fingerprint: the case of measurements, see `hf_helix.tuning.cache`.
        num_microbatches: the number of micro-batches of a window, as the run is configured.
        result: the result of this run or of an earlier run; None as long as there is none.
        scheduler: makes the schedules of windows, with the measured times of a given profile.
    """

    def __init__(self, config: HelixConfig, model: str, fingerprint: Mapping[str, str], num_microbatches: int) -> None:
        self.config = config
        self.fingerprint = fingerprint
        self.num_microbatches = num_microbatches
        self.result: TuningResult | None = None
        self.scheduler = scheduler_of(config)
        self._model = model
        self._mesh = config.option_sizes
        self._timed: _TimedWindow | None = None
        self._graphs: WindowGraphs | None = None
        self._steps = StepTimer()
        self._has_begun = False
        self._has_declined = False

    def first_plan(self, layout: Layout) -> Plan:
        """Returns the plan of the first step. Collective. Raises ValueError for a plan or profile file that does not
        fit."""
        name = self.config.plan
        is_file = name not in MEASURED and name not in RULES
        # Files may have other paths on another host, so the plan itself is compared once it is read.
        kind, is_given = "a file" if is_file else name, self.config.profile is not None
        check_same_on_all_ranks(f"plan={kind!r}\nprofile given: {is_given}\n{layout.describe()}", "plans")
        profile = self._given_profile(layout)
        if profile is not None:
            self.scheduler = scheduler_of(self.config, stage_costs(profile))
        if is_file:
            return load_plan(name, layout.graphs, model=self._model, mesh=self._mesh)
        if name in MEASURED and profile is None:
            # A single rank has no communication to overlap, and one strand at a time makes better use of the caches.
            name = UNMEASURED if self.config.communicates else BASELINE
        if name == AUTO:
            name = UNMEASURED
        plans = make_plans([name], profile or rough_profile(layout), model=self._model, mesh=self._mesh)
        return plans[name]

    @property
    def is_settled(self) -> bool:
        """Whether the plan is final for the rest of the run."""
        is_measured = self.config.plan in MEASURED
        is_planned = self.config.plan != AUTO and self.config.profile is not None
        is_done = self.result is not None and (self.config.plan != AUTO or self.result.tier == FULL.name)
        return not is_measured or is_planned or is_done or not self.config.communicates

    def update(
        self,
        runner: Runner,
        make_window: Callable[[], Sequence[MicroBatch]],
        num_microbatches: int,
        steps_left: int | None,
        graphs: WindowGraphs | None = None,
    ) -> Runner:
        """Returns the runner of the next step. Collective, before the step.

            before the first step:       a schedule within the memory; say if there is nothing to interleave
            the plan is settled:         the runner in use
            first window of two or more micro-batches:
                                         the plan of an earlier run, if the cache has one; done if that settles it
            no such window yet:          the runner in use
            plan="search" or "dhelix":   measure now
            plan="auto":                 measure now with tuning_share=1; otherwise after 2, 4, 8, ... steps, at the
                                         fullest tier that tuning_share of the time left pays for

        Args:
            runner: the runner in use.
            make_window: makes the micro-batches of the next step.
            num_microbatches: their number, the same on all ranks.
            steps_left: the number of steps left; None if unknown; then the number of steps done so far is expected.
            graphs: the CUDA graphs of the run, if any.
        """
        self._graphs = None if graphs is None or graphs.has_given_up else graphs
        if not self._has_begun:
            self._has_begun = True
            self._say_nothing_interleaves(num_microbatches)
            if self._graphs is not None:
                self._steps = StepTimer(uncounted=2)
            runner = self._within_memory(runner)
        if self.is_settled:
            return runner
        is_due = self._steps.begin_step(runner.executor.streams.synchronize)
        if self._timed is None and num_microbatches > 1:
            self._timed = self._timed_window(runner, make_window())
            runner = self._load_cached(runner, self._timed) if self.config.cache else runner
            if not self.is_settled:
                profile = self._known_profile(runner.rank_units.layout, self._timed)
                self._timed = dataclasses.replace(self._timed, profile=profile)
        if self._timed is None or self.is_settled:
            return runner
        if self.config.plan != AUTO:
            return self._measure(runner, dataclasses.replace(FULL, rules=MEASURED[self.config.plan]), self._timed)
        if self.config.tuning_share == 1:
            return self._measure(runner, FULL, self._timed)
        return self._measure_if_due(runner, self._timed, is_due, steps_left)

    def _within_memory(self, runner: Runner) -> Runner:
        """The runner of the first step, whose schedule keeps to the memory that there is. Collective."""
        profile = self._given_profile(runner.rank_units.layout)
        limit = self._memory_limit(profile, runner)
        if limit is None:
            return runner
        costs = stage_costs(profile) if profile is not None else None
        return runner.with_plan(runner.plan, scheduler_of(self.config, costs, limit))

    def _measure_if_due(self, runner: Runner, timed: _TimedWindow, is_due: bool, steps_left: int | None) -> Runner:
        """The runner of a tuning, if the rest of the run is worth it; otherwise the runner in use."""
        if not is_due:
            return runner
        expected = self._steps.steps_done if steps_left is None else steps_left
        seconds_left = None if steps_left is None else steps_left * self._steps.step_time
        cost = functools.partial(self._cost, runner, timed, self._steps.step_time * timed.share)
        done = self.result.tier if self.result else ""
        # by the clock of rank 0
        tier = decide_on_rank_0(lambda: affordable(self._steps.budget(expected, self.config.tuning_share), cost, done))
        if tier is not None:
            return self._measure(runner, tier, timed, seconds_left)
        if seconds_left is not None:
            self._say_untuned(runner, timed, seconds_left)
        return runner

    def _timed_window(self, runner: Runner, window: Sequence[MicroBatch]) -> _TimedWindow:
        """The timed window: the start of the first window of two micro-batches or more. Collective."""
        timed = window[: TUNED_MICROBATCHES * self.config.pp_size]
        about = {**machine(runner), **self.fingerprint, "shapes": ", ".join(batch.shape for batch in timed)}
        about |= {"compile": "True"} if self.config.compile else {}
        cache_key = {
            **about,
            "plan": self.config.plan,
            "profile": file_digest(self.config.profile),
            "schedule": self.config.schedule,
            "stages": runner.rank_units.layout.describe(),
            "memory_gb": str(self.config.memory_gb),
            "cuda_graphs": str(self._graphs is not None),
        }
        return _TimedWindow(timed, len(window), about, cache_key)

    def _cost(self, runner: Runner, timed: _TimedWindow, window_seconds: float, tier: Tier) -> float:
        """An estimate of the seconds of a tuning whose timed window takes `window_seconds`."""
        return tuning_cost(
            tier,
            runner.rank_units.layout,
            window_seconds,
            len(runner.program(len(timed.microbatches))),
            schedules=len(schedule_names(self.config.schedule, self.config.pp_size)),
            profiled=timed.profile is None,
            on_gpu=runner.mesh.device.type == "cuda",
            captured=self._graphs is not None,
        )

    @staticmethod
    def _seconds_of(runner: Runner, timed: _TimedWindow) -> float:
        """The seconds of the timed window before the first step. Collective."""
        (seconds,) = time_steps({"": runner}, timed.microbatches, 1, warm_up=False)[""]
        return seconds

    def _given_profile(self, layout: Layout) -> Profile | None:
        if self.config.profile is None:
            return None
        wanted: dict[str, str] = {key: self.fingerprint[key] for key in ("model", "mesh")}
        return load_profile(self.config.profile, about=wanted, layout=layout)

    def _known_profile(self, layout: Layout, timed: _TimedWindow) -> Profile | None:
        """The given profile, or the profile of an earlier run of the same operators; None to measure. Collective."""
        if self.config.profile is not None or not self.config.cache:
            return self._given_profile(layout)
        return decide_on_rank_0(lambda: cache.kept_profile(timed.about, layout))

    def _measure(self, runner: Runner, tier: Tier, timed: _TimedWindow, run_seconds: float | None = None) -> Runner:
        """The runner of the fastest plan; prints first how long tuning takes, of the seconds left. Collective."""
        if self._graphs is not None:
            self._graphs.release()  # a window operator by operator needs as much memory as they hold
        with self._steps.paused():
            seconds = self._steps.step_time * timed.share or self._seconds_of(runner, timed)
            of = "" if run_seconds is None else f" of about {about_time(run_seconds)}"
            kept = "; cached afterwards" if self.config.cache else ""
            taken = about_time(self._cost(runner, timed, seconds, tier))
            say(f"measuring and searching plans, about {taken}{of}{kept}")
            with progress_bar(rank() == 0) as progress:
                chosen, result = tune(
                    runner,
                    timed.microbatches,
                    tier,
                    about=timed.about,
                    profile=timed.profile,
                    schedules=lambda profile: candidates(
                        self.config.schedule, profile, timed.num_microbatches, self._memory_limit(profile, runner)
                    ),
                    num_microbatches=timed.num_microbatches,
                    progress=progress,
                    graphs=self._graphs,
                )
        self.result = self._in_words(dataclasses.replace(result, measured=time.strftime("%Y-%m-%d")), runner, timed)
        if rank() == 0 and self.config.cache:
            try:
                cache.store(timed.cache_key, self.result, chosen.plan.to_json())
            except OSError as error:
                say(f"what was measured could not be kept for the next run: {error}")
        return chosen

    def _load_cached(self, runner: Runner, timed: _TimedWindow) -> Runner:
        """The runner of the plan of an earlier run, if rank 0 finds its result; else the runner in use. Collective."""
        cached = decide_on_rank_0(lambda: cache.load(timed.cache_key))
        if cached is None:
            return runner
        result, text = cached
        try:
            plan = parse_plan(text, runner.rank_units.layout.graphs, model=self._model, mesh=self._mesh)
        except ValueError:
            return runner  # a plan of an older version, refused on every rank
        costs = stage_costs(result.profile) if result.profile is not None else None
        self.result = self._in_words(result, runner, timed)
        limit = self._memory_limit(result.profile, runner)
        return runner.with_plan(
            plan, scheduler_of(dataclasses.replace(self.config, schedule=result.schedule), costs, limit)
        )

    def _memory_limit(self, profile: Profile | None, runner: Runner) -> MemoryLimit | None:
        """Returns the limit of the run's windows if `auto` chooses their schedule. Collective."""
        if self.config.schedule != AUTO or self.config.pp_size == 1:
            return None
        return memory_limit(profile, runner, self._steps.steps_done > 0, self.config.memory_gb)

    @staticmethod
    def _in_words(result: TuningResult, runner: Runner, timed: _TimedWindow) -> TuningResult:
        """The result with its summary and report."""
        summary = format_summary(result, contention_of(runner.mesh))
        return dataclasses.replace(result, summary=summary, report=format_tuning(result, timed.share))

    def _say_untuned(self, runner: Runner, timed: _TimedWindow, seconds_left: float) -> None:
        """Says once that `auto` measures nothing, with the reason."""
        if self._has_declined or self.result is not None:
            return
        self._has_declined = True
        seconds = self._cost(runner, timed, self._steps.step_time * timed.share, QUICK)
        say(
            f"plan `{runner.plan.rule}`, made from rough estimates: to measure operators and choose among plans would "
            f"take about {about_time(seconds)} of the about {about_time(seconds_left)} of training that are left, more "
            f"than tuning_share={self.config.tuning_share:g} allows"
        )

    def _say_nothing_interleaves(self, num_microbatches: int) -> None:
        """Prints the option to change if the first step has nothing to interleave."""
        interleaves = self.config.pp_size > 1 or not runs_one_strand(self.config.plan)
        if num_microbatches > 1 or not (interleaves and self.config.communicates):
            return
        start = "an optimizer step has one micro-batch here, and nothing to interleave it with"
        if self.num_microbatches == 1:
            say(f"{start}; set gradient_accumulation_steps=2 or more, if need be with a smaller batch size")
        else:
            say(
                f"{start}: gradient_accumulation_steps is {self.num_microbatches}, but the data set has only one batch "
                "for this rank; use a smaller batch size or more data"
            )
