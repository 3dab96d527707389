"""Element-wise work of a layer in one kernel each: RMS norms, the gates of an MLP, ropes, rounding to fp8.

In:   values on a device of `DEVICES`.
Out:  results and gradients, by operators of torch, which counters of kernels and detectors of races see.
Must hold: a value is rounded after the same operations as by torch's own operators, unless a docstring names a
difference. Nothing is written to an argument.

Liger's kernels compute the same. They are not used: theirs write gradients over the saved values, need copies of slices
such as the outputs of a joint product, and have one type for a norm's residual stream and its result.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

DEVICES = {"cuda"}
"""Devices that Triton compiles for. With TRITON_INTERPRET=1 its interpreter runs the kernels on the CPU."""

TYPES = {torch.float32, torch.bfloat16, torch.float16}

PROGRAMS = 264
"""How many programs share the rows in backward of a norm: two for each multiprocessor of an H100. Each leaves a partial
gradient of the weight."""

BLOCK, HEADS = 1024, 8  # columns of gates, and heads of a rope, of a program

_library = torch.library.Library("hf_helix_fused", "DEF")


def is_on(value: Tensor) -> bool:
    """Returns whether kernels run for a value: for its device and its type there are kernels, and they are in use."""
    return _is_used and value.device.type in DEVICES and value.dtype in TYPES and (value.is_meta or _has_triton())


_is_used = True


@contextmanager
def using(fused: bool) -> Iterator[None]:
    """Returns the context in which operators run the kernels, or torch's own operators. Like autocast, it reaches code
    that torch calls, such as the functions of autograd."""
    global _is_used
    before, _is_used = _is_used, fused
    try:
        yield
    finally:
        _is_used = before


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _operator(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator: the function becomes an operator of torch on all devices."""

    def define(function: Callable[..., Any]) -> Any:
        name = function.__name__
        _library.define(f"{name}{schema}")
        _library.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.hf_helix_fused, name).default

    return define


@_operator("(Tensor gate, Tensor up) -> Tensor")
def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns `silu(gate) * up`, for values [..., features] of one type."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate, up = _rows(gate), _rows(up)
    launch("gated_silu", _grid(gate), gate, up, out, gate.stride(0), up.stride(0), gate.shape[1], BLOCK=BLOCK)
    return out


@_operator("(Tensor gradient, Tensor gate, Tensor up) -> Tensor")
def gated_silu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Returns the gradients of gate and `up`, side by side [..., 2 * features]: one product can read both."""
    columns = gate.shape[-1]
    out = gate.new_empty(*gate.shape[:-1], 2 * columns)
    gate, up = _rows(gate), _rows(up)
    strides = gate.stride(0), up.stride(0)
    launch("gated_silu_backward", _grid(gate), gradient.contiguous(), gate, up, out, *strides, columns, BLOCK=BLOCK)
    return out


@_operator("(Tensor value, Tensor weight, float epsilon, ScalarType dtype) -> (Tensor, Tensor)")
def rms_norm(value: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the norm of a value [..., hidden] with a weight [hidden], rounded once to a type, and the reciprocals of
    the roots for backward."""
    value = value.contiguous()
    out, scale = torch.empty_like(value, dtype=dtype), value.new_empty(value.shape[:-1], dtype=torch.float32)
    launch("rms_norm", (scale.numel(),), value, weight, out, scale, len(weight), epsilon, **_whole_row(weight))
    return out, scale


