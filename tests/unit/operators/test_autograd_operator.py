"""An AutogradOperator computes what autograd would, bit for bit, and keeps only what its backward needs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import llama
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from hf_helix.operators.autograd_operator import AutogradOperator, Dropout
from hf_helix.operators.base import OperatorContext, explicit_gradients

Case = tuple[Callable[..., Any], list[nn.Parameter], tuple[Tensor, ...]]


def new_context(seed: int = 0, saves_for_backward: bool = True, **side: Any) -> OperatorContext:
    return OperatorContext(side=side, seed=seed, saves_for_backward=saves_for_backward)


def norm() -> Case:
    module = llama().model.layers[0].input_layernorm
    return module, list(module.parameters()), (torch.randn(17, 2, 32),)


def attention() -> Case:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)

    return attend, [], (torch.randn(2, 4, 17, 8), torch.randn(2, 2, 17, 8), torch.randn(2, 2, 17, 8))


def gated() -> Case:
    return lambda gate, up: functional.silu(gate) * up, [], (torch.randn(17, 2, 57), torch.randn(17, 2, 57))


def two_outputs() -> Case:
    scale = nn.Parameter(torch.randn(6))
    return lambda x: ((x * scale).exp(), x.sum(-1)), [scale], (torch.randn(4, 6),)


@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize("make", [norm, attention, gated, two_outputs])
def test_equals_autograd_bit_for_bit(make: Callable[[], Case], frees: bool) -> None:
    """Twice in a row with both forwards first, so gradients accumulate and nothing is shared between calls."""
    torch.manual_seed(0)
    function, parameters, inputs = make()
    batches = [inputs, tuple(torch.randn_like(value) for value in inputs)]
    expected, directions = [], []
    for batch in batches:
        leaves = [value.clone().requires_grad_() for value in batch]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        directions.append([torch.randn_like(output) for output in outputs])
        torch.autograd.backward(outputs, directions[-1])
        expected.append(([output.detach() for output in outputs], [leaf.grad for leaf in leaves]))
    of_parameters = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None

    operator, contexts = AutogradOperator(function, parameters, frees_inputs=frees), [new_context(), new_context()]
    result = [operator.forward(ctx, *batch) for ctx, batch in zip(contexts, batches, strict=True)]
    gradients = [operator.backward(ctx, *given) for ctx, given in zip(contexts, directions, strict=True)]
    for (outputs, of_inputs), ours, of_ours in zip(expected, result, gradients, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, outputs, strict=True))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(of_ours, of_inputs, strict=True))
        assert not any(value.requires_grad for value in ours)
    for parameter, gradient in zip(parameters, of_parameters, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_side_inputs_get_no_gradient_and_an_unused_input_gets_zeros() -> None:
    operator, ctx = (
        AutogradOperator(lambda x, y, mask: x * mask, side=("mask",)),
        new_context(mask=torch.tensor([1.0, 0.0])),
    )
    operator.forward(ctx, torch.ones(2), torch.ones(3))
    of_x, of_y = operator.backward(ctx, torch.ones(2))
    assert of_x.tolist() == [1.0, 0.0]
    assert of_y.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("function", "keeps_output", "keeps_input"),
    [(lambda x: x * 2, False, False), (lambda x: x.exp(), True, False), (lambda x: x.square(), False, True)],
)
def test_keeps_only_what_backward_needs(function: Callable[..., Tensor], keeps_output: bool, keeps_input: bool) -> None:
    """exp needs its output and square its input, so the probe can tell the difference."""
    operator, ctx = AutogradOperator(function, frees_inputs=True), new_context()
    value = torch.randn(100)
    (output,) = operator.forward(ctx, value)
    given, made = StorageWeakRef(value.untyped_storage()), StorageWeakRef(output.untyped_storage())
    del value, output
    assert made.expired() != keeps_output
    assert given.expired() != keeps_input
    operator.backward(ctx, torch.ones(100))
    assert ctx.saved is None
    assert made.expired()
    assert given.expired()


def test_evaluation_keeps_nothing() -> None:
    module, parameters, (x,) = norm()
    ctx = new_context(saves_for_backward=False)
    with explicit_gradients():
        (output,) = AutogradOperator(module, parameters).forward(ctx, x)
    assert torch.equal(output, module(x).detach())
    assert ctx.saved is None
    assert not output.requires_grad
    given = StorageWeakRef(x.untyped_storage())
    del x
    assert given.expired()


@pytest.mark.parametrize("saves_for_backward", [True, False], ids=["mask kept", "drawn again"])
def test_dropout_drops_the_same_in_backward(saves_for_backward: bool) -> None:
    """However values and gradients lie in memory."""
    module = nn.Dropout(0.25)
    operator, ctx = Dropout(module), new_context(3, saves_for_backward)
    (out,) = operator.forward(ctx, torch.ones(400, 50).t())
    assert (ctx.saved is not None) == saves_for_backward
    (gradient,) = operator.backward(ctx, torch.ones(50, 400))
    assert torch.equal(out, gradient)
    assert out.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert abs(out.mean() - 1) < 0.02
    assert not torch.equal(operator.forward(new_context(4), torch.ones(50, 400))[0], out)
    module.eval()
    assert torch.equal(operator.forward(new_context(3), out)[0], out)
