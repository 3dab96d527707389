"""Counts kernels and live bytes of operators on the meta device.

In:   calls of torch's operators, under the label of the calling graph operator.
Out:  for each label: its kernels, with the floating-point operations and bytes of each, and the change of live memory.
Must hold: views are no kernels; a value written in place is also read. Layers repeat the same calls, so the shapes of
results and the kernels are cached: only of operators whose results depend only on the shapes of arguments. An operator
that returns views or writes to arguments runs each time.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hf_helix.doctor.amounts.records import ATTENTION, MATMUL, OTHER, Kernel
from hf_helix.models.stock import stock_modules
from hf_helix.models.trace.mixers import MixerCall
from hf_helix.operators.fused import kernels
from hf_helix.operators.linears import accumulate
from hf_helix.operators.vocabulary import statistics

_UNRULED = torch.ops.aten.addmm.dtype_out, torch.ops.aten.baddbmm.dtype_out
"""Operators that write to `out` and raise on the meta device: the first in torch 2.11, the second up to 2.13."""

_INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}
"""Operators that take indices of the host on the meta device."""

_made: dict[object, tuple[Any, Kernel | None] | None] = {}
"""Twins of results, and kernels, by operator and arguments; None if the shapes do not suffice to make these again."""


def made_on_meta(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]
) -> tuple[Any, list[Tensor], Kernel | None]:
    """Returns the result of an operator, an overload such as `aten.mm.default`, the tensors in it, and its kernel;
    `inputs` are the tensors among its arguments."""
    key = _key_of(function, args, kwargs) if _only_makes(function) else None
    known = None if key is None else _made.get(key)
    if known is not None:
        result = _twin(known[0])
        return result, tensors_in(result), known[1]
    if function in _UNRULED:
        result = kwargs["out"]
    else:
        given = (args, kwargs) if key is not None else _with_sizes(function, args, kwargs, inputs)
        result = function(*given[0], **given[1])
    outputs = tensors_in(result)
    kernel = kernel_of(function, args, kwargs, inputs, outputs)
    if key is not None and key not in _made:
        _made[key] = (_twin(result), kernel) if _is_new(result, inputs) else None
    return result, outputs, kernel


def _with_sizes(function: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor]) -> tuple[Any, Any]:
    """Returns arguments of which some are tensors of the host, as sizes of images are: they stay there, since code asks
    for their values, and with tensors of the meta device they count as such."""
    of_host = [tensor for tensor in inputs if not tensor.is_meta]
    if not of_host:
        return args, kwargs
    if len(of_host) == len(inputs) and function.overloadpacket is torch.ops.aten._to_copy:
        return args, {**kwargs, "device": "cpu"}
    is_mixed = len(of_host) < len(inputs) and any(tensor.dim() for tensor in of_host)  # torch takes numbers itself
    if not is_mixed or function.overloadpacket in _INDEXING:
        return args, kwargs
    given: tuple[Any, Any] = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
    return given


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors among arguments or results, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    found = []
    for each in value:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, tuple | list | dict):
            found += tensors_in(each)
    return found


@functools.cache
def _only_makes(function: Any) -> bool:
    """Returns whether an operator is declared to write to and to return none of its arguments."""
    schema = getattr(function, "_schema", None)  # operators of higher order have none
    return schema is not None and all(each.alias_info is None for each in (*schema.arguments, *schema.returns))


@functools.cache
def _only_views(function: Any) -> bool:
    """Returns whether an operator is declared to return views of an argument, and nothing else."""
    schema = getattr(function, "_schema", None)
    return (
        schema is not None
        and bool(schema.returns)
        and not _writes(function)
        and all(each.alias_info is not None for each in schema.returns)
    )


@functools.cache
def _writes(function: Any) -> bool:
    """Returns whether an operator is declared to write to one of its arguments."""
    return any(each.alias_info is not None and each.alias_info.is_write for each in function._schema.arguments)


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
    """Returns the properties of an argument on which shapes of results and bytes of a kernel depend. Raises TypeError
    for a tensor outside the meta device, whose values may matter, and for NaN, never found again in a cache."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError
        strides = value.stride()
        if 0 in strides:  # of an expanded tensor the kernel reads the storage
            return value.shape, strides, value.dtype, value.untyped_storage().nbytes()
        return value.shape, strides, value.dtype
    if isinstance(value, tuple | list):
        return tuple([_described(each) for each in value])
    if value != value:
        raise TypeError
    return type(value), value  # 1, 1.0 and True are equal, but make tensors of different types


def _is_new(result: Any, inputs: Sequence[Tensor]) -> bool:
    """Returns whether a result is new memory of the meta device, of exactly the size of its shapes."""
    known = {tensor.untyped_storage()._cdata for tensor in inputs}
    for each in [part for part in result if part is not None] if isinstance(result, tuple | list) else [result]:
        if not isinstance(each, Tensor) or not each.is_meta or each.storage_offset():
            return False
        storage = each.untyped_storage()
        if storage._cdata in known or storage.nbytes() != _twin(each).untyped_storage().nbytes():
            return False
        known.add(storage._cdata)
    return True


def _twin(result: Any) -> Any:
    """Returns new memory of the shapes of a result."""
    if isinstance(result, Tensor):
        return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    return None if result is None else type(result)(map(_twin, result))


class LargestPosition(TorchFunctionMode):
    """Gives the largest of the positions [..., length] on the meta device as a number of the host: ropes for long
    contexts ask for its value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_all = func in (torch.max, Tensor.max, torch.amax, Tensor.amax) and len(args) == 1 and not kwargs
        if of_all and args[0].is_meta and not args[0].is_floating_point():
            return torch.tensor(args[0].shape[-1] - 1)
        return func(*args, **(kwargs or {}))


aten = torch.ops.aten


@dataclass(eq=False)
class Allocated:
    """An allocation."""

    bytes: int
    maker: str | None  # the label of the allocation; None without a label
    last: str | None = None  # the label of the release; None for live memory


@dataclass
class Metered:
    """The counts of one label, over all its calls."""

    kernels: list[Kernel] = field(default_factory=list)
    delta: int = 0  # change of live bytes
    peak: int = 0  # largest increase of live bytes during a call


class Meter(TorchDispatchMode):
    """Counts kernels and live bytes by label.

    Args:
        existing: tensors whose storages do not count as live memory.
        before: an earlier meter, whose live memory does not count either.
        counts: whether kernels and peaks are counted, besides live bytes.
    """

    def __init__(self, existing: Sequence[Tensor] = (), before: Meter | None = None, counts: bool = True) -> None:
        super().__init__()
        self.counts = counts
        self.counted: dict[str, Metered] = defaultdict(Metered)
        self.allocated: list[Allocated] = []
        self._existing = {tensor.untyped_storage()._cdata for tensor in existing}
        self._held = list(existing)  # so that no new storage takes the address of one of these
        self._before: Mapping[int, object] = {} if before is None else before._live
        self._live: dict[int, tuple[weakref.ref[Any], Allocated]] = {}  # by the address of a storage
        self._bytes = 0  # of live memory
        self._label: str | None = None
        self._now: Metered | None = None
        self._start = 0

    def begin(self, label: str | None) -> None:
        """Sets the label of the following operators; None stops counting."""
        if self._now is not None:
            self._now.delta += self._bytes - self._start
        self._now, self._start, self._label = None if label is None else self.counted[label], self._bytes, label

    def note(self, kernel: Kernel) -> None:
        """Counts a kernel without a call of torch."""
        if self._now is not None:
            self._now.kernels.append(kernel)

    def few_parts(self, parts: Sequence[slice], settled: int) -> Iterator[slice]:
        """Yields at most `settled` equal parts of a loop in a row, see `run_parts`, and counts the kernels of the last
        for the others."""
        for _, group in itertools.groupby(parts, key=lambda part: part.stop - part.start):
            equal = list(group)
            yield from equal[: settled - 1]
            if len(equal) >= settled:
                begin = self._num_kernels
                yield equal[settled - 1]
                if self._now is not None:
                    self._now.kernels += self._now.kernels[begin:] * (len(equal) - settled)

    @property
    def _num_kernels(self) -> int:
        return len(self._now.kernels) if self._now is not None else 0

    def allocation_of(self, tensor: Tensor) -> Allocated | None:
        """Returns the allocation of a tensor; None for memory that does not count."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap every call, and nothing is compiled here

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunction():  # sizes are read without `FusedKernels`
            if _only_views(function):
                return function(*args, **(kwargs or {}))
            inputs = tensors_in(args)
            if kwargs:
                inputs += tensors_in(kwargs)
            result, outputs, kernel = made_on_meta(function, args, kwargs or {}, inputs)
            news = [self._allocate(leaf.untyped_storage()) for leaf in outputs]
            if self._now is not None and self.counts:
                if True in news:
                    self._now.peak = max(self._now.peak, self._bytes - self._start)
                if kernel is not None:
                    self._now.kernels.append(kernel)
        return result

    def _allocate(self, storage: torch.UntypedStorage) -> bool:
        """Returns whether a storage is new, and then counts its bytes as live until its release."""
        key = storage._cdata
        if key in self._existing or key in self._before or key in self._live:
            return False
        allocated = Allocated(storage.nbytes(), self._label)

        def release(_: object) -> None:
            del self._live[key]
            self._bytes -= allocated.bytes
            allocated.last = self._label

        self.allocated.append(allocated)
        self._live[key] = weakref.ref(storage, release), allocated
        self._bytes += allocated.bytes
        return True


def kernel_of(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Kernel | None:
    """Returns the kernel of an overload of torch, such as `aten.mm.default`; None without a kernel, as for views."""
    packet = function.overloadpacket
    if packet in _ALLOCATING or not outputs:
        return None
    if not _writes(function):
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        if all(tensor.untyped_storage()._cdata in known for tensor in outputs):
            return None
    if packet in _PRODUCTS:
        left, right = _PRODUCTS[packet](args)
        count = left.shape[0] if left.dim() == 3 else 1
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        return Kernel(
            MATMUL, 2.0 * count * m * n * k, _bytes(inputs) + _bytes(outputs), (count, m, n, k), fp8=left.itemsize == 1
        )
    if packet in _ATTENTIONS:
        first = _ATTENTIONS[packet]
        q, k, v = args[first : first + 3]
        place = 4 if first == 0 else 7
        causal = kwargs.get("is_causal", len(args) > place and args[place])
        return attention_kernel(q, k, v, bool(causal), backward=first > 0)
    if packet in _WINDOWS:
        first = _WINDOWS[packet]
        q, k, v = (value.transpose(1, 2) for value in args[first : first + 3])
        return attention_kernel(q, k, v, False, backward=first > 0, window=kwargs.get("window_size_left", -2) + 1)
    if packet in _GATHERING:
        return Kernel(OTHER, 0.0, 2 * _bytes(outputs))
    exponentials = outputs[0].numel() if packet in _EXPONENTIALS else 0
    return Kernel(OTHER, 0.0, _bytes(inputs) + _bytes(outputs), exponentials=exponentials)


def attention_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, backward: bool, window: int = 0) -> Kernel:
    """Returns the kernel of fused attention on [batch, heads, tokens, size]: scores are not stored, backward computes
    them again, with five products for the two of forward, and a causal mask leaves out half of the products.

    Args:
        q: queries.
        k: keys.
        v: values.
        causal: whether keys after a query are left out.
        backward: whether the kernel is of the backward pass.
        window: how many keys a query sees; 0 or less for all.
    """
    batch, heads, queries, size = q.shape
    keys, of_values = min(window, k.shape[2]) if window > 0 else k.shape[2], v.shape[3]
    causal = causal and queries == keys
    pairs = batch * heads * queries * keys * (0.5 if causal else 1.0)
    flops = 2.0 * pairs * ((3 * size + 2 * of_values) if backward else (size + of_values))
    out = batch * heads * queries * of_values * q.element_size()
    moved = (q.nbytes + k.nbytes + v.nbytes + out) * (2 if backward else 1)
    return Kernel(ATTENTION, flops, moved, (queries, keys, size), pairs, causal)


CHUNK = 64
"""The tokens of a chunk in kernels of recurrent mixers, for calls without a chunk of their own."""


