"""Text forms: JSON for people, lists cut short for errors, and the first different line of two texts.

In:   mappings, lists and plain values.
Out:  text of short lines.
Must hold: the JSON holds the same data.
"""

import json
from collections.abc import Sequence
from typing import Any


def format_json(data: Any, indent: str = "") -> str:
    """Returns JSON for people: a list or mapping without further lists or mappings takes one line."""
    items = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    flat = isinstance(data, dict) and not any(isinstance(item, (dict, list)) for item in items)
    if not items or (flat and indent):
        return json.dumps(data)
    if isinstance(data, list) and len(json.dumps(data)) + len(indent) < 100 and not isinstance(data[0], dict):
        return json.dumps(data)
    inner = indent + " "
    if isinstance(data, dict):
        lines = [f"{inner}{json.dumps(key)}: {format_json(value, inner)}" for key, value in data.items()]
        return "{\n" + ",\n".join(lines) + "\n" + indent + "}"
    return "[\n" + ",\n".join(inner + format_json(value, inner) for value in data) + "\n" + indent + "]"


def round_ms(seconds: float, digits: int = 6) -> float:
    """Milliseconds for files."""
    return float(f"{seconds * 1e3:.{digits}g}")


def first_difference(mine: str, theirs: str) -> str:
    """Returns the first different line of two texts, from each text; empty for equal texts."""
    left, right = mine.splitlines(), theirs.splitlines()
    for number in range(max(len(left), len(right))):
        a = left[number] if number < len(left) else "(nothing)"
        b = right[number] if number < len(right) else "(nothing)"
        if a != b:
            return f"line {number + 1}: {a.strip()!r} against {b.strip()!r}"
    return ""


def shorten_lines(items: Sequence[str], limit: int = 5) -> str:
    """Returns the first few items for an error message, a line each, and how many more there are."""
    rest = [f"and {len(items) - limit} more"] if len(items) > limit else []
    return "\n  ".join([*items[:limit], *rest])


def shorten_list(items: Sequence[str], limit: int = 6) -> str:
    """Returns the first few items for an error message, for example "a, b and 3 more"."""
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest
