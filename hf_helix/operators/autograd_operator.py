"""Local operators: any differentiable function as an operator, run forward and backward by autograd.

In:   a function over tensors (a Transformers submodule, usually) and its parameters.
Out:  an operator with inputs detached from earlier operators, so that its backward runs by itself.
Must hold: the gradients equal the gradients of the whole model's backward, bit for bit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hf_helix.operators.base import Computation, OperatorContext, Tensors, autocast_device
from hf_helix.operators.explicit import Explicit
from hf_helix.operators.random_numbers import generator, seeded
from hf_helix.planning.graph.operator import Part

COMPILER = "inductor"
"""The backend of `torch.compile`."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of an operator, compiled at its first call.

    torch keeps compilations by the code of a function, and takes the parameters of the function as further inputs. So
    the layers of a model, with the same code, share a compilation. A second shape is compiled with open sizes, and
    serves all other shapes.
    """
    return torch.compile(function, backend=COMPILER)


def run_backward(edges: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Adds to the gradients of inputs, as `torch.autograd.backward` does, without its checks of arguments, which take
    the host longer than a small graph.
    """
    engine: Any = Variable._execution_engine
    engine.run_backward(edges, gradients, False, False, inputs, allow_unreachable=True, accumulate_grad=True)


def cast_for_matmul(value: Tensor) -> Tensor:
    """Returns a value in the type of matrix products under the enabled autocast; unchanged without autocast."""
    device = autocast_device(value.device.type)
    return value.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else value


