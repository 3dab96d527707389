"""Copies of modules whose instances were patched.

In:   a module with attributes that are functions and refer to the module or its submodules in variables or defaults,
      for example a `forward` that wraps the former `forward`.
Out:  a copy whose functions refer to the copy.
Must hold: the given module does not change. `copy.deepcopy` would leave the functions with the given module.
"""

import copy
import functools
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn


def copy_module(module: nn.Module, memo: dict[int, Any] | None = None) -> Any:
    """Returns a copy of a module; `memo` has replacements of objects, by the identity of the object, and gets more."""
    memo = {} if memo is None else memo
    copied = copy.deepcopy(module, memo)
    for given in module.modules():
        for name, value in vars(given).items():
            if isinstance(value, (FunctionType, functools.partial)):
                vars(memo[id(given)])[name] = rebound(value, memo)
    return copied


def as_made(model: Any, kind: type | None = None) -> Any:
    """Returns an unpatched model of the same sizes on the meta device, of the same class or of `kind`."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return (kind or type(model))(copy.deepcopy(model.config))


def rebound(value: Any, memo: dict[int, Any]) -> Any:
    """Returns a value with replaced references to objects, also in variables and defaults of functions."""
    if isinstance(value, functools.partial):
        keywords = {name: rebound(part, memo) for name, part in value.keywords.items()}
        return functools.partial(rebound(value.func, memo), *(rebound(part, memo) for part in value.args), **keywords)
    if not isinstance(value, FunctionType):
        return copy.deepcopy(value, memo)
    if not (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
        return value
    if id(value) in memo:
        return memo[id(value)]
    cells = tuple(CellType() for _ in value.__closure__ or ())
    made = FunctionType(value.__code__, value.__globals__, value.__name__, closure=cells)
    made.__qualname__, made.__module__ = value.__qualname__, value.__module__
    memo[id(value)] = made  # a function may close over itself
    for cell, before in zip(cells, value.__closure__ or (), strict=True):
        cell.cell_contents = rebound(before.cell_contents, memo)
    made.__defaults__ = value.__defaults__ and tuple(rebound(part, memo) for part in value.__defaults__)
    made.__kwdefaults__ = value.__kwdefaults__ and {k: rebound(v, memo) for k, v in value.__kwdefaults__.items()}
    return made
