"""Adapters beside linears: what PEFT's own layers compute, and autograd's gradients of it, at whatever time W runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as Adapted
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_helix.models.peft import unwrap_peft
from hf_helix.operators.base import Call, Precision
from hf_helix.operators.linears.linear import SMALL, Linear
from hf_helix.planning.graph.operator import Part

FEATURES = 7
SHAPE = (5, 3, FEATURES)


def layer(outputs: int, transposed: bool = False, bias: bool = True, train_base: bool = False, **options: Any) -> Any:
    """A linear with two adapters that are switched on and one that is not."""
    torch.manual_seed(outputs)
    base = Conv1D(outputs, FEATURES) if transposed else nn.Linear(FEATURES, outputs, bias=bias)
    if transposed:
        nn.init.normal_(base.bias)
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
    sizes = [each.out_features for each in layers]
    return [torch.randn(*SHAPE[:2], size, dtype=torch.float64, generator=generator) for size in sizes]


def a_call(seed: int = 0, training: bool = True) -> Call:
    return Call(side={}, seed=seed, training=training)


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
    "plain": {},
    "no bias": {"bias": False},
    "rank-stabilised": {"use_rslora": True},
    "biases": {"lora_bias": True},
    "transposed": {"transposed": True},
    "base trained": {"train_base": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_pefts_layers_over_two_micro_batches(kind: str) -> None:
    """W runs after both I; in the second micro-batch it runs before its I."""
    layers = [layer(4, **KINDS[kind]), layer(6, **KINDS[kind])]
    expected = [by_autograd(layers, v, directions(layers, k)) for k, v in enumerate(values(2))]
    of_weights = take_gradients(layers)
    assert any(".lora_A.two." in name for name in of_weights)
    assert not any(".off." in name for name in of_weights)

    operator, calls = operator_of(layers), [a_call(), a_call()]
    outputs = [operator.forward(call, v) for call, v in zip(calls, values(2), strict=True)]
    first = operator.input_gradient(calls[0], *directions(layers, 0))
    operator.weight_gradient(calls[0], *directions(layers, 0), values(2)[0])
    operator.weight_gradient(calls[1], *directions(layers, 1), values(2)[1])
    second = operator.input_gradient(calls[1], *directions(layers, 1))
    for (wanted, of_input), result, of_value in zip(expected, outputs, (first, second), strict=True):
        assert_close(list(result), wanted)
        assert_close(of_value, (of_input,))
    assert_close(take_gradients(layers), of_weights)
    assert operator.trained == (1.0 if kind == "base trained" else SMALL)


def test_only_some_linears_of_an_operator_have_adapters() -> None:
    layers = [layer(4), nn.Linear(FEATURES, 2, dtype=torch.float64).requires_grad_(False)]
    gradients = [*directions(layers[:1]), torch.ones(*SHAPE[:2], 2, dtype=torch.float64)]
    expected, of_input = by_autograd(layers, values()[0], gradients)
    of_weights = take_gradients(layers)
    operator, call = operator_of(layers), a_call()
    assert_close(list(operator.forward(call, values()[0])), expected)
    assert_close(operator.input_gradient(call, *gradients), (of_input,))
    operator.weight_gradient(call, *gradients, values()[0])
    assert_close(take_gradients(layers), of_weights)


def test_what_is_switched_off_adds_nothing() -> None:
    made, call = layer(4), a_call(training=False)
    operator = operator_of([made])
    (with_two,) = operator.forward(call, values()[0])
    made.set_adapter("off")
    (with_other,) = operator.forward(call, values()[0])
    assert_close(with_other, made(values()[0]).detach())
    assert not torch.equal(with_two, with_other)
    made.enable_adapters(False)
    assert_close(operator.forward(call, values()[0]), (made.base_layer(values()[0]).detach(),))
    # Where nothing is trained the backward is the input gradient.
    made = layer(4)
    made.set_adapter(["one", "two"], inference_mode=True)
    operator, call = operator_of([made]), a_call()
    assert operator.trained == 0
    operator.forward(call, values()[0])
    _, of_input = by_autograd([made], values()[0], directions([made]))
    assert_close(operator.method_of(Part.B)(call, *directions([made])), (of_input,))
    assert take_gradients([made]) == {}


def test_dropout_is_the_same_in_all_parts_of_a_call() -> None:
    """Gradients are those of the function that forward was: by finite differences of the input and the weights."""
    layers = [layer(4, lora_dropout=0.4), layer(2, lora_dropout=0.4)]
    operator, gradients = operator_of(layers), directions(layers)

    def forward(value: Tensor, seed: int = 7) -> Tensor:
        outputs = operator.forward(a_call(seed, training=False), value)
        return sum(((output * way).sum() for output, way in zip(outputs, gradients, strict=True)), torch.zeros(()))

    value, call, step = values()[0], a_call(7), 1e-6
    operator.forward(call, value)
    (of_input,) = operator.input_gradient(call, *gradients)
    operator.weight_gradient(call, *gradients, value)
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


@pytest.mark.parametrize("autocast", [True, False])
def test_in_bf16_with_adapters_in_fp32(autocast: bool) -> None:
    """As PEFT has it: a model in bf16, adapters in fp32, products by autocast if there is any."""
    made = layer(4).float()
    made.base_layer.bfloat16()
    value, gradient = values()[0].bfloat16(), directions([made])[0].bfloat16()
    leaf = value.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = made(leaf)
    expected.backward(gradient)
    of_weights = take_gradients([made])
    operator = operator_of([made])
    call = Call({}, 0, True, Precision("cpu", torch.bfloat16 if autocast else None))
    (result,) = operator.forward(call, value)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result, expected.detach(), rtol=0.02, atol=0.05)
    (of_input,) = operator.input_gradient(call, gradient)
    torch.testing.assert_close(of_input, leaf.grad, rtol=0.02, atol=0.05)
    operator.weight_gradient(call, gradient, value)
    found_gradients = take_gradients([made])
    assert {gradient.dtype for gradient in found_gradients.values()} == {torch.float32}
    torch.testing.assert_close(found_gradients, of_weights, rtol=0.03, atol=0.1)
