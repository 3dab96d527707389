"""What was measured once, kept on disk, so that the next run of the same case starts at once.

In:   a cache key (hardware, versions, model, mesh, shapes, options), and a `TuningResult` with its plan.
Out:  the same, read back.
Must hold: a result is found by its own key only; a file is whole or not there; what cannot be read, such as a file of
an older format, is measured anew.

There is one folder for each key under `$HELIX_CACHE` (by default `hf_helix` in Hugging Face's cache), with
`profile.json`, `plan.json` and `tuning.json`. People can read them, and `HelixConfig(profile=..., plan=...)` takes the
first two.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME

from hf_helix.measure.overlap import Overlap
from hf_helix.planning.profile import Profile
from hf_helix.planning.profile_file import load_profile, profile_json
from hf_helix.planning.text import format_json
from hf_helix.tuning.result import TuningResult

CACHE_VARIABLE = "HELIX_CACHE"
FORMAT = "hf_helix.tuning/2"


def cache_root() -> Path:
    """Returns the folder that holds all results."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path(HF_HOME, "hf_helix"))


def result_folder(cache_key: Mapping[str, str]) -> Path:
    """Returns the folder of the result of a key, whether it is there or not."""
    digest = hashlib.sha256(json.dumps(dict(cache_key), sort_keys=True).encode()).hexdigest()
    return cache_root() / digest[:20]


def store(cache_key: Mapping[str, str], result: TuningResult, plan_text: str) -> Path:
    """Writes a result and its plan; returns the folder.

    Args:
        cache_key: what the result is found by.
        result: what was measured.
        plan_text: the plan that is kept, as JSON.
    """
    folder = result_folder(cache_key)
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "format": FORMAT,
        "case": dict(cache_key),
        "measured": result.measured,
        "kept": result.kept,
        "bound": result.bound,
        "gradient_bytes": result.gradient_bytes,
        "ranks": result.ranks,
        "schedule": result.schedule,
        "effort": result.effort,
        "predicted": dict(result.predicted),
        "overlaps": {rule: dataclasses.asdict(overlap) for rule, overlap in result.overlaps.items()},
    }
    _write_files(folder, result, plan_text)
    write_file(folder / "tuning.json", format_json(data) + "\n")
    return folder


def export(folder: Path, result: TuningResult, plan_text: str) -> None:
    """Writes a result for people: `tuning.txt`, with `plan.json` and `profile.json` for `hf-helix show`.

    Args:
        folder: where the files are written; it is made if it is not there.
        result: what was measured.
        plan_text: the plan that is kept, as JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_files(folder, result, plan_text)
    write_file(folder / "tuning.txt", f"{result}\n")


def load(cache_key: Mapping[str, str]) -> tuple[TuningResult, str] | None:
    """Returns the result of a key and its plan as JSON; None where there is none that can be read."""
    folder = result_folder(cache_key)
    try:
        data = json.loads((folder / "tuning.json").read_text())
        if data["format"] != FORMAT or data["case"] != dict(cache_key):
            return None
        profile = load_profile(folder / "profile.json") if (folder / "profile.json").is_file() else None
        return _parse_result(data, profile), (folder / "plan.json").read_text()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def today() -> str:
    """Returns the date as text."""
    return time.strftime("%Y-%m-%d")


def _parse_result(data: Mapping[str, Any], profile: Profile | None) -> TuningResult:
    overlaps = {rule: _parse_overlap(figures) for rule, figures in data["overlaps"].items()}
    if data["kept"] not in overlaps:
        raise ValueError(f"no figures of the plan that was kept, {data['kept']!r}")
    keys = ("kept", "predicted", "bound", "measured", "gradient_bytes", "ranks", "schedule", "effort")
    figures = {key: data[key] for key in keys}
    return TuningResult(overlaps=overlaps, profile=profile, **figures)


def _parse_overlap(figures: Mapping[str, Any]) -> Overlap:
    times = [figures[key] for key in ("step", "computation", "communication")]
    if not all(isinstance(seconds, float) and math.isfinite(seconds) and seconds >= 0 for seconds in times):
        raise ValueError(f"impossible times: {times}")
    return Overlap(**figures)


def _write_files(folder: Path, result: TuningResult, plan_text: str) -> None:
    if result.profile is not None:
        write_file(folder / "profile.json", profile_json(result.profile))
    write_file(folder / "plan.json", plan_text)


def write_file(path: Path, text: str) -> None:
    """Writes a file that is whole or not there, also where several processes write it."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(text)
    os.replace(scratch, path)
