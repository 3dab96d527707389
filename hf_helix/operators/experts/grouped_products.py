"""Products of the rows of every expert with a matrix of its own.

In:   rows sorted by expert, the sizes of each expert's rows, and a matrix for each expert.
Out:  the same number of rows; or a matrix for each expert, a sum over its rows.
Must hold: sums run over rows in their order. One grouped GEMM makes the products where torch has one; elsewhere each
expert's is a kernel of its own, and the host knows the sizes.
"""

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.linears.accumulate import add_product

Sizes = Tensor | list[int] | None
"""The rows of every expert: their ends, for the device; their numbers, for the host; None if all are equal."""


def grouped(rows: Tensor, matrices: Tensor, sizes: Sizes, bias: Tensor | None = None) -> Tensor:
    """Returns the rows of every expert times its matrix, plus its bias [rows, features out].

    Args:
        rows: [rows, features in].
        matrices: [experts, features in, features out].
        sizes: the rows of every expert.
        bias: [experts, features out]; None for none.
    """
    if sizes is None:
        blocks = rows.unflatten(0, (len(matrices), -1))
        out = torch.bmm(blocks, matrices) if bias is None else torch.baddbmm(bias.unsqueeze(1), blocks, matrices)
        return out.flatten(0, 1)
    if isinstance(sizes, Tensor):
        out = functional.grouped_mm(rows, matrices, offs=sizes)
        return out if bias is None else out.add_(bias[_experts_of(rows, sizes)])
    out = rows.new_empty(len(rows), matrices.shape[2])
    for expert, (piece, made) in enumerate(zip(rows.split(sizes), out.split(sizes), strict=True)):
        if bias is None:
            torch.mm(piece, matrices[expert], out=made)
        else:
            torch.addmm(bias[expert], piece, matrices[expert], out=made)
    return out


def add_grouped(total: Tensor, rows: Tensor, matrices: Tensor, sizes: Sizes) -> None:
    """Adds the result of `grouped` to a total.

    Args:
        total: [rows, features out], of the type of the rows; written to.
        rows: see `grouped`.
        matrices: see `grouped`.
        sizes: see `grouped`.
    """
    if sizes is None:
        total.unflatten(0, (len(matrices), -1)).baddbmm_(rows.unflatten(0, (len(matrices), -1)), matrices)
    elif isinstance(sizes, Tensor):
        total += functional.grouped_mm(rows, matrices, offs=sizes)
    else:
        for expert, (piece, sum_) in enumerate(zip(rows.split(sizes), total.split(sizes), strict=True)):
            sum_.addmm_(piece, matrices[expert])


def add_products(total: Tensor, left: Tensor, right: Tensor, sizes: Sizes) -> None:
    """Adds the products of each expert's rows.

    Args:
        total: [experts, features of the left, features of the right]; written to.
        left: [rows, features].
        right: [rows, features].
        sizes: see `grouped`.
    """
    if sizes is None:
        left, right = (value.unflatten(0, (len(total), -1)) for value in (left, right))
        add_product(total, left.transpose(1, 2), right)
    elif isinstance(sizes, Tensor):
        total += functional.grouped_mm(left.t(), right, offs=sizes)
    else:
        for sum_, ours, theirs in zip(total, left.split(sizes), right.split(sizes), strict=True):
            add_product(sum_, ours.t(), theirs)


def add_rows(total: Tensor, rows: Tensor, sizes: Sizes) -> None:
    """Adds to [experts, features] the sum of each expert's rows."""
    if sizes is None:
        total += rows.unflatten(0, (len(total), -1)).sum(1, dtype=total.dtype)
    elif isinstance(sizes, Tensor):
        # A product, since sums by index run in no fixed order on a GPU.
        is_of = _experts_of(rows, sizes) == torch.arange(len(total), device=rows.device).unsqueeze(1)
        add_product(total, is_of.to(rows.dtype), rows)
    else:
        for sum_, piece in zip(total, rows.split(sizes), strict=True):
            sum_ += piece.sum(0, dtype=total.dtype)


def _experts_of(rows: Tensor, ends: Tensor) -> Tensor:
    """Returns the expert of every row, on the device."""
    return torch.searchsorted(ends, torch.arange(len(rows), device=rows.device, dtype=ends.dtype), right=True)
