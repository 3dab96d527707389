"""DoRA: what PEFT's own layers compute, and autograd's gradients of it, at whatever time W runs."""

from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as Adapted
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_helix.models.stock.peft import unwrap_peft
from hf_helix.operators.base import OperatorContext, explicit_gradients
from hf_helix.operators.linears import dora
from hf_helix.operators.linears.dora import RowNorms
from hf_helix.operators.linears.linear import Linear
from hf_helix.operators.linears.low_rank import dropout_masks

FEATURES = 7
TOKENS = 15


def layer(outputs: int, transposed: bool = False, bias: bool = True, train_base: bool = False, **options: Any) -> Any:
    """A linear with an adapter whose magnitudes are far from the norms."""
    torch.manual_seed(outputs)
    base = Conv1D(outputs, FEATURES) if transposed else nn.Linear(FEATURES, outputs, bias=bias)
    if base.bias is not None:
        nn.init.normal_(base.bias)
    base.requires_grad_(train_base)
    config = LoraConfig(r=2, lora_alpha=5, init_lora_weights=False, fan_in_fan_out=transposed, **options)
    made = Adapted(base, "one", config, r=2, lora_alpha=5, is_target_conv_1d_layer=transposed).double()
    if options.get("use_dora"):
        made.lora_magnitude_vector["one"].weight.data *= torch.rand(outputs, dtype=torch.float64) + 0.5
    return made


class Masked(nn.Module):
    """Dropout with a given mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, value: Tensor) -> Tensor:
        return value * self.mask


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "transposed": {"transposed": True},
    "base trained": {"train_base": True},
    "dropout": {"lora_dropout": 0.4},
    "dropout, transposed": {"transposed": True, "lora_dropout": 0.4},
    "dropout, base trained": {"train_base": True, "lora_dropout": 0.4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_layers(kind: str) -> None:
    """Of two linears with magnitudes and one without; W runs twice, before I."""
    layers = [layer(4, use_dora=True, **KINDS[kind]), layer(3, **KINDS[kind]), layer(6, use_dora=True, **KINDS[kind])]
    linears = [unwrap_peft(each, "test") for each in layers]
    transposed = linears[0].is_transposed
    operator = Linear(linears, transposed=transposed, adapters=linears, takes_norms=True)
    value, *gradients = (torch.randn(TOKENS, size, dtype=torch.float64) for size in (FEATURES, 4, 3, 6))
    ctx = OperatorContext(side={}, seed=7, saves_for_backward=True)
    with mock.patch.object(dora, "TILE", 3), explicit_gradients():
        (norms,) = RowNorms(linears, transposed).forward(ctx)
        result = operator.forward(ctx, value, norms)
        for _ in range(2):
            operator.weight_gradient(ctx, *gradients, value, norms)
        (of_input,) = operator.input_gradient(ctx, *gradients, norms)
    of_weights = [{name: p.grad for name, p in each.named_parameters() if p.requires_grad} for each in layers]
    assert operator.trained == 1.0

    adapters = [adapter for linear in linears for adapter in linear.adapters()]
    masks = list(dropout_masks(ctx, adapters, TOKENS, value.device))
    assert ("dropout" in kind) == (masks[0] is not None)
    for each, mask in zip(layers, masks, strict=True):
        each.zero_grad()
        if mask is not None:
            each.lora_dropout["one"] = Masked(mask)
    leaf = value.clone().requires_grad_()
    wanted = [each(leaf) for each in layers]
    torch.autograd.backward(wanted, gradients)
    torch.testing.assert_close(list(result), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_input, leaf.grad, rtol=1e-12, atol=1e-12)
    for ours, each in zip(of_weights, layers, strict=True):
        assert any("magnitude" in name for name in ours) == bool(each.lora_magnitude_vector)
        for name, parameter in each.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(ours[name], 2 * parameter.grad, rtol=1e-12, atol=1e-12)


@explicit_gradients()
def test_norms_of_parts_of_rows_add_up() -> None:
    full = layer(5, use_dora=True)
    ctx = OperatorContext(side={}, seed=0, saves_for_backward=False)
    (norms,) = RowNorms([unwrap_peft(full, "test")], False).forward(ctx)
    (weight, down), total = (full.base_layer.weight, full.lora_A["one"].weight), torch.zeros_like(norms)
    for part in (slice(0, 4), slice(4, None)):
        half = layer(5, use_dora=True)
        half.base_layer.weight = nn.Parameter(weight[:, part].detach())
        half.lora_A["one"].weight = nn.Parameter(down[:, part].detach())
        total += RowNorms([unwrap_peft(half, "test")], False).forward(ctx)[0]
    torch.testing.assert_close(total, norms)
    delta = full.lora_B["one"].weight @ down * full.scaling["one"]
    torch.testing.assert_close(norms[0].sqrt(), torch.linalg.vector_norm(weight + delta, dim=1))
