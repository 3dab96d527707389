"""The model card: the stock card, with a section on the training by hf_helix.

In:   a trainer and the arguments of its `create_model_card`.
Out:  `README.md` in the output folder: the stock card with the tag `hf_helix` and a section on layout, plan, overlap,
      versions, and a YAML for the same training; `helix/page.html`, if operators were measured and bokeh is there.
Must hold: the card is written only on rank 0, without collectives; every figure was measured; no path of this machine
appears; totals of the stock card count a batch once, not once for every rank that shares the batch; the Hub is asked
only for the needs of the stock card, and a card is also written without a network.
"""

import dataclasses
import inspect
import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import RepoCard

from hf_helix.config import OF_A_NODE, HelixConfig
from hf_helix.measure.overlap import Overlap
from hf_helix.planning.plan.predict import Prediction
from hf_helix.report.page import Part, WindowMemory, plan_parts, write_page
from hf_helix.tuning.result_text import TuningResult, format_plans, format_scorecard, hint
from hf_helix.tuning.tuner import TUNED_MICROBATCHES
from hf_helix.version import __version__

TAG = "hf_helix"
AXES = ("dp", "tp", "pp", "cp", "ep")  # ep takes its ranks from dp
PACKAGES = ("torch", "transformers", "accelerate")
PAGE = "helix/page.html"
SLOW_RANKS = "The ranks that others have waited for, with the cause and the part of the looks in which it was seen."

# A phrase of the stock card for a model trained from random weights, without the name of a base model.
_OF_NO_MODEL = "is a fine-tuned version of [](https://huggingface.co/) on"
# The stock card multiplies the batch of a process by all processes; processes that share a batch must count once.
_TOTALS = re.compile(r"^(- total_(?:train|eval)_batch_size: )(\d+)$", re.MULTILINE)


def write_card(trainer: Any, stock: Callable[..., None], given: Mapping[str, Any]) -> None:
    """Writes the card of a trainer. Called on rank 0 only."""
    path = Path(trainer.args.output_dir, "README.md")
    base_model = RepoCard.load(path).data.get("base_model") if path.is_file() else None  # of an earlier card
    given = {**given, "tags": _with_tag(given.get("tags"))}
    names_base = "finetuned_from" in inspect.signature(stock).parameters  # TRL's method has no such argument
    if names_base and isinstance(base_model, str) and not given.get("finetuned_from") and not _hub_name(trainer.model):
        given["finetuned_from"] = base_model
    stock(**given)
    card = RepoCard.load(path)
    card.data["tags"] = _with_tag(card.data.get("tags"))  # PEFT writes its own tags over the others
    card.data["base_model"] = card.data.get("base_model", base_model)
    text = _corrected(card.text, trainer.helix_config.ranks_per_batch)
    tuning = trainer.helix.tuning
    overlap = trainer.helix.overlap or (tuning.overlaps[tuning.chosen] if tuning is not None else None)
    card.text = f"{text.rstrip()}\n\n{_section(trainer, overlap)}{_write_page(trainer, overlap)}"
    card.save(path)


def _section(trainer: Any, overlap: Overlap | None) -> str:
    """Returns the section on the run, as Markdown."""
    args, engine, config = trainer.args, trainer.helix, trainer.helix_config
    sizes = {"ep": 1, **engine.mesh.sizes}
    ranks = math.prod(size for name, size in sizes.items() if name != "ep")
    many, rows = args.gradient_accumulation_steps, args.train_batch_size
    mixed, cuda = trainer.accelerator.mixed_precision, args.device.type == "cuda"
    device = torch.cuda.get_device_name(args.device) if cuda else f"CPU ({platform.machine()})"
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[trainer.model.dtype]
    slow = engine.session.looks.describe()
    facts = {
        "layout": " ".join(f"{name}={sizes[name]}" for name in AXES),
        "ranks": f"{ranks} x {device}",
        "batch": f"{rows * sizes['dp'] * many} sequences: {sizes['dp']} data-parallel x {many} micro-batches x {rows}",
        "precision": dtype + ("" if mixed == "no" else f", products in {mixed}"),
        "schedule": f"`{engine.runner.scheduler.name}`",
        "plan": f"`{engine.plan.rule}`, {_reason(config.plan, engine.plan.rule, engine.tuning)}",
        **({"network": f"an emulated link of {engine.mesh.link}"} if engine.mesh.link else {}),
        "communication": _communication(overlap),
        **({"slow ranks": slow.replace("\n", "; ")} if slow else {}),
        "versions": ", ".join([f"hf_helix {__version__}", *(f"{name} {version(name)}" for name in PACKAGES)]),
    }
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts.items())])
    measured = [format_scorecard(overlap, engine.plan.rule)] if overlap is not None else []
    if engine.tuning is not None and len(engine.tuning.overlaps) > 1:
        timed = min(1.0, TUNED_MICROBATCHES * sizes["pp"] / many)  # the share of a step
        plans = format_plans(engine.tuning.overlaps, engine.tuning.chosen, engine.tuning.predicted)
        measured = [plans, *measured, *hint(engine.tuning, timed)]
    figures = ["```\n" + "\n".join(measured) + "\n```"] if measured else []
    return "\n\n".join(["## Trained with hf_helix", table, *figures, format_launch(config, ranks, mixed, not cuda)])


