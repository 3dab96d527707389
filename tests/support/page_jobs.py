"""Runs with the family that `docs/adding_a_model.md` adds, by the code on that page."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from types import ModuleType
from typing import Any

from support import pipeline_jobs
from support.paths import ROOT

PAGE = ROOT / "docs" / "adding_a_model.md"


def blocks() -> list[str]:
    """The Python of the page."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def register() -> None:
    """What `import starcoder2` does where the first block of the page is a file of that name."""
    if "starcoder2" not in sys.modules:
        module = ModuleType("starcoder2")
        exec(compile(blocks()[0], "starcoder2.py", "exec"), module.__dict__)
        sys.modules["starcoder2"] = module


def windows(**options: Any) -> list[dict[str, Any]]:
    """See `pipeline_jobs.windows`."""
    register()
    return pipeline_jobs.windows(**options)


def check(folder: str) -> None:
    """Run the page's own check."""
    register()
    with contextlib.chdir(folder):
        os.makedirs("runs", exist_ok=True)
        exec(compile(blocks()[1], "check.py", "exec"), {"__name__": "__main__"})
