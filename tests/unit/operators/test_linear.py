"""Linears, also with adapters: what torch's and PEFT's own layers compute, and autograd's gradients of it, at whatever
time W runs."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as Adapted
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_helix.models.stock.peft import unwrap_peft
from hf_helix.operators.base import OperatorContext
from hf_helix.operators.linears.linear import SMALL, Linear

FEATURES = 7
SHAPE = (5, 3, FEATURES)


def layer(
    outputs: int,
    adapts: bool = True,
    transposed: bool = False,
    bias: bool = True,
    train_base: bool = False,
    **options: Any,
) -> Any:
    """A linear, with two adapters that are switched on and one that is not."""
    torch.manual_seed(outputs)
    base = Conv1D(outputs, FEATURES) if transposed else nn.Linear(FEATURES, outputs, bias=bias)
    if transposed:
        nn.init.normal_(base.bias)
    if not adapts:
        return base.double()
    base.requires_grad_(train_base)

    def config(rank: int) -> LoraConfig:
        return LoraConfig(r=rank, lora_alpha=5, init_lora_weights=False, fan_in_fan_out=transposed, **options)

    made = Adapted(base, "one", config(2), r=2, lora_alpha=5, is_target_conv_1d_layer=transposed)
    for name, rank in (("two", 3), ("off", 4)):
        made.update_layer(name, rank, lora_alpha=5, config=config(rank))
    made.set_adapter(["one", "two"])
    return made.double()


def operator_of(layers: list[Any], **options: Any) -> Linear:
    result = [unwrap_peft(each, "test") for each in layers]
    return Linear(result, transposed=result[0].is_transposed, adapters=result, **options)


def values(count: int = 1) -> list[Tensor]:
    return list(torch.randn(count, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def directions(layers: list[Any], seed: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [each.nf if isinstance(each, Conv1D) else each.out_features for each in layers]
    return [torch.randn(*SHAPE[:2], size, dtype=torch.float64, generator=generator) for size in sizes]


def new_context(seed: int = 0, saves_for_backward: bool = True) -> OperatorContext:
    return OperatorContext(side={}, seed=seed, saves_for_backward=saves_for_backward)


def by_autograd(layers: list[Any], value: Tensor, gradients: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    leaf = value.clone().requires_grad_()
    outputs = [each(leaf) for each in layers]
    torch.autograd.backward(outputs, gradients)
    return [output.detach() for output in outputs], leaf.grad


def take_gradients(layers: list[Any]) -> dict[str, Tensor]:
    result = {}
    for place, each in enumerate(layers):
        for name, parameter in each.named_parameters():
            if parameter.grad is not None:
                result[f"{place}.{name}"] = parameter.grad
                parameter.grad = None
    return result


def assert_close(result: Any, expected: Any) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


KINDS: dict[str, dict[str, Any]] = {
    "alone": {"adapts": False},
    "alone, no bias": {"adapts": False, "bias": False},
    "alone, transposed": {"adapts": False, "transposed": True},
    "plain": {},
    "no bias": {"bias": False},
    "rank-stabilised": {"use_rslora": True},
    "biases": {"lora_bias": True},
    "transposed": {"transposed": True},
    "base trained": {"train_base": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_layers_over_two_micro_batches(kind: str) -> None:
    """W runs after both I; in the second micro-batch it runs before its I."""
    layers = [layer(4, **KINDS[kind]), layer(6, **KINDS[kind])]
    expected = [by_autograd(layers, v, directions(layers, k)) for k, v in enumerate(values(2))]
    of_weights = take_gradients(layers)
    assert any(".lora_A.two." in name for name in of_weights) == (not kind.startswith("alone"))
    assert not any(".off." in name for name in of_weights)

    operator, contexts = operator_of(layers), [new_context(), new_context()]
    outputs = [operator.forward(ctx, v) for ctx, v in zip(contexts, values(2), strict=True)]
    first = operator.input_gradient(contexts[0], *directions(layers, 0))
    operator.weight_gradient(contexts[0], *directions(layers, 0), values(2)[0])
    operator.weight_gradient(contexts[1], *directions(layers, 1), values(2)[1])
    second = operator.input_gradient(contexts[1], *directions(layers, 1))
    for (wanted, of_input), result, of_value in zip(expected, outputs, (first, second), strict=True):
        assert_close(list(result), wanted)
        assert_close(of_value, (of_input,))
    assert_close(take_gradients(layers), of_weights)
    assert operator.trained == (SMALL if layers[0].weight.requires_grad is False else 1.0)


def test_dropout_is_the_same_in_all_parts_of_a_call() -> None:
    """Gradients are those of the function that forward was: by finite differences of the input and the weights."""
    layers = [layer(4, lora_dropout=0.4), layer(2, lora_dropout=0.4)]
    operator, gradients = operator_of(layers), directions(layers)

    def forward(value: Tensor, seed: int = 7) -> Tensor:
        outputs = operator.forward(new_context(seed, saves_for_backward=False), value)
        return sum(((output * way).sum() for output, way in zip(outputs, gradients, strict=True)), torch.zeros(()))

    value, ctx, step = values()[0], new_context(7), 1e-6
    operator.forward(ctx, value)
    (of_input,) = operator.input_gradient(ctx, *gradients)
    operator.weight_gradient(ctx, *gradients, value)
    way = values(2)[1]
    slope = (forward(value + step * way) - forward(value - step * way)) / (2 * step)
    torch.testing.assert_close((of_input * way).sum(), slope, rtol=1e-6, atol=1e-6)
    for name, gradient in take_gradients(layers).items():
        place, _, path = name.partition(".")
        weight = layers[int(place)].get_parameter(path).data
        way = torch.randn_like(weight)
        weight += step * way
        above = forward(value)
        weight -= 2 * step * way
        slope = (above - forward(value)) / (2 * step)
        weight += step * way
        torch.testing.assert_close((gradient * way).sum(), slope, rtol=1e-5, atol=1e-5)
    assert forward(value, 7) == forward(value, 7) != forward(value, 8)
    for each in layers:
        each.eval()
    assert forward(value, 7) == forward(value, 8)
