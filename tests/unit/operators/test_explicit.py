"""A backward that is written out gives what autograd gives, and stands back where a module is not one that is known."""

from collections.abc import Callable

import pytest
import torch
from support.models import tiny
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_helix.models.graph.attention import by_heads
from hf_helix.models.stock.stock_modules import is_silu
from hf_helix.operators.attention.rope import rotated
from hf_helix.operators.autograd_operator import AutogradOperator
from hf_helix.operators.base import OperatorContext, Precision, explicit_gradients
from hf_helix.operators.explicit import Explicit, GatedSilu
from hf_helix.operators.side_by_side import contiguous_heads

BF16, FP32 = torch.bfloat16, torch.float32


def run(operator: AutogradOperator, inputs: list[Tensor], direction: Tensor, precision: Precision) -> list[Tensor]:
    """The output, the gradients of the inputs, those of the parameters; twice, so that the latter add up."""
    for parameter in operator.parameters:
        parameter.grad = None
    with explicit_gradients():
        for _ in range(2):
            ctx = OperatorContext({}, 0, True, precision)
            (output,) = operator.forward(ctx, *inputs)
            gradients = operator.backward(ctx, direction.to(output.dtype))
            assert ctx.saved is None
    return [output, *gradients, *(p.grad for p in operator.parameters if p.grad is not None)]


def pair(
    function: Callable[..., Tensor], explicit: Explicit, module: nn.Module
) -> tuple[AutogradOperator, AutogradOperator]:
    parameters = list(module.parameters())
    return AutogradOperator(function, parameters), AutogradOperator(_not_called, parameters, explicit=explicit)


def _not_called(*_: Tensor) -> Tensor:
    raise AssertionError("the function was called")


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gated_silu_gives_the_same_bits(dtype: torch.dtype) -> None:
    act = ACT2FN["silu"]
    left, right = pair(lambda gate, up: act(gate) * up, GatedSilu(lambda: is_silu(act)), act)
    inputs = [torch.randn(5, 3, 16).to(dtype) for _ in range(2)]
    direction = torch.randn(5, 3, 16)
    result = [run(operator, inputs, direction, Precision()) for operator in (left, right)]
    for ours, expected in zip(*result, strict=True):
        assert torch.equal(ours, expected)
        assert ours.dtype is expected.dtype


def test_another_activation_is_left_to_autograd() -> None:
    assert not is_silu(ACT2FN["gelu"])
    hooked = ACT2FN["silu"]
    assert is_silu(hooked)
    hooked.register_forward_hook(lambda *_: None)
    assert not is_silu(hooked)
    assert all(is_silu(layer.mlp.act_fn) for layer in tiny("llama").model.layers)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("batch", "kv_heads"), [(2, 2), (1, 2), (1, 1), (2, 1)])
@pytest.mark.parametrize("angles", [FP32, BF16])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rope_gives_the_same_bits(
    dtype: torch.dtype, angles: torch.dtype, batch: int, kv_heads: int, together: bool
) -> None:
    """Of queries and keys that one product gave, and of others."""
    tokens, sizes = 6, [4 * 8, kv_heads * 8]
    given = torch.randn(tokens, batch, sum(sizes)).to(dtype)
    cos, sin = (torch.randn(batch, tokens, 8).to(angles) for _ in range(2))
    directions = [torch.randn(batch, size // 8, tokens, 8) for size in sizes]
    rows = []
    for rotate in (apply_rotary_pos_emb, rotated):
        leaves = [part if together else part.clone() for part in given.split(sizes, -1)]
        leaves = [part.detach().requires_grad_() for part in leaves]
        assert (contiguous_heads([by_heads(leaf, 8).permute(2, 0, 1, 3) for leaf in leaves]) is not None) == together
        outputs = rotate(*(by_heads(leaf, 8) for leaf in leaves), cos, sin)
        torch.autograd.backward(outputs, [d.to(out.dtype) for d, out in zip(directions, outputs, strict=True)])
        rows.append([*outputs, *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*rows, strict=True):
        assert ours.dtype is expected.dtype
        assert torch.equal(ours, expected)
