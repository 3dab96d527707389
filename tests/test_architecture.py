"""Nothing imports upward, heavy packages and private names stay where they belong, planning runs without torch."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hf_helix

PACKAGE = Path(hf_helix.__file__).parent
HOME = PACKAGE.parent

# The one rule of the package: a part imports what stands in its own row or in a row above it.
ORDER: tuple[tuple[str, ...], ...] = (
    ("config", "version"),
    ("planning",),
    ("operators",),
    ("models", "runtime"),
    ("measure", "tuning", "checkpoint"),
    ("report",),
    ("engine",),
    ("doctor",),
    ("testing",),
    ("integrations", "cli", "__main__"),
)
LEVELS = {part: level for level, parts in enumerate(ORDER) for part in parts}
STANDARD_LIBRARY_ONLY = {"config", "planning", "version"}
LAZY = {"yaml"}  # what these may import inside a function
IMPORTERS = {
    "accelerate": ("integrations.accelerate",),
    "transformers": ("models", "checkpoint", "engine", "integrations"),
}

PRIVATE = re.compile(r"\._[a-zA-Z]")


class Import(NamedTuple):
    """One imported module and where; `lazy` means inside a function."""

    target: str
    line: int
    lazy: bool


@functools.cache
def imports_of(path: Path, module: str) -> tuple[Import, ...]:
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

    return tuple(visit(ast.parse(path.read_text()), False))


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        yield ".".join([hf_helix.__name__, *(part for part in parts if part != "__init__")]), path


def part_of(module: str) -> str:
    """The part that a module belongs to: `planning`, `engine`, ...; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def violations(package: Path) -> list[str]:
    """Every import that breaks a rule of the design, as `file:line: ...`."""
    result = []
    for module, path in modules(package):
        part = part_of(module)
        if not part:
            continue  # hf_helix/__init__.py loads the public names from wherever they are
        if part not in LEVELS:
            result.append(f"{path.relative_to(package)}: the part {part} is not in ORDER")
            continue
        for target, line, lazy in imports_of(path, module):
            top = target.split(".")[0]
            where = f"{path.relative_to(package)}:{line}: "
            if top == hf_helix.__name__:
                if LEVELS.get(part_of(target), len(ORDER)) > LEVELS[part]:
                    result.append(f"{where}imports upward: {target}")
            elif part in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names and not (lazy and top in LAZY):
                result.append(f"{where}is not the standard library: {target}")
            if top in IMPORTERS and not within(module, IMPORTERS[top]):
                result.append(f"{where}only {', '.join(IMPORTERS[top])} may import {top}")
    return result


def within(module: str, parts: tuple[str, ...]) -> bool:
    """Whether a module lies in one of these parts."""
    return any(f"{module}.".startswith(f"{hf_helix.__name__}.{part}.") for part in parts)


def test_the_package_keeps_the_import_rule():
    assert violations(PACKAGE) == []
    # Were the scan blind, the rule would hold of anything.
    seen = {
        (part_of(module), result.target.split(".")[0])
        for module, path in modules(PACKAGE)
        for result in imports_of(path, module)
    }
    expected = {("integrations", "accelerate"), ("integrations", "transformers"), ("models", "transformers")}
    assert expected | {("config", "yaml")} <= seen
    assert {part_of(module) for module, _ in modules(PACKAGE)} == {*LEVELS, ""}


