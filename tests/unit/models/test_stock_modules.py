"""Fused RMS norms give what Transformers' modules give, and stand back wherever a module is not one that is known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import tiny
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_helix.models.stock import stock_modules
from hf_helix.models.stock.stock_modules import is_rms_norm, normed, rms_norm


def run(function: Callable[[Tensor], Tensor], value: Tensor, direction: Tensor, weight: nn.Parameter) -> list[Tensor]:
    """Value, input gradient, weight gradient, in fp64."""
    leaf, weight.grad = value.clone().requires_grad_(), None
    out = function(leaf)
    out.backward(direction.to(out.dtype))
    assert weight.grad is not None
    return [result.detach().double() for result in (out, leaf.grad, weight.grad)]


def distance(result: Tensor, expected: Tensor) -> float:
    return ((result - expected).norm() / expected.norm()).item()


def case(value: torch.dtype, weight: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    module = LlamaRMSNorm(64, 1e-5).to(weight)
    nn.init.normal_(module.weight, 1.0, 0.3)
    return module, (torch.randn(50, 3, 64) * 3).to(value), torch.randn(50, 3, 64).to(value)


def test_equals_the_module_in_fp32() -> None:
    module, value, direction = case(torch.float32, torch.float32)
    expected = run(module, value, direction, module.weight)
    result = run(lambda x: rms_norm(x, module.weight, 1e-5), value, direction, module.weight)
    assert [distance(*pair) <= 2e-7 for pair in zip(result, expected, strict=True)] == [True] * 3


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_is_as_exact_as_the_module_in_bf16(weight: torch.dtype) -> None:
    """Each error against fp64 is at most that of the module."""
    module, value, direction = case(torch.bfloat16, weight)
    exact, of, to = module.weight.detach().double().requires_grad_(), value.double(), direction.double()
    reference = run(lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * exact, of, to, exact)
    stock = run(module, value, direction, module.weight)
    result = run(lambda x: rms_norm(x, module.weight, 1e-5), value, direction, module.weight)
    for ours, theirs, expected in zip(result, stock, reference, strict=True):
        assert distance(ours, expected) <= 1.05 * distance(theirs, expected)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_norms_of_families_are_known(family: str) -> None:
    result = [module for module in tiny(family).modules() if type(module).__name__.endswith("RMSNorm")]
    assert len(result) >= 7  # two in each of three layers, and the last
    assert all(map(is_rms_norm, result))


def changed(change: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    module: nn.Module = LlamaRMSNorm(8)
    if change == "another class":
        return GemmaRMSNorm(8)
    if change == "a class of the same name":
        return type("LlamaRMSNorm", (nn.Module,), {"forward": lambda self, x: x})()
    if change == "a subclass":
        return type("LlamaRMSNorm", (LlamaRMSNorm,), {"forward": lambda self, x: x})(8)
    if change == "forward of the instance":
        module.forward = lambda x: x
    elif change == "forward of the class":
        monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: x)
    else:
        getattr(module, f"register_{change}")(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "change",
    [
        "another class",
        "a class of the same name",
        "a subclass",
        "forward of the instance",
        "forward of the class",
        "forward_hook",
        "forward_pre_hook",
        "full_backward_hook",
        "full_backward_pre_hook",
    ],
)
def test_what_was_changed_is_called(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_modules, "DEVICES", {"cpu"})
    module, value = changed(change, monkeypatch), torch.randn(3, 8)
    assert not is_rms_norm(module)
    monkeypatch.setattr(stock_modules, "rms_norm", lambda *_: pytest.fail("the module was not called"))
    assert torch.equal(normed(module, value), module(value))


def test_a_cpu_calls_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_modules, "rms_norm", lambda *_: pytest.fail("the module was not called"))
    module, value = LlamaRMSNorm(8), torch.randn(3, 8)
    assert torch.equal(normed(module, value), module(value))
