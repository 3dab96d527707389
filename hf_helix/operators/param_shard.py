"""How a parameter lies on the ranks of an axis: cut along a dimension, or copied.

In:   a parameter, full or as a rank holds it.
Out:  the slices that a rank holds, their shape, and their places in the full parameter.
Must hold: the slices of all ranks together are the parameter, each element once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TP, EXPERTS = "tp", "experts"


@dataclass(frozen=True)
class Placement:
    """How a parameter lies on the ranks of an axis of the mesh.

    Attributes:
        dim: the dimension along which it is cut; None for a copy on every rank.
        length: the length of that dimension in the whole parameter.
        sums_gradient: a copy whose gradient each rank sees only for its part of the sequence, of the heads or of the
            features, to be summed.
        blocks: the whole lengths of matrices that lie side by side along that dimension and are cut each by itself,
            such as queries, keys and values in one; empty for one matrix.
        over: the axis: `tp`, or `experts`, where the ranks of a copy of the model together hold every expert once.
    """

    dim: int | None = None
    length: int = 0
    sums_gradient: bool = False
    blocks: tuple[int, ...] = ()
    over: str = TP

    @property
    def is_fused(self) -> bool:
        """Returns whether a rank's part is several slices, one of each block, rather than one."""
        return len(self.blocks) > 1

    def bounds(self, size: int, rank: int) -> list[tuple[int, int]]:
        """Returns where the slices of a rank begin and end in that dimension, one for each block."""
        bounds, start = [], 0
        for length in self.blocks or (self.length,):
            first, last = cut_bounds(length, size, rank)
            bounds.append((start + first, start + last))
            start += length
        return bounds

    def shape(self, whole: Sequence[int], size: int, rank: int) -> tuple[int, ...]:
        """Returns the shape of what a rank holds of a parameter.

        Args:
            whole: the shape of the parameter.
            size: how many ranks it is cut over.
            rank: the rank among these.
        """
        held = list(whole)
        if self.dim is not None:
            held[self.dim] = sum(last - first for first, last in self.bounds(size, rank))
        return tuple(held)

    def full_shape(self, held: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the whole parameter, from that of any part."""
        whole = list(held)
        if self.dim is not None:
            whole[self.dim] = self.length
        return tuple(whole)

    def slices(self, whole: Tensor, size: int, rank: int) -> list[Tensor]:
        """Returns what a rank holds of a parameter that is cut: a view for each block.

        Args:
            whole: the parameter.
            size: how many ranks it is cut over.
            rank: the rank among these.
        """
        assert self.dim is not None
        return [whole.narrow(self.dim, first, last - first) for first, last in self.bounds(size, rank)]

    def cut(self, whole: Tensor, size: int, rank: int) -> Tensor:
        """Returns the slices of a rank in one piece, with memory of its own; the whole parameter if it is not cut.

        Args:
            whole: the parameter.
            size: how many ranks it is cut over.
            rank: the rank among these.
        """
        if self.dim is None or size == 1:
            return whole
        return torch.cat(self.slices(whole, size, rank), self.dim)

    def paste(self, whole: Tensor, part: Tensor, size: int, rank: int) -> None:
        """Copies what a rank holds to its places in the whole parameter, which is cut.

        Args:
            whole: the parameter, which is written to.
            part: what the rank holds, of the shape that `cut` returns.
            size: how many ranks it is cut over.
            rank: the rank among these.
        """
        assert self.dim is not None
        places = self.slices(whole, size, rank)
        parts = part.split([place.shape[self.dim] for place in places], self.dim)
        for place, block in zip(places, parts, strict=True):
            place.copy_(block)


CUT_ROWS = Placement(dim=0)
CUT_COLUMNS = Placement(dim=1)
CUT_EXPERTS = Placement(dim=0, over=EXPERTS)
COPIED = Placement()
COPIED_ON_SHARDS = Placement(sums_gradient=True)


def cut_bounds(length: int, size: int, rank: int) -> tuple[int, int]:
    """The slice of a dimension that a rank holds: as even as can be, the longer ones first.

    Args:
        length: of the dimension.
        size: ranks that share it.
        rank: which of them.
    """
    short, extra = divmod(length, size)
    first = rank * short + min(rank, extra)
    return first, first + short + (rank < extra)
