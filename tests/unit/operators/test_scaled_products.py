"""fp8: the emulation on CPUs is torch's own scaled product; blocks of bytes bring what a product reads."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from hf_helix.operators.float8 import GRADIENTS, pack, product, quantize, unpack

RECIPES = tuple(GRADIENTS)
WAYS = {"tensorwise": ScalingType.TensorWise, "rowwise": ScalingType.RowWise}


def matrix(rows: int, columns: int = 64, seed: int = 0) -> Tensor:
    """Rows of very different sizes, in bf16; the last of zeros."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 4, rows).unsqueeze(1)
    made[-1] = 0
    return made.bfloat16()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_product_is_that_of_torch(recipe: str, dtype: torch.dtype) -> None:
    left, right = quantize(matrix(20), recipe, dtype), quantize(matrix(48, seed=1), recipe)
    way = WAYS[recipe]
    ours = product(left, right, torch.float32, fast=False)
    theirs = scaled_mm(left.values, right.values.t(), left.scale, way, right.scale.t(), way, output_dtype=torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    exact = matrix(20).float() @ matrix(48, seed=1).float().t()
    assert 1e-3 < (ours - exact).norm() / exact.norm() < 0.2


@pytest.mark.parametrize("recipe", RECIPES)
def test_rounding_twice_is_rounding_once(recipe: str) -> None:
    once = quantize(matrix(20), recipe).matrix(torch.bfloat16)
    assert torch.equal(quantize(once, recipe).matrix(torch.bfloat16), once)
    by_row = quantize(matrix(20), "rowwise").matrix(torch.bfloat16)
    twice = quantize(by_row, recipe).matrix(torch.bfloat16)
    assert (twice - once).abs().max() <= 1e-4 * once.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_that_are_none_stay_none(dtype: torch.dtype) -> None:
    for given in (float("nan"), float("inf")):
        value = torch.ones(16, 16, dtype=dtype)
        value[0, 3] = given
        out = product(
            quantize(value, "tensorwise"), quantize(torch.ones(16, 16, dtype=dtype), "tensorwise"), dtype, True
        )
        assert out[0].isnan().all()


def test_no_rows() -> None:
    for recipe in RECIPES:
        assert product(quantize(matrix(1)[:0], recipe), quantize(matrix(16), recipe), torch.float32, True).shape == (
            0,
            16,
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_blocks_bring_the_rounded_value(dtype: torch.dtype) -> None:
    values = torch.randn(2, 3, 4, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    blocks = torch.cat([pack(value) for value in values])
    assert blocks.shape == (2, 3 * 4 * (32 + 2))
    out = torch.empty(6, 4, 32, dtype=dtype)
    unpack(blocks, out)
    assert torch.equal(out.view(-1, 32), quantize(values.view(-1, 32), "rowwise").matrix(dtype))