def has_hooks(module: Any) -> bool:
    """Returns whether a call of a module, or a backward pass through it, also calls hooks."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class AutogradOperator(Computation):
    """`function(*inputs, **side)` as an operator, with the backward pass of autograd.

    Args:
        function: returns a tensor or a tuple of tensors.
        parameters: differentiated besides the inputs.
        side: names of the micro-batch's side inputs for its keywords.
        draws: returns True while the function draws random numbers (dropout); it then runs under the context's seed.
        num_plain: how many of its outputs, the last ones, have no gradient (indices).
        explicit: replaces the function if it applies.
        backward_reads: whether backward reads the values of parameters; False for a lookup in a table.
        frees_inputs: whether inputs that autograd does not save are freed with their last reader, such as queries
            before a rope. Takes the host some microseconds for each input.
        elementwise: whether an element of the only output depends on the same element of the only input, and on nothing
            else.
        plain_inputs: how many of its inputs, the last ones, have no gradient though they are no indices.
        by_data: see `TensorOperator`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: Sequence[torch.nn.Parameter] = (),
        side: Sequence[str] = (),
        draws: Callable[[], bool] | None = None,
        num_plain: int = 0,
        explicit: Explicit | None = None,
        backward_reads: bool = True,
        frees_inputs: bool = False,
        elementwise: bool = False,
        plain_inputs: int = 0,
        by_data: bool = False,
    ) -> None:
        self._plain_inputs = plain_inputs
        self.by_data = by_data
        self.elementwise = elementwise
        self.num_plain = num_plain
        self.function = function
        self.side = tuple(side)
        self.explicit = explicit
        self._parameters = tuple(parameters)
        self._draws = draws
        self._backward_reads = backward_reads
        self._frees_inputs = frees_inputs

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self._parameters

    def weights_read_by(self, part: Part) -> tuple[Tensor, ...]:
        return self._parameters if self._backward_reads or part in (Part.F, Part.R) else ()

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        explicit = self.explicit
        if explicit is not None and explicit.applies(*inputs):
            output, kept = explicit.forward(ctx.precision, *inputs)
            if ctx.saves_for_backward:
                ctx.saved = partial(explicit.backward, kept)
            return (output,)
        side = {name: ctx.side[name] for name in self.side} if self.side else {}
        if not ctx.saves_for_backward:
            return self._run(ctx, inputs, side)
        leaves = tuple([value.detach() for value in inputs])
        differentiated = leaves[: len(leaves) - self._plain_inputs]
        for leaf in differentiated:
            leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
        with torch.enable_grad():
            given = tuple([leaf.view_as(leaf) for leaf in leaves]) if self._frees_inputs else leaves
            outputs = self._run(ctx, given, side)
        if self._frees_inputs:
            for leaf in leaves:
                leaf.data = leaf.new_empty(()).expand(leaf.shape)  # the shape is all that its gradient needs
        # Only the edges are saved: an output without use in backward is freed with its last reader.
        differentiable = outputs[: len(outputs) - self.num_plain]
        if differentiable and (differentiated or self._trained()):
            edges = tuple([get_gradient_edge(output) for output in differentiable])
            ctx.saved = partial(self._run_backward, tuple([leaf for leaf in leaves if leaf.requires_grad]), edges)
        return tuple([output.detach() for output in outputs])

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        if ctx.saved is None:  # nothing to differentiate, such as a frozen table
            return ()
        run: Callable[..., Tensors] = ctx.saved
        ctx.saved = None
        return run(ctx, *gradients)

    def _run_backward(
        self, leaves: Tensors, edges: tuple[GradientEdge, ...], ctx: OperatorContext, *gradients: Tensor | None
    ) -> Tensors:
        given = tuple([each for each in gradients if each is not None])
        if len(given) < len(edges):  # the caller of a decoder gave no gradient of a value that it can read
            edges = tuple([edge for edge, each in zip(edges, gradients, strict=True) if each is not None])
        run_backward(edges, given, (*leaves, *self._trained()))
        return tuple([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def _run(self, ctx: OperatorContext, inputs: Tensors, side: dict[str, Any]) -> Tensors:
        with ctx.precision.autocast():
            result = self._call_function(ctx, inputs, side)
        return result if isinstance(result, tuple) else (result,)

    def _call_function(self, ctx: OperatorContext, inputs: Tensors, side: dict[str, Any]) -> Any:
        if self._draws is None or not self._draws():
            return self.function(*inputs, **side)
        device = next(value.device for value in (*inputs, *self._parameters) if isinstance(value, Tensor))
        with seeded(device, ctx.seed):
            return self.function(*inputs, **side)


class Add(Computation):
    """Residual addition of two values. Saves only their types."""

    has_saved_state = False

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        left, right = inputs
        ctx.saved = left.dtype, right.dtype
        return (left + right,)

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        (left, right), ctx.saved = ctx.saved, None
        (gradient,) = gradients
        return gradient.to(left), gradient.to(right)


class SumOfParts(Computation):
    """The sum of equal parts [parts * n, ...] of a value, in their order [n, ...]."""

    has_saved_state = False

    def __init__(self, count: int) -> None:
        self.count = count

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        first, *others = inputs[0].chunk(self.count)
        return (sum(others, start=first),)

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        return (torch.cat(gradients * self.count),)


class Dropout(Computation):
    """A module's dropout, under the context's seed. Backward draws the same mask if forward did not save it."""

    has_saved_state = False

    def __init__(self, module: torch.nn.Dropout) -> None:
        self.module = module

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        (value,) = inputs
        if not self.module.training:
            return (value,)
        mask = self._mask(ctx, value)
        if ctx.saves_for_backward:
            ctx.saved = mask
        return (self._drop(value, mask),)

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        (gradient,) = gradients
        if not self.module.training:
            return (gradient,)
        mask = self._mask(ctx, gradient) if ctx.saved is None else ctx.saved
        ctx.saved = None
        return (self._drop(gradient, mask),)

    def _mask(self, ctx: OperatorContext, value: Tensor) -> Tensor:
        """True for elements that stay. Depends only on the shape, not on strides."""
        kept = torch.empty(value.shape, dtype=torch.bool, device=value.device)
        return kept.bernoulli_(1 - self.module.p, generator=generator(value.device, ctx.seed))

    def _drop(self, value: Tensor, mask: Tensor) -> Tensor:
        return (value * mask).mul_(1 / (1 - self.module.p) if self.module.p < 1 else 0.0)


class SumOfGradients(Computation):
    """The sum of the parts of one gradient, some of which communication brings. Backward only."""

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        raise AssertionError("there is nothing to sum in a forward pass")

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        total = gradients[0]
        for gradient in gradients[1:]:
            total = total + gradient
        return (total,)
