"""Functions with explicit backward: a few kernels, without an autograd graph around them.

In:   the inputs of a segment.
Out:  its output, and the tensors for its backward; backward returns the gradients of the inputs, and adds to those of
      parameters.
Must hold: the kernels are those of autograd, so the bits are the same. Where `applies` returns False, the segment
leaves the function to autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_helix.operators.base import Precision, Tensors

aten = torch.ops.aten


class Explicit(ABC):
    """A function with one output, and its backward."""

    @abstractmethod
    def applies(self, *inputs: Tensor) -> bool:
        """Returns whether the result equals the segment's function for these inputs, on their device."""

    @abstractmethod
    def forward(self, precision: Precision, *inputs: Tensor) -> tuple[Tensor, Tensors]:
        """Returns the output, and the tensors for `backward`."""

    @abstractmethod
    def backward(self, kept: Tensors, gradient: Tensor) -> Tensors:
        """Returns the gradients of the inputs, and adds to those of parameters."""


class GatedSilu(Explicit):
    """`silu(gate) * up`.

    Args:
        is_silu: whether the activation of the model is exactly SiLU.
    """

    def __init__(self, is_silu: Callable[[], bool]) -> None:
        self._is_silu = is_silu

    def applies(self, *inputs: Tensor) -> bool:
        gate, up = inputs
        return gate.dtype is up.dtype and self._is_silu()

    def forward(self, precision: Precision, *inputs: Tensor) -> tuple[Tensor, Tensors]:
        gate, up = inputs
        activated = functional.silu(gate)
        return activated * up, (gate, up, activated)

    def backward(self, kept: Tensors, gradient: Tensor) -> Tensors:
        gate, up, activated = kept
        gradient = gradient.to(gate.dtype)
        return aten.silu_backward.default(gradient * up, gate), gradient * activated


class RmsNorm(Explicit):
    """RMS norm over the last dimension, computed in fp32 by torch's kernels. It rounds once, where the modules of
    Transformers round twice in bf16.

    Args:
        module: has a `weight` and a `variance_epsilon`.
        is_fused: whether torch has a kernel for the module's function on the device of a value.
        lowers: whether the result has the type of matrix products.
    """

    def __init__(self, module: Any, is_fused: Callable[[nn.Module, Tensor], bool], lowers: bool) -> None:
        self._module = module
        self._is_fused = is_fused
        self._lowers = lowers

    def applies(self, *inputs: Tensor) -> bool:
        return self._is_fused(self._module, inputs[0])

    def forward(self, precision: Precision, *inputs: Tensor) -> tuple[Tensor, Tensors]:
        (value,) = inputs
        given, weight = in_one_dtype(value, self._module.weight)
        out, scale = fused_rms_norm(given, weight, self._module.variance_epsilon)
        return precision.cast_for_matmul(out) if self._lowers else out, (value, scale)

    def backward(self, kept: Tensors, gradient: Tensor) -> Tensors:
        value, scale = kept
        parameter = self._module.weight
        given, weight = in_one_dtype(value, parameter)
        of_value, of_weight = fused_rms_norm_backward(
            gradient.to(given.dtype), given, scale, weight, parameter.requires_grad
        )
        if of_weight is not None:
            of_weight = of_weight.to(parameter.dtype)
            parameter.grad = of_weight if parameter.grad is None else parameter.grad.add_(of_weight)
        return (of_value.to(value.dtype),)


def in_one_dtype(value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the value and the weight of an RMS norm in one type, as the kernels require."""
    if value.dtype is weight.dtype:
        return value, weight
    dtype = torch.promote_types(value.dtype, weight.dtype)
    return value.to(dtype), weight.to(dtype)


def fused_rms_norm(value: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns the normed value, and the reciprocals of the roots for backward.

    Args:
        value: [..., hidden].
        weight: [hidden].
    """
    out, scale = aten._fused_rms_norm.default(value, weight.shape, weight, epsilon)
    return out, scale


def fused_rms_norm_backward(
    gradient: Tensor, value: Tensor, scale: Tensor, weight: Tensor, trained: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of the value and, where it is trained, of the weight.

    Args:
        gradient: of the normed value, [..., hidden].
        value: the input of the norm, [..., hidden].
        weight: [hidden].
        trained: whether to return the gradient of the weight.
    """
    of_value, of_weight = aten._fused_rms_norm_backward.default(
        gradient, value, weight.shape, scale, weight, [True, trained]
    )
    return of_value, of_weight if trained else None
