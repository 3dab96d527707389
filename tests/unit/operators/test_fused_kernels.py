"""Kernels of Triton, run by its interpreter, give what torch gives; and how many bytes a layer moves with them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm

from hf_helix.config import HelixConfig
from hf_helix.doctor.counting import amounts_of
from hf_helix.models.stock.stock_modules import is_rms_norm
from hf_helix.operators.attention.rope import rotated
from hf_helix.operators.autograd_operator import AutogradOperator
from hf_helix.operators.base import OperatorContext, Precision, explicit_gradients
from hf_helix.operators.explicit import GatedSilu, RmsNorm
from hf_helix.operators.float8 import quantize
from hf_helix.operators.fused import kernels

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CLOSE = {FP32: 2e-6, FP16: 2e-3, BF16: 2e-2}  # the interpreter cuts bf16 off, where a GPU rounds


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, on the CPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})


def check(ours: Any, expected: Any, dtype: torch.dtype) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        difference = (one.double() - other.double()).norm() / other.double().norm()
        assert difference <= CLOSE[dtype]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_gates(dtype: torch.dtype) -> None:
    """Of slices of one product, as the linear before gives them."""
    torch.manual_seed(0)
    inputs = torch.randn(3, 2, 2 * 24).to(dtype).split(24, -1)
    operator = AutogradOperator(lambda gate, up: gate, explicit=GatedSilu(lambda: True))
    gradient, ctx = torch.randn(3, 2, 24).to(dtype), OperatorContext({}, 0, True)
    with explicit_gradients():
        ours = [*operator.forward(ctx, *inputs), *operator.backward(ctx, gradient)]
    leaves = [value.detach().requires_grad_() for value in inputs]
    expected = functional.silu(leaves[0]) * leaves[1]
    check(ours, [expected, *torch.autograd.grad(expected, leaves, gradient)], dtype)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("value", "weight", "autocast"), [(FP32, FP32, BF16), (FP32, FP32, None), (FP16, FP16, None)])
def test_norms(
    value: torch.dtype, weight: torch.dtype, autocast: torch.dtype | None, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than programs, with and without the gradient of the residual stream."""
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "PROGRAMS", 4)
    module = LlamaRMSNorm(24, 1e-5).to(weight)
    torch.nn.init.normal_(module.weight, 1.0, 0.3)
    x, gradient, partial = torch.randn(3, 3, 24).to(value), torch.randn(3, 3, 24), torch.randn(3, 3, 24).to(value)
    operator = AutogradOperator(module, [module.weight], explicit=RmsNorm(module, is_rms_norm, lowers=True))
    ctx = OperatorContext({}, 0, True, Precision("cpu", autocast))
    with explicit_gradients():
        (out,) = operator.forward(ctx, x)
        ctx.partials = (partial,) if adds else ()
        (of_value,) = operator.backward(ctx, gradient.to(out.dtype))
    assert ctx.partials == ()
    leaf = x.detach().requires_grad_()
    expected = functional.rms_norm(leaf, (24,), module.weight, 1e-5).to(autocast or value)
    grads = torch.autograd.grad(expected, [leaf, module.weight], gradient.to(out.dtype))
    lowest = BF16 if autocast else value
    assert module.weight.grad is not None
    check([out, of_value, module.weight.grad], [expected, grads[0] + partial * adds, grads[1]], lowest)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("dtype", "angles", "together"), [(FP32, FP32, True), (FP16, FP16, False), (BF16, FP32, True), (BF16, FP32, False)]
)
def test_ropes(dtype: torch.dtype, angles: torch.dtype, together: bool) -> None:
    torch.manual_seed(0)
    tokens, batch, sizes = 3, 2, [3 * 12, 12]
    given = torch.randn(tokens, batch, sum(sizes)).to(dtype)
    cos, sin = (torch.randn(batch, tokens, 12).to(angles) for _ in range(2))
    directions = [torch.randn(batch, size // 12, tokens, 12).to(dtype) for size in sizes]
    rows: list[list[Tensor]] = []
    for rotate in (rotated, apply_rotary_pos_emb):
        leaves = [part if together else part.clone() for part in given.split(sizes, -1)]
        leaves = [part.detach().requires_grad_() for part in leaves]
        outputs = [
            out.to(dtype) for out in rotate(*(x.unflatten(-1, (-1, 12)).permute(1, 2, 0, 3) for x in leaves), cos, sin)
        ]
        torch.autograd.backward(outputs, directions)
        rows.append([*outputs, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    check(*rows, dtype)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("recipe", "kind", "dtype"),
    [
        ("tensorwise", torch.float8_e4m3fn, FP32),
        ("tensorwise", torch.float8_e5m2, BF16),
        ("rowwise", torch.float8_e4m3fn, BF16),
        ("rowwise", torch.float8_e5m2, FP32),
    ],
)
def test_rounding_to_fp8(recipe: str, kind: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of columns of a wider matrix, in more than a block, with a row of zeros. All values are of fp8: where there is
    something to round, the interpreter loses carries (31 becomes 16), which a GPU does not."""
    wide = torch.randn(4, 4200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 4).unsqueeze(1)
    wide[2] = 0
    monkeypatch.setattr(kernels, "DEVICES", set())
    rows = quantize(wide, recipe, kind).matrix(dtype)[:, 16:4176]
    theirs = quantize(rows, recipe, kind)
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    ours = quantize(rows, recipe, kind)
    assert torch.equal(ours.scale, theirs.scale)
    assert torch.equal(ours.matrix(FP32), rows.float())


def test_bytes_of_a_layer_of_8b() -> None:
    """1,447 kB a token step by step, of which at most 650 are left."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = AutoConfig.for_model("llama", num_hidden_layers=1, vocab_size=512, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    amounts = amounts_of(model, HelixConfig(), 1, 2048, BF16)
    layer = amounts.model.units[1]
    moved = sum(
        kernel.bytes
        for (unit, _), operator in amounts.operators.items()
        if unit == layer
        for kernel in operator.kernels
        if kernel.sort == "other"
    )
    assert 500e3 < moved / 2048 <= 650e3


def test_norms_are_known_by_their_code() -> None:
    assert is_rms_norm(Phi3RMSNorm(8))
    assert not is_rms_norm(GemmaRMSNorm(8))


@pytest.mark.usefixtures("interpreted")
def test_two_engines_in_a_process_each_have_their_own_kernels() -> None:
    """As with one engine of `fused_kernels=True`, and a later one of `fused_kernels=False`."""
    value = torch.ones(2, 4)
    for fused in (True, False, True):
        with Precision(fused=fused).in_window():
            assert kernels.is_on(value) == fused
    assert kernels.is_on(value)
