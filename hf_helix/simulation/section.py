"""A mapping of a YAML file, whose keys are taken one by one.

In:   what a YAML file holds.
Out:  texts, numbers, counts, choices and points of curves.
Must hold: a key that is unknown, missing or impossible is refused by its full name, with what works.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from hf_helix.planning.text import shorten_list

T = TypeVar("T")

MOST_EFFICIENT = 1.5
"""The largest share of a curve: a peak may be that of large sizes, and what is in a cache faster."""

Bounds = tuple[float, float]
SHARES: Bounds = (1e-9, MOST_EFFICIENT)
EFFICIENCY = "[size, share of the peak], sizes growing, such as [[1e9, 0.5], [1e11, 0.9]]"


class Section:
    """A mapping of a file. What is read is taken out; `left` holds the rest.

    Args:
        data: what stands in the file.
        where: the file.
        name: of the section; empty for the whole file.
    """

    def __init__(self, data: Any, where: str, name: str) -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: {name or 'the file'} must be a mapping of keys to values, and is {data!r}")
        self.left: dict[str, Any] = {str(key): value for key, value in data.items()}
        self.where = where
        self.name = name
        self.is_empty = not self.left

    def section(self, key: str, optional: bool = False) -> Section:
        if key not in self.left and not optional:
            raise self._missing(key, "a mapping")
        return Section(self.left.pop(key, {}), self.where, self._full(key))

    def text(self, key: str) -> str:
        if key not in self.left:
            raise self._missing(key, "a text")
        value = self.left.pop(key)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def texts(self) -> dict[str, str]:
        return {key: self.text(key) for key in list(self.left)}

    def choice(self, key: str, choices: Sequence[T]) -> T:
        value = self.left.pop(key, choices[0])
        if value not in choices or type(value) is not type(choices[0]):
            works = ", ".join(str(each).lower() if isinstance(each, bool) else str(each) for each in choices)
            raise self._wrong(key, value, f"one of {works}")
        return value

    def number(self, key: str, default: float | None = None, least: float | None = None, works: str = "") -> float:
        """Returns a number.

        Args:
            key: its name in the section.
            default: what holds where it is not given; None where it must be.
            least: the smallest that is allowed; None for more than 0.
            works: what else may stand there, for the message.

        Raises:
            ValueError: there is none, or no such number.
        """
        if key not in self.left:
            if default is None:
                raise self._missing(key, "a number")
            return default
        value = self.left.pop(key)
        number = _number(value)
        if number is None or (number <= 0 if least is None else number < least):
            raise self._wrong(
                key, value, f"a number, {'more than 0' if least is None else f'at least {least:g}'}{works}"
            )
        return number

    def count(self, key: str, default: int | None = None) -> int:
        number = self.number(key, default, least=1)
        if number != int(number):
            raise self._wrong(key, number, "a whole number, at least 1")
        return int(number)

    def points(
        self, key: str, default: Sequence[tuple[float, float]], what: str = EFFICIENCY, bounds: Bounds = SHARES
    ) -> Sequence[tuple[float, float]]:
        """Returns (size, value) with growing sizes.

        Args:
            key: its name in the section.
            default: what holds where it is not given.
            what: is listed, with an example.
            bounds: the smallest and the largest value.

        Raises:
            ValueError: it is no such list.
        """
        if key not in self.left:
            return default
        given = self.left.pop(key)
        pairs = given if isinstance(given, list) and all(isinstance(p, list) and len(p) == 2 for p in given) else []
        points = [(size, value) for size, value in (map(_number, pair) for pair in pairs) if size and value]
        sizes = [size for size, _ in points]
        possible = all(size > 0 and bounds[0] <= value <= bounds[1] for size, value in points)
        if not points or len(points) < len(pairs) or sorted(set(sizes)) != sizes or not possible:
            raise self._wrong(key, given, f"a list of {what}")
        return points

    def refuse_rest(self, works: str = "") -> None:
        if self.left:
            unknown = shorten_list([self._full(key) for key in self.left])
            raise ValueError(f"{self.where}: unknown keys: {unknown}{works}")

    def _full(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def _missing(self, key: str, what: str) -> ValueError:
        spelled = "".join(f", and {each!r} is given" for each in self.left if each.lower().replace("-", "_") == key)
        return ValueError(f"{self.where}: {self._full(key)} is missing{spelled}; it must be {what}")

    def _wrong(self, key: str, value: Any, needed: str) -> ValueError:
        return ValueError(f"{self.where}: {self._full(key)}: {value!r} must be {needed}")


def _number(value: Any) -> float | None:
    """The finite number that a value is, also one that YAML takes for a text, such as 1e9."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
