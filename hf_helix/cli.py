"""hf-helix: measure operators, make plans from the measurement, and look at both.

In:   a command line.
Out:  JSON files that people can read, compare and hand to `HelixConfig(profile=..., plan=...)`; text and pictures.
Must hold: only `profile` needs the model and its processes; `plan` and `show` work from files alone, without torch.

    hf-helix profile --model FOLDER --tp_size 2 --sequence_length 256 --output profile.json
    hf-helix plan profile.json --rule search --output plan.json
    hf-helix show plan.json --profile profile.json --output plan.svg
    hf-helix show plan.json --profile profile.json --compare sequential
    hf-helix show profile.json
    hf-helix show --schedule w --pp 4 --microbatches 12 --output pipeline.svg
    hf-helix show --schedule all --gain 1.4
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_helix.config import ABLATIONS, AXES, RECOMPUTE

if TYPE_CHECKING:
    from hf_helix.planning.plan import Plan
    from hf_helix.planning.profile import Profile
    from hf_helix.planning.schedule import Schedule
    from hf_helix.planning.simulate import Simulated

EVERY = ("sequential", "intra_batch", "round_robin", "dhelix", "greedy", "search")
PARTS = {"forward": "F", "input": "I, the input gradient", "weight": "W, the weight gradients"}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `hf-helix`; errors of use end with status 2 and one message."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"hf-helix {options.command}: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-helix", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)

    profile = commands.add_parser("profile", help="measure every operator, and operators beside each other")
    profile.add_argument("--model", required=True, help="a folder with a config.json, or such a file")
    profile.add_argument("--tp_size", type=int, default=2)
    profile.add_argument("--pp_size", type=int, default=1)
    profile.add_argument("--cp_size", type=int, default=1, help="ranks that share a sequence")
    profile.add_argument("--ep_size", type=int, default=1, help="ranks that share the experts")
    profile.add_argument("--expert_capacity_factor", type=float, help="room of an expert; without it, none is dropped")
    profile.add_argument("--cross_node", nargs="+", choices=AXES, help="axes between hosts, if not by their names")
    profile.add_argument("--schedule", default="w", help="of the pipeline: w, dualpipe_v, 1f1b, or an action file")
    profile.add_argument("--batch_size", type=int, default=1, help="sequences of a micro-batch")
    profile.add_argument("--sequence_length", type=int, default=512)
    profile.add_argument("--microbatches", type=int, default=4, help="of the window that is timed")
    profile.add_argument("--bf16", action="store_true", help="matrix products in bf16, as TrainingArguments(bf16=True)")
    profile.add_argument("--recompute", choices=RECOMPUTE, default="none", help="what backward computes again")
    profile.add_argument("--output", type=Path, default=Path("profile.json"))
    profile.add_argument("--trace", type=Path, help="also write a Perfetto trace of a window under `greedy` there")
    profile.add_argument(
        "--nccl_channels",
        type=int,
        nargs="+",
        help="measure once per value of NCCL_MAX_NCHANNELS and keep the one with the shortest predicted window",
    )
    profile.set_defaults(run=run_profile)

    plan = commands.add_parser("plan", help="make a plan from a profile, and predict every rule's time")
    plan.add_argument("profile", type=Path)
    plan.add_argument("--rule", choices=EVERY, default="search")
    plan.add_argument("--microbatches", type=int, default=8, help="of the window that is predicted")
    plan.add_argument("--schedule", default="w", help="of a pipeline: w, dualpipe_v, 1f1b, auto, or an action file")
    plan.add_argument("--without", nargs="+", choices=ABLATIONS, default=[], help="what plans must not use")
    plan.add_argument("--recompute", choices=RECOMPUTE[1:], help="as if the profile had been measured so")
    plan.add_argument("--output", type=Path, default=Path("plan.json"))
    plan.set_defaults(run=run_plan)

    show = commands.add_parser(
        "show", help="draw a plan as a timeline, a profile as OEF table, a schedule as a pipeline"
    )
    show.add_argument("file", type=Path, nargs="?", help="a plan or a profile")
    show.add_argument("--profile", type=Path, help="the profile that a plan is drawn with")
    show.add_argument(
        "--compare", choices=EVERY, help="two layers under this rule and under the plan, one below the other"
    )
    show.add_argument("--without", nargs="+", choices=ABLATIONS, default=[], help="as the plan was made")
    show.add_argument("--recompute", choices=RECOMPUTE[1:], help="as the plan was made")
    show.add_argument("--microbatches", type=int, help="of the window that is drawn")
    show.add_argument("--width", type=int, default=100, help="columns of text")
    show.add_argument("--output", type=Path, help="a picture, .svg or .png, instead of text")
    show.add_argument("--schedule", help="draw this: w, dualpipe_v, 1f1b, auto, or an action file; `all` compares them")
    show.add_argument("--pp", type=int, default=4, help="pipeline ranks of the schedule")
    show.add_argument("--layers", type=int, help="of the model; two for each rank if left out")
    for part in ("forward", "input", "weight"):
        show.add_argument(f"--{part}", type=float, default=1.0, help=f"time of a layer's {PARTS[part]}")
    show.add_argument("--transfer", type=float, default=0.0, help="time from a rank to the next")
    show.add_argument("--gain", type=float, default=1.0, help="how much faster forward beside backward is than apart")
    show.set_defaults(run=run_show)
    return parser


# -- profile ---------------------------------------------------------------------------------------------------------


def run_profile(options: argparse.Namespace) -> None:
    """Measure, in as many processes as the mesh needs: started by a launcher, or here by torchrun."""
    from hf_helix.planning.scheduler import Scheduler

    if not Path(options.model).exists():
        raise ValueError(f"--model {options.model} does not exist; give a folder with a config.json, or such a file")
    Scheduler(options.schedule, options.pp_size)  # refused once, not by every process
    if "WORLD_SIZE" in os.environ:
        if options.nccl_channels:
            raise ValueError("--nccl_channels starts its own processes; call hf-helix without a launcher")
        _measure(options)
    elif options.nccl_channels:
        _choose_channels(options)
    else:
        _launch(options, {})


def _launch(options: argparse.Namespace, environment: dict[str, str]) -> None:
    words = [
        f"--{name}={getattr(options, name)}"
        for name in (
            *(
                "model",
                "tp_size",
                "pp_size",
                "cp_size",
                "ep_size",
                "expert_capacity_factor",
                "schedule",
                "recompute",
                "batch_size",
                "sequence_length",
                "microbatches",
                "output",
            ),
            "trace",
        )
        if getattr(options, name) is not None
    ]
    if options.bf16:
        words.append("--bf16")
    if options.cross_node:
        words += ["--cross_node", *options.cross_node]
    processes = options.tp_size * options.pp_size * options.cp_size * options.ep_size
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    code = subprocess.call(
        [*launcher, "-m", "hf_helix", "profile", *words],
        env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
    )
    if code:
        sys.exit(code)


def _choose_channels(options: argparse.Namespace) -> None:
    from hf_helix.planning.profile import load_profile
    from hf_helix.planning.search import greedy, predict

    best, shortest = "", float("inf")
    for channels in options.nccl_channels:
        _launch(options, {"NCCL_MAX_NCHANNELS": str(channels)})
        profile = load_profile(options.output)
        seconds = predict(greedy(profile), profile, _schedule(profile, options.microbatches)).seconds
        print(f"NCCL_MAX_NCHANNELS={channels}: a window is predicted to take {seconds * 1e3:,.1f} ms")
        if seconds < shortest:
            best, shortest = options.output.read_text(), seconds
    options.output.write_text(best)
    print(f"kept in {options.output}: {json.loads(best)['about'].get('NCCL_MAX_NCHANNELS')} channels")


def _measure(options: argparse.Namespace) -> None:
    """One process of the measurement."""
    import torch
    import torch.distributed as dist
    from tqdm.auto import tqdm

    from hf_helix.runtime.profiler import measure_profile
    from hf_helix.runtime.streams import prepare_cuda
    from hf_helix.workload import Workload

    notice = prepare_cuda()
    if notice:
        print(notice, file=sys.stderr)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    work = Workload(
        options.model,
        options.tp_size,
        device,
        options.pp_size,
        options.schedule,
        cp_size=options.cp_size,
        ep_size=options.ep_size,
        capacity_factor=options.expert_capacity_factor,
        cross_node=options.cross_node,
        products=torch.bfloat16 if options.bf16 else None,
        recompute=options.recompute,
    )
    window = work.window(options.microbatches, options.batch_size, options.sequence_length)
    about = {**work.about, "shapes": ", ".join(batch.shape for batch in window)}
    if "NCCL_MAX_NCHANNELS" in os.environ:
        about["NCCL_MAX_NCHANNELS"] = os.environ["NCCL_MAX_NCHANNELS"]
    with tqdm(total=100, desc="measuring operators", unit="%", disable=dist.get_rank() != 0) as bar:
        profile = measure_profile(
            work.runner, window, about, progress=lambda share: bar.update(round(100 * share) - bar.n)
        )
    if dist.get_rank() == 0:
        profile.save(options.output)
        print(f"{len(profile.times)} operators and {len(profile.pairs)} pairs: {options.output}")
    if options.trace:
        _write_trace(options.trace, work, window, profile)
    dist.destroy_process_group()


def _write_trace(path: Path, work: Any, window: Any, profile: Profile) -> None:
    from hf_helix.report.perfetto import write_perfetto
    from hf_helix.runtime.measure import over_ranks, trace_window
    from hf_helix.runtime.mesh import rank
    from hf_helix.runtime.tuning import planned

    runner = planned(work.runner, ["greedy"], profile, len(window))["greedy"]
    trace_window(runner, window)  # warms up
    spans = over_ranks(trace_window(runner, window).spans)
    if rank() == 0:
        write_perfetto(path, spans)
        print(f"a trace for https://ui.perfetto.dev: {path}")


# -- plan ------------------------------------------------------------------------------------------------------------


def run_plan(options: argparse.Namespace) -> None:
    """Predict every rule, print the table, save the plan of one."""
    from hf_helix.planning.rules import predict_plan
    from hf_helix.planning.search import lower_bound

    profile = _profile(options)
    schedule = _schedule(profile, options.microbatches, options.schedule)
    limit = lower_bound(profile, schedule)
    plans = {rule: _plan(rule, profile, schedule) for rule in EVERY}
    predicted = {rule: predict_plan(plan, profile, schedule)[1].seconds for rule, plan in plans.items()}
    print(f"a window of {options.microbatches} micro-batches; no plan can beat {limit * 1e3:,.1f} ms")
    print(f"{'plan':<12} {'predicted':>13} {'speed-up':>9} {'of bound':>9}")
    for rule, seconds in predicted.items():
        print(
            f"{rule:<12} {seconds * 1e3:10,.1f} ms {predicted['sequential'] / seconds:8.2f}x {limit / seconds:9.2f}"
            f"{'  <- saved' if rule == options.rule else ''}"
        )
    plans[options.rule].save(options.output)
    print(f"{options.rule}: {options.output}")


def _profile(options: argparse.Namespace) -> Profile:
    """The profile that is planned or drawn with."""
    from hf_helix.planning.profile import load_profile
    from hf_helix.planning.recompute import recompute_profile

    profile = load_profile(options.profile)
    if options.recompute is not None:
        if "recompute" in profile.about:
            raise ValueError(
                f"{options.profile} was measured with recompute {profile.about['recompute']}; leave --recompute out"
            )
        profile = recompute_profile(profile, options.recompute)
    return profile.without(options.without)


def _plan(rule: str, profile: Profile, schedule: Schedule) -> Plan:
    from tqdm.auto import tqdm

    from hf_helix.planning.rules import make_plan

    model, mesh = _made_for(profile)
    with tqdm(total=100, desc=rule, unit="%", leave=False) as bar:
        return make_plan(
            rule,
            profile,
            model=model,
            mesh=mesh,
            schedule=schedule,
            progress=lambda share: bar.update(round(100 * share) - bar.n),
        )


def _made_for(profile: Profile) -> tuple[str, dict[str, int]]:
    """The model's class and the mesh, as plan files name them."""
    try:
        sizes = dict(part.split("=") for part in profile.about["mesh"].split())
        found = {
            f"{name}_size": int(sizes.get(name, 1))
            for name in ("tp", "pp", "cp", "ep")
            if name in sizes or name == "pp"
        }
        return profile.about["model"].split()[0], {"tp_size": int(sizes["tp"]), **found}
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(
            f"the profile does not say what it is for ({error}); measure anew with `hf-helix profile`"
        ) from error


