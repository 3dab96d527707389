"""Contents of batches and of arguments, as numbers that ranks compare.

In:   a batch of a data collator, the batches of a window, or the arguments of a call.
Out:  a number of 64 bits for all of it, and a number for every tensor by its name.
Must hold: equal contents have equal numbers on every rank. The host waits for the device once for each number, and for
a window not at all.
"""

import functools
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_DEEPEST = 8
"""Attributes of attributes of arguments are read so deep: caches hold layers with tensors."""


def window_number(batches: Sequence[Any]) -> Tensor:
    """Returns a number from the tensors of a window, and their names; a scalar on their device."""
    numbers = [(2 * place + 1) * _number_of([*tensors_of(batch)]) for place, batch in enumerate(batches)]
    return torch.stack([number.to(numbers[0].device) for number in numbers]).sum() if numbers else torch.tensor(0)


def tensor_numbers(batch: Any) -> dict[str, int]:
    """Returns a number for every tensor of a batch, by its name."""
    return {name: int(_number_of([(name, value)])) for name, value in tensors_of(batch)}


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a batch with their names, also in mappings and sequences inside it."""
    if isinstance(value, Tensor):
        yield name or "the batch", value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from tensors_of(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from tensors_of(each, f"{name}[{place}]")


def _number_of(tensors: Sequence[tuple[str, Tensor]]) -> Tensor:
    """A number from the names, types, shapes and bytes of tensors; 64 bits, which may overflow."""
    if not tensors:
        return torch.tensor(1)
    about = zlib.crc32(repr([(name, value.dtype, value.shape) for name, value in tensors]).encode())
    device = tensors[0][1].device
    content = torch.cat([_bytes_of(value).to(device) for _, value in tensors])
    words = nn.functional.pad(content, (0, -len(content) % 8)).view(torch.int64)
    weights = torch.arange(1, len(words) + 1, device=words.device) * 0x1E3779B97F4A7C15
    return ((words * (weights ^ weights >> 29 | 1)).sum() + 1) * (2 * about + 1)


def _bytes_of(value: Tensor) -> Tensor:
    """Returns the bytes of a tensor [bytes]; of one without a memory of rows, such as a sparse one, none."""
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        return torch.empty(0, dtype=torch.uint8)
    return value.detach().contiguous().view(-1).view(torch.uint8)


# -- arguments of calls ---------------------------------------------------------------------------------------------


def arguments_number(arguments: Any) -> int:
    """Returns a number from the arguments of a call: tensors by their content, functions and modules by their names,
    and other objects by their attributes."""
    tensors: list[Tensor] = []
    text = repr(_described(arguments, tensors, {}, 0))
    numbers = [_number_of([("", each)]) for each in tensors]
    found = torch.stack([number.to(numbers[0].device) for number in numbers]).tolist() if numbers else []
    digest = hashlib.blake2b(f"{text}{found}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _described(value: Any, tensors: list[Tensor], known: dict[int, Any], depth: int) -> Any:
    """Returns a description of a value, equal on ranks with equal values.

    Args:
        value: an argument, or a part of one.
        tensors: the tensors so far, to which this value's are added.
        known: the values so far, by id; they stay alive, so that no id comes twice.
        depth: the number of objects around the value.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", value.device.type
    if isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, type(None))):
        return type(value).__name__, repr(value)
    if isinstance(value, torch.device):
        return "device", value.type
    if id(value) in known:
        return "again", [*known].index(id(value))
    known[id(value)] = value
    inside = functools.partial(_described, tensors=tensors, known=known, depth=depth)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Mapping):
        return name, [(str(key), inside(value[key])) for key in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return name, [inside(each) for each in value]
    if isinstance(value, np.ndarray):
        return name, str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, functools.partial):
        return name, [inside(each) for each in (value.func, value.args, value.keywords)]
    if hasattr(value, "__qualname__"):  # a function, a method or a class
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        return value.__qualname__, [inside(each, depth=_DEEPEST) for each in cells]
    if depth >= _DEEPEST or isinstance(value, nn.Module) or hasattr(value, "decode"):  # a model, a tokenizer
        return name
    return name, inside(dict(getattr(value, "__dict__", {})), depth=depth + 1)
