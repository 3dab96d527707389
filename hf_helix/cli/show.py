"""hf-helix show: draw a plan as a timeline, a profile as a table of overlap, a schedule as a pipeline.

In:   a plan with its profile, a profile, or the name of a schedule.
Out:  text, or pictures.
Must hold: it works from files alone, without torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_helix.cli.files import made_for, profile_of, schedule_for
from hf_helix.cli.options import add_parser
from hf_helix.cli.plan import plan_by
from hf_helix.config import RECOMPUTE, RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_helix.cli.options import Commands
    from hf_helix.planning.pipeline.simulate import Simulated
    from hf_helix.planning.plans.plan import Plan
    from hf_helix.planning.profile import Profile

PARTS = {"forward": "forward (F)", "input": "input gradient (I)", "weight": "weight gradients (W)"}
# What only one kind of drawing reads.
OF_SCHEDULES = ("pp", "layers", *PARTS, "transfer", "gain")
OF_PLANS = ("profile", "compare", "recompute")
OF_PLANS_AND_SCHEDULES = ("microbatches",)
DEFAULTS: dict[str, Any] = {"pp": 4, **dict.fromkeys(PARTS, 1.0), "transfer": 0.0, "gain": 1.0}

COMPARED_MICROBATCHES = 8  # of the windows that plans which are compared are made for


EXAMPLES = """\
examples:
  hf-helix show plan.json --profile profile.json                      a timeline in the terminal
  hf-helix show plan.json --profile profile.json --output plan.svg    the same as a picture
  hf-helix show plan.json --profile profile.json --compare sequential   two layers under both plans
  hf-helix show profile.json                                          where time goes, and what overlaps well
  hf-helix show --schedule w --pp 4 --microbatches 12                 a pipeline, slot by slot
  hf-helix show --schedule all --gain 1.4                             the schedules beside each other

