"""hf-helix plan: make plans from a profile, and predict their times.

In:   a profile.
Out:  a table of every rule's predicted time; one plan, as JSON: the fastest, or that of the rule that is asked for.
Must hold: it works from the file alone, without torch; a slower plan than the fastest is never saved without a word.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hf_helix.cli.files import made_for, profile_of, schedule_for
from hf_helix.cli.options import add_parser
from hf_helix.config import AUTO, RECOMPUTE, RULES

if TYPE_CHECKING:
    from hf_helix.cli.options import Commands
    from hf_helix.planning.pipeline.actions import Schedule
    from hf_helix.planning.plans.plan import Plan
    from hf_helix.planning.profile import Profile

FASTEST = "fastest"

EXAMPLES = """\
examples:
  hf-helix plan profile.json                                  predicts every rule, writes plan.json
  hf-helix plan profile.json --rule greedy --microbatches 16

Training takes the plan with HelixConfig(plan="plan.json"). The rules, the paper's and others to compare with, are
explained in docs/plans.md.
"""


def add_command(commands: Commands) -> None:
    """Declare the command and its options."""
    summary = "make plans from a profile, and predict the time of a window under each"
    parser = add_parser(commands, "plan", run, summary, EXAMPLES)
    parser.add_argument("profile", type=Path, help="a file made with `hf-helix profile`")
    rule = f"the rule whose plan is saved; {FASTEST}: whichever is predicted to be fastest"
    parser.add_argument("--rule", choices=(FASTEST, *RULES), default=FASTEST, help=rule)
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches in the window that is predicted")
    order = (
        "the order of micro-batches in a pipeline: auto, folded_1f1b, dualpipe_v, 1f1b, or the path of an action file"
    )
    parser.add_argument("--schedule", default=AUTO, help=order)
    recompute = "plan as if the profile had been measured with this `--recompute`"
    parser.add_argument("--recompute", choices=RECOMPUTE[1:], help=recompute)
    parser.add_argument("--output", type=Path, default=Path("plan.json"), help="where the plan is written")


def run(options: argparse.Namespace) -> None:
    """Predict every rule, print the table, save one plan."""
    from hf_helix.planning.plans.search import lower_bound
    from hf_helix.planning.predict import predict_seconds

    profile = profile_of(options)
    schedule = schedule_for(profile, options.microbatches, options.schedule)
    limit = lower_bound(profile, schedule)
    plans = {rule: plan_by(rule, profile, schedule) for rule in RULES}
    predicted = {rule: predict_seconds(plan, profile, schedule) for rule, plan in plans.items()}
    fastest = min(predicted, key=lambda rule: predicted[rule])
    saved = fastest if options.rule == FASTEST else options.rule
    print(f"a window of {options.microbatches} micro-batches; no plan can beat {limit * 1e3:,.1f} ms")
    print(f"{'plan':<12} {'predicted':>13} {'speed-up':>9} {'of bound':>9}")
    for rule, seconds in predicted.items():
        print(
            f"{rule:<12} {seconds * 1e3:10,.1f} ms {predicted['sequential'] / seconds:8.2f}x {limit / seconds:9.2f}"
            f"{'  <- saved' if rule == saved else ''}"
        )
    plans[saved].save(options.output)
    print(f"{saved}: {options.output}")
    gain = predicted[saved] / predicted[fastest] - 1
    if gain > 0:
        print(f"{fastest} is predicted to be {gain:.1%} faster: --rule {fastest}")


def plan_by(rule: str, profile: Profile, schedule: Schedule) -> Plan:
    """The plan that a rule makes from a profile for windows of a schedule.

    Args:
        rule: a key of `RULES`.
        profile: the times of the operators.
        schedule: of the windows that the plan is for.
    """
    from hf_helix.measure.progress import progress_bar
    from hf_helix.planning.plans.registry import make_plan

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
