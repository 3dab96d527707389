"""The frozen weight of a linear in 4 bits (QLoRA, arXiv 2305.14314), as bitsandbytes packs it.

In:   codes, two in a byte, and the scale of each block of consecutive features of a row.
Out:  the matrix of the linear, made for one product and then let go.
Must hold: a rank's rows, or its blocks of every row, give the same elements as in the full weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FourBit:
    """A weight in 4 bits, in full or a rank's part.

    Attributes:
        codes: [features out, features in / 2], uint8.
        absmax: the largest absolute value of each block [features out, features in / block_size], float32.
        block_size: in features.
        kind: `nf4` or `fp4`.
        dtype: of the weight before it was packed.
        compute_dtype: of products, unless there is autocast; None for the type of the input.
    """

    codes: Tensor
    absmax: Tensor
    block_size: int
    kind: str
    dtype: torch.dtype
    compute_dtype: torch.dtype | None

    def matrix(self, dtype: torch.dtype, rounds: bool = False) -> Tensor:
        """Returns the elements in a type, in new memory [features out, features in]; `rounds` them to the type of the
        weight first, as bitsandbytes does in backward."""
        rows, width = self.codes.shape
        # The operator exists once bitsandbytes is imported, without which there is no such weight.
        unpack = torch.ops.bitsandbytes.dequantize_4bit.default
        shape, kind = (rows, 2 * width), self.dtype if rounds else dtype
        elements: Tensor = unpack(self.codes, self.absmax, self.block_size, self.kind, shape, kind)
        return elements.to(dtype)
