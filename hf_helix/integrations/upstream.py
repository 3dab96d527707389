"""Methods of other packages that classes of hf_helix override, and the check that their overrides are still called.

In:   a subclass of another package's class; `overrides` marks each overriding method.
Out:  the class itself, or an error with every method that does not fit, the package, its version, and working versions.
Must hold: only the standard library is imported here. A method renamed upstream, or called with other parameters, is an
error when the class is made: the override would silently be without effect. Names that hf_helix only calls or reads
need no check: a missing name raises.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import CodeType
from typing import Any, NamedTuple, TypeVar

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])

KNOWN: Mapping[str, tuple[str, str]] = {
    "torch": ("2.11", "2.15"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.14", "1.15"),
    "peft": ("0.21", "0.21"),
    "trl": ("1.16", "1.16"),
}
"""The packages that hf_helix stands on, and the oldest and newest version that were tried."""

_OURS = "hf_helix"
_MARK = "_helix_overrides"
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class UpstreamChanged(RuntimeError):
    """An installed package differs from all known versions."""


class Override(NamedTuple):
    """The mark of an overriding method, see `overrides`."""

    owner: str
    otherwise: str
    caller: str | None = ""
    needs: tuple[str, ...] = ()


class Problem(NamedTuple):
    """A mismatch, and the package to blame."""

    package: str
    sentence: str


def overrides(
    owner: str, *, otherwise: str, caller: str | None = "", needs: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Returns a decorator that marks a method as an override of another package's method.

    Args:
        owner: the name of the other package's class.
        otherwise: the consequence if the override were not called.
        caller: the class, as `module:class`, whose code calls the method; "" for the owner, None for users.
        needs: further parameters that the override reads by name.
    """

    def mark(function: Function) -> Function:
        setattr(function, _MARK, Override(owner, otherwise, caller, needs))
        return function

    return mark


def check_class(kind: Class) -> Class:
    """Returns the class if its methods fit the installed packages. Also a decorator.

    Raises:
        UpstreamChanged: names every method without a fit, and working versions.
    """
    _raise(problems_of_class(kind))
    return kind


def explain(error: ImportError) -> None:
    """Explains a failed import of a name of a known package by the versions with this name.

    Raises:
        UpstreamChanged: the name is of such a package.
    """
    package = (error.name or "").partition(".")[0]
    if package in KNOWN:
        _raise([Problem(package, str(error).partition(" (")[0])])


def problems_of_class(kind: type) -> list[Problem]:
    """Returns the mismatches of the methods that a class overrides, or hides by accident."""
    ours = [base for base in kind.__mro__ if _package(base) == _OURS]
    theirs = [base for base in kind.__mro__ if _package(base) in KNOWN]
    if not theirs:
        return []
    marks = {name: mark for base in ours for name, value in vars(base).items() if (mark := _mark_of(value))}
    problems = []
    for name, mark in marks.items():
        owner = next((base for base in theirs if base.__name__ == mark.owner), theirs[-1])
        problems += [Problem(_package(owner), words) for words in _problems_of(name, mark, ours, theirs)]
    for base in theirs:
        for name in sorted(vars(base).keys() & {own for each in ours for own in _names(each)} - marks.keys()):
            words = f"{base.__qualname__}.{name} exists, and hf_helix uses that name for something of its own"
            problems.append(Problem(_package(base), words))
    return problems


def hidden_methods(kind: type) -> Iterator[tuple[str, type]]:
    """Yields the methods that an override of hf_helix replaces without a call, with the class of the replaced one."""
    for place, base in enumerate(kind.__mro__):
        for name, value in vars(base).items() if _package(base) == _OURS else ():
            if _mark_of(value) is not None and "super" not in mentions(value):
                yield name, next(each for each in kind.__mro__[place + 1 :] if name in vars(each))


def _mark_of(value: Any) -> Override | None:
    return getattr(value.fget if isinstance(value, property) else value, _MARK, None)


def _problems_of(name: str, mark: Override, ours: list[type], theirs: list[type]) -> Iterator[str]:
    """The mismatches of a method, as sentences."""
    about, why = f"{mark.owner}.{name}", f"; hf_helix overrides it: without ours, {mark.otherwise}"
    stock = [vars(base)[name] for base in theirs if name in vars(base)]
    if not stock:
        yield f"{about} is gone{why}"
        return
    callers = theirs if mark.caller == "" else [resolve(mark.caller)] if mark.caller else []
    if callers and not any(name in _mentioned_by(caller) for caller in callers):
        yield f"{about} is not called any more by {mark.caller or mark.owner}{why}"
    for own in (vars(base)[name] for base in ours if name in vars(base)):
        for other in stock:
            yield from (f"{about} {words}{why}" for words in _differences(own, other, mark.needs))


def _differences(own: Any, stock: Any, needs: tuple[str, ...]) -> Iterator[str]:
    """The differences between the parameters of a method, the arguments of its calls, and the arguments passed on."""
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
    """Returns the object named by `module:attribute.attribute`.

    Raises:
        ImportError, AttributeError: no such object.
    """
    module, _, attributes = name.partition(":")
    return functools.reduce(getattr, attributes.split("."), importlib.import_module(module))


@functools.lru_cache(maxsize=8)
def _mentioned_by(kind: type) -> set[str]:
    """The names in the code of a class and its bases."""
    methods = [method for base in kind.__mro__ for method in vars(base).values()]
    return {name for method in methods for name in mentions(method)}


def mentions(method: Any) -> set[str]:
    """The names of attributes, and the texts, in the code of a function, a method or a property."""
    function = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return {name for part in _parts(code) for name in (*part.co_names, *part.co_consts) if isinstance(name, str)}


def _parts(code: CodeType | None) -> Iterator[CodeType]:
    """The code of a function and of its inner functions."""
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
