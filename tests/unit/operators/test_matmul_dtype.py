"""Weights are cast once in a window, and never older than it."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_helix.operators.base import OperatorContext, Precision, explicit_gradients
from hf_helix.operators.experts.grouped_linear import GroupedLinear
from hf_helix.operators.linears.linear import Linear
from hf_helix.operators.matmul_dtype import CastWeights


class Casts(TorchDispatchMode):
    """Counts what is cast to bf16, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.dtype is torch.bfloat16:
            self.shapes.append(tuple(made.shape))
        return made


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_two_micro_batches_forward_and_backward_cast_a_weight_once(kind: str) -> None:
    precision = Precision("cpu", torch.bfloat16)
    made = {"linear": Linear([nn.Linear(6, 4)]), "experts": GroupedLinear(nn.Parameter(torch.randn(2, 4, 6)))}
    operator: Any = made[kind]
    weight = operator.parameters[0]
    value, gradient = torch.randn(10, 6), torch.randn(10, 4, dtype=torch.bfloat16)

    def run() -> None:
        with explicit_gradients():
            for _ in range(2):
                ctx = OperatorContext({}, 0, True, precision)
                operator.forward(ctx, value, *sizes)
                operator.input_gradient(ctx, gradient, *sizes)

    sizes = [] if kind == "linear" else [torch.tensor([3, 7])]
    with Casts() as casts:
        run()
        assert casts.shapes.count(tuple(weight.shape)) == 4
        casts.shapes.clear()
        with precision.weights.kept():
            run()
        assert casts.shapes.count(tuple(weight.shape)) == 1


def test_a_new_window_sees_what_left_no_mark() -> None:
    """`.data` is written without a new version of the parameter, as by merged adapters."""
    weights, weight = CastWeights(), nn.Parameter(torch.ones(3, 2))
    with weights.kept():
        old = weights.of((weight,), torch.bfloat16)
        assert weights.of((weight,), torch.bfloat16) is old
    version = weight._version
    weight.data.mul_(2)
    assert weight._version == version
    with weights.kept():
        assert torch.equal(weights.of((weight,), torch.bfloat16), torch.full((3, 2), 2.0, dtype=torch.bfloat16))


def test_copies_of_weights() -> None:
    weights, weight = CastWeights(), nn.Parameter(torch.ones(3, 2))
    with weights.kept():
        made: weakref.ref[Tensor] = weakref.ref(weights.of((weight,), torch.bfloat16))
        assert made() is not None
    assert made() is None
    # Weights of the type are not copied.
    weights, weight = CastWeights(), nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    with weights.kept():
        assert weights.of((weight,), torch.bfloat16) is weight
    # Several lie in one piece.
    weights, several = CastWeights(), [nn.Parameter(torch.randn(rows, 2)) for rows in (3, 1, 2)]
    with weights.kept():
        whole = weights.of(several, torch.bfloat16)
        assert weights.of(several, torch.bfloat16) is whole
    assert torch.equal(whole, torch.cat([weight.detach() for weight in several]).bfloat16())
    assert not whole.requires_grad
