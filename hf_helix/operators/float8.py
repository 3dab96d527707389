"""Matrices in 8-bit floating point (fp8) with scales, and their products.

In:   matrices in bf16, or in another type; their last dimension is the inner dimension of the product.
Out:  products; blocks of bytes with the same values, for transfers.
Must hold: scales are powers of two. So scaling rounds nothing, rounding a matrix to fp8 a second time changes nothing,
and a part of a matrix is rounded as in the full matrix, but for values below 1e-4 of the largest. On CPUs a
product is computed in fp32 from the values in fp8: equal to a GPU's but for the order of the sum.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from hf_helix.operators.fused import kernels

ROWWISE = "rowwise"

FORWARD = torch.float8_e4m3fn
"""The type of activations and weights: 3 bits of mantissa, values up to 448."""

GRADIENTS = {"tensorwise": torch.float8_e5m2, ROWWISE: torch.float8_e4m3fn}
"""The type of gradients by recipe, as in torchao: a single scale needs more exponents."""

MULTIPLE = 16
"""Divides the inner dimension and the columns of a product in fp8."""

LEAST = 1e-30  # the smallest maximum of a matrix: the scale of zeros stays finite
EXPONENT = 0x7F800000  # the bits of a float32 that hold its exponent


class Scaled(NamedTuple):
    """A matrix in fp8.

    Attributes:
        values: [rows, columns], in a type of fp8.
        scale: of the values, float32: [] for all of them, or [rows, 1].
    """

    values: Tensor
    scale: Tensor

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix in another type."""
        return self.values.to(dtype) * self.scale.to(dtype)


def quantize(matrix: Tensor, recipe: str, dtype: torch.dtype = FORWARD) -> Scaled:
    """Returns a matrix [rows, columns] in fp8, with a scale for all of it, or with `rowwise` for each row."""
    is_fused, by_row = kernels.is_on(matrix), recipe == ROWWISE
    if not by_row:
        largest = torch.linalg.vector_norm(matrix, math.inf) if matrix.numel() else matrix.new_zeros(())
    elif not is_fused:
        largest = torch.linalg.vector_norm(matrix, math.inf, dim=1, keepdim=True)
    if is_fused:
        return Scaled(*kernels.to_float8(matrix, None if by_row else largest, dtype, LEAST))
    factor = torch.finfo(dtype).max / largest.float().clamp(min=LEAST)
    factor = (factor.view(torch.int32) & EXPONENT).view(torch.float32)  # the next power of two below
    wide = torch.promote_types(matrix.dtype, torch.bfloat16)  # fp16 has too few exponents
    return Scaled((matrix.to(wide) * factor.to(wide)).to(dtype).contiguous(), factor.reciprocal())


def product(left: Scaled, right: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
    """Returns the product [rows, columns] of two matrices of one recipe, [rows, inner] and [columns, inner], in a type.
    `fast` allows sums in less than fp32."""
    if left.values.device.type == "cpu":
        return (left.matrix(torch.float32) @ right.matrix(torch.float32).t()).to(dtype)
    way = ScalingType.RowWise if left.scale.dim() else ScalingType.TensorWise
    return scaled_mm(left.values, right.values.t(), left.scale, way, right.scale.t(), way, use_fast_accum=fast).to(
        dtype
    )


def pack(value: Tensor) -> Tensor:
    """Returns a value [..., features] in fp8, with a scale for each row of features, as one block [1, bytes]."""
    values, scale = quantize(value.reshape(-1, value.shape[-1]), ROWWISE)
    parts = values.view(torch.uint8).view(-1), scale.to(torch.bfloat16).view(torch.uint8).view(-1)
    return torch.cat(parts).unsqueeze(0)


def unpack(blocks: Tensor, out: Tensor) -> None:
    """Fills a value [blocks * n, ..., features] from blocks [blocks, bytes]; allocates nothing."""
    rows = out.view(len(blocks), -1, out.shape[-1])
    end = rows[0].numel()
    rows.copy_(blocks[:, :end].view(FORWARD).view(rows.shape))
    rows.mul_(blocks[:, end:].view(torch.bfloat16).unsqueeze(-1))
