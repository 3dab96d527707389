"""Whether two layers, or two functions, compute the same.

In:   a decoder layer, or two functions.
Out:  for a layer, a text: code of the submodules' forwards, options, and sizes of weights; for two functions, whether
      the functions are copies.
Must hold: layers with equal texts have equal traces. The text of a model is equal in every process, so that proofs can
be kept by the text, unless code closes over objects without a text.
"""

import functools
import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

_OPTIONS = (*_PLAIN, tuple, list, dict, FunctionType, functools.partial, torch.Tensor)
"""The types of attributes that are options; of a configuration, those count that the code of the module names."""

_CODE = ("co_code", "co_names", "co_varnames", "co_argcount", "co_kwonlyargcount")
"""The parts of a code object that define its behaviour, apart from constants."""


_known: dict[nn.Module, str] | None = None
"""The texts of layers within `unchanged`."""


@contextmanager
def unchanged(texts: dict[nn.Module, str]) -> Iterator[None]:
    """Within, the text of a layer is found once, since nobody changes it, and kept in `texts`."""
    global _known
    before, _known = _known, texts
    try:
        yield
    finally:
        _known = before


def description(layer: nn.Module) -> str:
    """Returns the code and the options that decide the results of a layer."""
    if _known is None:
        return _description(layer)
    return _known[layer] if layer in _known else _known.setdefault(layer, _description(layer))


def _description(layer: nn.Module) -> str:
    names = {id(module): f"module {name}" for name, module in layer.named_modules()}
    lines = []
    for name, module in layer.named_modules():
        options = {
            key: text_of(value, names)
            for key, value in sorted(vars(module).items())
            if not key.startswith("_")
            and key not in ("training", "layer_idx", "forward")
            and isinstance(value, _OPTIONS)
        }
        config = getattr(module, "config", None)
        for key in sorted({*_names_in(module.forward)} & {*getattr(config, "__dict__", ())}):
            if isinstance(value := vars(config)[key], _PLAIN):
                options[f"config.{key}"] = text_of(value, names)
        shapes = [(key, tuple(tensor.shape)) for key, tensor in module.named_parameters(recurse=False)]
        buffers = [(key, tuple(tensor.shape)) for key, tensor in module.named_buffers(recurse=False)]
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        lines.append(f"{name} {kind} {text_of(module.forward, names)} {options} {shapes} {buffers}")
    text, inside = "\n".join(lines), "|".join(re.escape(name) for name, _ in layer.named_children())
    # PEFT's modules keep their names in the whole model, such as 'model.layers.1.mlp.down_proj'
    return re.sub(rf"'[\w.]*\.\d+\.((?:{inside})\b[\w.]*)'", r"'\1'", text) if inside else text


def _names_in(function: Any) -> tuple[str, ...]:
    """Returns the names of attributes and functions that the code of a function reads."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names


def text_of(value: Any, names: Mapping[int, str]) -> str:
    """Returns a text for an option, or for code with the variables of its closure."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in names:
        return f"<{names[id(value)]}>"
    if isinstance(value, MethodType):
        return f"{text_of(value.__func__, names)} of {text_of(value.__self__, names)}"
    if isinstance(value, functools.partial):
        return f"{text_of(value.func, names)} with {text_of([*value.args, *sorted(value.keywords.items())], names)}"
    if isinstance(value, FunctionType):
        names = {**names, id(value): value.__qualname__}  # functions may close over themselves
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        defaults = [*(value.__defaults__ or ()), *sorted((value.__kwdefaults__ or {}).items())]
        name = f"{value.__module__}.{value.__qualname__}"
        return f"{name} {digest_of_code(value.__code__)} {text_of([*cells, *defaults], names)}"
    if isinstance(value, Mapping):  # such as the interface of experts, which their forwards close over
        return f"{type(value).__qualname__} {text_of(sorted(value.items(), key=str), names)}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(text_of(part, names) for part in value) + "]"
    if isinstance(value, torch.Tensor) and value.numel() <= 16 and not value.is_meta:
        return repr(value.tolist())
    if isinstance(value, (BuiltinFunctionType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__qualname__} {id(value)}"


@functools.cache
def digest_of_code(code: CodeType) -> str:
    """Returns a digest of a function's code, independent of its file and line."""
    parts = [
        digest_of_code(part)
        if isinstance(part, CodeType)
        else repr(sorted(map(repr, part)) if isinstance(part, frozenset) else part)
        for part in code.co_consts
    ]
    text = f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {parts}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _constants(function: FunctionType) -> list[Any]:
    """Returns the constants of a function without its docstring."""
    return [value for value in function.__code__.co_consts if value is None or value != function.__doc__]


def same_code(one: Any, other: Any) -> bool:
    """Returns whether two functions are copies in two files, together with the called functions of their files.

    Names of parameters and defaults count, annotations and docstrings do not. Functions that close over variables are
    no copies: the results depend on the variables.
    """
    if one is other:
        return True
    if not isinstance(one, FunctionType) or not isinstance(other, FunctionType) or one.__closure__ or other.__closure__:
        return False
    if any(getattr(one.__code__, part) != getattr(other.__code__, part) for part in _CODE):
        return False
    if _constants(one) != _constants(other):
        return False
    if (one.__defaults__, one.__kwdefaults__) != (other.__defaults__, other.__kwdefaults__):
        return False
    mine, theirs = one.__globals__, other.__globals__
    return all(same_code(mine.get(name), theirs.get(name)) for name in one.__code__.co_names)
