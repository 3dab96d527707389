"""What messages, docstrings and pages call `Class.name` exists; the first line of an error holds the reason."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import hf_helix

PACKAGE = Path(hf_helix.__file__).parent
HOME = PACKAGE.parent
PAGES = [HOME / "README.md", HOME / "CONTRIBUTING.md", *sorted((HOME / "docs").glob("*.md"))]

NAMED = re.compile(r"(?<![\w.])([A-Z]\w+)\.([a-z]\w+)")
PLAIN_BASES = {"ABC", "Protocol", "Enum", "IntEnum", "StrEnum", "Generic", "NamedTuple", "object"}


@functools.cache
def parsed() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


@functools.cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """The classes of the package by name; files may have classes of one name."""
    result: dict[str, list[ast.ClassDef]] = {}
    for _, module in parsed():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                result.setdefault(node.name, []).append(node)
    return result


def own_names(node: ast.ClassDef) -> set[str]:
    """What a class has by its own lines: methods, fields, and what its methods set on `self`."""
    body = [part for line in node.body for part in ([line] if isinstance(line, ast.FunctionDef) else ast.walk(line))]
    names = {part.name for part in body if isinstance(part, ast.FunctionDef)}
    names |= {part.id for part in body if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return names | {
        part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
    }


@functools.cache
def names_of(name: str) -> set[str] | None:
    """What the classes of a name have, with their bases; None where a class or a base is of another package."""
    known = classes()
    if name not in known:
        return None
    names = set().union(*map(own_names, known[name]))
    for base in (base for node in known[name] for base in node.bases):
        base = base.value if isinstance(base, ast.Subscript) else base
        called = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
        if called in PLAIN_BASES:
            continue
        inherited = names_of(called)
        if inherited is None:
            return None
        names |= inherited
    return names


def texts() -> Iterator[tuple[str, str]]:
    """Every string of the package with its place, docstrings among them, and the lines of every page."""
    for path, module in parsed():
        for node in ast.walk(module):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(HOME)}:{node.lineno}", node.value
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            yield f"{page.relative_to(HOME)}:{number}", line


def missing(text: str) -> list[str]:
    """The names `Class.name` of a text, of classes of this package, that the class does not have."""
    result = []
    for class_name, name in NAMED.findall(text):
        names = names_of(class_name)
        if names is not None and name not in names:
            result.append(f"{class_name}.{name}")
    return result


def test_names_in_messages_and_pages_exist():
    assert [f"{place}: {name}" for place, text in texts() for name in missing(text)] == []


def test_the_scan_finds():
    for text, names in (
        ("declare it with Builder.local", ["Builder.local"]),
        ("declare it with Builder.autograd or Builder.add", []),
        ("`Engine.tuning` and `Engine.tuned`", ["Engine.tuned"]),
        ("Tensor.backward and torch.Builder.local are not ours", []),
    ):
        assert missing(text) == names


PICTURES = {"planning/plan/block_plan.py", "planning/schedule/actions.py", "planning/schedule/validate.py"}
"""Files whose errors show the order or the schedule that they are about, below a line with the reason."""


def test_no_reason_begins_on_the_second_line():
    """What is raised is never a heading that ends with a colon: launchers and logs show no more than the first line."""
    headings = {
        path.relative_to(PACKAGE).as_posix()
        for path, module in parsed()
        for node in ast.walk(module)
        if isinstance(node, ast.Raise)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and ":\n" in part.value
    }
    assert headings - PICTURES <= {"planning/choice/scheduler.py"}