def test_the_scan_finds_and_lets_pass(tmp_path: Path):
    for file, source in {
        "planning/plan.py": "import torch\ndef f():\n    import torch\nimport yaml",
        "config.py": "import json\nif True:\n    from torch import nn\ndef f():\n    import yaml",
        "planning/__init__.py": "from . import graph\nfrom .graph import Graph",
        "planning/a.py": "from hf_helix.operators import unit\nfrom ..runtime import mesh",
        "operators/a.py": "import torch\nimport hf_helix.runtime.mesh\nfrom hf_helix.planning import graph",
        "runtime/a.py": "import hf_helix.models\nfrom hf_helix import tuning, HelixConfig\nimport accelerate.utils",
        "integrations/trainer/a.py": "from accelerate import Accelerator",
        "integrations/accelerate/a.py": "import accelerate, transformers\nfrom hf_helix.runtime import mesh",
        "tuning/a.py": "class A:\n    from transformers import A",
        "engine/a.py": "from hf_helix.version import __version__\nfrom hf_helix.tuning import tuner",
        "other/a.py": "",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    assert violations(tmp_path) == [
        "config.py:3: is not the standard library: torch.nn",
        "integrations/trainer/a.py:1: only integrations.accelerate may import accelerate",
        "operators/a.py:2: imports upward: hf_helix.runtime.mesh",
        "other/a.py: the part other is not in ORDER",
        "planning/a.py:1: imports upward: hf_helix.operators.unit",
        "planning/a.py:2: imports upward: hf_helix.runtime.mesh",
        "planning/plan.py:1: is not the standard library: torch",
        "planning/plan.py:3: is not the standard library: torch",
        "planning/plan.py:4: is not the standard library: yaml",
        "runtime/a.py:2: imports upward: hf_helix.tuning",
        "runtime/a.py:2: imports upward: hf_helix.HelixConfig",
        "runtime/a.py:3: only integrations.accelerate may import accelerate",
        "tuning/a.py:2: only models, checkpoint, engine, integrations may import transformers",
    ]


def circles(package: Path, folders: bool = False) -> list[list[str]]:
    """The groups of files, or of folders, that import each other, over any number of steps; imports for types count."""
    paths = dict(modules(package))

    def node(module: str) -> str:
        return module if not folders or paths[module].name == "__init__.py" else module.rpartition(".")[0]

    targets: dict[str, set[str]] = {}
    for module, path in paths.items():
        read = (
            next((name for name in (each.target, each.target.rpartition(".")[0]) if name in paths), "")
            for each in imports_of(path, module)
        )
        nodes = {node(name) for name in read if name} - {node(module), hf_helix.__name__}
        targets.setdefault(node(module), set()).update(nodes)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            waiting += targets.get(waiting.pop(), set()) - seen
            seen |= set(waiting)
        return seen

    reaches = {each: reached(each) for each in targets if each != hf_helix.__name__}
    groups = {
        tuple(sorted(other for other in reaches[each] if each in reaches.get(other, ())))
        for each in reaches
        if each in reaches[each]
    }
    return sorted(list(group) for group in groups)


def test_no_files_import_each_other(tmp_path: Path):
    assert circles(PACKAGE) == []
    # The scan finds circles.
    (tmp_path / "a.py").write_text("from hf_helix.b import B")
    (tmp_path / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hf_helix.c import C")
    (tmp_path / "c.py").write_text("def f():\n    from hf_helix import a")
    (tmp_path / "d.py").write_text("from hf_helix.a import A")
    assert circles(tmp_path) == [["hf_helix.a", "hf_helix.b", "hf_helix.c"]]


def test_no_folders_import_each_other(tmp_path: Path):
    assert circles(PACKAGE, folders=True) == []
    # The scan finds folders in a circle, though no files are.
    for file, source in {
        "one/a.py": "from hf_helix.two.a import A",
        "one/b.py": "",
        "two/a.py": "",
        "two/b.py": "from hf_helix.one.b import B",
        "three/a.py": "from hf_helix.one import a",
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(source)
    assert circles(tmp_path) == []
    assert circles(tmp_path, folders=True) == [["hf_helix.one", "hf_helix.two"]]


LISTED = re.compile(r"^([a-z_]+)/? {2,}\S", re.MULTILINE)  # a row of the list in a package's docstring


def unlisted(package: Path) -> list[str]:
    """What a package's docstring lists and its folder lacks, or the reverse; nothing where it has no list."""
    words = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    listed = set(LISTED.findall(words))
    files = {path.stem for path in package.glob("*.py")} - {"__init__"}
    folders = {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    missing = {name for name in files | folders if not re.search(rf"\b{name}\b", words)}
    return sorted(missing | (listed - files - folders)) if len(listed) > 1 else []


def test_lists_of_modules_are_complete(tmp_path: Path):
    folders = [path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    assert {str(folder.relative_to(PACKAGE)): unlisted(folder) for folder in folders if unlisted(folder)} == {}
    # The comparison with lists finds.
    (tmp_path / "__init__.py").write_text('"""A package.\n\nhere   a file\ngone   none\n"""')
    for name in ("here", "new"):
        (tmp_path / f"{name}.py").touch()
    assert unlisted(tmp_path) == ["gone", "new"]


def private_imports(folder: Path) -> list[str]:
    """Every private name of hf_helix that a file imports from another, as `file:line: ...`."""
    return [
        f"{path.relative_to(folder.parent)}:{line}: {target}"
        for path in sorted(folder.rglob("*.py"))
        for target, line, _ in imports_of(path, ".".join(path.relative_to(folder.parent).with_suffix("").parts))
        if target.startswith(f"{hf_helix.__name__}.") and PRIVATE.search(target)
    ]


def test_private_names_stay_in_their_file(tmp_path: Path):
    folders = ("hf_helix", "tests", "benchmarks", "recipes")
    assert [found for folder in folders for found in private_imports(HOME / folder)] == []
    # The scan finds private names.
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "a.py").write_text(
        "from hf_helix import __version__\nfrom hf_helix.config import RULES, _given\nfrom torch import _C\n"
        "def f():\n    from hf_helix.runtime._inner import public\n"
    )
    assert private_imports(tmp_path / "benchmarks") == [
        "benchmarks/a.py:2: hf_helix.config._given",
        "benchmarks/a.py:5: hf_helix.runtime._inner.public",
    ]


MANY = 3  # parameters from which on a public function says what each of them is


class Method(NamedTuple):
    """A function of a class, or of a module (`owner` is empty)."""

    owner: str
    node: ast.FunctionDef

    @property
    def words(self) -> str:
        return ast.get_docstring(self.node) or ""

    def parameters(self) -> int:
        """How many a caller gives by name or place, without `self`, `cls`, `*args` and `**kwargs`."""
        given = self.node.args
        static = any(ast.unparse(each) == "staticmethod" for each in self.node.decorator_list)
        return len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - bool(self.owner and not static)


def public_functions(body: list[ast.stmt], owner: str = "") -> Iterator[Method]:
    """Functions and methods without a leading underscore; none of those that stand inside a function."""
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield Method(owner, node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, node.name)
        elif isinstance(node, ast.If):
            yield from public_functions([*node.body, *node.orelse], owner)


def without_args(package: Path) -> list[str]:
    """Public functions of many parameters that several files call and whose docstring has no `Args:`.

    Each as `file:line: name`. A function that at most one other file imports is described by its names and types. A
    method is described where a class of the package says its parameters, or in another package: without a docstring.
    """
    importers: dict[str, set[str]] = {}
    for module, path in modules(package):
        for each in imports_of(path, module):
            importers.setdefault(each.target, set()).add(module)
    functions = [
        (path, f"{module}.{each.owner or each.node.name}", each)
        for module, path in modules(package)
        for each in public_functions(ast.parse(path.read_text()).body)
    ]
    described = {each.node.name for _, _, each in functions if each.owner and "Args:" in each.words}
    return [
        f"{path.relative_to(package)}:{each.node.lineno}: {each.owner}{'.' if each.owner else ''}{each.node.name}"
        for path, target, each in functions
        if each.parameters() >= MANY
        and len(importers.get(target, ())) > 1
        and "Args:" not in each.words
        and not (each.owner and (each.node.name in described or not each.words))
    ]


def test_functions_of_many_parameters_say_what_they_are(tmp_path: Path):
    assert without_args(PACKAGE) == []
    # The scan finds parameters without words.
    (tmp_path / "a.py").write_text(
        "class Base:\n"
        "    def told(self, a, b, c):\n        'Adds.\\n\\nArgs:\\n    a, b, c: terms.'\n"
        "    def untold(self, a, b, c):\n        'Adds.'\n"
        "class Heir(Base):\n"
        "    def told(self, a, b, c):\n        pass\n"
        "    def few(self, a, b, *more):\n        'Adds.'\n"
        "def untold(a, b, *, c):\n    'Adds.'\n"
        "def _private(a, b, c):\n    'Adds.'\n"
        "def alone(a, b, c):\n    'Adds.'\n"
    )
    for name in ("b", "c"):
        (tmp_path / f"{name}.py").write_text("from hf_helix.a import Base, Heir, untold")
    (tmp_path / "d.py").write_text("from hf_helix.a import alone")
    assert without_args(tmp_path) == ["a.py:4: Base.untold", "a.py:11: untold"]


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
    here = {module for module, _ in modules(PACKAGE) if module.startswith("hf_helix.planning.")}
    assert set(names) == here
    assert "hf_helix.planning.graph.operator" in here
    # The block on torch works.
    result = run_python(WITHOUT + "import hf_helix.operators.units.unit")
    assert result.returncode != 0
    assert "import of torch halted" in result.stderr
    # Importing the package is quick.
    result = run_python("import hf_helix, sys; print({'torch', 'transformers', 'accelerate'} & set(sys.modules))")
    assert (result.returncode, result.stdout.strip()) == (0, "set()"), result.stderr
