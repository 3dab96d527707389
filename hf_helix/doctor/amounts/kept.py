"""Counts of a model on disk, so that a later question about the same model needs neither torch nor counting; and the
answers to earlier questions.

In:   the digest of a model's configuration, of the options of a count, and of the code that counts.
Out:  `Facts`, `Amounts`, or the error of a layout that cannot be cut; rankings and steps.
Must hold: a change of the code of hf_helix, or of a package that counts, makes all files stale; a file is complete or
not there; an unreadable file is counted anew. Files are JSON of plain values: reading one runs no code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from hf_helix.doctor.amounts.records import (
    Amounts,
    Facts,
    Kernel,
    Lifetimes,
    Model,
    OperatorAmounts,
    Storage,
    Transfer,
    of_each,
)
from hf_helix.measure.cache_folder import cache_root, write_file
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part
from hf_helix.planning.parameters import Cut, Flat, Parameter
from hf_helix.planning.timing.token_flops import TokenFlops
from hf_helix.planning.window.layout import Layout

T = TypeVar("T")

PACKAGES = ("torch", "transformers", "peft", "accelerate")
"""The packages, besides hf_helix, of which another version may count otherwise."""

CLASSES: Mapping[str, Any] = {
    each.__name__: each
    for each in (
        *(Kernel, Transfer, Storage, Lifetimes, OperatorAmounts, Model, Amounts, Facts),
        *(Parameter, Cut, Flat),
        GraphPair,
        Graph,
        Operator,
        TokenFlops,
        Layout,
        Kind,
        Part,
    )
}
"""The classes of values in a file."""


class KeptAmounts:
    """The counts of one model.

    Args:
        about: the conditions of the counts besides the layout: the configuration of the model, adapters, types.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        text = json.dumps({**about, "code": code_digest()}, sort_keys=True)
        self.folder = cache_root() / "amounts" / hashlib.sha256(text.encode()).hexdigest()[:20]

    def value(self, key: str, find: Callable[[], T], classes: Mapping[str, Any] = CLASSES) -> T:
        """Returns the value of a key, found if it is not on disk.

        Args:
            key: all that the value depends on, besides the model and the code.
            find: counts the model, or finds the answer to a question about it.
            classes: the classes of the values inside, by name.
        """
        path = self._path(key)
        try:
            kept: T = from_json(json.loads(path.read_text())["value"], classes)
            return kept
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        found = find()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps({"key": key, "value": to_json(found)}, separators=(",", ":")))
        except OSError:  # no room, or a folder of somebody else's
            pass
        return found

    def has(self, key: str) -> bool:
        """Returns whether a key is on disk."""
        return self._path(key).exists()

    def _path(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"


@cache
def code_digest() -> str:
    """Returns a digest of the code of hf_helix, and of the versions of the packages that it counts with."""
    digest, home = hashlib.sha256(), Path(__file__).parents[2]
    for path in sorted(home.rglob("*.py")):
        digest.update(f"{path.relative_to(home)}\n".encode() + path.read_bytes())
    for name in PACKAGES:
        try:
            digest.update(f"{name} {version(name)}\n".encode())
        except PackageNotFoundError:
            continue
    return digest.hexdigest()


# -- JSON --------------------------------------------------------------------------------------------------------------

IS = "is"
"""The key of the class of a value; the other keys are its fields, without default values."""


@cache
def _defaults(kind: Any) -> list[tuple[str, Any]]:
    """Returns the fields of a class, each with its default value or MISSING."""
    return [(each.name, each.default) for each in fields(kind) if each.init]


def to_json(value: Any) -> Any:
    """Returns a value of plain types: a tuple as a list, and a list or a mapping as an object."""
    kind: Any = value.__class__
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return [to_json(each) for each in value]
    if is_dataclass(value):
        made = {IS: kind.__name__}
        for name, usual in _defaults(kind):
            given = getattr(value, name)
            if given is not usual and (usual is MISSING or given != usual):
                made[name] = given if given.__class__ in _PLAIN else to_json(given)
        return made
    if isinstance(value, Enum):
        return {IS: kind.__name__, "value": value.value}
    if isinstance(value, (int, float, str)):
        return value
    if isinstance(value, tuple):
        return [to_json(each) for each in value]
    if isinstance(value, list):
        return {IS: "list", "items": of_each(to_json, value)}
    if isinstance(value, Mapping):
        return {IS: "mapping", "items": [[to_json(key), to_json(each)] for key, each in value.items()]}
    if isinstance(value, ValueError):
        return {IS: "ValueError", "text": str(value)}
    raise TypeError(f"{kind.__name__} is not kept on disk")


_PLAIN = frozenset((bool, int, float, str, type(None)))
"""The types of JSON."""


def from_json(data: Any, classes: Mapping[str, Any] = CLASSES) -> Any:
    """Returns the value of `to_json`; `classes` has the classes of its values, by name."""
    if isinstance(data, list):
        return tuple([from_json(each, classes) for each in data])
    if not isinstance(data, dict):
        return data
    kind = data[IS]
    if kind == "list":
        return [from_json(each, classes) for each in data["items"]]
    if kind == "mapping":
        return {from_json(key, classes): from_json(each, classes) for key, each in data["items"]}
    if kind == "ValueError":
        return ValueError(data["text"])
    return classes[kind](**{name: from_json(each, classes) for name, each in data.items() if name != IS})
