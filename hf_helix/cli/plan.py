"""hf-helix plan: make plans from a profile, and predict their times.

In:   a profile.
Out:  a table of every rule's predicted time; a plan, as JSON: the fastest, or the plan of `--rule`.
Must hold: the file is enough, without torch; a line tells if the saved plan is slower than the fastest.
"""

from dataclasses import dataclass
from pathlib import Path

from hf_helix.cli.options import Command, argument, config_option, made_for, option, read_profile, schedule_for
from hf_helix.config import RECOMPUTE, RULES
from hf_helix.measure.progress import progress_bar
from hf_helix.planning.plan.bounds import lower_bound
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.timing.profile import Profile

FASTEST = "fastest"


@dataclass(kw_only=True)
class PlanCommand(Command):
    """Make plans from a profile, and predict the time of a window under each.

    examples:
      hf-helix plan profile.json                                  predicts every rule, writes plan.json
      hf-helix plan profile.json --rule greedy --microbatches 16

    Training takes the plan with HelixConfig(plan="plan.json"). The rules, the paper's and others to compare with, are
    explained in docs/plans.md.
    """

    profile: Path = argument(..., "a file made with `hf-helix profile`")
    rule: str = option(FASTEST, "the rule whose plan is saved, or the fastest as predicted", choices=(FASTEST, *RULES))
    microbatches: int = option(8, "micro-batches in the window that is predicted")
    schedule: str = config_option("schedule")
    recompute: str | None = option(None, "plan as if the profile were measured with it", choices=RECOMPUTE[1:])
    output: Path = option(Path("plan.json"), "where the plan is written")

    def run(self) -> None:
        """Predict every rule, print the table, save a plan."""

        profile = read_profile(self.profile, self.recompute)
        schedule = schedule_for(profile, self.microbatches, self.schedule)
        limit = lower_bound(profile, schedule)
        plans = {rule: plan_by(rule, profile, schedule) for rule in RULES}
        predicted = {rule: predict(plan, profile, schedule).seconds for rule, plan in plans.items()}
        fastest = min(predicted, key=lambda rule: predicted[rule])
        saved = fastest if self.rule == FASTEST else self.rule
        print(f"a window of {self.microbatches} micro-batches; no plan can beat {limit * 1e3:,.1f} ms")
        print(f"{'plan':<12} {'predicted':>13} {'speed-up':>9} {'of bound':>9}")
        for rule, seconds in predicted.items():
            print(
                f"{rule:<12} {seconds * 1e3:10,.1f} ms {predicted['sequential'] / seconds:8.2f}x {limit / seconds:9.2f}"
                f"{'  <- saved' if rule == saved else ''}"
            )
        plans[saved].save(self.output)
        print(f"{saved}: {self.output}")
        gain = predicted[saved] / predicted[fastest] - 1
        if gain > 0:
            print(f"{fastest} is predicted to be {gain:.1%} faster: --rule {fastest}")


def plan_by(rule: str, profile: Profile, schedule: Schedule) -> Plan:
    """The plan of a rule from a profile, for windows of a schedule."""
    model, mesh = made_for(profile)
    with progress_bar() as progress:
        return make_plan(
            rule,
            profile,
            model=model,
            mesh=mesh,
            schedule=schedule,
            progress=lambda share: progress(f"planning ({rule})", share),
        )
