"""Pauses of Python's collector of cyclic garbage.

A function with millions of new lists of numbers is a fifth to a quarter faster during a pause. The lists have hardly
any cycles, so reference counts free them.
"""

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Found = TypeVar("Found")


def without_collection(function: Callable[Params, Found]) -> Callable[Params, Found]:
    """Returns a function with the same results that runs while the collector is paused."""

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