The overlap efficiency (OEF) of two operators is (T_i + T_j - P_ij) / min(T_i, T_j), with their times alone and the
time of both side by side (equation 1 of the DHelix paper). At 1 the shorter is hidden wholly behind the longer, at 0
they take as long as one after the other, below 0 they hinder each other.
"""


def add_command(commands: Commands) -> None:
    """Declare the command and its options."""
    summary = "draw a plan as a timeline, a profile as a table of overlap, or a schedule as a pipeline"
    parser = add_parser(commands, "show", run, summary, EXAMPLES)
    parser.add_argument("file", type=Path, nargs="?", help="a plan or a profile")
    parser.add_argument("--profile", type=Path, help="the profile whose times a plan is drawn with")
    compare = "draw two layers under this rule, and below it under the plan, on one axis of time"
    parser.add_argument("--compare", choices=RULES, help=compare)
    parser.add_argument("--recompute", choices=RECOMPUTE[1:], help="as given when the plan was made")
    parser.add_argument(
        "--microbatches", type=int, help="micro-batches that are drawn: 3 of a plan, 3 * pp of a schedule"
    )
    parser.add_argument("--width", type=int, default=100, help="columns of text")
    parser.add_argument(
        "--output", type=Path, help="draw a picture instead of text: a path ending in .svg, .png or .pdf"
    )
    schedule = (
        "draw this schedule: auto, folded_1f1b, dualpipe_v, 1f1b, or the path of an action file; `all` compares them"
    )
    parser.add_argument("--schedule", help=schedule)
    parser.add_argument("--pp", type=int, default=DEFAULTS["pp"], help="pipeline ranks of the schedule")
    parser.add_argument("--layers", type=int, help="layers of the model; left out, two for each rank")
    for part, meaning in PARTS.items():
        parser.add_argument(f"--{part}", type=float, default=DEFAULTS[part], help=f"time of a layer's {meaning}")
    parser.add_argument("--transfer", type=float, default=DEFAULTS["transfer"], help="time from a rank to the next")
    gain = "how many times faster a forward and a backward are side by side than one after the other"
    parser.add_argument("--gain", type=float, default=DEFAULTS["gain"], help=gain)


def _refuse(options: argparse.Namespace, names: Sequence[str], what: str) -> None:
    given = [f"--{name}" for name in names if getattr(options, name) != DEFAULTS.get(name)]
    if given:
        raise ValueError(f"{' and '.join(given)} would mean nothing where {what} is drawn; leave it out")


def run(options: argparse.Namespace) -> None:
    """Text, or a picture where `--output` is given."""
    if (options.file is None) == (options.schedule is None):
        raise ValueError("show takes either a plan or a profile, or a schedule, such as --schedule w; give one of them")
    if options.schedule is not None:
        _refuse(options, OF_PLANS, "a schedule")
        return _show_schedule(options)
    _refuse(options, OF_SCHEDULES, "a file")
    if not options.file.is_file():
        raise ValueError(
            f"{options.file} is no file; `hf-helix profile` makes a profile, and `hf-helix plan` makes a plan from it"
        )
    try:
        data = json.loads(options.file.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{options.file} is not JSON: {error}") from error
    kind = str(data.get("format", "")) if isinstance(data, dict) else ""
    if kind.startswith("hf_helix.profile/"):
        _show_profile(options)
    elif kind.startswith("hf_helix.plan/"):
        _show_plan(options)
    else:
        raise ValueError(f"{options.file} is neither a plan nor a profile (its format is {kind!r})")


def _show_profile(options: argparse.Namespace) -> None:
    from hf_helix.planning.profile_file import load_profile
    from hf_helix.report import heatmap

    _refuse(options, (*OF_PLANS, *OF_PLANS_AND_SCHEDULES), "a profile")
    profile = load_profile(options.file)
    if options.output is None:
        about = "\n".join(f"{key}: {value}" for key, value in profile.about.items())
        print(about, heatmap.text_breakdown(profile), heatmap.text_heatmap(profile), sep="\n\n")
        return
    share = options.output.with_stem(options.output.stem + "-breakdown")
    heatmap.draw_heatmap(profile, options.output)
    heatmap.draw_breakdown(profile, share)
    print(f"{options.output}\n{share}")


def _show_plan(options: argparse.Namespace) -> None:
    from hf_helix.planning.plans.files import load_plan
    from hf_helix.planning.plans.registry import predict_plan
    from hf_helix.report.bars import bars_of_timeline
    from hf_helix.report.timeline import draw_timeline, text_timeline

    microbatches = 3 if options.microbatches is None else options.microbatches
    if options.profile is None:
        raise ValueError("a plan is drawn with times: add --profile profile.json")
    profile = profile_of(options)
    model, mesh = made_for(profile)
    plan = load_plan(options.file, profile.layout.graphs, model=model, mesh=mesh)
    if options.compare is not None:
        _refuse(options, OF_PLANS_AND_SCHEDULES, "a comparison of two layers")
        other = plan_by(options.compare, profile, schedule_for(profile, COMPARED_MICROBATCHES))
        return _show_strips([other, plan], profile, options)
    program, timeline = predict_plan(plan, profile, schedule_for(profile, microbatches))
    bars = bars_of_timeline(timeline, program)
    title = f"{plan.rule}: {microbatches} micro-batches, predicted {timeline.seconds * 1e3:,.1f} ms"
    if options.output is None:
        print(title, text_timeline(bars, options.width), sep="\n")
    else:
        draw_timeline(bars, options.output, title)
        print(options.output)


def _show_strips(plans: Sequence[Plan], profile: Profile, options: argparse.Namespace) -> None:
    from hf_helix.report.strands import draw_strips, note_of, strips_of_plans, text_strips

    shown = strips_of_plans(profile, plans)
    if options.output is None:
        print(f"two decoder layers ({note_of(profile)})", text_strips(shown, options.width), sep="\n")
    else:
        draw_strips(shown, options.output, note_of(profile))
        print(options.output)


def _show_schedule(options: argparse.Namespace) -> None:
    from hf_helix.config import AUTO
    from hf_helix.planning.pipeline.named import PLACEMENT_OF
    from hf_helix.report.pipeline import draw_pipeline, text_comparison, text_pipeline, text_ranks

    if options.pp < 1:
        raise ValueError(f"--pp {options.pp} must be at least 1, such as --pp 4")
    if options.schedule == "all":
        if options.output is not None:
            raise ValueError("--schedule all is a table; for a picture name one schedule, such as --schedule auto")
        print(text_comparison(dict(_simulated(name, options) for name in (*PLACEMENT_OF, AUTO))))
        return
    label, simulated = _simulated(options.schedule, options)
    title = f"{label}: {options.pp} ranks, {simulated.num_microbatches} micro-batches, time {simulated.seconds:,.6g}"
    if options.output is None:
        print(title, text_pipeline(simulated, options.width), text_ranks(simulated), sep="\n\n")
    else:
        draw_pipeline(simulated, options.output, title)
        print(text_ranks(simulated), options.output, sep="\n")


def _simulated(name: str, options: argparse.Namespace) -> tuple[str, Simulated]:
    """A schedule by name or file, and its label, run on a clock with the times of the command line."""
    from hf_helix.planning.pipeline.scheduler import simulate_layers

    times = {key: getattr(options, key) for key in (*PARTS, "transfer", "gain")}
    label, simulated = simulate_layers(name, options.pp, options.microbatches, options.layers, **times)
    return name if label == name else f"{name} ({label})", simulated
