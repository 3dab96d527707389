"""Candidates: runners with the plans of several rules.

In:   a runner, a window, the names of rules, and a profile.
Out:  runners that share parameters and streams and differ in their plan; a `Comparison` of plans; the rate of an
      emulated link.
Must hold: every rank has the same plans, each made by one rank; if a rank cannot make a plan, every rank raises.
Measuring leaves training as it was.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hf_helix.measure.operators import measure_profile
from hf_helix.measure.overlap import Overlap, measure_overlap, time_computation, time_steps
from hf_helix.measure.progress import Progress, StageProgress, stage_progress
from hf_helix.operators.communication.emulated_link import bare
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.rules.registry import NEED_PROFILE, baseline_plan, make_plan, parse_plan
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.timing.profile import Profile
from hf_helix.runtime.cuda_graphs import WindowGraphs
from hf_helix.runtime.distributed.agreement import all_gather_object, on_all_ranks
from hf_helix.runtime.distributed.mesh import rank, world_size
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner, forget_gradients
from hf_helix.tuning.budget import BASELINE

PAPER = "dhelix"


def plan_runners(
    runner: Runner,
    rules: Sequence[str],
    profile: Profile,
    num_microbatches: int,
    progress: StageProgress | None = None,
    search_share: float = 1.0,
) -> dict[str, Runner]:
    """Returns, by rule, a runner with the plan of the rule. Collective.

    Args:
        runner: the runner whose parameters, streams and schedule are used.
        rules: names of `hf_helix.planning.rules.registry`.
        profile: the operator times.
        num_microbatches: the number of micro-batches of the window.
        progress: called while plans are made.
        search_share: the length of a search, see `make_plan`.
    """
    plans = make_plans(
        rules,
        profile,
        model=runner.plan.model,
        mesh=runner.plan.mesh,
        schedule=runner.scheduler(num_microbatches),
        progress=progress,
        search_share=search_share,
    )
    return {rule: runner.with_plan(plan) for rule, plan in plans.items()}


def baseline_runner(runner: Runner) -> Runner:
    """Returns a runner with the plan `sequential`, which needs no measurement."""
    plan = runner.plan
    return runner.with_plan(baseline_plan(runner.rank_units.layout, model=plan.model, mesh=plan.mesh))


def make_plans(
    rules: Sequence[str],
    profile: Profile,
    *,
    model: str,
    mesh: Mapping[str, int],
    schedule: Schedule | None = None,
    progress: StageProgress | None = None,
    search_share: float = 1.0,
) -> dict[str, Plan]:
    """Returns the plan of each rule, or raises the error: ranks share the rules that search, rank 0 makes the other
    plans, and every rank receives all of them. Collective."""
    searched = [rule for rule in rules if rule in NEED_PROFILE][::-1]  # rank 0, which tells, begins with the longest
    makers = {rule: place % world_size() for place, rule in enumerate(searched)}
    mine = [rule for rule in rules if makers.get(rule, 0) == rank()]

    def make() -> dict[str, str]:
        texts = {}
        for place, rule in enumerate(mine):
            tell = stage_progress(progress, "making plans", place, len(mine))
            if tell is not None:
                tell(0.0)
            plan = make_plan(
                rule, profile, model=model, mesh=mesh, schedule=schedule, progress=tell, search_share=search_share
            )
            texts[rule] = plan.to_json()
        return texts

    texts = {rule: text for made in all_gather_object(on_all_ranks(make)) for rule, text in made.items()}
    graphs = profile.layout.graphs
    return {rule: parse_plan(texts[rule], graphs, model=model, mesh=mesh) for rule in rules}


def predict_window(runner: Runner, profile: Profile, num_microbatches: int) -> float:
    """Returns the predicted seconds of a runner's window, with its gradient reductions."""
    return predict(runner.plan, profile, runner.scheduler(num_microbatches)).seconds


# -- a comparison of the plan in use with others -----------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Several plans on the same window, by rule, with the operator times that the plans were made with. `chosen` is the
    rule in use; `bare` are the seconds of a window without the emulated link, empty without such a link."""

    chosen: str
    overlaps: Mapping[str, Overlap]
    plans: Mapping[str, Plan]
    profile: Profile
    schedule: Schedule
    bare: Mapping[str, float] = field(default_factory=dict)

    def gain(self, rule: str = BASELINE) -> float:
        """Returns the speed of the plan in use, in parts of the speed of another rule's plan."""
        return self.overlaps[rule].step / self.overlaps[self.chosen].step


def compare(
    runner: Runner,
    window: Sequence[MicroBatch],
    rules: Sequence[str] = (BASELINE, PAPER),
    profile: Profile | None = None,
    repeats: int = 5,
    progress: Progress | None = None,
    graphs: WindowGraphs | None = None,
) -> Comparison:
    """Times a window under the plan of every rule and under the runner's own, in turn; on an emulated link the baseline
    and the runner's own without the link, too. Operators are measured if no profile is given. For `graphs` see
    `measure_overlap`. Collective."""
    if profile is None:
        profile = measure_profile(baseline_runner(runner), window)
    chosen = runner.plan.rule
    others = [rule for rule in dict.fromkeys(rules) if rule != chosen]
    runners = {**plan_runners(runner, others, profile, len(window)), chosen: runner}
    overlaps = measure_overlap(runners, window, repeats, progress, graphs)
    without: dict[str, float] = {}
    if runner.mesh.link is not None:
        ends = {rule: runners[rule] for rule in dict.fromkeys((BASELINE, chosen)) if rule in runners}
        with bare(runner.mesh.link):
            times = time_steps(ends, window, repeats, warm_up=False)
        without = {rule: statistics.median(seconds) for rule, seconds in times.items()}
    plans = {rule: its_runner.plan for rule, its_runner in runners.items()}
    return Comparison(chosen, overlaps, plans, profile, runner.scheduler(len(window)), without)


# -- the rate of an emulated link ------------------------------------------------------------------------------------


def calibrate_link(runner: Runner, window: Sequence[MicroBatch], repeats: int = 2) -> None:
    """Gives an emulated link (`link="even"`) the rate at which communication takes as long as computation, in three
    digits, so that the printed rate is the emulated rate. Collective. Raises ValueError if nothing goes over the link.
    """
    link = runner.mesh.link
    assert link is not None
    # Computation of one strand at a time, the reference in comparisons of plans.
    alone = baseline_runner(runner)
    with bare(link):
        before = link.out.bytes
        alone.train_window(window)
        forget_gradients(alone)
        sent = max(all_gather_object(link.out.bytes - before))
        if not sent:
            raise ValueError("link='even' needs something to carry, and a window sends nothing; use link=None")
        computation = time_computation(alone, window, repeats)
    link.rate = float(f"{8 * sent / computation:.3g}")
