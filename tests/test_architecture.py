"""Nothing imports upward, heavy packages stay where they belong, and planning runs without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import hf_helix

PACKAGE = Path(hf_helix.__file__).parent

LEVELS = {"config": 0, "upstream": 0, "planning": 0, "operators": 1, "adapters": 1, "runtime": 2}
LEVELS |= dict.fromkeys(("report", "cache", "tuner", "checkpoint", "adapter_files", "checks", "evaluation"), 3)
LEVELS |= dict.fromkeys(
    ("recompute", "stored", "loading", "saving", "safetensors_file", "direct_use", "workload", "sizes", "engine"), 3
)
TOP = 4  # everything else: trainer, refusals, plugin, cli, ...
IMPORTERS = {
    "accelerate": {"plugin", "loop"},
    "transformers": {
        "trainer",
        "refusals",
        "adapters",
        "workload",
        "loading",
        "saving",
        "stored",
        "loop",
        "resume",
        "overrides",
        "search_hooks",
        "takeover",
    },
}
ONLY = (
    "only adapters, loading, loop, overrides, refusals, resume, saving, search_hooks, stored, takeover, trainer, "
    "workload"
)
LAZY = {"yaml", "psutil"}  # what level 0 may import inside a function


class Import(NamedTuple):
    """One imported module and where; `lazy` means inside a function."""

    target: str
    line: int
    lazy: bool


def imports_of(path: Path, module: str) -> Iterator[Import]:
    """Every import of a file, wherever it stands. `from a import b` counts as `a.b`, which may be a module."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                base = ".".join([*parents[: len(parents) - node.level + 1], *base.split(".")]).strip(".")
            yield from (Import(f"{base}.{alias.name}", node.lineno, lazy) for alias in node.names)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy)

    yield from visit(ast.parse(path.read_text()), False)


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        yield ".".join([hf_helix.__name__, *(part for part in parts if part != "__init__")]), path


