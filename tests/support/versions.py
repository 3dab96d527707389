"""The installed versions: cases that an older one lacks are skipped there, and say why; a run can be recorded."""

import json
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata

import pytest
import torch
import transformers
from packaging.version import Version
from support.paths import ROOT

INSTALLED = Version(transformers.__version__)
RECORD = ROOT / "docs" / "versions.json"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl")
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed")


def since(version: str, what: str) -> pytest.MarkDecorator:
    """Skips a case where the installed Transformers is older than what the case is about; from then on, it must pass.

    Args:
        version: of Transformers, the first that has it.
        what: the class or the form of it that is needed.
    """
    reason = f"{what} came with Transformers {version}; installed is {INSTALLED}"
    return pytest.mark.skipif(Version(version) > INSTALLED, reason=reason)


def record(stats: Mapping[str, Sequence[object]], what: Sequence[str]) -> None:
    """Adds the versions and the outcomes of this run to docs/versions.json, in the place of one of the same tests.

    Args:
        stats: the tests of every outcome, as pytest reports them.
        what: the tests that were asked for.
    """
    installed = {dist.metadata["Name"].lower() for dist in metadata.distributions()}
    found = {
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in PACKAGES if name in installed},
        },
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})",
        "tests": " ".join(what) or "all",
    }
    runs = json.loads(RECORD.read_text()) if RECORD.is_file() else []
    kept = [run for run in runs if {**run, **found} != run]
    counts = {outcome: len(stats[outcome]) for outcome in OUTCOMES if stats.get(outcome)}
    RECORD.write_text(json.dumps([*kept, {"date": time.strftime("%Y-%m-%d"), **found, **counts}], indent=1) + "\n")
