"""Adding to the gradients of parameters.

In:   parameters that one matrix product is for, and what one micro-batch found.
Out:  `parameter.grad`, in the type of the parameter; several that come from one product lie in one piece.
Must hold: nothing is allocated for a gradient that is there already, if the types agree or the device has GEMMs that
add products of half precision to a float32 total.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.side_by_side import contiguous_rows

DEVICES = {"cuda"}
"""Devices whose GEMMs add products of half precision to a float32 total."""


def add_to_gradients(weights: Sequence[Tensor], left: Tensor, right: Tensor) -> None:
    """Adds a product to the gradients of weights; the rows of the product belong to the weights in order.

    Args:
        weights: [rows, columns] each.
        left: [rows of all weights, tokens].
        right: [tokens, columns].
    """
    joined = _gradient_of(weights)
    if joined is not None:
        add_product(joined, left, right)
    elif all(weight.grad is None for weight in weights):
        _start(weights, product(left, right, weights[0].dtype))
    else:
        for weight, part in zip(weights, left.split(list(map(len, weights))), strict=True):
            add_to_gradients((weight,), part, right)


def add_to_bias_gradients(biases: Sequence[Tensor], rows: Tensor, factor: float = 1.0) -> None:
    """Adds the sum of rows, times a factor, to the gradients of biases; the elements of the sum belong to the biases in
    order.

    Args:
        biases: [features] each.
        rows: [tokens, features of all biases].
        factor: of the sum.
    """
    total = rows.sum(0, dtype=biases[0].dtype)
    if factor != 1:
        total *= factor
    joined = _gradient_of(biases)
    if joined is not None:
        joined.add_(total)
    elif all(bias.grad is None for bias in biases):
        _start(biases, total)
    else:
        for bias, part in zip(biases, total.split(list(map(len, biases))), strict=True):
            bias.grad = part.clone() if bias.grad is None else bias.grad.add_(part)


def started_gradient(parameter: Tensor) -> Tensor:
    """Returns the gradient of a parameter, zeros at first."""
    if parameter.grad is None:
        parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return parameter.grad


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the product of matrices [rows, inner] and [inner, columns] in a type of the same or a higher
    precision."""
    if in_one_gemm(left, dtype):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product of two matrices, or of two stacks of matrices, to a total of the same or a higher precision.

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
    """Returns whether a single GEMM can multiply factors like this and write, or add, the product in a type.

    cuBLAS does so from half precision to float32, and torch offers it on CUDA in every version that hf_helix supports.
    Elsewhere the product is rounded to the type of the factors first.
    """
    halves = factor.dtype in (torch.bfloat16, torch.float16)
    return factor.device.type in DEVICES and torch.version.hip is None and halves and dtype is torch.float32


def _start(parameters: Sequence[Tensor], gradient: Tensor) -> None:
    """Gives parameters their parts of a joint gradient."""
    first = 0
    for parameter in parameters:
        parameter.grad = gradient if len(parameters) == 1 else gradient.narrow(0, first, len(parameter))
        first += len(parameter)


def _gradient_of(parameters: Sequence[Tensor]) -> Tensor | None:
    """The joint gradient of all parameters, if all have a gradient and these are adjacent."""
    if len(parameters) == 1:
        return parameters[0].grad
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return contiguous_rows(gradients) if len(gradients) == len(parameters) else None
