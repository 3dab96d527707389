"""Where what a rank steps of a parameter lies in the whole parameter.

In:   the model of a stage, with how its parameters are cut and spread.
Out:  of every parameter that this rank steps a part of, its name, and views of anything of its shape by their place in
      the whole.
Must hold: the pieces of all ranks fill the whole parameter; those of copies are the same pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, nn

from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.param_shard import Placement
from hf_helix.operators.unit import Unit
from hf_helix.operators.zero.zero1 import Zero1FlatParameter, zero1_flat_parameters
from hf_helix.planning.window.layout import Layout, WeightGather
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.gradients.buckets import max_elements
from hf_helix.runtime.stage import Stage

Offset = tuple[int, ...]


@dataclass(frozen=True)
class FlatShard:
    """What a rank steps of a slice that is spread over ranks (`shard_optimizer`, `shard_parameters`): some of its
    elements, in a row.

    Attributes:
        shape: of the slice.
        start: the first element of the flattened slice.
        axis: the ranks that it is spread over.
        is_first_replica: whether no other rank of tensor parallelism writes what this one does. These copies of a
            parameter may be spread otherwise, since they lie beside slices of other lengths.
    """

    shape: tuple[int, ...]
    start: int
    axis: Axis
    is_first_replica: bool


@dataclass(frozen=True)
class LocalParameter:
    """A parameter that this rank steps a slice of, or a stretch of a slice.

    Attributes:
        name: of the parameter in the model.
        placement: how it is cut.
        axis: the ranks that it is cut over.
        stretch: of the slice; None where this rank steps all of it.
        trained: whether the parameter is at present; what is frozen once it is cut is frozen in the model alone.
    """

    name: str
    placement: Placement
    axis: Axis
    stretch: FlatShard | None = None
    trained: bool = True

    @property
    def mark(self) -> str:
        """The suffix of a state that belongs to what this rank steps alone; empty where that is the whole parameter."""
        axes = [self.axis] if self.placement.dim is not None and self.axis.size > 1 else []
        axes += [self.stretch.axis] if self.stretch is not None else []
        if not axes:
            return ""
        return f"@{'.'.join(str(axis.rank) for axis in axes)}of{'.'.join(str(axis.size) for axis in axes)}"

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank writes its pieces."""
        return self.stretch is None or self.stretch.is_first_replica

    def full_shape(self, local: Tensor) -> torch.Size:
        """The shape of the whole tensor, from what this rank steps of it."""
        return torch.Size(self.placement.full_shape(local.shape if self.stretch is None else self.stretch.shape))

    def pieces(self, local: Tensor) -> dict[Offset, Tensor]:
        """Views of what this rank steps by their offset in the whole tensor: one for each block that is cut by itself;
        of a stretch, one for each box that its elements fill in the slice, and again for each block."""
        boxes = {(0,) * local.dim(): local}
        if self.stretch is not None:
            boxes = dict(boxes_of(local, self.stretch.start, self.stretch.shape))
        dim = self.placement.dim
        if dim is None:
            return boxes
        pieces: dict[Offset, Tensor] = {}
        start = 0  # of a block in the slice
        for first, last in self.placement.bounds(self.axis.size, self.axis.rank):
            for offset, box in boxes.items():
                begin, end = max(start, offset[dim]), min(start + last - first, offset[dim] + box.shape[dim])
                if begin < end:
                    place = (*offset[:dim], begin - start + first, *offset[dim + 1 :])
                    pieces[place] = box.narrow(dim, begin - offset[dim], end - begin)
            start += last - first
        return {offset: piece for offset, piece in pieces.items() if piece.numel()}


def boxes_of(elements: Tensor, start: int, shape: Sequence[int]) -> Iterator[tuple[Offset, Tensor]]:
    """Yields the boxes that elements in a row fill in a tensor, each with its offset.

    Those of a matrix are the end of a row, whole rows, and the beginning of a row.

    Args:
        elements: [n], of the flattened tensor.
        start: the first of them there.
        shape: of the tensor.
    """
    if not elements.numel():
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), elements.view([elements.numel()] * len(shape))
        return
    row = prod(shape[1:])
    end = start + elements.numel()
    first, last = -(-start // row), end // row  # whole rows
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


def local_parameters(model: nn.Module, stage: Stage, mesh: Mesh) -> dict[nn.Parameter, LocalParameter]:
    """What an optimizer steps on this rank: parameters, or stretches of them, without those of other pipeline ranks.

    Args:
        model: the cut model.
        stage: its units on this rank.
        mesh: the layout of the ranks.
    """
    placements, owners, shards = stage.all_placements, stage.owners, stage.shards
    flats = {parameter: flat for flat in stage.flat_parameters for parameter in flat.placements}
    result = {}
    for name, parameter in model.named_parameters():
        if owners.get(parameter) != stage.rank:
            continue
        placement, stretch = placements[parameter], None
        if parameter in flats:
            flat = flats[parameter]
            is_first_replica = placement.dim is not None or mesh.tp.rank == 0
            stretch = FlatShard(
                tuple(parameter.shape), flat.owned_range(parameter)[0], flat.gather_axis, is_first_replica
            )
        stepped = shards.get(parameter, parameter)
        axis, trained = mesh.axis_of(placement), parameter.requires_grad
        result[stepped] = LocalParameter(name, placement, axis, stretch, trained)
    return result


# -- kept weights --------------------------------------------------------------------------------------------------
# Weights that every rank keeps whole, and that each steps a part of: what a layout knows of them.
#
# In:   units whose parameters are in flats that are kept whole (`hf_helix.operators.zero.zero1`).
# Out:  the gathers of a layout, and which units read which flat.
# Must hold: gathers are in the order in which a micro-batch first reads them, the same on all ranks of a pipeline.


T = TypeVar("T")


def layout_with_gathers(layout: Layout, model: Mapping[int, Unit], mesh: Mesh) -> Layout:
    """Returns a layout with the gathers of weights of all ranks of the pipeline.

    Args:
        layout: what the ranks hold.
        model: the units of the whole model, before any parameter is cut.
        mesh: which ranks share what.
    """
    readers = readers_of(sorted(model.items()))
    return replace(
        layout, gathers=[WeightGather(tuple(units), flat.name, _bytes(flat, mesh)) for flat, units in readers.items()]
    )


def readers_of(units: Iterable[tuple[T, Unit]]) -> dict[Zero1FlatParameter, list[T]]:
    """Returns, for every flat that is kept whole, the units that read it, in the order in which they are given.

    Args:
        units: each with what it goes by in the result, in forward order.
    """
    readers: dict[Zero1FlatParameter, list[T]] = {}
    for name, unit in units:
        for flat in zero1_flat_parameters(unit.flat_parameters.values()):
            readers.setdefault(flat, []).append(name)
    return readers


def _bytes(flat: Zero1FlatParameter, mesh: Mesh) -> int:
    """The bytes of the piece on the rank that holds most of it, without padding."""
    return sum(
        max_elements(parameter, placement, mesh) * (flat.cast_to or parameter.dtype).itemsize
        for parameter, placement in flat.placements.items()
    )
