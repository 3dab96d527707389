"""Matrices that lie side by side in memory, seen as one.

In:   parts of one matrix, by rows or by columns, in order.
Out:  the matrix: a view if the parts are adjacent in memory, otherwise nothing, or a copy.
Must hold: a view has the values of exactly these parts.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def contiguous_view(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns a view [elements] of contiguous tensors adjacent in memory; None for other tensors."""
    lengths = [part.numel() for part in parts]
    if not all(part.is_contiguous() for part in parts) or not _follow(parts, lengths):
        return None
    return parts[0].as_strided((sum(lengths),), (1,))


def contiguous_rows(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns a view of parts adjacent in memory, joined along the first dimension; None for other parts."""
    if len(parts) == 1:
        return parts[0]
    whole = contiguous_view(parts)
    return None if whole is None else whole.view(-1, *parts[0].shape[1:])


def contiguous_columns(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns a view of matrices [n, columns], adjacent slices of the same rows; None for other matrices."""
    first = parts[0]
    if len(parts) == 1:
        return first
    columns = sum(part.shape[1] for part in parts)
    row = first.stride(0)
    aligned = row >= columns and all(part.stride() == (row, 1) for part in parts)
    if not aligned or not _follow(parts, [part.shape[1] for part in parts]):
        return None
    return first.as_strided((len(first), columns), (row, 1))


def contiguous_heads(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns a view [..., heads, head_dim] of parts with adjacent heads in memory; None for other parts."""
    first = parts[0]
    *outer, _, inner = first.stride()
    strides = (*outer, first.shape[-1] * inner, inner)
    heads = [part.shape[-2] for part in parts]
    aligned = all(_lies_by(part, strides) for part in parts)
    if not aligned or not _follow(parts, [count * strides[-2] for count in heads]):
        return None
    return first.as_strided((*first.shape[:-2], sum(heads), first.shape[-1]), strides)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """Returns matrices [n, columns] side by side, copied only if not adjacent."""
    joined = contiguous_columns(parts)
    return torch.cat(list(parts), 1) if joined is None else joined


def _lies_by(part: Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides; the stride of a dimension with one element is ignored."""
    rows = zip(part.shape, part.stride(), strides, strict=True)
    return all(size == 1 or own == stride for size, own, stride in rows)


def _follow(parts: Sequence[Tensor], distances: Sequence[int]) -> bool:
    """Whether every part of a storage begins at the given distance, in elements, after the previous part."""
    storage, dtype = parts[0].untyped_storage()._cdata, parts[0].dtype
    return all(
        part.untyped_storage()._cdata == storage
        and part.dtype is dtype
        and part.storage_offset() == before.storage_offset() + distance
        for (before, part), distance in zip(pairwise(parts), distances, strict=False)
    )
