"""What was measured once, kept on disk, so that the next run of the same case starts at once.

In:   what a case is (hardware, versions, model, mesh, shapes, options), and a `Tuning` with its plan.
Out:  the same, read back.
Must hold: another case never finds it; a file is whole or not there; what cannot be read is measured anew.

One folder per case under `$HELIX_CACHE` (by default `hf_helix` in Hugging Face's cache), with `profile.json`,
`plan.json` and `tuning.json`: files for people, too, and for `HelixConfig(profile=..., plan=...)`.
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

from hf_helix.planning.profile_file import load_profile, profile_json
from hf_helix.planning.text import format_json
from hf_helix.tuning.autotune import Tuning
from hf_helix.tuning.measure.overlap import Overlap

CACHE_VARIABLE = "HELIX_CACHE"
FORMAT = "hf_helix.tuning/2"


def cache_root() -> Path:
    """The folder that holds all cases."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path(HF_HOME, "hf_helix"))


def case_folder(case: Mapping[str, str]) -> Path:
    """Where a case is kept."""
    digest = hashlib.sha256(json.dumps(dict(case), sort_keys=True).encode()).hexdigest()
    return cache_root() / digest[:20]


def store(case: Mapping[str, str], tuning: Tuning, plan_text: str) -> Path:
    """Keep a tuning; returns the folder."""
    folder = case_folder(case)
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "format": FORMAT,
        "case": dict(case),
        "measured": tuning.measured,
        "kept": tuning.kept,
        "bound": tuning.bound,
        "gradient_bytes": tuning.gradient_bytes,
        "ranks": tuning.ranks,
        "schedule": tuning.schedule,
        "effort": tuning.effort,
        "predicted": dict(tuning.predicted),
        "overlaps": {rule: dataclasses.asdict(overlap) for rule, overlap in tuning.overlaps.items()},
    }
    _write_files(folder, tuning, plan_text)
    _write(folder / "tuning.json", format_json(data) + "\n")
    return folder


def export(folder: Path, tuning: Tuning, plan_text: str) -> None:
    """Write what was found for people: `tuning.txt`, beside `plan.json` and `profile.json` for `hf-helix show`."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_files(folder, tuning, plan_text)
    _write(folder / "tuning.txt", f"{tuning}\n")


def load(case: Mapping[str, str]) -> tuple[Tuning, str] | None:
    """The tuning and the plan of a case; None where there is none that can be read."""
    folder = case_folder(case)
    try:
        data = json.loads((folder / "tuning.json").read_text())
        if data["format"] != FORMAT or data["case"] != dict(case):
            return None
        profile = load_profile(folder / "profile.json") if (folder / "profile.json").is_file() else None
        return _tuning(data, profile), (folder / "plan.json").read_text()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def today() -> str:
    """The date, for figures."""
    return time.strftime("%Y-%m-%d")


def _tuning(data: Mapping[str, Any], profile: Any) -> Tuning:
    overlaps = {rule: _overlap(figures) for rule, figures in data["overlaps"].items()}
    if data["kept"] not in overlaps:
        raise ValueError(f"no figures of the plan that was kept, {data['kept']!r}")
    keys = ("kept", "predicted", "bound", "measured", "gradient_bytes", "ranks", "schedule", "effort")
    figures = {key: data[key] for key in keys}
    return Tuning(overlaps=overlaps, profile=profile, **figures)


def _overlap(figures: Mapping[str, Any]) -> Overlap:
    times = [figures[key] for key in ("step", "computation", "communication")]
    if not all(isinstance(seconds, float) and math.isfinite(seconds) and seconds >= 0 for seconds in times):
        raise ValueError(f"impossible times: {times}")
    return Overlap(**figures)


def _write_files(folder: Path, tuning: Tuning, plan_text: str) -> None:
    if tuning.profile is not None:
        _write(folder / "profile.json", profile_json(tuning.profile))
    _write(folder / "plan.json", plan_text)


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(text)
    os.replace(scratch, path)