def mixer_kernel(call: MixerCall, tensors: Sequence[Tensor], backward: bool) -> Kernel:
    """Returns the kernel of a recurrent mixer, as fla, mamba-ssm and causal-conv1d have it, not the loops of
    Transformers: a scan over heads has products of [batch, tokens, heads, size] inside of chunks, and with the states
    between chunks; other mixers are bound by memory. Backward computes the states again."""
    like = tensors[call.like]
    moved = (_bytes(tensors) + like.nbytes) * (2 if backward else 1)
    if like.dim() < 4:
        decay = dict(zip(call.tensors, tensors, strict=True)).get("A")
        return Kernel(OTHER, 0.0, moved, exponentials=0 if decay is None else like.numel() * decay.shape[-1])
    features = next(each.shape[-1] for place, each in enumerate(tensors) if each.dim() == 4 and place != call.like)
    tokens, size, rows = like.shape[1], like.shape[-1], like.numel() // like.shape[-1]
    chunk, keys = dict(call.options).get("chunk_size", CHUNK), 2 if "beta" in call.tensors else 1  # a delta rule's two
    flops = 2.0 * rows * (chunk * (keys * features + size) + (1 + keys) * features * size)
    return Kernel(ATTENTION, (3 if backward else 1) * flops, moved, (tokens, chunk, features), rows * chunk)


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Returns the bytes of tensors; an expanded tensor counts the bytes of its storage."""
    return sum([min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors])


_ALLOCATING = {
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten.empty_strided,
    aten.new_empty_strided,
    aten.empty_permuted,
}
_GATHERING = {aten.index_select, aten.embedding, aten.gather, aten.index, aten.slice_scatter}
_EXPONENTIALS = {
    aten.exp,
    aten.exp_,
    aten.log,
    aten.sigmoid,
    aten.tanh,
    aten.erf,
    aten.silu,
    aten.silu_backward,
    aten.gelu,
    aten.gelu_backward,
    aten._softmax,
    aten._log_softmax,
    aten.logsumexp,
    aten.softplus,
    aten.cos,
    aten.sin,
}
_PRODUCTS: Mapping[Any, Callable[[Sequence[Any]], tuple[Tensor, Tensor]]] = {
    aten.mm: lambda args: (args[0], args[1]),
    aten.bmm: lambda args: (args[0], args[1]),
    aten.addmm: lambda args: (args[1], args[2]),
    aten.addmm_: lambda args: (args[1], args[2]),
    aten.baddbmm: lambda args: (args[1], args[2]),
    aten.baddbmm_: lambda args: (args[1], args[2]),
    aten._scaled_mm_v2: lambda args: (args[0], args[1]),
    aten._grouped_mm: lambda args: (args[0], args[1][0] if args[1].dim() == 3 else args[1]),
}
_ATTENTIONS = {
    aten._scaled_dot_product_flash_attention_for_cpu: 0,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 1,
}
_WINDOWS = {aten._flash_attention_forward: 0, aten._flash_attention_backward: 1}


class _Attention(torch.autograd.Function):
    """Fused attention on the meta device; torch's own would store all scores."""

    @staticmethod
    def forward(ctx: Any, meter: Meter, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out = _by_token(q, v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        ctx.meter, ctx.causal = meter, causal
        meter.note(attention_kernel(q, k, v, causal, backward=False))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        q, k, v, *_ = ctx.saved_tensors
        ctx.meter.note(attention_kernel(q, k, v, ctx.causal, backward=True))
        return None, *(_by_token(value, value.shape[-1]) for value in (q, k, v)), None


class _Mixer(torch.autograd.Function):
    """A recurrent mixer as one kernel on the meta device."""

    @staticmethod
    def forward(ctx: Any, meter: Meter, call: MixerCall, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.meter, ctx.call = meter, call
        meter.note(mixer_kernel(call, tensors, backward=False))
        return torch.empty_like(tensors[call.like])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        ctx.meter.note(mixer_kernel(ctx.call, tensors, backward=True))
        return None, None, *(torch.empty_like(tensor) for tensor in tensors)


class _RmsNorm(torch.autograd.Function):
    """torch's fused RMS norm, a kernel forward and two backward; on the meta device torch takes it apart."""

    @staticmethod
    def forward(ctx: Any, meter: Meter, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.meter = meter
        meter.note(Kernel(OTHER, 0.0, 2 * _bytes([value])))
        return value.new_empty(value.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        value, weight = ctx.saved_tensors
        for tensors in (3, 2):  # the gradient of the value is written, the weight's is a sum
            ctx.meter.note(Kernel(OTHER, 0.0, tensors * _bytes([value])))
        return None, value.new_empty(value.shape), torch.empty_like(weight)


def _by_token(like: Tensor, size: int) -> Tensor:
    """Returns an empty [batch, heads, tokens, size] with the heads of a token contiguous, as fused kernels return."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, size).transpose(1, 2)


@contextmanager
def meta_as(backend: str) -> Iterator[None]:
    """Makes operators on the meta device take the branches of a GPU ("nccl") or of a CPU ("gloo")."""
    on_gpu = (stock_modules.DEVICES, accumulate.DEVICES, kernels.DEVICES) if backend == "nccl" else ()
    for devices in on_gpu:
        devices.add("meta")
    statistics.CHUNK["meta"] = statistics.CHUNK["cuda" if on_gpu else "cpu"]
    try:
        yield
    finally:
        del statistics.CHUNK["meta"]
        for devices in on_gpu:
            devices.discard("meta")


class FusedKernels(TorchFunctionMode):
    """Counts attention, RMS norms and recurrent mixers as the kernels of a GPU, which the meta device has not."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention and args[0].is_meta:
            return _Attention.apply(self._meter, *args[:3], kwargs.get("is_causal", False))
        if function is functional.rms_norm and args[0].is_meta:
            return _RmsNorm.apply(self._meter, args[0], kwargs["weight"])
        if isinstance(call := getattr(function, "call", None), MixerCall):
            return _Mixer.apply(self._meter, call, *args)
        return function(*args, **kwargs)
