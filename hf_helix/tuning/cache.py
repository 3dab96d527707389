"""The cache of results, so that the next run of the same case starts at once.

In:   a cache key (hardware, versions, model, mesh, shapes, options), and a `TuningResult` with its plan.
Out:  the same, read back; the fingerprint of a case, and digests of models and files.
Must hold: a result is found by its own key only; a change of graphs or operator times changes the key; a file is
complete or not there; an unreadable file, such as a file of an older format, is measured anew.

There is a folder for each key under `$HELIX_CACHE` (by default `hf_helix` in Hugging Face's cache), with
`profile.json`, `plan.json` and `tuning.json`. People can read them, and `HelixConfig(profile=..., plan=...)` takes the
first two.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hf_helix.config import SCHEDULES, HelixConfig
from hf_helix.measure.cache_folder import cache_root, write_file
from hf_helix.measure.overlap import Overlap
from hf_helix.models.graph.context import LossTweaks
from hf_helix.planning.text import format_json
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.timing.profile_file import load_profile, profile_json
from hf_helix.planning.timing.recompute import NONE
from hf_helix.planning.window.layout import Layout
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.tuning.result_text import TuningResult
from hf_helix.version import __version__

FORMAT = "hf_helix.tuning/1"
FIGURES = ("measured", "bound", "gradient_bytes", "ranks", "schedule")


def result_folder(cache_key: Mapping[str, str]) -> Path:
    """Returns the folder of the result of a key; it may be absent."""
    digest = hashlib.sha256(json.dumps(dict(cache_key), sort_keys=True).encode()).hexdigest()
    return cache_root() / digest[:20]


def store(cache_key: Mapping[str, str], result: TuningResult, plan_text: str) -> Path:
    """Writes a result and its chosen plan, as JSON; returns the folder."""
    folder = result_folder(cache_key)
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "format": FORMAT,
        "case": dict(cache_key),
        "kept": result.chosen,
        "effort": result.tier,
        **{name: getattr(result, name) for name in FIGURES},
        "predicted": dict(result.predicted),
        "overlaps": {rule: dataclasses.asdict(overlap) for rule, overlap in result.overlaps.items()},
    }
    _write_files(folder, result, plan_text)
    write_file(folder / "tuning.json", format_json(data) + "\n")
    return folder


def export(folder: Path, result: TuningResult, plan_text: str) -> None:
    """Writes a result for people: `tuning.txt`, with `plan.json` and `profile.json` for `hf-helix show`."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_files(folder, result, plan_text)
    write_file(folder / "tuning.txt", f"{result}\n")


def load(cache_key: Mapping[str, str]) -> tuple[TuningResult, str] | None:
    """Returns the result of a key and its plan as JSON; None without a readable result."""
    folder = result_folder(cache_key)
    try:
        data = json.loads((folder / "tuning.json").read_text())
        if data["format"] != FORMAT or data["case"] != dict(cache_key):
            return None
        profile = load_profile(folder / "profile.json") if (folder / "profile.json").is_file() else None
        return _parse_result(data, profile), (folder / "plan.json").read_text()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def kept_profile(about: Mapping[str, str], layout: Layout) -> Profile | None:
    """Returns the newest profile of the same operators on the same machine, of this model or of another; None without
    one.

    Args:
        about: the case, see `Profile.about`.
        layout: the layout of the run.
    """
    wanted = {name: value for name, value in about.items() if name not in MODEL_KEYS}
    files = {path: path.stat().st_mtime for path in cache_root().glob("*/profile.json")}
    for path in sorted(files, key=files.__getitem__, reverse=True):
        try:
            known = load_profile(path, about=wanted)
            if {*known.about} - {*about} or _moved(known.layout) != _moved(layout):
                continue
            return dataclasses.replace(load_profile(path, about=wanted, layout=layout), about=dict(about))
        except ValueError:  # of another case, or damaged
            continue
    return None


def _moved(layout: Layout) -> list[tuple[bool, int]]:
    """The traffic of a layout, whose times a profile holds one by one."""
    return [(bool(each.adders), each.bytes) for each in layout.traffic]


def _parse_result(data: Mapping[str, Any], profile: Profile | None) -> TuningResult:
    overlaps = {rule: _parse_overlap(figures) for rule, figures in data["overlaps"].items()}
    if data["kept"] not in overlaps:
        raise ValueError(f"no figures of the plan that was kept, {data['kept']!r}")
    figures = {name: data[name] for name in FIGURES}
    return TuningResult(
        data["kept"], overlaps, predicted=data["predicted"], profile=profile, tier=data["effort"], **figures
    )


def _parse_overlap(figures: Mapping[str, Any]) -> Overlap:
    times = [figures[key] for key in ("step", "computation", "communication")]
    if not all(isinstance(seconds, float) and math.isfinite(seconds) and seconds >= 0 for seconds in times):
        raise ValueError(f"impossible times: {times}")
    return Overlap(**figures)


def _write_files(folder: Path, result: TuningResult, plan_text: str) -> None:
    if result.profile is not None:
        write_file(folder / "profile.json", profile_json(result.profile))
    write_file(folder / "plan.json", plan_text)


# -- the fingerprint of a case ---------------------------------------------------------------------------------------


USUAL_LOSS = LossTweaks()
MODEL_KEYS = ("model", "configuration")
"""Names in a case that tell models with equal operators apart."""

PER_LAYER = ("layer_types", "mlp_layer_types")
OF_MODELS = (
    *("_name_or_path", "architectures", "transformers_version", "use_cache", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "num_hidden_layers", "n_layer", "max_window_layers"),
)
"""Options of a configuration, with an entry for each layer, and that no operator depends on."""

