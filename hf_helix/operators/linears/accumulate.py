"""Matrices that lie side by side in memory, seen as one.

In:   parts of one matrix, by rows or by columns, in order.
Out:  the matrix: a view where the parts really lie so, otherwise nothing, or a copy.
Must hold: a view has the values of exactly these parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def in_one(parts: Sequence[Tensor]) -> Tensor | None:
    """The view [elements] of contiguous tensors that follow one another in memory; None if they do not."""
    lengths = [part.numel() for part in parts]
    if not all(part.is_contiguous() for part in parts) or not _follow(parts, lengths):
        return None
    return parts[0].as_strided((sum(lengths),), (1,))


def rows_in_one(parts: Sequence[Tensor]) -> Tensor | None:
    """The view of parts that follow one another in memory, joined along the first dimension; None if they do not."""
    if len(parts) == 1:
        return parts[0]
    whole = in_one(parts)
    return None if whole is None else whole.view(-1, *parts[0].shape[1:])


def columns_in_one(parts: Sequence[Tensor]) -> Tensor | None:
    """The view of matrices [n, columns] that are slices of the same rows; None if they are not."""
    first = parts[0]
    if len(parts) == 1:
        return first
    columns = sum(part.shape[1] for part in parts)
    row = first.stride(0)
    aligned = row >= columns and all(part.stride() == (row, 1) for part in parts)
    if not aligned or not _follow(parts, [part.shape[1] for part in parts]):
        return None
    return first.as_strided((len(first), columns), (row, 1))


def heads_in_one(parts: Sequence[Tensor]) -> Tensor | None:
    """The view [..., heads, head_dim] of parts whose heads follow one another in memory; None if they do not."""
    first = parts[0]
    *outer, _, inner = first.stride()
    strides = (*outer, first.shape[-1] * inner, inner)
    heads = [part.shape[-2] for part in parts]
    aligned = all(_lies_by(part, strides) for part in parts)
    if not aligned or not _follow(parts, [count * strides[-2] for count in heads]):
        return None
    return first.as_strided((*first.shape[:-2], sum(heads), first.shape[-1]), strides)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """Matrices [n, columns] beside one another, copied only where they do not lie so."""
    joined = columns_in_one(parts)
    return torch.cat(list(parts), 1) if joined is None else joined


def _lies_by(part: Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides; where a dimension has one element, its stride says nothing."""
    rows = zip(part.shape, part.stride(), strides, strict=True)
    return all(size == 1 or own == stride for size, own, stride in rows)


def _follow(parts: Sequence[Tensor], distances: Sequence[int]) -> bool:
    """Whether every part of one storage begins so many elements after the one before it."""
    storage, dtype = parts[0].untyped_storage()._cdata, parts[0].dtype
    return all(
        part.untyped_storage()._cdata == storage
        and part.dtype is dtype
        and part.storage_offset() == before.storage_offset() + distance
        for (before, part), distance in zip(pairwise(parts), distances, strict=False)
    )


# -- accumulate ----------------------------------------------------------------------------------------------------
# Adding to the gradients of parameters.
#
# In:   parameters that one matrix product is for, and what one micro-batch found.
# Out:  `parameter.grad`, in the type of the parameter; several that come from one product lie in one piece.
# Must hold: nothing is allocated for a gradient that is there already, where the types agree or the device has GEMMs
# that
# add products of half precision to a float32 total.


DEVICES = {"cuda"}
"""Devices whose GEMMs add products of half precision to a float32 total."""


def add_to_gradients(weights: Sequence[Tensor], left: Tensor, right: Tensor) -> None:
    """Adds a product to the gradients of weights whose rows it holds, one weight after the other.

    Args:
        weights: [rows, columns] each.
        left: [rows of all weights, tokens].
        right: [tokens, columns].
    """
    whole = _gradient_of(weights)
    if whole is not None:
        add_product(whole, left, right)
    elif all(weight.grad is None for weight in weights):
        _start(weights, product(left, right, weights[0].dtype))
    else:
        for weight, part in zip(weights, left.split(list(map(len, weights))), strict=True):
            add_to_gradients((weight,), part, right)


def add_to_bias_gradients(biases: Sequence[Tensor], rows: Tensor, factor: float = 1.0) -> None:
    """Adds the sum of rows, times a factor, to the gradients of biases whose elements it holds, one after the other.

    Args:
        biases: [features] each.
        rows: [tokens, features of all biases].
        factor: what the sum is multiplied with.
    """
    total = rows.sum(0, dtype=biases[0].dtype)
    if factor != 1:
        total *= factor
    whole = _gradient_of(biases)
    if whole is not None:
        whole.add_(total)
    elif all(bias.grad is None for bias in biases):
        _start(biases, total)
    else:
        for bias, part in zip(biases, total.split(list(map(len, biases))), strict=True):
            bias.grad = part.clone() if bias.grad is None else bias.grad.add_(part)


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the product of two matrices in a type that may be of higher precision.

    Args:
        left: [rows, inner].
        right: [inner, columns].
        dtype: of the product.
    """
    if in_one_gemm(left, dtype):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product of two matrices, or of two stacks of them, to a total that may be of higher precision.

    Args:
        total: [rows, columns], or [stack, rows, columns]; written to.
        left: [rows, inner], or [stack, rows, inner].
        right: [inner, columns], or [stack, inner, columns].
    """
    if total.dtype is left.dtype:
        add: Any = total.baddbmm_ if total.dim() == 3 else total.addmm_
        add(left, right)
    elif in_one_gemm(left, total.dtype):
        add = torch.baddbmm if total.dim() == 3 else torch.addmm
        add(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def in_one_gemm(factor: Tensor, dtype: torch.dtype) -> bool:
    """Whether one GEMM can multiply factors like this one and write, or add, the product in a type.

    cuBLAS does so from half precision to float32, and torch offers it on CUDA since the oldest version that hf_helix
    supports. Elsewhere the product is rounded to the type of the factors first.
    """
    halves = factor.dtype in (torch.bfloat16, torch.float16)
    return factor.device.type in DEVICES and torch.version.hip is None and halves and dtype is torch.float32


def _start(parameters: Sequence[Tensor], gradient: Tensor) -> None:
    """Gives parameters their parts of a gradient that is all of theirs."""
    first = 0
    for parameter in parameters:
        parameter.grad = gradient if len(parameters) == 1 else gradient.narrow(0, first, len(parameter))
        first += len(parameter)


def _gradient_of(parameters: Sequence[Tensor]) -> Tensor | None:
    """All gradients in one, if they are there and lie so."""
    if len(parameters) == 1:
        return parameters[0].grad
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return rows_in_one(gradients) if len(gradients) == len(parameters) else None
