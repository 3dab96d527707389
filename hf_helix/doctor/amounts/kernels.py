"""Kernels and transfers: the units of counting.

In:   nothing.
Out:  `Kernel` and `Transfer`.
Must hold: no import of torch, so estimates work without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

MATMUL, ATTENTION, OTHER = "matmul", "attention", "other"


@dataclass(frozen=True)
class Kernel:
    """One kernel, or several equal kernels.

    Attributes:
        sort: `MATMUL`, `ATTENTION`, or `OTHER` (bound by memory).
        flops: floating-point operations; a multiplication and an addition count as two.
        bytes: bytes read and written.
        sizes: of a matrix product, (number of products, rows, columns, depth); of attention, (queries, keys, size of a
            head).
        exponentials: number of values of an exponential or a similar function.
        causal: whether attention leaves out the keys after a query.
    """

    sort: str
    flops: float
    bytes: int
    sizes: tuple[int, ...] = ()
    exponentials: float = 0.0
    causal: bool = False


@dataclass(frozen=True)
class Transfer:
    """One use of a transport.

    Attributes:
        axis: "tp", "cp", "experts", "pp", "dp", "copies" or "expert_copies".
        method: a method of the transport; "send" between stages, "all_reduce" of gradients.
        bytes: the larger of the bytes sent and received by a rank.
    """

    axis: str
    method: str
    bytes: int