OPERATOR_OPTIONS = ("cp_method", "cp_recurrence", "expert_capacity_factor", "fused_kernels")
"""Options of `HelixConfig` that change operators, and neither shapes of weights nor the layout."""


def fingerprint(
    model: Any,
    mesh: Mesh,
    config: HelixConfig,
    autocast_dtype: torch.dtype | None = None,
    recompute: Sequence[str] = (),
    loss: LossTweaks = USUAL_LOSS,
) -> dict[str, str]:
    """Returns the case of measurements of a model, as names and values.

    Args:
        model: a Transformers model, before it is cut.
        config: has the formats and kernels of matrix products.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.
        recompute: the recompute mode of every layer, see `hf_helix.engine.cut.recompute`.
        loss: additions to the loss.
    """
    shared = [(name, mesh.sizes[name]) for name in ("tp", "pp", "cp", "ep")]
    runs = [f"{mode} x {len(list(layers))}" for mode, layers in itertools.groupby(recompute)]
    usual = HelixConfig()
    changed = [name for name in OPERATOR_OPTIONS if getattr(config, name) != getattr(usual, name)]
    again = {} if set(recompute) <= {NONE} else {"recompute": recompute[0] if len(runs) == 1 else ", ".join(runs)}
    types = f" {autocast_dtype}".replace("torch.", "") if autocast_dtype else ""
    types += f" float8 {config.float8_recipe}" if config.float8_recipe else ""
    return {
        "model": f"{type(model).__name__} {model_digest(model)}{types}",
        "operators": f"{type(model).__name__} {operators_digest(model)}{types}",
        "mesh": " ".join(f"{name}={size}" for name, size in shared if size > 1 or name == "tp"),
        **_sharding(mesh),
        "configuration": configuration_digest(model.config),
        "attention": str(model.config._attn_implementation),
        **again,
        **({} if loss == USUAL_LOSS else {"loss": _loss_text(loss)}),
        **{name: str(getattr(config, name)) for name in changed},
        "transformers": version("transformers"),
        "hf_helix": __version__,
    }


def _sharding(mesh: Mesh) -> dict[str, str]:
    """The number of replicas, and the sharding of weights over them."""
    if mesh.replica_axes is None:
        return {"replicas": str(mesh.sizes["dp"])} if mesh.sizes["dp"] > 1 else {}
    once = mesh.replica_axes.gather is mesh.replica_axes.reduce
    copies = f" in {axis.size} copies" if (axis := mesh.replica_axes.copies) else ""
    host = f", {mesh.host_link.holds} on the host" if mesh.host_link.holds else ""
    return {"weights": f"{'stepped by' if once else 'spread over'} {mesh.replica_axes.gather.size}{copies}{host}"}


def model_digest(model: Any, with_types: bool = True) -> str:
    """Returns a digest of the names and shapes of a model's parameters, of frozen ones as such; of types if asked."""
    weights = [
        (
            name,
            tuple(weight.shape),
            *((str(weight.dtype),) if with_types else ()),
            *(() if weight.requires_grad else ("frozen",)),
        )
        for name, weight in model.named_parameters()
    ]
    return hashlib.sha256(json.dumps(weights).encode()).hexdigest()[:12]


def operators_digest(model: Any) -> str:
    """Returns a digest of a model's distinct operators: equal for models of a class that differ in the number of equal
    layers, or in names and tokens, only."""
    every = [
        (re.sub(r"\.\d+\.", ".*.", name), tuple(p.shape), p.dtype, p.requires_grad)
        for name, p in model.named_parameters()
    ]
    return _digest([sorted(map(str, {*every})), _operator_options(model.config.to_dict())])


def _operator_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that operators may depend on; of lists with an entry for each layer, the distinct entries."""
    nested = {name: _operator_options(value) for name, value in options.items() if isinstance(value, Mapping)}
    each = {name: sorted({*map(str, options[name])}) for name in PER_LAYER if isinstance(options.get(name), list)}
    return {name: value for name, value in {**options, **nested, **each}.items() if name not in OF_MODELS}


def _loss_text(loss: LossTweaks) -> str:
    """The additions to a loss that are not the usual ones."""
    values = {field.name: getattr(loss, field.name) for field in dataclasses.fields(loss)}
    changed = {name: value for name, value in values.items() if value != getattr(USUAL_LOSS, name)}
    return " ".join(
        f"{name}={value if isinstance(value, (bool, float)) else type(value).__qualname__}"
        for name, value in changed.items()
    )


def configuration_digest(options: Any) -> str:
    """Returns a digest of a model's configuration: heads, chosen experts, windows and dropout change no shape of a
    weight."""
    without = ("_name_or_path", "transformers_version")
    values = {name: value for name, value in options.to_dict().items() if name not in without}
    return _digest(values)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


def file_digest(path: str | None) -> str:
    """Returns a digest of the content of a file; an empty text without a path."""
    return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def shared_options(config: HelixConfig) -> str:
    """Returns the options that all ranks must have in common, an option on each line; the contents of files, whose
    paths may differ between hosts, and no plan, since plans are compared once they are made."""
    values = dataclasses.asdict(config)
    del values["plan"]
    values["profile"] = file_digest(config.profile)
    if config.schedule not in SCHEDULES:
        values["schedule"] = Path(config.schedule).read_text().strip()
    return "\n".join(f"{name}={value}" for name, value in values.items())
