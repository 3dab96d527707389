"""Linear's explicit I and W are autograd's gradients, at whatever time W runs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_helix.operators.base import OperatorContext, explicit_gradients
from hf_helix.operators.linears.linear import Linear

FEATURES = 7


def make(outputs: tuple[int, ...], bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(FEATURES, n, bias=bias, dtype=torch.float64) for n in outputs]


def make_transposed(outputs: tuple[int, ...]) -> list[Any]:
    """Their weights are [in, out]."""
    torch.manual_seed(0)
    linears = [Conv1D(n, FEATURES).double() for n in outputs]
    for linear in linears:
        nn.init.normal_(linear.bias)
    return linears


def values(count: int = 1) -> list[Tensor]:
    """[sequence, batch, features] for `count` micro-batches."""
    return list(torch.randn(count, 5, 3, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def directions(linears: list[nn.Linear], seed: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [linear.nf if isinstance(linear, Conv1D) else linear.out_features for linear in linears]
    return [torch.randn(5, 3, size, dtype=torch.float64, generator=generator) for size in sizes]


def new_context(saves_for_backward: bool = True) -> OperatorContext:
    return OperatorContext(side={}, seed=0, saves_for_backward=saves_for_backward)


def by_autograd(linears: list[nn.Linear], value: Tensor, gradients: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Outputs and the input's gradient; parameters' gradients are added up as autograd does."""
    leaf = value.clone().requires_grad_()
    outputs = [linear(leaf) for linear in linears]
    torch.autograd.backward(outputs, gradients)
    return [output.detach() for output in outputs], leaf.grad


def take_gradients(linears: list[nn.Linear]) -> list[Tensor | None]:
    result = []
    for linear in linears:
        for parameter in linear.parameters():
            result.append(parameter.grad)
            parameter.grad = None
    return result


def assert_close(result: Any, expected: Any) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["bias", "no bias", "transposed"])
@pytest.mark.parametrize("outputs", [(4,), (4, 2, 2), (6, 1)])
def test_equals_autograd_over_two_micro_batches(outputs: tuple[int, ...], kind: str) -> None:
    """Both W run after both I, in micro-batch order, and read only what they are given."""
    transposed = kind == "transposed"
    linears = make_transposed(outputs) if transposed else make(outputs, bias=kind == "bias")
    expected = [by_autograd(linears, v, directions(linears, k)) for k, v in enumerate(values(2))]
    expected_gradients = take_gradients(linears)

    operator, contexts = Linear(linears, transposed=transposed), [new_context(), new_context()]
    with explicit_gradients():
        found_outputs = [operator.forward(ctx, v) for ctx, v in zip(contexts, values(2), strict=True)]
        of_inputs = [operator.input_gradient(ctx, *directions(linears, k)) for k, ctx in enumerate(contexts)]
        assert all(parameter.grad is None for linear in linears for parameter in linear.parameters())
        for k, ctx in enumerate(contexts):
            operator.weight_gradient(ctx, *directions(linears, k), values(2)[k])
            assert ctx.saved is None

    for k, (outputs_, of_input) in enumerate(expected):
        assert_close(list(found_outputs[k]), outputs_)
        assert_close(of_inputs[k], (of_input,))
    assert_close(take_gradients(linears), expected_gradients)
