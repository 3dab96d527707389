"""What was changed on the instances of a model is in the small model that is proven, or is refused by name."""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import SmolLM3Config, SmolLM3ForCausalLM
from transformers.models.smollm3.modeling_smollm3 import SmolLM3MLP

from hf_helix.engine.proof.first_use import carry_patches
from hf_helix.engine.proof.prove import Subject
from hf_helix.models.stock.copies import copy_module

IDS = torch.arange(1, 9).unsqueeze(0)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def model(**changes: Any) -> Any:
    torch.manual_seed(1)
    return SmolLM3ForCausalLM(SmolLM3Config(vocab_size=64, num_hidden_layers=6, pad_token_id=0, **SIZES, **changes))


def small_of(given: Any) -> Any:
    return Subject(given.config, type(given)).build()


def by_closure(layer: Any) -> None:
    before = layer.mlp.forward
    layer.mlp.forward = lambda x: 2 * before(x)


def by_default(layer: Any) -> None:
    def doubled(x: torch.Tensor, before: Any = layer.mlp.forward) -> torch.Tensor:
        result: torch.Tensor = 2 * before(x)
        return result

    layer.mlp.forward = doubled


def by_method(layer: Any) -> None:
    def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = 2 * type(self).forward(self, x)
        return result

    layer.mlp.forward = types.MethodType(doubled, layer.mlp)


def by_partial(layer: Any) -> None:
    def doubled(mlp: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = 2 * type(mlp).forward(mlp, x)
        return result

    layer.mlp.forward = functools.partial(doubled, layer.mlp)


def twice(layer: Any) -> None:
    """A patch over a patch."""
    before = layer.mlp.forward
    layer.mlp.forward = lambda x: 4 * before(x)
    again = layer.mlp.forward
    layer.mlp.forward = lambda x: again(x) / 2


class Doubled(SmolLM3MLP):
    """Another class in the place of the model's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def by_class(layer: Any) -> None:
    layer.mlp.__class__ = Doubled


@pytest.mark.parametrize("patch", [by_closure, by_default, by_method, by_partial, twice, by_class])
def test_forwards_are_carried_over(patch: Callable[[Any], None]) -> None:
    """They run on the weights of the small model, and of its copies."""
    given = model()
    for layer in given.model.layers:
        patch(layer)
    small = small_of(given)
    x = torch.randn(2, small.config.hidden_size)
    plain = [layer.mlp(x) for layer in small.model.layers]
    carry_patches(given, small)
    copied = copy_module(small)
    for layer, before in zip(small.model.layers, plain, strict=True):
        torch.testing.assert_close(layer.mlp(x), 2 * before)
    for layer, mine in zip(small.model.layers, copied.model.layers, strict=True):
        layer.mlp(x).sum().backward()
        assert layer.mlp.up_proj.weight.grad is not None
        assert mine.mlp.up_proj.weight.grad is None
        mine.mlp(x).sum().backward()
        assert mine.mlp.up_proj.weight.grad.equal(layer.mlp.up_proj.weight.grad)


def test_options_are_carried_over() -> None:
    given = model()
    for layer in given.model.layers:
        layer.self_attn.scaling = 0.5
        layer.mlp.act_fn = nn.Tanh()
    given.model.norm.variance_epsilon = 0.25
    small = small_of(given)
    carry_patches(given, small)
    assert [layer.self_attn.scaling for layer in small.model.layers] == [0.5, 0.5]
    assert all(type(layer.mlp.act_fn) is nn.Tanh for layer in small.model.layers)
    assert small.model.norm.variance_epsilon == 0.25
    # A patch of all layers with a window is in those of the small model that have one.
    types_of_layers = ["full_attention", "sliding_attention"] * 3
    given = model(layer_types=types_of_layers, use_sliding_window=True, sliding_window=4)
    for layer in given.model.layers[1::2]:
        layer.self_attn.scaling = 0.5
    small = small_of(given)
    carry_patches(given, small)
    kinds = zip(small.config.layer_types, small.model.layers, strict=True)
    scales = {kind: layer.self_attn.scaling for kind, layer in kinds}
    assert scales["sliding_attention"] == 0.5 != scales["full_attention"]
    # It is in the small model, beside one that was not changed; what differs in numbers only is taken as it comes.
    given = model()
    by_closure(given.model.layers[3])
    for number, layer in enumerate(given.model.layers):
        layer.self_attn.scaling = 1.0 + number
    small = small_of(given)
    carry_patches(given, small)
    assert ["forward" in vars(layer.mlp) for layer in small.model.layers] == [False, True]
    assert [layer.self_attn.scaling for layer in small.model.layers] == [1.0, 4.0]


class Other(nn.Module):
    """A module with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))


def in_three_ways(given: Any) -> None:
    for layer, patch in zip(given.model.layers, (by_closure, by_method, twice), strict=False):
        patch(layer)


def with_weights(given: Any) -> None:
    given.model.norm = Other()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (in_three_ways, r"model\.model\.layers\.2 was changed in another way than 2 layers before it"),
        (with_weights, r"model\.model\.norm is a Other, where the class makes a SmolLM3RMSNorm"),
    ],
)
def test_what_cannot_be_carried_over_is_named(change: Callable[[Any], None], said: str) -> None:
    given = model()
    change(given)
    with pytest.raises(ValueError, match=said + r".*adding_a_model\.md"):
        carry_patches(given, small_of(given))


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "GptOssForCausalLM"])
def test_nothing_is_carried_over_from_a_model_as_its_class_makes_it(name: str) -> None:
    given = Subject.of(name).build()
    given.gradient_checkpointing_enable()
    small = small_of(given)
    before = {path: dict(vars(module)) for path, module in small.named_modules()}
    carry_patches(given.train(), small)
    assert before == {path: dict(vars(module)) for path, module in small.named_modules()}
