"""The model card: the stock one, and what hf_helix can say of the run.

In:   a trainer and the arguments of its `create_model_card`.
Out:  `README.md` in the output folder: the stock card with the tag `hf_helix` and a section on layout, plan, overlap,
      versions, and the YAML that trains so again.
Must hold: it runs on rank 0 alone, so nothing here is collective; no figure that was not measured; no path of this
machine; what the stock card gets wrong about ranks that share a batch is put right; nothing is asked of the Hub beyond
what the stock card asks, and without a network it is written all the same.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub.repocard import metadata_load, metadata_save

from hf_helix.config import HelixConfig
from hf_helix.report.scorecard import format_scorecard
from hf_helix.tuning.effort import BASELINE
from hf_helix.tuning.measure.overlap import Overlap
from hf_helix.tuning.result import TuningResult
from hf_helix.tuning.tuner import TUNED_MICROBATCHES
from hf_helix.version import __version__

TAG = "hf_helix"
AXES = ("dp", "tp", "pp", "cp", "ep")  # ep takes its ranks from dp
PACKAGES = ("torch", "transformers", "accelerate")

# Stock cards of models with random weights say that they are versions of a model without a name.
_OF_NO_MODEL = "is a fine-tuned version of [](https://huggingface.co/) on"
_TOTALS = re.compile(r"^(- total_(?:train|eval)_batch_size: )(\d+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a card says of a run.

    Attributes:
        sizes: ranks of every axis, `dp` included.
        plan: the rule of the plan in use.
        schedule: the name of the schedule in use.
        tuning: what `plan="auto"` measured.
        overlap: what was measured of the plan in use.
        microbatches: in a window of one data-parallel rank, and sequences in each.
        dtype: of the weights, as text.
        device: of a rank, as text.
        link: the emulated link between the ranks, as text; empty where there was none.
    """

    config: HelixConfig
    sizes: Mapping[str, int]
    plan: str
    schedule: str
    tuning: TuningResult | None
    overlap: Overlap | None
    microbatches: tuple[int, int]
    mixed_precision: str
    dtype: str
    device: str
    use_cpu: bool
    link: str = ""

    @property
    def num_ranks(self) -> int:
        return math.prod(size for name, size in self.sizes.items() if name != "ep")


def write_card(trainer: Any, stock: Callable[..., None], given: Mapping[str, Any], overlap: Overlap | None) -> None:
    """Write the card of a trainer. On rank 0 only.

    Args:
        stock: the trainer's inherited `create_model_card`.
        given: its arguments.
        overlap: what was measured after tuning, if anything was.
    """
    path = Path(trainer.args.output_dir, "README.md")
    earlier = _base_model(path)
    given = {**given, "tags": _with_tag(given.get("tags"))}
    knows_base = "finetuned_from" in inspect.signature(stock).parameters  # not so with TRL
    if knows_base and isinstance(earlier, str) and not given.get("finetuned_from") and not _name_on_hub(trainer.model):
        given["finetuned_from"] = earlier
    stock(**given)
    if earlier is not None and _base_model(path) is None:
        metadata_save(path, {**(metadata_load(path) or {}), "base_model": earlier})
    data = metadata_load(path) or {}
    if TAG not in (data.get("tags") or []):  # PEFT writes tags of its own over the others
        metadata_save(path, {**data, "tags": [*(data.get("tags") or []), TAG]})
    text = _put_right(path.read_text(encoding="utf-8"), trainer.helix_config.ranks_per_batch)
    path.write_text(f"{text.rstrip()}\n\n{format_section(_run_of(trainer, overlap))}", encoding="utf-8")


def format_section(run: Run) -> str:
    """The section, as Markdown."""
    many, rows = run.microbatches
    total = rows * run.sizes["dp"] * many
    facts = {
        "layout": " ".join(f"{name}={run.sizes[name]}" for name in AXES),
        "ranks": f"{run.num_ranks} x {run.device}",
        "batch": f"{total} sequences: {run.sizes['dp']} data-parallel x {many} micro-batches x {rows}",
        "precision": run.dtype + ("" if run.mixed_precision == "no" else f", products in {run.mixed_precision}"),
        "schedule": f"`{run.schedule}`",
        "plan": f"`{run.plan}`, {_reason(run)}",
        **({"network": f"an emulated link of {run.link}"} if run.link else {}),
        "communication": _communication(run.overlap),
        "versions": ", ".join([f"hf_helix {__version__}", *(f"{name} {version(name)}" for name in PACKAGES)]),
    }
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts.items())])
    parts = ["## Trained with hf_helix", table, *_timed(run)]
    if run.overlap is not None:
        parts.append(f"```\n{format_scorecard(run.overlap, run.plan)}\n```")
    parts += ["To train so again, with `accelerate launch --config_file`:", f"```yaml\n{_launch_yaml(run)}```"]
    return "\n\n".join(parts) + "\n"


