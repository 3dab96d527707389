"""Functions with explicit backward: a kernel or a few, without an autograd graph around them.

In:   the inputs of an operator.
Out:  its output, and the tensors for its backward; backward returns the gradients of the inputs, and adds to the
    gradients of parameters.
Must hold: results are rounded as by autograd, unless a docstring names a difference. If `applies` returns False, the
operator leaves the function to autograd.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.base import OperatorContext, Precision, Tensors
from hf_helix.operators.fused import kernels

aten = torch.ops.aten


class Explicit(ABC):
    """A function with one output, and its backward."""

    @abstractmethod
    def applies(self, *inputs: Tensor) -> bool:
        """Returns whether the result equals the operator's function for these inputs, on their device."""

    @abstractmethod
    def forward(self, precision: Precision, *inputs: Tensor) -> tuple[Tensor, Tensors]:
        """Returns the output, and the tensors for `backward`."""

    @abstractmethod
    def backward(self, kept: Tensors, ctx: OperatorContext, gradient: Tensor) -> Tensors:
        """Returns the gradients of the inputs, and adds to the gradients of parameters.

        Args:
            kept: the tensors that forward has kept.
            ctx: may have its `partials` added, and then set to an empty tuple.
            gradient: of the output.
        """


class GatedSilu(Explicit):
    """`silu(gate) * up`. The fused kernels keep no activated gate for backward.

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
        if kernels.is_on(gate):
            return kernels.gated_silu(gate, up), inputs
        activated = functional.silu(gate)
        return activated * up, (gate, up, activated)

    def backward(self, kept: Tensors, ctx: OperatorContext, gradient: Tensor) -> Tensors:
        gate, up, *activated = kept
        gradient = gradient.to(gate.dtype)
        if not activated:
            return kernels.gated_silu_backward(gradient, gate, up).chunk(2, -1)
        return aten.silu_backward.default(gradient * up, gate), gradient * activated[0]


class RmsNorm(Explicit):
    """RMS norm over the last dimension, computed in fp32 by a fused kernel. It rounds once; the modules of Transformers
    round twice in bf16. The gradient of the residual stream is added in the same kernel, before the sum is rounded.

    Args:
        module: has a `weight` and a `variance_epsilon`.
        is_known: whether the module computes exactly this.
        lowers: whether the result has the type of matrix products.
    """

    def __init__(self, module: Any, is_known: Callable[[Any], bool], lowers: bool) -> None:
        self._module = module
        self._is_known = is_known
        self._lowers = lowers

    def applies(self, *inputs: Tensor) -> bool:
        return kernels.is_on(inputs[0]) and self._is_known(self._module)

    def forward(self, precision: Precision, *inputs: Tensor) -> tuple[Tensor, Tensors]:
        (value,) = inputs
        weight = self._module.weight
        dtype = torch.promote_types(value.dtype, weight.dtype)
        if self._lowers:
            dtype = precision.autocast_dtype or dtype
        out, scale = kernels.rms_norm(value, weight, self._module.variance_epsilon, dtype)
        return out, (value, scale)

    def backward(self, kept: Tensors, ctx: OperatorContext, gradient: Tensor) -> Tensors:
        value, scale = kept
        weight = self._module.weight
        partial = None
        if ctx.partials and ctx.partials[0] is not None and ctx.partials[0].dtype is value.dtype:
            (partial,), ctx.partials = ctx.partials, ()
        of_value, rows = kernels.rms_norm_backward(gradient, value, scale, weight, partial)
        if weight.requires_grad:
            of_weight = rows.sum(0).to(weight.dtype)
            weight.grad = of_weight if weight.grad is None else weight.grad.add_(of_weight)
        return (of_value,)
