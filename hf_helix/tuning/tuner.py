"""Which plan a run uses, and when it is decided.

In:   the configuration, what the run is for, the first window, and how many steps are left.
Out:  a plan before anything runs; once the run is worth it, the one that was measured to be the fastest.
Must hold: every rank decides the same; nothing is exchanged in most steps; measuring and searching take at most
`tuning_share` of the run, and say beforehand how long they take; what was measured is kept on disk.

Trainer and loop ask between two steps. What an earlier run of the same case has measured is taken at once. Otherwise
the clock of rank 0 decides after 2, 4, 8, ... steps how thorough a tuning the rest of the run is worth.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hf_helix.config import AUTO, SCHEDULES, HelixConfig
from hf_helix.planning.graph.recompute import NONE
from hf_helix.planning.layout import Layout
from hf_helix.planning.pipeline.costs import stage_costs
from hf_helix.planning.pipeline.scheduler import Scheduler, candidates, schedule_names
from hf_helix.planning.plans.files import load_plan, parse_plan
from hf_helix.planning.plans.plan import Plan
from hf_helix.planning.plans.registry import RULES, runs_one_strand
from hf_helix.planning.profile import Profile, rough_profile
from hf_helix.planning.profile_file import load_profile
from hf_helix.runtime.distributed.agreement import agree_on_text, decide_on_rank_0
from hf_helix.runtime.distributed.mesh import Mesh, rank
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.notices import about_time, say
from hf_helix.runtime.runner import Runner
from hf_helix.tuning import cache
from hf_helix.tuning.autotune import Tuning, make_plans, tune
from hf_helix.tuning.effort import (
    BASELINE,
    CANDIDATES,
    FULL,
    QUICK,
    Effort,
    Pace,
    affordable,
    tuning_budget,
    tuning_cost,
)
from hf_helix.tuning.measure.machine import machine
from hf_helix.tuning.measure.overlap import time_steps
from hf_helix.tuning.progress import progress_bar
from hf_helix.tuning.verdict import contention_of, format_tuning, format_verdict
from hf_helix.version import __version__

# Rules that wait for a measurement; until then, a plan that needs none serves.
MEASURED = {AUTO: CANDIDATES} | {name: (name,) for name, rule in RULES.items() if rule.needs_profile}
UNMEASURED = "greedy"
TUNED_MICROBATCHES = 4  # for each rank of the pipeline: enough to see the steady state


def describe(
    model: Any, mesh: Mesh, products: torch.dtype | None = None, recompute: Sequence[str] = ()
) -> dict[str, str]:
    """What measurements of a model are for; before it is cut.

    Args:
        products: see `Runner`.
        recompute: the mode of every layer, see `hf_helix.engine.recompute`.
    """
    weights = [
        (name, tuple(weight.shape), str(weight.dtype), *(() if weight.requires_grad else ("frozen",)))
        for name, weight in model.named_parameters()
    ]
    shared = [(name, mesh.sizes[name]) for name in ("tp", "pp", "cp", "ep")]
    digest = hashlib.sha256(json.dumps(weights).encode()).hexdigest()[:12]
    runs = [f"{mode} x {len(list(found))}" for mode, found in itertools.groupby(recompute)]
    again = {} if set(recompute) <= {NONE} else {"recompute": recompute[0] if len(runs) == 1 else ", ".join(runs)}
    return {
        "model": f"{type(model).__name__} {digest}" + (f" {products}".replace("torch.", "") if products else ""),
        "mesh": " ".join(f"{name}={size}" for name, size in shared if size > 1 or name == "tp"),
        "attention": str(model.config._attn_implementation),
        **again,
        "transformers": version("transformers"),
        "hf_helix": __version__,
    }


def digest_of(path: str | None) -> str:
    """A fingerprint of a file; empty without one."""
    return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def options_of(config: HelixConfig) -> str:
    """What ranks must have in common, a line for each option; the plan is compared by itself, once it is made.

    Files may lie elsewhere on another host, so what is in them counts.
    """
    values = dataclasses.asdict(config)
    del values["plan"]
    values["profile"] = digest_of(config.profile)
    if config.schedule not in SCHEDULES:
        values["schedule"] = Path(config.schedule).read_text().strip()
    return "\n".join(f"{name}={value}" for name, value in values.items())


@dataclasses.dataclass(frozen=True)
class _Case:
    """What is measured with.

    Attributes:
        window: the micro-batches that are timed.
        microbatches: of the whole window of an optimizer step.
        about: what a profile of it is for.
        key: what the cache goes by.
    """

    window: Sequence[MicroBatch]
    microbatches: int
    about: Mapping[str, str]
    key: Mapping[str, str]

    @property
    def share(self) -> float:
        """The part of a step's micro-batches that is timed."""
        return len(self.window) / self.microbatches


