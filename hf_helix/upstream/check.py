"""Compares the table of this folder with the packages that are installed.

In:   a class of ours that stands on a class of another package; the table.
Out:  the class itself, or an error that names every hook that does not fit, the package and its version, and versions
      that work.
Must hold: only the standard library is imported here, and a module is looked at only if it is imported already. A
method of ours whose counterpart was renamed, or takes other parameters now, is an error, and never silently without
effect.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import CodeType
from typing import Any, NamedTuple, TypeVar

from hf_helix.upstream.overridden import OVERRIDDEN, Overridden

Class = TypeVar("Class", bound=type)

KNOWN: Mapping[str, tuple[str, str]] = {
    "torch": ("2.11", "2.15"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.14", "1.15"),
    "peft": ("0.21", "0.21"),
    "trl": ("1.16", "1.16"),
}
"""The packages that hf_helix stands on, and the oldest and newest version that were tried."""

_OURS = "hf_helix"
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class UpstreamChanged(RuntimeError):
    """An installed package has changed in a way that hf_helix does not know yet."""


class Problem(NamedTuple):
    """What does not fit, and the package that it belongs to."""

    package: str
    sentence: str


def check_class(kind: Class) -> Class:
    """Returns the class if its methods fit what is installed. Also a decorator.

    Raises:
        UpstreamChanged: names every method that does not fit, and versions that do.
    """
    _raise(problems_of_class(kind))
    return kind


def explain(error: ImportError) -> None:
    """Says which versions of a known package have a name that cannot be imported.

    Raises:
        UpstreamChanged: the name is of such a package.
    """
    package = (error.name or "").partition(".")[0]
    if package in KNOWN:
        _raise([Problem(package, str(error).partition(" (")[0])])


def problems_of_class(kind: type) -> list[Problem]:
    """Returns what does not fit of the methods that a class of ours overrides, or hides by accident."""
    ours = [base for base in kind.__mro__ if _package(base) == _OURS]
    theirs = [base for base in kind.__mro__ if _package(base) in KNOWN]
    rows = [row for row in OVERRIDDEN if any(row.method in vars(base) for base in ours)]
    rows = [row for row in rows if _is_class(row.owner) and resolve(row.owner) in theirs]
    problems = [Problem(row.package, words) for row in rows for words in _problems_of_row(row, ours, theirs)]
    listed = {row.method for row in rows}
    for base in theirs:
        for name in sorted(vars(base).keys() & {own for each in ours for own in _names(each)} - listed):
            words = f"{base.__qualname__}.{name} exists, and hf_helix uses that name for something of its own"
            problems.append(Problem(_package(base), words))
    return problems


def _problems_of_row(row: Overridden, ours: list[type], theirs: list[type]) -> Iterator[str]:
    """What does not fit of one method, as sentences."""
    about = f"{row.owner.partition(':')[2]}.{row.method}"
    why = f"; hf_helix overrides it: {row.purpose}. Without it, {row.otherwise}"
    stock = [vars(base)[row.method] for base in theirs if row.method in vars(base)]
    if not stock:
        yield f"{about} is gone{why}"
        return
    if row.callers and not any(row.method in _mentioned_by(resolve(caller)) for caller in row.callers):
        yield f"{about} is not called any more by {' or '.join(row.callers)}{why}"
    for own in (vars(base)[row.method] for base in ours if row.method in vars(base)):
        for other in stock:
            yield from (f"{about} {words}{why}" for words in _differences(own, other, row.needs))


def _differences(own: Any, stock: Any, needs: tuple[str, ...]) -> Iterator[str]:
    """How the parameters of a method differ from those that it is called with, and passes on."""
    if isinstance(own, property) or isinstance(stock, property):
        if type(own) is not type(stock):
            yield f"is a {type(stock).__name__} now"
        return
    mine, given = (list(inspect.signature(each).parameters.values()) for each in (own, stock))
    places = {parameter.name: place for place, parameter in enumerate(given) if parameter.kind in _NAMED}
    takes_any = _takes(given, inspect.Parameter.VAR_KEYWORD)
    wanted = {parameter.name: place for place, parameter in enumerate(mine) if parameter.kind in _NAMED}
    for name, place in wanted.items():
        if name not in places and not takes_any:
            yield f"has no parameter {name!r} any more, its parameters are ({', '.join(places)})"
        elif places.get(name, place) != place:
            yield f"has its parameter {name!r} at another place, its parameters are ({', '.join(places)})"
    for name in needs:
        if name not in places and not takes_any:
            yield f"has no parameter {name!r} any more, its parameters are ({', '.join(places)})"
    if not _takes(mine, inspect.Parameter.VAR_KEYWORD):
        yield from (f"has a new parameter {name!r}" for name in places if name not in wanted)


def _takes(parameters: list[inspect.Parameter], kind: Any) -> bool:
    return any(parameter.kind is kind for parameter in parameters)


def resolve(name: str) -> Any:
    """Returns what `module:attribute.attribute` names.

    Raises:
        ImportError, AttributeError: it is not there.
    """
    module, _, attributes = name.partition(":")
    return functools.reduce(getattr, attributes.split("."), importlib.import_module(module))


def _is_class(name: str) -> bool:
    """Whether a class of that name is there; its module is not imported for it."""
    module, _, attribute = name.partition(":")
    return module in sys.modules and isinstance(getattr(sys.modules[module], attribute, None), type)


@functools.lru_cache(maxsize=8)
def _mentioned_by(kind: type) -> set[str]:
    """The names that stand in the code of a class and its bases."""
    methods = [method for base in kind.__mro__ for method in vars(base).values()]
    return {name for method in methods for name in mentions(method)}


def mentions(method: Any) -> set[str]:
    """The names of attributes, and the texts, in the code of a function, a method or a property."""
    function = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return {name for part in _parts(code) for name in (*part.co_names, *part.co_consts) if isinstance(name, str)}


def _parts(code: CodeType | None) -> Iterator[CodeType]:
    """A function's code, and that of the functions inside it."""
    if code is not None:
        yield code
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from _parts(inner)


def _names(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith(("__", "_abc_"))}


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _raise(problems: list[Problem]) -> None:
    if problems:
        packages = dict.fromkeys(problem.package for problem in problems)
        lines = [f"{name} {_version(name)}: {words}" for name, words in problems]
        known = " and ".join(f"{name} {' to '.join(dict.fromkeys(KNOWN[name]))}" for name in packages)
        pins = " ".join(f"'{name}~={KNOWN[name][1]}.0'" for name in packages)
        raise UpstreamChanged(
            f"hf_helix {_version(_OURS)} does not fit what is installed; use `pip install {pins}`, known to work "
            f"({known}), or a newer hf_helix: " + "\n  ".join(lines)
        )


def _version(package: str) -> str:
    loaded = getattr(sys.modules.get(package), "__version__", None)
    try:
        return loaded or version(package)
    except PackageNotFoundError:
        return "of an unknown version"
