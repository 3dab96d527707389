"""Logits divided over the vocabulary: to a loss, whole logits.

In:   the logits of this rank's slice of the vocabulary, and the axis of the ranks with the other slices.
Out:  a tensor with the shape of the whole logits, on which Transformers', TRL's and a user's own code computes losses.
Must hold: every rank runs the same code on equal values, so sums over the vocabulary are equal on all ranks and their
gradient is not summed again. Functions that work on slices communicate a few numbers per token, or nothing; all others
gather whole logits, with one line of output.

`__torch_function__` lets a subclass decide how a function runs. Torch itself tells which functions are element-wise (by
the tags of its operators) and which leave the vocabulary whole (by a trial on the meta device).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.torch_functions import is_elementwise, is_in_place, map_tensors
from hf_helix.operators.vocabulary.slices import (
    VocabDivision,
    all_gathered,
    extreme_ids,
    gather_ids,
    gathered,
    log_probabilities,
    log_sum_exp,
    loss_of_ids,
    sliced,
    summed_gradient,
    total,
    upcast,
)

Handler = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""Runs a function with its arguments on slices, or returns `NotImplemented`."""


def _warn(name: str) -> None:
    warnings.warn(
        f"torch's {name} does not run on slices of the vocabulary: it gathers whole logits on every rank, which takes "
        "memory and time; log_softmax, logsumexp, gather, cross_entropy, sums and element-wise functions do not",
        stacklevel=2,
    )


on_gather: Callable[[str], None] = _warn
"""Called once in a process, with the name of the first function that gathers whole logits."""
gathers: Counter[str] = Counter()
"""How often functions have gathered whole logits, by name."""


class _Linked(torch.autograd.Function):
    """Makes whole logits the result of their slice in the graph, for what reads the graph and not the slice."""

    @staticmethod
    def forward(ctx: Any, logits: VocabLogits, local: Tensor) -> VocabLogits:
        ctx.division = logits.division
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return None, gradient.local if isinstance(gradient, VocabLogits) else ctx.division.slice(gradient)


class _Slice(torch.autograd.Function):
    """The slice of whole logits, for logits that a function of autograd returned: their slice has no graph."""

    @staticmethod
    def forward(ctx: Any, logits: VocabLogits, local: Tensor) -> Tensor:
        ctx.division = logits.division
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _whole(gradients[0], ctx.division), None


# -- the tensor --------------------------------------------------------------------------------------------------------


def divided_logits(local: Tensor, axis: Axis, length: int) -> Tensor:
    """Returns whole logits of this rank's slice [..., slice], cut by `cut_bounds`; the slice itself on an axis of one
    rank."""
    return local if axis.size == 1 else _whole(local, VocabDivision(axis, length))