def _schedule(profile: Profile, microbatches: int, name: str = "w") -> Schedule:
    """The schedule of a window on the ranks that a profile is for."""
    from hf_helix.planning.scheduler import Scheduler, stage_costs

    return Scheduler(name, profile.layout.num_ranks, stage_costs(profile))(microbatches)


# -- show ------------------------------------------------------------------------------------------------------------


def run_show(options: argparse.Namespace) -> None:
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
    profile = _profile(options)
    model, mesh = _made_for(profile)
    plan = load_plan(options.file, profile.layout.graphs, model=model, mesh=mesh)
    if options.compare is not None:
        return _show_strands([_plan(options.compare, profile, _schedule(profile, 8)), plan], profile, options)
    program, timeline = predict_plan(plan, profile, _schedule(profile, microbatches))
    bars = bars_of_timeline(timeline, program)
    title = f"{plan.rule}: {microbatches} micro-batches, predicted {timeline.seconds * 1e3:,.1f} ms"
    if options.output is None:
        print(title, text_timeline(bars, options.width), sep="\n")
    else:
        draw_timeline(bars, options.output, title)
        print(options.output)


def _show_strands(plans: Sequence[Plan], profile: Profile, options: argparse.Namespace) -> None:
    from hf_helix.report.strands import draw_strips, note_of, strips, text_strips

    found = strips(profile, plans)
    if options.output is None:
        print(f"two decoder layers ({note_of(profile)})", text_strips(found, options.width), sep="\n")
    else:
        draw_strips(found, options.output, note_of(profile))
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
