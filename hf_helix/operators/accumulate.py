"""Adding to the gradients of parameters.

In:   a parameter, and what one micro-batch found.
Out:  `parameter.grad`, in the type of the parameter.
Must hold: nothing is allocated for a gradient that is there already, where the types agree.
"""

from __future__ import annotations

from torch import Tensor


def add_to_gradient(weight: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices."""
    if weight.grad is None:
        weight.grad = (left @ right).to(weight.dtype)
    else:
        add_product(weight.grad, left, right)


def add_to_bias_gradient(bias: Tensor, rows: Tensor, factor: float = 1.0) -> None:
    """Add the sum of rows, times a factor."""
    total = rows.sum(0, dtype=bias.dtype)
    if factor != 1:
        total *= factor
    bias.grad = total if bias.grad is None else bias.grad.add_(total)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices, or of two stacks of them, to a total that may be of higher precision."""
    if total.dtype is not left.dtype:
        total += left @ right
    elif total.dim() == 3:
        total.baddbmm_(left, right)
    else:
        total.addmm_(left, right)