class VocabLogits(Tensor):
    """Whole logits [..., vocabulary], of which every rank holds the slice `local`."""

    division: VocabDivision
    _local: Tensor
    _gathered: tuple[tuple[int, int], Tensor] | None

    @property
    def local(self) -> Tensor:
        """This rank's slice [..., slice], under autograd."""
        if not self._local.requires_grad and torch.is_grad_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                if self.requires_grad:
                    self._local = _Slice.apply(self, self._local)
        return self._local

    def full(self) -> Tensor:
        """Returns the whole logits as a plain tensor, under autograd. Collective; a second call communicates nothing
        unless the logits were written in between."""
        local, known = self.local, self._gathered
        if known is not None:
            has_graph = known[1].requires_grad or not (local.requires_grad and torch.is_grad_enabled())
            if has_graph and known[0] == (_version(local), _version(known[1])):
                return known[1]
        full = gathered(local, self.division)
        self._gathered = (_version(local), _version(full)), full
        return full

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"VocabLogits(shape={tuple(self.shape)}, slice={self.division.bounds()}, local={self.local!r})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if all(kind in (cls, Tensor) for kind in types):
            try:
                result = _run(func, args, kwargs)
            except _NotOnSlices:
                result = NotImplemented
            if result is not NotImplemented:
                return result
        return _run_on_full(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Below autograd: what reads the tensor past `__torch_function__`, such as a function of torch.distributed.
        gather = lambda each: each.division.gather(each.local) if isinstance(each, VocabLogits) else each  # noqa: E731
        return func(*map_tensors(args, gather), **map_tensors(dict(kwargs or {}), gather))


def _whole(local: Tensor, division: VocabDivision) -> VocabLogits:
    shape = (*local.shape[:-1], division.length)
    logits: Any = Tensor._make_wrapper_subclass(VocabLogits, shape, dtype=local.dtype, device=local.device)
    return _link(logits, local, division)


def _link(logits: VocabLogits, local: Tensor, division: VocabDivision) -> VocabLogits:
    """Makes `local` the slice of logits, in place."""
    logits._local, logits.division, logits._gathered = local, division, None
    if local.requires_grad and torch.is_grad_enabled():
        with torch._C.DisableTorchFunctionSubclass():
            _Linked.apply(logits, local)
    return logits


def _version(value: Tensor) -> int:
    return -1 if value.is_inference() else value._version


def _full_of(value: Any) -> Any:
    return value.full() if isinstance(value, VocabLogits) else value


def _logits_in(value: Any) -> Iterator[VocabLogits]:
    if isinstance(value, VocabLogits):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from chain.from_iterable(map(_logits_in, value))


# -- how a function runs -----------------------------------------------------------------------------------------------


class _NotOnSlices(Exception):
    """The function needs whole logits."""


_NATIVE = {"size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "is_signed"}
_NATIVE |= {"get_device", "element_size", "is_contiguous", "is_inference", "requires_grad_", "__len__", "__hash__"}
"""Functions of shape and type, and of the graph."""

_SHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "swapaxes", "swapdims"}
_SHAPES |= {"permute", "movedim", "moveaxis", "__getitem__", "narrow", "select", "index_select", "expand", "repeat"}
_SHAPES |= {"repeat_interleave", "pad", "unbind", "split", "split_with_sizes", "chunk", "tensor_split"}
_JOINS = {"cat", "concat", "concatenate", "stack"}
_TAKES_SHAPE = {"view", "reshape", "expand"}


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of a function on slices, or `NotImplemented`."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _run_property(func, args)
    if name in _NATIVE or (name == "type" and len(args) + len(kwargs) == 1):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name.startswith("new_"):
        return func(args[0].local, *args[1:], **kwargs)
    if name in _HANDLERS and (result := _HANDLERS[name](func, args, kwargs)) is not NotImplemented:
        return result
    if name in _SHAPES or name in _JOINS:
        return _run_shape(func, args, kwargs)
    return _run_elementwise(func, args, kwargs) if is_elementwise(name) else NotImplemented


def _run_on_full(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function on whole logits. What it writes to them is written to their slices."""
    name = getattr(func, "__name__", str(func))
    gathers[name] += 1
    if gathers.total() == 1:
        on_gather(name)
    known = [(logits, logits.full()) for logits in _logits_in((args, tuple(kwargs.values())))]
    versions = [_version(full) for _, full in known]
    result = func(*map_tensors(args, _full_of), **map_tensors(dict(kwargs), _full_of))
    # Functions of torch.distributed write without a trace.
    writes = is_in_place(name) or getattr(func, "__module__", "").startswith("torch.distributed")
    for (logits, full), version in zip(known, versions, strict=True):
        if writes or _version(full) != version:
            logits.local.copy_(sliced(full, logits.division))
            _link(logits, logits.local, logits.division)
        if result is full:
            result = logits
    return result


def _run_property(func: Any, args: tuple[Any, ...]) -> Any:
    logits, name = args[0], func.__self__.__name__
    if name in ("data", "T", "H", "mT", "mH", "real", "imag"):
        is_read = name == "data" and func.__name__ == "__get__"
        return _whole(logits.local.data, logits.division) if is_read else NotImplemented
    if name == "grad" and func.__name__ == "__get__" and logits.local.retains_grad:
        return None if logits.local.grad is None else _whole(logits.local.grad, logits.division)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args)


def _operand(value: Any, division: VocabDivision) -> Any:
    """Returns the part of an operand, along this vocabulary or broadcast along it, for this rank's slice."""
    is_recorded = value.requires_grad and torch.is_grad_enabled()
    if isinstance(value, VocabLogits):
        if value.division != division:
            raise _NotOnSlices
        return value.local
    if value.dim() == 0 or value.shape[-1] == 1:
        return summed_gradient(value, division.axis) if is_recorded else value
    if value.shape[-1] != division.length:
        raise _NotOnSlices
    return sliced(value, division) if is_recorded else division.slice(value)


def _run_elementwise(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    given = list(_logits_in((args, tuple(kwargs.values()))))
    division, writes = given[0].division, is_in_place(func.__name__)
    if (writes and args[0] is not given[0]) or kwargs.get("out") is not None:
        return NotImplemented
    operand = lambda each: _operand(each, division)  # noqa: E731
    result = func(*map_tensors(args, operand), **map_tensors(dict(kwargs), operand))
    if writes:
        return _link(given[0], given[0].local, division)
    return map_tensors(result, lambda each: _result(each, given))


def _result(value: Tensor, given: list[VocabLogits]) -> Tensor:
    """Returns whole logits of a result; the given logits if the function returned their slice."""
    first = given[0]
    if value.device != first.local.device:
        raise _NotOnSlices
    same = [each for each in given if each.local is value]
    return same[0] if same else _whole(value, first.division)


# -- functions of the shape --------------------------------------------------------------------------------------------


def _run_shape(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name, given = func.__name__, list(_logits_in(args))
    if not given:
        return NotImplemented
    division = given[0].division
    if name == "__getitem__":
        args = (args[0], _explicit(args[1]))
    if not _stays_whole(func, args, kwargs, division):
        return _picked_items(*args) if name == "__getitem__" else NotImplemented
    args = _sized(name, args, division.length, division.size())
    operand = lambda each: _operand(each, division)  # noqa: E731
    local = lambda each: each.local if isinstance(each, VocabLogits) else each  # noqa: E731
    result = func(*map_tensors(args, operand if name in _JOINS else local), **kwargs)
    return map_tensors(result, lambda each: _whole(each, division))


def _explicit(index: Any) -> Any:
    """Returns an index with the positions of masks in place of the masks, so that a trial needs no values."""
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(torch.as_tensor(part) if isinstance(part, list) else part for part in parts)
    is_mask = lambda part: isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)  # noqa: E731
    return tuple(chain.from_iterable(part.nonzero(as_tuple=True) if is_mask(part) else (part,) for part in parts))


def _sized(name: str, args: tuple[Any, ...], length: int, size: int) -> tuple[Any, ...]:
    """Returns the arguments with `size` for the length of the vocabulary in a given shape."""
    if name not in _TAKES_SHAPE or len(args) < 2:
        return args
    shape = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
    return (args[0], (*shape[:-1], size)) if shape and shape[-1] == length else args


def _stays_whole(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], division: VocabDivision) -> bool:
    """Whether all results are along the vocabulary: with a slice in place of the vocabulary, only their last dimension
    differs. All ranks get the same answer."""
    name, length = func.__name__, division.length
    if name == "pad" and any((args[1] if len(args) > 1 else kwargs["pad"])[:2]):
        return False

    def outlines(size: int) -> list[torch.Size]:
        def outline(value: Tensor) -> Tensor:
            is_along = isinstance(value, VocabLogits) or (name in _JOINS and value.shape[-1:] == (length,))
            shape = (*value.shape[:-1], size) if is_along else value.shape
            return torch.empty(shape, dtype=value.dtype, device="meta")

        result = func(*map_tensors(_sized(name, args, length, size), outline), **kwargs)
        return [each.shape for each in ((result,) if isinstance(result, Tensor) else result)]

    try:
        full = outlines(length)
        for size in {division.size(0), division.size(division.axis.size - 1)}:
            if outlines(size) != [torch.Size((*shape[:-1], size)) for shape in full]:
                return False
    except (RuntimeError, TypeError, IndexError, ValueError):
        return False
    return all(shape[-1:] == (length,) for shape in full)


def _picked_items(logits: VocabLogits, index: tuple[Any, ...]) -> Any:
    """Returns `logits[index]` if the index ends in token ids, such as `logits[rows, labels]` or `logits[..., 5]`."""
    *others, ids = index
    rest = [each for each in others if each is not Ellipsis and each is not None]
    if len(rest) == len(others) and len(rest) != logits.dim() - 1:
        return NotImplemented
    shapes = {each.shape if isinstance(each, Tensor) else None for each in rest}
    ids = torch.tensor(ids, device=logits.device) if type(ids) is int else ids
    is_ids = isinstance(ids, Tensor) and ids.dtype is torch.long
    if not is_ids or not (shapes == {ids.shape} or (shapes <= {None} and ids.dim() < 2)):
        return NotImplemented
    place, inside = logits.division.places(torch.where(ids < 0, ids + logits.division.length, ids))
    return total(logits.local[(*others, place)].masked_fill(~inside, 0), logits.division.axis)


# -- functions along the vocabulary ------------------------------------------------------------------------------------


def _dims(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[int] | None:
    """Returns the dimensions that a function runs over, counted from the first; None for all."""
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if dim is None or dim in ((), []):
        return None
    return {each % args[0].dim() for each in (dim if isinstance(dim, (tuple, list)) else (dim,))}


def _type_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the type of a function's result, also under autocast."""
    return func(args[0].local.new_zeros((1,) * args[0].dim()), *args[1:], **kwargs).dtype


def _along(handler: Handler) -> Handler:
    """Returns a handler that runs functions over other dimensions on slices, and calls `handler` for the vocabulary."""

    def handle(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        logits: Any = args[0] if args else None
        others = (args[1:], tuple(kwargs.values()))
        is_one = isinstance(logits, VocabLogits) and logits.dim() and not list(_logits_in(others))
        if not is_one or isinstance(kwargs.get("other", args[1] if len(args) > 1 else None), Tensor):
            return NotImplemented
        dims = _dims(args, kwargs)
        if dims is None or logits.dim() - 1 in dims:
            return handler(func, args, kwargs)
        return map_tensors(func(logits.local, *args[1:], **kwargs), lambda each: _whole(each, logits.division))

    return handle


@_along
def _reduce(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Reduces slices, then the ranks' results."""
    logits, name, dims = args[0], func.__name__, _dims(args, kwargs)
    run = Tensor.sum if name == "mean" else func
    parts = all_gathered(run(upcast(logits.local), *args[1:], **kwargs), logits.division.axis)
    result = getattr(torch, run.__name__)(parts, 0)
    if name == "mean":
        result = result / prod(size for at, size in enumerate(logits.shape) if dims is None or at in dims)
    return result.to(_type_of(func, args, kwargs))


@_along
def _logsumexp(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if _dims(args, kwargs) != {args[0].dim() - 1}:
        return NotImplemented
    result = log_sum_exp(args[0].local, args[0].division.axis).to(_type_of(func, args, kwargs))
    return result.unsqueeze(-1) if kwargs.get("keepdim", len(args) > 2 and args[2]) else result


@_along
def _softmax(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    dtype, logits = _type_of(func, args, kwargs), args[0]
    local = logits.local if logits.dtype is torch.float64 else logits.local.to(dtype)
    result = log_probabilities(local, logits.division.axis)
    return _whole((result.exp() if func.__name__ == "softmax" else result).to(dtype), logits.division)


@_along
def _extreme(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs max, min, argmax and argmin."""
    (logits, *_), name = args, func.__name__
    local, division, kind = logits.local, logits.division, name.removeprefix("arg")
    if _dims(args, kwargs) is None:
        best = getattr(torch, kind)
        return NotImplemented if name != kind else best(all_gathered(best(local), division.axis))
    ids = extreme_ids(local, division, kind)
    results = [ids] if name != kind else [gather_ids(local, ids, division), ids]
    if not kwargs.get("keepdim", len(args) > 2 and args[2]):
        results = [each.squeeze(-1) for each in results]
    return getattr(torch.return_types, name)(results) if name == kind else results[0]


@_along
def _gather(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return gather_ids(args[0].local, kwargs.get("index", args[2] if len(args) > 2 else None), args[0].division)


_LOSS_ARGS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def _loss_of_ids(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs cross_entropy and nll_loss with token ids as targets."""
    given: dict[str, Any] = {**dict(zip(_LOSS_ARGS, args, strict=False)), **kwargs}
    is_legacy = given.pop("size_average", None) is not None or given.pop("reduce", None) is not None
    given.pop("reduce", None)
    logits, target = given.pop("input"), given.pop("target")
    is_rows = isinstance(logits, VocabLogits) and logits.dim() in (1, 2) and target.dim() == logits.dim() - 1
    if is_legacy or not is_rows or target.is_floating_point() or isinstance(given.get("weight"), VocabLogits):
        return NotImplemented
    loss = loss_of_ids(logits.local, target, logits.division, of_logits=func.__name__ == "cross_entropy", **given)
    probe = logits.local.new_zeros((1,) * logits.dim())
    return loss.to(func(probe, target.new_zeros((1,) * target.dim())).dtype)


def _paired_loss(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs losses that are means or sums of an element-wise function."""
    if len(args) > 2 or kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        return NotImplemented
    values = _run_elementwise(func, args, {**kwargs, "reduction": "none"})
    reduction = kwargs.get("reduction", "mean")
    if values is NotImplemented or reduction == "none":
        return values
    return values.mean() if reduction == "mean" else values.sum() / (len(values) if reduction == "batchmean" else 1)


# -- writes, hooks -----------------------------------------------------------------------------------------------------


def _set_item(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    logits, index, value = args
    if not isinstance(logits, VocabLogits):
        return NotImplemented
    division, index = logits.division, _explicit(index)
    if not _stays_whole(Tensor.__getitem__, (logits, index), {}, division):
        return NotImplemented
    logits.local[index] = _operand(value, division) if isinstance(value, Tensor) else value
    _link(logits, logits.local, division)
    return None


def _refuse_hook(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    raise RuntimeError(
        f"logits.{func.__name__}() on logits divided over the vocabulary: a rank has that of its slice only; use "
        "it on the hidden states, or on whole = logits.full() and compute the loss from that"
    )


_HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "any", "all"), _reduce),
    **dict.fromkeys(("max", "min", "argmax", "argmin"), _extreme),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("cross_entropy", "nll_loss"), _loss_of_ids),
    **dict.fromkeys(("std", "var", "cumsum", "sort", "topk"), _along(lambda func, args, kwargs: NotImplemented)),
    **dict.fromkeys(("kl_div", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), _paired_loss),
    "binary_cross_entropy_with_logits": _paired_loss,
    "logsumexp": _logsumexp,
    "gather": _gather,
    "__setitem__": _set_item,
    "__iter__": lambda func, args, kwargs: iter(args[0].unbind(0)),
    "register_hook": _refuse_hook,
    "retain_grad": lambda func, args, kwargs: args[0].local.retain_grad(),
}
"""How functions of torch run on slices, by name; for a function along another dimension see `_along`."""