def home(module: str) -> str:
    """The part of the package that a module belongs to: `planning`, `trainer`, ...; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def violations(package: Path) -> list[str]:
    """Every import that breaks a rule of the design, as `file:line: ...`."""
    found = []
    for module, path in modules(package):
        level = LEVELS.get(home(module), TOP)
        for target, line, lazy in imports_of(path, module):
            top = target.split(".")[0]
            where = f"{path.relative_to(package)}:{line}: "
            if top == hf_helix.__name__:
                if home(target) != "__version__" and LEVELS.get(home(target), TOP) > level:
                    found.append(f"{where}imports upward: {target}")
            elif level == 0 and top not in sys.stdlib_module_names and not (lazy and top in LAZY):
                found.append(f"{where}is not the standard library: {target}")
            if home(module) not in IMPORTERS.get(top, {home(module)}):
                found.append(f"{where}only {', '.join(sorted(IMPORTERS[top]))} may import {top}")
    return found


def test_the_package_keeps_the_import_rule():
    assert violations(PACKAGE) == []


def test_the_scan_sees_the_package():
    """Were the scan blind, the rule would hold of anything."""
    seen = {
        (home(module), found.target.split(".")[0])
        for module, path in modules(PACKAGE)
        for found in imports_of(path, module)
    }
    expected = {("plugin", "accelerate"), ("trainer", "transformers"), ("adapters", "transformers"), ("config", "yaml")}
    assert expected <= seen
    assert {*LEVELS, "trainer", "plugin"} <= {home(module) for module, _ in modules(PACKAGE)}


@pytest.mark.parametrize(
    ("file", "source", "violation"),
    [
        ("planning/plan.py", "import torch", "planning/plan.py:1: is not the standard library: torch"),
        ("planning/plan.py", "def f():\n    import torch", "planning/plan.py:2: is not the standard library: torch"),
        ("planning/plan.py", "import yaml", "planning/plan.py:1: is not the standard library: yaml"),
        ("config.py", "if True:\n    from torch import nn", "config.py:2: is not the standard library: torch.nn"),
        (
            "planning/a.py",
            "from hf_helix.operators import unit",
            "planning/a.py:1: imports upward: hf_helix.operators.unit",
        ),
        ("planning/a.py", "from ..runtime import mesh", "planning/a.py:1: imports upward: hf_helix.runtime.mesh"),
        ("operators/a.py", "import hf_helix.runtime.mesh", "operators/a.py:1: imports upward: hf_helix.runtime.mesh"),
        ("runtime/a.py", "from hf_helix import plugin", "runtime/a.py:1: imports upward: hf_helix.plugin"),
        ("runtime/a.py", "from hf_helix import HelixConfig", "runtime/a.py:1: imports upward: hf_helix.HelixConfig"),
        ("runtime/a.py", "from hf_helix import engine", "runtime/a.py:1: imports upward: hf_helix.engine"),
        ("engine.py", "from hf_helix.trainer import A", "engine.py:1: imports upward: hf_helix.trainer.A"),
        ("engine.py", "from transformers import A", f"engine.py:1: {ONLY} may import transformers"),
        ("runtime/a.py", "import accelerate.utils", "runtime/a.py:1: only loop, plugin may import accelerate"),
        ("trainer.py", "from accelerate import Accelerator", "trainer.py:1: only loop, plugin may import accelerate"),
        (
            "runtime/a.py",
            "class A:\n    import transformers",
            f"runtime/a.py:2: {ONLY} may import transformers",
        ),
        (
            "operators/a.py",
            "import transformers",
            f"operators/a.py:1: {ONLY} may import transformers",
        ),
    ],
)
def test_the_scan_finds(tmp_path: Path, file: str, source: str, violation: str):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(source)
    assert violations(tmp_path) == [violation]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("config.py", "import json\ndef f():\n    import yaml, psutil"),
        ("planning/__init__.py", "from . import graph\nfrom .graph import Graph"),
        ("operators/a.py", "import torch\nfrom hf_helix.planning import graph"),
        ("runtime/a.py", "import torch\nfrom hf_helix.adapters import base\nfrom hf_helix.config import HelixConfig"),
        ("plugin.py", "import accelerate\nfrom hf_helix.runtime import mesh"),
        ("engine.py", "from hf_helix import __version__, tuner"),
    ],
)
def test_the_scan_lets_pass(tmp_path: Path, file: str, source: str):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(source)
    assert violations(tmp_path) == []


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60)


WITHOUT = """
import importlib, pkgutil, sys
for name in ("torch", "transformers", "accelerate", "safetensors", "numpy", "yaml", "psutil"):
    sys.modules[name] = None  # importing it is now an error
"""


def test_planning_and_config_import_without_anything_else():
    result = run_python(
        WITHOUT
        + """
import hf_helix.planning, hf_helix.config
names = [module.name for module in pkgutil.walk_packages(hf_helix.planning.__path__, "hf_helix.planning.")]
for name in names:
    importlib.import_module(name)
print(*names, hf_helix.HelixConfig(tp_size=2).tp_size)
"""
    )
    assert result.returncode == 0, result.stderr
    *names, size = result.stdout.split()
    assert size == "2"
    here = {f"hf_helix.planning.{path.stem}" for path in (PACKAGE / "planning").glob("[!_]*.py")}
    assert set(names) >= here > {"hf_helix.planning.graph"}


def test_the_block_on_torch_works():
    result = run_python(WITHOUT + "import hf_helix.operators.unit")
    assert result.returncode != 0
    assert "import of torch halted" in result.stderr


def test_importing_the_package_is_quick():
    result = run_python("import hf_helix, sys; print({'torch', 'transformers', 'accelerate'} & set(sys.modules))")
    assert (result.returncode, result.stdout.strip()) == (0, "set()"), result.stderr
