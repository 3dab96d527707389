"""Whether a name of another package is as hf_helix uses it."""

from __future__ import annotations

import inspect
from typing import Any

from support.used_names.rows import Used

from hf_helix.integrations.upstream import mentions, resolve


def problem_of_use(row: Used) -> str:
    """Returns what is wrong with a name that is used; empty where it is as it was."""
    why = f"; hf_helix uses it: {row.purpose}. Without it, {row.otherwise}"
    name = row.within or row.name
    try:
        value = resolve(name)
    except (ImportError, AttributeError):
        return f"{name} is gone{why}"
    if row.within:
        return "" if row.method in mentions(value) else f"{row.within} knows no {row.method} any more{why}"
    error = _misfit(value, row.takes) if row.takes else None
    return f"{row.name} cannot be called with ({row.takes}) any more, {error}{why}" if error else ""


def _misfit(function: Any, takes: str) -> TypeError | None:
    """Why a function cannot be called as `Used.takes` says."""
    names = takes.split(", ")
    keywords = {name[:-1]: None for name in names if name.endswith("=")}
    try:
        inspect.signature(function).bind(*[None] * (len(names) - len(keywords)), **keywords)
    except TypeError as error:
        return error
    return None