def _run_of(trainer: Any, overlap: Overlap | None) -> Run:
    args, tuning = trainer.args, trainer.tuning
    cuda = args.device.type == "cuda"
    tuned = tuning.overlaps[tuning.kept] if tuning is not None else None
    return Run(
        config=trainer.helix_config,
        sizes={"ep": 1, **trainer.helix.mesh.sizes},
        plan=trainer.plan.rule,
        schedule=trainer.helix.runner.scheduler.name,
        tuning=tuning,
        overlap=overlap or tuned,
        microbatches=(args.gradient_accumulation_steps, args.train_batch_size),
        mixed_precision=trainer.accelerator.mixed_precision,
        dtype={torch.float32: "fp32", torch.bfloat16: "bf16"}[trainer.model.dtype],
        device=torch.cuda.get_device_name(args.device) if cuda else f"CPU ({platform.machine()})",
        use_cpu=not cuda,
        link=str(trainer.helix.mesh.link or ""),
    )


def _reason(run: Run) -> str:
    """Why this plan."""
    asked, tuning = run.config.plan, run.tuning
    if asked != "auto":
        return "as given" if asked == run.plan else "from a file"
    if tuning is None:
        return "by `auto` without measuring"
    when = f", {tuning.measured}" if tuning.measured else ""
    return f"the fastest of {len(tuning.overlaps)} that `auto` timed{when}"


def _communication(overlap: Overlap | None) -> str:
    """The two fractions, or why there are none."""
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


def _timed(run: Run) -> list[str]:
    """A table of the plans that were timed, the one that was kept in bold, beside what might do as well."""
    tuning = run.tuning
    if tuning is None or len(tuning.overlaps) < 2:
        return []
    baseline = next((found.step for name, found in tuning.overlaps.items() if name.split(" on ")[0] == BASELINE), None)
    lines = ["| plan | a window takes | predicted | gain |", "|---|---:|---:|---:|"]
    for name, found in sorted(tuning.overlaps.items(), key=lambda item: item[1].step):
        predicted = _ms(tuning.predicted[name]) if name in tuning.predicted else ""
        gain = f"{baseline / found.step:.2f}x" if baseline is not None else ""
        lines.append(f"| {f'**{name}**' if name == tuning.kept else name} | {_ms(found.step)} | {predicted} | {gain} |")
    kept = tuning.overlaps[tuning.kept]
    if tuning.ranks > 1 and not kept.bubble_fraction:
        share = min(1.0, TUNED_MICROBATCHES * run.sizes["pp"] / run.microbatches[0])  # of a step, in that window
        alone = _ms(kept.computation + share * tuning.gradient_seconds)
        lines.append(f"| *instead:* data parallelism, if the model fits | | {alone} | |")
    return ["\n".join(lines)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _launch_yaml(run: Run) -> str:
    """A configuration for the launcher. Files are named without their folder, which is this machine's."""
    fields = dataclasses.fields(run.config)
    changed = {f.name: value for f in fields if (value := getattr(run.config, f.name)) != f.default}
    options = {**changed, "plan": run.config.plan}
    for name in ("plan", "schedule", "profile"):
        if options.get(name):
            options[name] = Path(options[name]).name
    launch = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if run.num_ranks > 1 else "NO",
        "use_cpu": run.use_cpu,
        "num_machines": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        "num_processes": run.num_ranks,
        "mixed_precision": run.mixed_precision,
        "parallelism_config": {"helix": {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}},
    }
    return yaml.safe_dump(launch, sort_keys=False)


def _with_tag(tags: str | list[str] | None) -> list[str]:
    given = [tags] if isinstance(tags, str) else list(tags or ())
    return given if TAG in given else [*given, TAG]


def _base_model(path: Path) -> str | list[str] | None:
    """What a card says that the model was made from."""
    return (metadata_load(path) or {}).get("base_model") if path.is_file() else None


def _name_on_hub(model: Any) -> str:
    """What the stock card takes for the base model: the name that the model was loaded by, unless it is a folder."""
    name = str(getattr(model.config, "_name_or_path", None) or "")
    return "" if os.path.isdir(name) else name


def _put_right(text: str, ranks_per_batch: int) -> str:
    """The stock card counts a batch once for every rank, and takes random weights for those of a model."""
    text = _TOTALS.sub(lambda found: f"{found[1]}{int(found[2]) // ranks_per_batch}", text)
    return text.replace(_OF_NO_MODEL, "was trained from scratch on")
