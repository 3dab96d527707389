"""Pauses of Python's collector of cyclic garbage.

In:   a function that makes millions of lists of numbers, which it keeps until it returns.
Out:  the same function, a fifth to a quarter faster.
Must hold: the collector is as it was before once the function has returned or raised. What the function makes has
hardly any cycles: it is freed by its reference counts, so next to nothing is lost by not looking for any.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Found = TypeVar("Found")


def without_collection(function: Callable[Params, Found]) -> Callable[Params, Found]:
    """Returns a function that does the same while the collector is paused."""

    @functools.wraps(function)
    def paused(*args: Params.args, **kwargs: Params.kwargs) -> Found:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return paused
