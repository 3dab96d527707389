"""Adding to the gradients of parameters.

In:   a parameter, and what one micro-batch found.
Out:  `parameter.grad`, in the type of the parameter.
Must hold: nothing is allocated for a gradient that is there already, where the types agree or the device has GEMMs that
add products of half precision to a float32 total.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def add_to_gradient(weight: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices."""
    if weight.grad is None:
        weight.grad = product(left, right, weight.dtype)
    else:
        add_product(weight.grad, left, right)


def add_to_bias_gradient(bias: Tensor, rows: Tensor, factor: float = 1.0) -> None:
    """Add the sum of rows, times a factor."""
    total = rows.sum(0, dtype=bias.dtype)
    if factor != 1:
        total *= factor
    bias.grad = total if bias.grad is None else bias.grad.add_(total)


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two matrices in a type that may be of higher precision."""
    if in_one_gemm(left, dtype):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices, or of two stacks of them, to a total that may be of higher precision."""
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
    return factor.is_cuda and torch.version.hip is None and halves and dtype is torch.float32
