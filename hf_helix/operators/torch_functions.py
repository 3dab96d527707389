"""Functions of torch as `__torch_function__` sees them: which are element-wise, and which write to their argument.

In:   the name of a function, method or operator.
Out:  its properties, by the tags of torch's own operators.
Must hold: only a function that is known to be element-wise counts as element-wise.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_OPERATORS = {"add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "neg", "pos", "abs", "invert", "eq"}
_OPERATORS |= {"ne", "lt", "le", "gt", "ge", "and", "or", "xor", "lshift", "rshift"}
UNTAGGED = {"to", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "type", "cpu", "cuda"}
UNTAGGED |= {"contiguous", "detach", "copy", "fill", "zero", "logsigmoid", "multiply", "subtract", "divide"}
UNTAGGED |= {"zeros_like", "ones_like", "full_like", "empty_like", "alias"}
"""Element-wise functions without the tag of torch's operators."""


def is_in_place(name: str) -> bool:
    """Returns whether a function writes to its first argument."""
    is_operator = name.startswith("__i") and name.strip("_")[1:] in _OPERATORS
    return is_operator or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


@functools.cache
def is_elementwise(name: str) -> bool:
    """Returns whether every element of the result depends only on the same element of the operands, and on no random
    number."""
    if name.startswith("__"):
        plain = name.strip("_")
        return plain in _OPERATORS or (plain[:1] in ("r", "i") and plain[1:] in _OPERATORS)
    name = name.removesuffix("_")
    return name in UNTAGGED or is_tagged_elementwise(name)


@functools.cache
def is_tagged_elementwise(name: str) -> bool:
    """Returns whether torch tags an operator as element-wise, without random numbers."""
    operator: Any = getattr(torch.ops.aten, name, None)
    overloads = operator.overloads() if hasattr(operator, "overloads") else ()
    tags = {tag for each in overloads for tag in getattr(operator, each).tags}
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns a value with every tensor in its lists, tuples and dictionaries changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(each, change) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        changed = [map_tensors(each, change) for each in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)  # of named tuples, fields
    return value
