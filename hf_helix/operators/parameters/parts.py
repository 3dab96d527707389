"""Tensors of a rank's part of a parameter: slices of full tensors, and views of pieces.

In:   a parameter's cut or part, see `hf_helix.planning.parameters`; tensors of the full shape, or of the part's.
Out:  slices and pieces as tensors.
Must hold: slices and pieces are views; only `cut_tensor` copies.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_helix.planning.parameters import Cut, Part, Piece, Shape


def slices_of(full: Tensor, cut: Cut, size: int, rank: int) -> list[Tensor]:
    """Returns a rank's part of a cut parameter: a view for each block.

    Args:
        full: the full parameter.
        cut: along a dimension.
        size: how many ranks share the parameter.
        rank: the rank among these.
    """
    assert cut.dim is not None
    return [full.narrow(cut.dim, first, last - first) for first, last in cut.bounds(size, rank)]


def cut_tensor(full: Tensor, cut: Cut, size: int, rank: int) -> Tensor:
    """Returns a rank's slices in a new tensor; the parameter itself if not cut.

    Args:
        full, cut, size, rank: see `slices_of`.
    """
    if cut.dim is None or size == 1:
        return full
    return torch.cat(slices_of(full, cut, size, rank), cut.dim)


def paste(full: Tensor, part: Tensor, cut: Cut, size: int, rank: int) -> None:
    """Copies a rank's part to its position in the full parameter of a cut one.

    Args:
        full: the full parameter, written to.
        part: the result of `cut_tensor`.
        cut, size, rank: see `slices_of`.
    """
    assert cut.dim is not None
    places = slices_of(full, cut, size, rank)
    parts = part.split([place.shape[cut.dim] for place in places], cut.dim)
    for place, block in zip(places, parts, strict=True):
        place.copy_(block)


def views_of(part: Part, held: Tensor) -> dict[Shape, Tensor]:
    """Returns views of a rank's tensor of a parameter (a value, a gradient, a state) by their offset in the full one.

    Args:
        part: of the parameter.
        held: of the part's shape: a slice, or the elements of a shard.
    """
    return {piece.offset: _view(held, piece) for piece in part.pieces()}


def views_with_index(part: Part, held: Tensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """Yields the views of `views_of`, each with its index in the full tensor."""
    for piece in part.pieces():
        yield _view(held, piece), piece.place


def _view(held: Tensor, piece: Piece) -> Tensor:
    box = held if piece.elements is None else held[slice(*piece.elements)].view(piece.around)
    return box if piece.shape == tuple(box.shape) else box[piece.inner_place]