def format_launch(config: HelixConfig, ranks: int, mixed_precision: str, use_cpu: bool) -> str:
    """Returns the command and the YAML of the same training, as Markdown."""
    machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    several = f" {OF_A_NODE}" if machines > 1 else ""
    where = "on every machine, with its RANK from 0 on and the address HOST of machine 0, " if machines > 1 else ""
    options = {
        field.name: value
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != field.default or field.name == "plan"
    }
    for name in ("plan", "schedule", "profile"):  # files, without their folder on this machine
        if options.get(name):
            options[name] = Path(options[name]).name
    launch = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if ranks > 1 else "NO",
        "use_cpu": use_cpu,
        "num_machines": machines,
        "machine_rank": 0,
        "num_processes": ranks,
        "mixed_precision": mixed_precision,
        "parallelism_config": {"helix": {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}},
    }
    return (
        f"To train so again, {where}with `accelerate launch --config_file FILE{several} YOUR_SCRIPT.py`, where FILE is:"
        f"\n\n```yaml\n{yaml.safe_dump(launch, sort_keys=False)}```\n"
    )


def _write_page(trainer: Any, overlap: Overlap | None) -> str:
    """Writes the page of the run if its operators were measured, and returns the link to it, as Markdown."""
    from hf_helix.doctor.page import memory_of_run  # here, so that a training script starts without the doctor

    engine, page = trainer.helix, Path(trainer.args.output_dir, PAGE)
    profile = engine.tuning.profile if engine.tuning is not None else None
    if profile is None or not page.parent.is_dir():
        return ""
    rule, many = engine.plan.rule, min(trainer.args.gradient_accumulation_steps, 3 * engine.mesh.pipe.size)
    measured = format_scorecard(overlap, rule) if overlap is not None else ""

    def memory(predicted: Prediction) -> WindowMemory | None:
        try:
            return memory_of_run(trainer.model.config, profile, engine.config.option_sizes, predicted)
        except ValueError:  # not of adapters, nor of a class that Transformers does not make from a configuration
            return None

    try:
        parts = plan_parts(engine.plan, profile, engine.runner.scheduler(many), measured, memory)
        if slow := engine.session.looks.describe():
            parts = [*parts, Part("Slow ranks", SLOW_RANKS, slow)]
        write_page(page, f"{Path(trainer.args.output_dir).name}: plan {rule}", parts)
    except ImportError:
        command = "hf-helix show plan.json --profile profile.json --html page.html"
        return f"\n`{command}`, in `{page.parent.name}`, draws a window.\n"
    return f"\n[A page of the run]({PAGE}): a window operator by operator, and its memory; for a browser.\n"


def _reason(asked: str, rule: str, tuning: TuningResult | None) -> str:
    """Returns the reason for the plan of a run."""
    if asked != "auto":
        return "as given" if asked == rule else "from a file"
    if tuning is None:
        return "by `auto` without measuring"
    when = f", {tuning.measured}" if tuning.measured else ""
    return f"the fastest of {len(tuning.overlaps)} that `auto` timed{when}"


def _communication(overlap: Overlap | None) -> str:
    """Returns the overlapped and the hidden fraction, or the reason for their absence."""
    if overlap is None:
        return "overlap not measured"
    if not overlap.communication:
        return "no collectives to hide"
    hidden = overlap.hidden_fraction
    saved = f"{'none' if hidden < 0 else f'{hidden:.0%}'} of its time was saved (hidden {hidden:.0%})"
    if not (overlap.overlapped_by_kind or overlap.overlapped_fraction):
        return f"only the sums of gradients; {saved}"
    share = f"{overlap.overlapped_fraction:.0%}"
    return f"{share} of it ran beside computation (overlapped {share}), {saved}"


def _with_tag(tags: str | list[str] | None) -> list[str]:
    """Returns the tags with the tag `hf_helix`, once."""
    given = [tags] if isinstance(tags, str) else list(tags or ())
    return given if TAG in given else [*given, TAG]


def _hub_name(model: Any) -> str:
    """Returns the base model of the stock card: the name of the loaded model, unless the name is a folder."""
    name = str(getattr(model.config, "_name_or_path", None) or "")
    return "" if os.path.isdir(name) else name


def _corrected(text: str, ranks_per_batch: int) -> str:
    """Returns the text of a stock card with corrections: totals that count a shared batch once, and random weights
    instead of a fine-tuned model without a name.
    """
    text = _TOTALS.sub(lambda line: f"{line[1]}{int(line[2]) // ranks_per_batch}", text)
    return text.replace(_OF_NO_MODEL, "was trained from scratch on")
