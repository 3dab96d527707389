"""ZeRO in a whole model: the position of this rank's optimizer parameters in the full ones.

In:   the units of a rank, with its cuts and its flat parameters.
Out:  for every parameter that this rank steps: its name, and views of any tensor of its shape by their offset in the
      full parameter.
Must hold: the pieces of all ranks fill the full parameter; replicas have the same pieces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.parameters.param_shard import Placement
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.rank_units import RankUnits

Offset = tuple[int, ...]


@dataclass(frozen=True)
class FlatShard:
    """This rank's shard of a slice (`shard_optimizer`, `shard_parameters`): consecutive elements of the flattened
    slice.

    Attributes:
        shape: of the slice.
        start: the first element of the flattened slice.
        axis: the ranks with the other shards.
        is_first_replica: whether this rank writes the shard, of the copies of the shard (`dp_replicate_size`) and of
            the tensor-parallel ranks with the same slice. The flat parameters of these ranks may differ, since slices
            of other lengths accompany the slice.
    """

    shape: tuple[int, ...]
    start: int
    axis: Axis
    is_first_replica: bool


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of which this rank steps a slice, or a shard of a slice.

    Attributes:
        name: of the parameter in the model.
        placement: its cut.
        axis: the ranks of the cut.
        shard: of the slice; None if this rank steps the full slice.
        trained: whether the parameter is trained now; freezing after the cut freezes only the parameter of the model.
    """

    name: str
    placement: Placement
    axis: Axis
    shard: FlatShard | None = None
    trained: bool = True

    @property
    def mark(self) -> str:
        """The suffix of a state of this rank's part; empty if this rank steps the full parameter."""
        axes = [self.axis] if self.placement.dim is not None and self.axis.size > 1 else []
        axes += [self.shard.axis] if self.shard is not None and self.shard.axis.size > 1 else []
        if not axes:
            return ""
        return f"@{'.'.join(str(axis.rank) for axis in axes)}of{'.'.join(str(axis.size) for axis in axes)}"

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank writes its pieces."""
        return self.shard is None or self.shard.is_first_replica

    def full_shape(self, local: Tensor) -> torch.Size:
        """The shape of the full tensor, from this rank's part of it."""
        return torch.Size(self.placement.full_shape(local.shape if self.shard is None else self.shard.shape))

    def pieces(self, local: Tensor) -> dict[Offset, Tensor]:
        """Views of this rank's part by their offset in the full tensor. A slice is one view for each of its blocks; a
        shard is one view for each box that its elements fill in the slice, split by blocks again."""
        boxes = {(0,) * local.dim(): local}
        if self.shard is not None:
            boxes = dict(boxes_of(local, self.shard.start, self.shard.shape))
        dim = self.placement.dim
        if dim is None or self.axis.size == 1:
            return boxes
        pieces: dict[Offset, Tensor] = {}
        start = 0  # of a block in the slice
        for first, last in self.placement.bounds(self.axis.size, self.axis.rank):
            for offset, box in boxes.items():
                begin, end = max(start, offset[dim]), min(start + last - first, offset[dim] + box.shape[dim])
                if begin < end:
                    corner = (*offset[:dim], begin - start + first, *offset[dim + 1 :])
                    pieces[corner] = box.narrow(dim, begin - offset[dim], end - begin)
            start += last - first
        return {offset: piece for offset, piece in pieces.items() if piece.numel()}

    def pieces_with_index(self, local: Tensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """Yields the views of `pieces`, each with its index in the full tensor."""
        for offset, piece in self.pieces(local).items():
            yield piece, tuple(slice(at, at + length) for at, length in zip(offset, piece.shape, strict=True))


def boxes_of(elements: Tensor, start: int, shape: Sequence[int]) -> Iterator[tuple[Offset, Tensor]]:
    """Yields the boxes of consecutive elements of a flattened tensor, each with its offset.

    The boxes of a matrix are the end of a row, full rows, and the beginning of a row.

    Args:
        elements: [n].
    """
    if not elements.numel():
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), elements.view([elements.numel()] * len(shape))
        return
    row = prod(shape[1:])
    end = start + elements.numel()
    first, last = -(-start // row), end // row  # full rows
    if first < last:
        head, body, tail = elements.split([first * row - start, (last - first) * row, end - last * row])
        parts = [(start, head), (last * row, tail)]
        yield (first, *[0] * (len(shape) - 1)), body.view(last - first, *shape[1:])
    else:
        cut = min(first * row, end)
        head, tail = elements.split([cut - start, end - cut])
        parts = [(start, head), (cut, tail)]
    for begin, part in parts:
        for offset, box in boxes_of(part, begin % row, shape[1:]):
            yield (begin // row, *offset), box.unsqueeze(0)


def local_parameters(model: nn.Module, rank_units: RankUnits, mesh: Mesh) -> dict[nn.Parameter, LocalParameter]:
    """Returns this rank's optimizer parameters: parameters, or shards of them; parameters of other pipeline ranks are
    left out.

    Args:
        model: the cut model.
        rank_units: its units on this rank.
        mesh: the layout of the ranks.
    """
    placements, owners, shards = rank_units.all_placements, rank_units.owners, rank_units.shards
    sharded = {parameter: flat for flat in rank_units.flat_parameters for parameter in flat.placements}
    result = {}
    for name, parameter in model.named_parameters():
        if owners.get(parameter) != rank_units.rank:
            continue
        placement, shard = placements[parameter], None
        if parameter in sharded:
            flat = sharded[parameter]
            start, is_first_replica = flat.owned_range(parameter)[0], mesh.holds_first_replica(placement, flat)
            shard = FlatShard(tuple(parameter.shape), start, flat.gather_axis, is_first_replica)
        stepped = shards.get(parameter, parameter)
        axis, trained = mesh.axis_of(placement), parameter.requires_grad
        result[stepped] = LocalParameter(name, placement, axis, shard, trained)
    return result