@_operator("(Tensor gradient, Tensor value, Tensor scale, Tensor weight, Tensor? partial) -> (Tensor, Tensor)")
def rms_norm_backward(
    gradient: Tensor, value: Tensor, scale: Tensor, weight: Tensor, partial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the value of `rms_norm`, and rows [programs, hidden] whose sum is the gradient of the
    weight. `partial` is a part of the value's gradient, of the same type, added before the sum is rounded."""
    value, of_value = value.contiguous(), torch.empty_like(value, memory_format=torch.contiguous_format)
    of_weight = value.new_empty((min(PROGRAMS, scale.numel()), len(weight)), dtype=torch.float32)
    adds = partial is not None
    given = value if partial is None else partial.contiguous()
    tensors = gradient.contiguous(), value, scale, weight, given, of_value, of_weight
    sizes = scale.numel(), len(weight)
    launch("rms_norm_backward", (len(of_weight),), *tensors, *sizes, ADDS=adds, **_whole_row(weight))
    return of_value, of_weight


@_operator("(Tensor[] parts, Tensor cos, Tensor sin, ScalarType dtype, bool back) -> Tensor")
def rotate(parts: Sequence[Tensor], cos: Tensor, sin: Tensor, dtype: torch.dtype, back: bool) -> Tensor:
    """Returns rotated heads side by side [tokens, batch, all heads, head_dim], rounded to a type after their sum.

    Args:
        parts: [tokens, batch, heads, head_dim] each, such as queries and keys.
        cos: [tokens, batch or 1, head_dim].
        sin: of the same shape.
        dtype: of the result.
        back: whether to rotate gradients back. Products are then rounded to `dtype`, forward to the type that torch
            gives products of the parts with the cosines.
    """
    tokens, batch, _, size = parts[0].shape
    out = parts[0].new_empty(tokens, batch, sum(part.shape[2] for part in parts), size, dtype=dtype)
    product = dtype if back else torch.promote_types(parts[0].dtype, cos.dtype)
    strides = out.stride(1), cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0
    place = 0
    for part in parts:
        part = part if part.stride(-1) == 1 else part.contiguous()
        target, place = out[:, :, place : place + part.shape[2]], place + part.shape[2]
        sizes = batch, part.shape[2], size // 2
        grid, block = (tokens * batch, -(-part.shape[2] // HEADS)), _power_of_two(size // 2)
        options: dict[str, Any] = {"PRODUCT": product, "BACK": back, "HEADS": HEADS, "BLOCK": block}
        launch("rotate", grid, part, cos, sin, target, *part.stride()[:3], *strides, *sizes, **options)
    return out


@_operator("(Tensor rows, Tensor? largest, ScalarType dtype, float least) -> (Tensor, Tensor)")
def to_float8(rows: Tensor, largest: Tensor | None, dtype: torch.dtype, least: float) -> tuple[Tensor, Tensor]:
    """Returns a matrix in fp8, and its scale, see `hf_helix.operators.float8.quantize`.

    Args:
        rows: [rows, columns].
        largest: the largest absolute value [], for a scale []; None for a scale of each row [rows, 1].
        dtype: of the values.
        least: what counts as the largest value of zeros.
    """
    rows, columns = _rows(rows), rows.shape[1]
    by_row = largest is None
    values = torch.empty_like(rows, dtype=dtype, memory_format=torch.contiguous_format)
    scale = rows.new_empty((len(rows), 1) if by_row else (), dtype=torch.float32)
    tensors = rows, rows if largest is None else largest, values, scale
    options: dict[str, Any] = {"MOST": torch.finfo(dtype).max, "LEAST": least, "BY_ROW": by_row}
    launch(
        "to_float8", (len(rows),), *tensors, rows.stride(0), columns, **options, BLOCK=min(4096, _power_of_two(columns))
    )
    return values, scale


def launch(name: str, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, **options: Any) -> None:
    """Runs a kernel of Triton; nothing on the meta device, or without elements."""
    first = arguments[0]
    if first.is_meta or not first.numel():
        return
    import triton.language

    from hf_helix.operators.fused import triton_kernels

    if "PRODUCT" in options:
        options["PRODUCT"] = getattr(triton.language, str(options["PRODUCT"]).removeprefix("torch."))
    # Without fused multiplications and additions, products are rounded as by torch.
    getattr(triton_kernels, name)[grid](*arguments, **options, num_warps=num_warps, enable_fp_fusion=False)


def _rows(value: Tensor) -> Tensor:
    """Returns a value as a matrix [rows, features] whose rows are contiguous."""
    rows = value.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _grid(rows: Tensor) -> tuple[int, int]:
    return len(rows), -(-rows.shape[1] // BLOCK)


def _whole_row(weight: Tensor) -> dict[str, Any]:
    block = _power_of_two(len(weight))
    return {"BLOCK": block, "num_warps": 4 if block < 2048 else 8 if block < 8192 else 16}


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