class Tuner:
    """Chooses the plan of a run.

    Args:
        config: the options of the run.
        model: the model's class, for plan files.
        about: what measurements are for, see `describe`.
        microbatches: of a usual window, as the run is configured.

    Attributes:
        tuning: what was measured, in this run or an earlier one; None as long as nothing was.
    """

    def __init__(self, config: HelixConfig, model: str, about: Mapping[str, str], microbatches: int) -> None:
        self.config = config
        self.tuning: Tuning | None = None
        self._model = model
        self._mesh = {name: getattr(config, name) for name in ("tp_size", "pp_size")}
        self._mesh |= {name: getattr(config, name) for name in ("cp_size", "ep_size") if getattr(config, name) > 1}
        self._about = about
        self._microbatches = microbatches
        self._case: _Case | None = None
        self._pace = Pace()
        self._has_begun = False
        self._has_declined = False
        self.scheduler = Scheduler(config.schedule, config.pp_size)

    def first_plan(self, layout: Layout) -> Plan:
        """The plan that the run starts with. Collective.

        Raises:
            ValueError: a plan or profile file that is damaged or for something else.
        """
        name = self.config.plan
        is_file = name not in MEASURED and name not in RULES
        # Files may lie elsewhere on another host; what is in them is compared with the plan.
        source, has_profile = "a file" if is_file else name, self.config.profile is not None
        placed = f"plan={source!r}\nprofile given: {has_profile}\n{layout.describe()}"
        agree_on_text(placed, "plans")
        profile = self._given_profile(layout)
        if profile is not None:
            self.scheduler = Scheduler(self.config.schedule, self.config.pp_size, stage_costs(profile))
        if is_file:
            return load_plan(name, layout.graphs, model=self._model, mesh=self._mesh)
        if name in MEASURED and profile is None:
            # One rank has nothing to hide, and one strand at a time is kinder to the caches.
            name = UNMEASURED if self.config.communicates else BASELINE
        if name == AUTO:
            name = UNMEASURED
        plans = make_plans([name], profile or rough_profile(layout), model=self._model, mesh=self._mesh)
        return plans[name]

    @property
    def is_settled(self) -> bool:
        """Whether the plan stays as it is."""
        rules = MEASURED.get(self.config.plan)
        known = self.config.plan != "auto" and self.config.profile is not None
        done = self.tuning is not None and (self.config.plan != "auto" or self.tuning.effort == FULL.name)
        return rules is None or known or done or not self.config.communicates

    def update(
        self, runner: Runner, make_window: Callable[[], Sequence[MicroBatch]], count: int, steps_left: int | None
    ) -> Runner:
        """The runner to go on with. Collective, when a step begins; in most steps nothing is exchanged.

        Args:
            runner: in use.
            make_window: makes the micro-batches of the step that begins.
            count: of them, the same on all ranks.
            steps_left: of the run; None where that is not known, and then as many as there were are expected.
        """
        self._warn_alone(count)
        if self.is_settled:
            return runner
        is_due = self._pace.begin_step(runner.executor.streams.synchronize)
        if self._case is None and count > 1:
            self._case = self._case_of(runner, make_window())
            runner = self._recall(runner) if self.config.cache else runner
        if self._case is None or self.is_settled:
            return runner
        if self.config.plan != "auto":
            return self._measure(runner, dataclasses.replace(FULL, rules=MEASURED[self.config.plan]))
        if self.config.tuning_share == 1:
            return self._measure(runner, FULL)
        left = self._pace.steps_done if steps_left is None else steps_left
        effort = decide_on_rank_0(lambda: self._affordable(runner, left)) if is_due else None
        if effort is not None:
            return self._measure(runner, effort, None if steps_left is None else left * self._pace.seconds_per_step)
        if is_due and steps_left is not None:
            self._say_untuned(runner, left)
        return runner

    def _case_of(self, runner: Runner, window: Sequence[MicroBatch]) -> _Case:
        """What to measure with: the start of the first window of two micro-batches or more. Collective."""
        timed = window[: TUNED_MICROBATCHES * self.config.pp_size]
        about = {**machine(runner), **self._about, "shapes": ", ".join(batch.shape for batch in timed)}
        key = {**about, "plan": self.config.plan}
        key |= {"profile": digest_of(self.config.profile), "schedule": self.config.schedule}
        key |= {"compile": str(self.config.compile)}
        return _Case(timed, len(window), about, key)

    def _affordable(self, runner: Runner, steps_left: int) -> Effort | None:
        """What the rest of the run is worth, beyond what was done already; by the clock of this rank."""
        assert self._case is not None
        pace = self._pace.seconds_per_step
        budget = tuning_budget(steps_left, pace, self.config.tuning_share) - self._pace.seconds_paused
        cost = functools.partial(self._cost, runner, pace * self._case.share)
        return affordable(budget, cost, self.tuning.effort if self.tuning else "")

    def _cost(self, runner: Runner, window_seconds: float, effort: Effort) -> float:
        """An estimate of the seconds that tuning takes."""
        assert self._case is not None
        return tuning_cost(
            effort,
            runner.stage.layout,
            window_seconds,
            len(runner.program(len(self._case.window))),
            schedules=len(schedule_names(self.config.schedule, self.config.pp_size)),
            profiled=self.config.profile is None,
            on_gpu=runner.mesh.device.type == "cuda",
        )

    def _given_profile(self, layout: Layout) -> Profile | None:
        if self.config.profile is None:
            return None
        wanted: dict[str, str] = {key: self._about[key] for key in ("model", "mesh")}
        return load_profile(self.config.profile, about=wanted, layout=layout)

    def _measure(self, runner: Runner, effort: Effort, run_seconds: float | None = None) -> Runner:
        """The runner of the fastest plan. Collective; says before how long it takes.

        Args:
            runner: in use.
            effort: the rules to choose from, and how thoroughly.
            run_seconds: what the rest of the run takes; None where that is not known.
        """
        case = self._case
        assert case is not None
        with self._pace.paused():
            (seconds,) = time_steps({"": runner}, case.window, 1)[""]
            self._say_before(self._cost(runner, seconds, effort), run_seconds)
            with progress_bar(rank() == 0) as progress:
                chosen, tuning = tune(
                    runner,
                    case.window,
                    effort,
                    about=case.about,
                    profile=self._given_profile(runner.stage.layout),
                    schedules=functools.partial(candidates, self.config.schedule),
                    microbatches=case.microbatches,
                    progress=progress,
                )
        self._keep(dataclasses.replace(tuning, measured=cache.today()), runner)
        if rank() == 0 and self.config.cache:
            assert self.tuning is not None
            try:
                cache.store(case.key, self.tuning, chosen.plan.to_json())
            except OSError as error:
                say(f"what was measured could not be kept for the next run: {error}")
        return chosen

    def _recall(self, runner: Runner) -> Runner:
        """The runner of the plan that an earlier run has measured, if rank 0 finds it. Collective."""
        case = self._case
        assert case is not None
        found = decide_on_rank_0(lambda: cache.load(case.key))
        if found is None:
            return runner
        tuning, text = found
        try:
            plan = parse_plan(text, runner.stage.layout.graphs, model=self._model, mesh=self._mesh)
        except ValueError:
            return runner  # of an older version: the same on every rank
        costs = stage_costs(tuning.profile) if tuning.profile is not None else None
        self._keep(tuning, runner)
        return runner.with_plan(plan, Scheduler(tuning.schedule, self.config.pp_size, costs))

    def _keep(self, tuning: Tuning, runner: Runner) -> None:
        assert self._case is not None
        verdict = format_verdict(tuning, contention_of(runner.mesh))
        report = format_tuning(tuning, self._case.share)
        self.tuning = dataclasses.replace(tuning, verdict=verdict, report=report)

    def _say_before(self, seconds: float, run_seconds: float | None) -> None:
        of = "" if run_seconds is None else f" of about {about_time(run_seconds)}"
        kept = "; cached afterwards" if self.config.cache else ""
        say(f"measuring and searching plans, about {about_time(seconds)}{of}{kept}")

    def _say_untuned(self, runner: Runner, steps_left: int) -> None:
        """Once: why `auto` measures nothing."""
        if self._has_declined or self.tuning is not None:
            return
        self._has_declined = True
        pace = self._pace.seconds_per_step
        assert self._case is not None
        say(
            f"plan `{runner.plan.rule}`, not measured: that would take about "
            f"{about_time(self._cost(runner, pace * self._case.share, QUICK))} of the about "
            f"{about_time(pace * steps_left)} that are left, more than tuning_share={self.config.tuning_share:g} allows"
        )

    def _warn_alone(self, count: int) -> None:
        """Once, if the first step has nothing to interleave: what to change."""
        is_first, self._has_begun = not self._has_begun, True
        interleaves = self.config.pp_size > 1 or not runs_one_strand(self.config.plan)
        if count > 1 or not is_first or not (interleaves and self.config.communicates):
            return
        start = "an optimizer step has one micro-batch here, and nothing to interleave it with"
        if self._microbatches == 1:
            say(f"{start}; set gradient_accumulation_steps=2 or more, if need be with a smaller batch size")
        else:
            say(
                f"{start}: gradient_accumulation_steps is {self._microbatches}, but the data set has only one batch "
                "for this rank; use a smaller batch size or more data"
            )
