"""How a parameter lies on the ranks of an axis: cut along a dimension, or copied.

In:   a parameter, full or as a rank holds it.
Out:  the slices that a rank holds, their shape, and their places in the full parameter.
Must hold: the slices of all ranks together are the parameter, each element once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TP, EXPERTS, VOCABULARY = "tp", "experts", "vocabulary"


@dataclass(frozen=True)
class Placement:
    """The cut of a parameter over the ranks of an axis of the mesh.

    Attributes:
        dim: the dimension of the cut; None for a copy on every rank.
        length: the full length of the cut dimension.
        sums_gradient: a copy whose gradient on a rank covers only the rank's part of the sequence, of the heads or of
            the features, and must be summed.
        blocks: the full lengths of matrices side by side along the cut dimension, each cut by itself (queries, keys and
            values in a single parameter); empty for a single matrix.
        mesh_axis: `tp`; `experts`, whose ranks together hold every expert of a replica once; or `vocabulary`, the
            ranks of tensor parallelism and of the pipeline together.
    """

    dim: int | None = None
    length: int = 0
    sums_gradient: bool = False
    blocks: tuple[int, ...] = ()
    mesh_axis: str = TP

    @property
    def is_fused(self) -> bool:
        """Whether a rank's part is several slices, from several blocks."""
        return len(self.blocks) > 1

    def bounds(self, size: int, rank: int) -> list[tuple[int, int]]:
        """Returns the begin and the end of a rank's slices in the cut dimension, a pair for each block."""
        bounds, start = [], 0
        for length in self.blocks or (self.length,):
            first, last = cut_bounds(length, size, rank)
            bounds.append((start + first, start + last))
            start += length
        return bounds

    def shape(self, whole: Sequence[int], size: int, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's part of a parameter.

        Args:
            whole: the full shape.
            size: how many ranks share the parameter.
            rank: the rank among these.
        """
        held = list(whole)
        if self.dim is not None:
            held[self.dim] = sum(last - first for first, last in self.bounds(size, rank))
        return tuple(held)

    def full_shape(self, held: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the full parameter, from the shape of any part."""
        whole = list(held)
        if self.dim is not None:
            whole[self.dim] = self.length
        return tuple(whole)

    def slices(self, whole: Tensor, size: int, rank: int) -> list[Tensor]:
        """Returns a rank's part of a cut parameter: a view for each block.

        Args:
            whole: the full parameter.
            size: how many ranks share the parameter.
            rank: the rank among these.
        """
        assert self.dim is not None
        return [whole.narrow(self.dim, first, last - first) for first, last in self.bounds(size, rank)]

    def cut(self, whole: Tensor, size: int, rank: int) -> Tensor:
        """Returns a rank's slices in a new tensor; the parameter itself if not cut.

        Args:
            whole: the full parameter.
            size: how many ranks share the parameter.
            rank: the rank among these.
        """
        if self.dim is None or size == 1:
            return whole
        return torch.cat(self.slices(whole, size, rank), self.dim)

    def paste(self, whole: Tensor, part: Tensor, size: int, rank: int) -> None:
        """Copies a rank's part to its position in the full parameter of a cut one.

        Args:
            whole: the full parameter, written to.
            part: the result of `cut`.
            size: how many ranks share the parameter.
            rank: the rank among these.
        """
        assert self.dim is not None
        places = self.slices(whole, size, rank)
        parts = part.split([place.shape[self.dim] for place in places], self.dim)
        for place, block in zip(places, parts, strict=True):
            place.copy_(block)


CUT_DIM_0 = Placement(dim=0)
CUT_DIM_1 = Placement(dim=1)
CUT_EXPERTS = Placement(dim=0, mesh_axis=EXPERTS)
COPIED = Placement()
COPIED_SUMMED = Placement(sums_gradient=True)


def cut_bounds(length: int, size: int, rank: int) -> tuple[int, int]:
    """Returns the slice of a dimension on a rank: as even as possible, the longer slices first.

    Args:
        length: of the dimension.
        size: how many ranks share the dimension.
        rank: the rank among these.
    """
    short, extra = divmod(length, size)
    first = rank * short + min(rank, extra)
    return first, first + short + (rank < extra)
