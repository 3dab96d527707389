"""Runs operators of torch on the meta device, with a cache of the shapes of results.

In:   an operator, and its arguments.
Out:  the operator's result.
Must hold: only operators whose results depend on the shapes of arguments alone are cached; an operator that returns
views runs each time, and one that writes to arguments, unless torch cannot run it or it only writes to the argument
that it returns. The layers of a model repeat the same calls; without the cache, calls of torch take half of the time of
counting.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass(frozen=True, slots=True)
class _Shape:
    """The sizes, strides and type of a tensor."""

    sizes: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype


_UNRULED = torch.ops.aten.addmm.dtype_out, torch.ops.aten.baddbmm.dtype_out
"""Operators that write to `out` and raise on the meta device: the first in torch 2.11, the second up to 2.13."""

_INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}
"""Operators that take indices of the host on the meta device."""

_made: dict[object, _Shape | Sequence[_Shape | None] | None] = {}
"""Shapes of results by operator and arguments; None where the shapes do not suffice to make the result again."""

_written: set[object] = set()
"""Operators and arguments of calls that wrote to their first argument, and left its shape as it was."""


def made_on_meta(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of an operator, an overload such as `aten.mm.default`."""
    if function in _UNRULED:
        return kwargs["out"]
    if _only_writes_first(function):
        return _first_written(function, args, kwargs)
    key = _key_of(function, args, kwargs) if _only_makes(function) else None
    if key is None:
        args, kwargs = _with_sizes(function, args, kwargs)
        return function(*args, **kwargs)
    shapes = _made.get(key)
    if shapes is not None:
        return _new(shapes)
    result = function(*args, **kwargs)
    if key not in _made:
        _made[key] = _shapes_of(result, args, kwargs)
    return result


def _first_written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the first argument of an operator that writes to it; on the meta device there is nothing to write."""
    key = _key_of(function, args, kwargs)
    if key is not None and key in _written:
        return args[0]
    args, kwargs = _with_sizes(function, args, kwargs)
    before = _shape_of(args[0])
    result = function(*args, **kwargs)
    if key is not None and result is args[0] and _shape_of(result) == before:
        _written.add(key)
    return result


def _with_sizes(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns arguments of which some are tensors of the host, as sizes of images are: they stay there, since code asks
    for their values, and beside tensors of the meta device they count as such."""
    found = [*tensors_in((args, kwargs))]
    of_host = [tensor for tensor in found if not tensor.is_meta]
    if len(of_host) == len(found) > 0 and function.overloadpacket is torch.ops.aten._to_copy:
        return args, {**kwargs, "device": "cpu"}
    is_mixed = len(of_host) < len(found) and any(tensor.dim() for tensor in of_host)  # torch takes numbers itself
    if not is_mixed or function.overloadpacket in _INDEXING:
        return args, kwargs
    given: tuple[Any, Any] = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
    return given


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors among arguments or results, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


@functools.cache
def _only_makes(function: Any) -> bool:
    """Returns whether an operator is declared to write to and to return none of its arguments."""
    schema = getattr(function, "_schema", None)  # operators of higher order have none
    return schema is not None and all(each.alias_info is None for each in (*schema.arguments, *schema.returns))


@functools.cache
def _only_writes_first(function: Any) -> bool:
    """Returns whether an operator is declared to write to its first argument alone, and to return it."""
    schema = getattr(function, "_schema", None)
    if schema is None or len(schema.returns) != 1 or not schema.arguments:
        return False
    first, *others = (each.alias_info for each in (*schema.arguments, *schema.returns))
    aliases = [each for each in others if each is not None]
    return first is not None and first.is_write and aliases == [schema.returns[0].alias_info]


def _key_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Returns the key of a call in the cache; None for calls that cannot be cached."""
    try:
        named = tuple((name, _described(value)) for name, value in kwargs.items())
        key = function, _described(args), named, torch.get_default_dtype()
        hash(key)
    except TypeError:
        return None
    return key


def _described(value: Any) -> object:
    """Returns the properties of an argument on which shapes of results depend. Raises TypeError for a tensor outside
    the meta device, whose values may matter, and for NaN, never found again in a cache."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple([_described(each) for each in value])
    if value != value:
        raise TypeError
    return type(value), value  # 1, 1.0 and True are equal, but make tensors of different types


def _shapes_of(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Shape | Sequence[_Shape | None] | None:
    """Returns the shapes of a result; None unless the result is new memory of exactly the size of its shapes."""
    given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
    results = result if isinstance(result, tuple | list) else [result]
    storages: set[int] = set()
    for each in results:
        if each is None and result is not None:
            continue
        if not isinstance(each, Tensor) or not each.is_meta or each.storage_offset():
            return None
        storage, shape = each.untyped_storage(), _shape_of(each)
        if storage._cdata in given | storages or storage.nbytes() != _new(shape).untyped_storage().nbytes():
            return None
        storages.add(storage._cdata)
    if isinstance(result, tuple | list):
        return type(result)(None if each is None else _shape_of(each) for each in result)
    return _shape_of(result)


def _shape_of(tensor: Tensor) -> _Shape:
    return _Shape(tensor.shape, tensor.stride(), tensor.dtype)


def _new(shapes: _Shape | Sequence[_Shape | None]) -> Any:
    if isinstance(shapes, _Shape):
        return torch.empty_strided(shapes.sizes, shapes.strides, dtype=shapes.dtype, device="meta")
    return type(shapes)(None if each is None else _new(each) for each in shapes)  # type: ignore[call-arg]
