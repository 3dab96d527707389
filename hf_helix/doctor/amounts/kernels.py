"""The words in which amounts are counted: kernels, and uses of a link.

In:   nothing.
Out:  `Kernel` and `Transfer`.
Must hold: nothing here imports torch, so that estimates can be made where it is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass

MATMUL, ATTENTION, OTHER = "matmul", "attention", "other"


@dataclass(frozen=True)
class Kernel:
    """One kernel, or several alike.

    Attributes:
        sort: `MATMUL`, `ATTENTION`, or `OTHER`, which is bound by memory.
        flops: floating-point operations; a multiplication and an addition count as two.
        bytes: read and written.
        sizes: of a matrix product, how many, its rows, columns and depth; of attention, queries, keys and the size of
            a head.
        exponentials: how many values an exponential, or a function like it, is taken of.
        causal: of attention, whether keys that come after a query are left out.
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
        method: of the transport; "send" between stages, "all_reduce" of gradients.
        bytes: what a rank sends, or what it receives where that is more.
    """

    axis: str
    method: str
    bytes: int
