"""hf-helix show: draw a plan as a timeline, a profile as a table of overlap, a schedule as a pipeline.

In:   a plan with its profile, a profile, or the name of a schedule.
Out:  text, or pictures.
Must hold: it works from files alone, without torch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from hf_helix.cli.files import made_for, profile_of, schedule_for
from hf_helix.config import ABLATIONS, RECOMPUTE

if TYPE_CHECKING:
    from hf_helix.cli.main import Commands
    from hf_helix.planning.simulate import Simulated

PARTS = {"forward": "F", "input": "I, the input gradient", "weight": "W, the weight gradients"}


def add_command(commands: Commands) -> None:
    """Declare the command and its options."""
    parser = commands.add_parser(
        "show", help="draw a plan as a timeline, a profile as OEF table, a schedule as a pipeline"
    )
    parser.add_argument("file", type=Path, nargs="?", help="a plan or a profile")
    parser.add_argument("--profile", type=Path, help="the profile that a plan is drawn with")
    parser.add_argument("--without", nargs="+", choices=ABLATIONS, default=[], help="as the plan was made")
    parser.add_argument("--recompute", choices=RECOMPUTE[1:], help="as the plan was made")
    parser.add_argument("--microbatches", type=int, help="of the window that is drawn")
    parser.add_argument("--width", type=int, default=100, help="columns of text")
    parser.add_argument("--output", type=Path, help="a picture, .svg or .png, instead of text")
    parser.add_argument(
        "--schedule", help="draw this: w, dualpipe_v, 1f1b, auto, or an action file; `all` compares them"
    )
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks of the schedule")
    parser.add_argument("--layers", type=int, help="of the model; two for each rank if left out")
    for part in ("forward", "input", "weight"):
        parser.add_argument(f"--{part}", type=float, default=1.0, help=f"time of a layer's {PARTS[part]}")
    parser.add_argument("--transfer", type=float, default=0.0, help="time from a rank to the next")
    parser.add_argument("--gain", type=float, default=1.0, help="how much faster forward beside backward is than apart")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Text, or a picture where `--output` is given."""
    if (options.file is None) == (options.schedule is None):
        raise ValueError("show takes either a plan or a profile, or a schedule, such as --schedule w; give one of them")
    if options.schedule is not None:
        return _show_schedule(options)
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
    from hf_helix.planning.profile import load_profile
    from hf_helix.report import heatmap

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
    from hf_helix.planning.plan import load_plan
    from hf_helix.planning.rules import predict_plan
    from hf_helix.report.bars import bars_of_timeline
    from hf_helix.report.timeline import draw_timeline, text_timeline

    microbatches = 3 if options.microbatches is None else options.microbatches
    if options.profile is None:
        raise ValueError("a plan is drawn with times: add --profile profile.json")
    profile = profile_of(options)
    model, mesh = made_for(profile)
    plan = load_plan(options.file, profile.layout.graphs, model=model, mesh=mesh)
    program, timeline = predict_plan(plan, profile, schedule_for(profile, microbatches))
    bars = bars_of_timeline(timeline, program)
    title = f"{plan.rule}: {microbatches} micro-batches, predicted {timeline.seconds * 1e3:,.1f} ms"
    if options.output is None:
        print(title, text_timeline(bars, options.width), sep="\n")
    else:
        draw_timeline(bars, options.output, title)
        print(options.output)


def _show_schedule(options: argparse.Namespace) -> None:
    from hf_helix.planning.pipeline import AUTO
    from hf_helix.planning.schedule import PLACEMENT_OF
    from hf_helix.report.pipeline import draw_pipeline, text_comparison, text_pipeline, text_ranks

    if options.pp < 1:
        raise ValueError(f"--pp {options.pp} must be at least 1, such as --pp 4")
    if options.schedule == "all":
        if options.output is not None:
            raise ValueError("--schedule all is a table; for a picture name one schedule, such as --schedule w")
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
    from hf_helix.planning.pipeline import simulate_layers

    times = {key: getattr(options, key) for key in (*PARTS, "transfer", "gain")}
    label, simulated = simulate_layers(name, options.pp, options.microbatches, options.layers, **times)
    return name if label == name else f"{name} ({label})", simulated
