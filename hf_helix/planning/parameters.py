"""Parameters as rows: each with its cut over ranks, its owner, the operators that add to its gradient, and the flat
parameter that replicas shard.

In:   declarations of units: parameters with their cuts and flat parameters; a rank's place among the others.
Out:  `Parameter`, a row that is the same on every rank; `Part`, the elements of a row on one rank.
Must hold: the pieces of all parts are the full parameter, and parts that count hold each element once. Whoever reads or
writes parameters (reductions, norms, checkpoints, optimizers, the view of scripts, tuning) asks these rows.

A parameter of six rows in two blocks, cut over two ranks; the slice of the first, sharded over two replicas:

    full      0 1 2 | 3 4 5
    slices    0 1 | 3 4        2 | 5        each block is cut by itself, the longer part first
    shards    0 1    3 4                    consecutive elements, whatever the blocks
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

TP, EXPERTS, VOCABULARY = "tp", "experts", "vocabulary"

Shape = tuple[int, ...]

Adder = tuple[int, str]
"""A backward operator that adds to a gradient: the index of its unit, and its name in that unit."""

ALIGNMENT, BLOCK, BLOCKED = 32, 256, 4096
"""A parameter begins at a multiple of `ALIGNMENT` elements: 64 bytes in half precision. From `BLOCKED` elements on, it
begins and is divided at multiples of `BLOCK`, the elements with a common scale in optimizer states of 8 bits."""


# -- places of ranks ---------------------------------------------------------------------------------------------------


class Ranks(NamedTuple):
    """Ranks that share something: their number, and this rank's number among them."""

    size: int = 1
    rank: int = 0


class Sharers(NamedTuple):
    """The ranks that share the parameters which an axis cuts; by default this rank only.

    Attributes:
        slices: the ranks with the slices of a replica.
        replicas: the ranks with the same slice and other tokens.
        shards: the replicas that step a shard of a slice each.
        copies: the replicas with copies of the same shard.
    """

    slices: Ranks = Ranks()
    replicas: Ranks = Ranks()
    shards: Ranks = Ranks()
    copies: Ranks = Ranks()


@dataclass(frozen=True)
class Place:
    """The place of a rank among all ranks; by default the only one.

    Attributes:
        axes: by the axis of a cut, the ranks that share the parameters.
        pipeline: the rank in the pipeline.
        num_sequence_parts: the number of ranks with parts of the same sequences (context parallelism).
        num_batches: the number of ranks with other batches (data parallelism).
    """

    axes: Mapping[str, Sharers] = field(default_factory=dict)
    pipeline: int = 0
    num_sequence_parts: int = 1
    num_batches: int = 1

    def sharers(self, axis: str) -> Sharers:
        """Returns the ranks that share the parameters which an axis cuts."""
        return self.axes.get(axis, Sharers())


# -- cuts --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
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

    def shape(self, full: Sequence[int], size: int, rank: int) -> Shape:
        """Returns the shape of a rank's part of a parameter.

        Args:
            full: the full shape.
            size: how many ranks share the parameter.
            rank: the rank among these.
        """
        lengths = list(full)
        if self.dim is not None:
            lengths[self.dim] = sum(last - first for first, last in self.bounds(size, rank))
        return tuple(lengths)

    def full_shape(self, part: Sequence[int]) -> Shape:
        """Returns the shape of the full parameter, from the shape of any part."""
        lengths = list(part)
        if self.dim is not None:
            lengths[self.dim] = self.length
        return tuple(lengths)


CUT_DIM_0 = Cut(dim=0)
CUT_DIM_1 = Cut(dim=1)
CUT_EXPERTS = Cut(dim=0, mesh_axis=EXPERTS)
COPIED = Cut()
COPIED_SUMMED = Cut(sums_gradient=True)


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


# -- flat parameters ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extent:
    """The position of a slice in a flat buffer: its first element, and its shape."""

    start: int
    shape: Shape

    @property
    def end(self) -> int:
        """The first element after it."""
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """The layout of a flat buffer: slices one after the other, divided into equal shards.

    Attributes:
        extents: of the slices.
        shard: the elements of a shard, padding included.
    """

    extents: tuple[Extent, ...]
    shard: int

    @classmethod
    def of(cls, shapes: Sequence[Shape], num_shards: int) -> "FlatLayout":
        """Returns the layout of slices in their order, see `ALIGNMENT`."""
        extents: list[Extent] = []
        end = 0
        for shape in shapes:
            extents.append(Extent(_aligned(end, _alignment(shape)), shape))
            end = extents[-1].end
        largest = max(map(_alignment, shapes))
        return cls(tuple(extents), _aligned(-(-_aligned(end, ALIGNMENT) // num_shards), largest))

    def elements(self, number: int, rank: int) -> tuple[int, int]:
        """Returns the first and the last element, exclusive, of a flattened slice in a rank's shard; two equal numbers
        for none."""
        extent, begin = self.extents[number], rank * self.shard
        first, last = (
            min(max(bound, extent.start), extent.end) - extent.start for bound in (begin, begin + self.shard)
        )
        return first, last


def _alignment(shape: Shape) -> int:
    """The elements of which a slice's start is a multiple."""
    return BLOCK if prod(shape) >= BLOCKED else ALIGNMENT


def _aligned(count: int, alignment: int) -> int:
    """The next multiple of an alignment."""
    return -(-count // alignment) * alignment


@dataclass(frozen=True)
class Flat:
    """A flat parameter: parameters in a flat buffer, of which every replica steps a shard (ZeRO, offload).

    Attributes:
        unit: the first unit with the flat parameter.
        name: unique among the flat parameters of that unit.
        members: the full shapes and the cuts of the parameters, in the order of the buffer.
        itemsize: bytes of an element of the gathered buffer.
        is_kept: whether every replica keeps the gathered buffer (ZeRO-1).
    """

    unit: int
    name: str
    members: tuple[tuple[Shape, Cut], ...]
    itemsize: int = 4
    is_kept: bool = False

    def layout(self, place: Place) -> FlatLayout:
        """Returns the layout of the buffer on a rank: ranks with longer slices have longer buffers."""
        sharers = place.sharers(self.members[0][1].mesh_axis)  # the same for all members
        return FlatLayout.of([cut.shape(shape, *sharers.slices) for shape, cut in self.members], sharers.shards.size)


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model; also a buffer, which every rank has.

    Attributes:
        name: in the model.
        shape: of the full parameter.
        itemsize: bytes of an element.
        trained: whether it is trained.
        cut: its cut over ranks.
        owner: the pipeline rank with the parameter. A parameter with slices on all pipeline ranks has a row for each.
        units: the units with the parameter, in forward order.
        adders: the operators that add to its gradient, in the order of a micro-batch's backward.
        is_above: whether it is above the decoder, so that only the caller's code reads it.
        is_read: whether the model's code reads it.
        is_conditional: whether the data decide if it gets a gradient in a window.
        flat: the flat parameter with its shards; None if every replica steps the full slice.
        number: among the members of `flat`.
    """

    name: str
    shape: Shape
    itemsize: int = 4
    trained: bool = False
    cut: Cut = COPIED
    owner: int = 0
    units: tuple[int, ...] = ()
    adders: tuple[Adder, ...] = ()
    is_above: bool = False
    is_read: bool = True
    is_conditional: bool = False
    flat: Flat | None = None
    number: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the full parameter."""
        return prod(self.shape) * self.itemsize

    def most_elements(self, place: Place) -> int:
        """Returns the elements of the longest slice, which the first rank of the cut has."""
        return prod(self.cut.shape(self.shape, place.sharers(self.cut.mesh_axis).slices.size, 0))


class Piece(NamedTuple):
    """A box of a full tensor, and its position in a rank's tensor.

    Attributes:
        offset, shape: of the box in the full tensor.
        corner: its offset in the slice, or in the box of elements of a shard.
        elements: the elements of the shard, first and last, exclusive, with the box around it; None for a slice.
        around: the shape of the box of these elements, or of the slice.
    """

    offset: Shape
    shape: Shape
    corner: Shape
    elements: tuple[int, int] | None
    around: Shape

    @property
    def place(self) -> tuple[slice, ...]:
        """The index of the box in the full tensor."""
        return _index(self.offset, self.shape)

    @property
    def inner_place(self) -> tuple[slice, ...]:
        """The index of the box in the slice, or in the box of elements of a shard."""
        return _index(self.corner, self.shape)


def _index(offset: Shape, shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(offset, shape, strict=True))


@dataclass(frozen=True)
class Part:
    """The part of a parameter on a rank.

    Attributes:
        row: the parameter.
        place: of the rank.
    """

    row: Parameter
    place: Place = Place()

    @property
    def ranks(self) -> Ranks:
        """The ranks of the cut."""
        return self._sharers.slices

    @property
    def _sharers(self) -> Sharers:
        return self.place.sharers(self.row.cut.mesh_axis)

    @property
    def is_here(self) -> bool:
        """Whether this pipeline rank has a part of the parameter."""
        return self.row.owner == self.place.pipeline

    @property
    def is_cut(self) -> bool:
        """Whether several ranks hold slices of the parameter."""
        return self.row.cut.dim is not None and self.ranks.size > 1

    @property
    def is_full(self) -> bool:
        """Whether the rank steps the full parameter, in its shape."""
        pieces = self.pieces()
        return self.stepped_shape == self.row.shape and [each.shape for each in pieces] == [self.row.shape]

    @property
    def counts(self) -> bool:
        """Whether this rank is the first with its elements: sums over all ranks skip the others."""
        if not self.is_here or (self.row.cut.dim is None and self.ranks.rank > 0):
            return False
        return (self._sharers.replicas if self.row.flat is None else self._sharers.copies).rank == 0

    @property
    def writes(self) -> bool:
        """Whether this rank offers its elements to a checkpoint: all replicas do, if they have the same pieces."""
        return self.row.flat is None or self.counts

    @property
    def num_summed(self) -> int:
        """The number of ranks with the same batch whose gradients of the parameter are summed."""
        over_tp = self.place.sharers(TP).slices.size if self.row.cut.sums_gradient else 1
        return self.place.num_sequence_parts * over_tp

    @property
    def shape(self) -> Shape:
        """The shape of the slice."""
        return self.row.cut.shape(self.row.shape, *self.ranks)

    @property
    def elements(self) -> tuple[int, int] | None:
        """The first and the last element, exclusive, of the flattened slice in this rank's shard; None if this rank
        steps the full slice."""
        flat = self.row.flat
        if flat is None:
            return None
        return flat.layout(self.place).elements(self.row.number, self._sharers.shards.rank)

    @property
    def stepped_shape(self) -> Shape:
        """The shape of the tensor that an optimizer steps here: of the slice, or the elements of a shard."""
        elements = self.elements
        return self.shape if elements is None else (elements[1] - elements[0],)

    @property
    def mark(self) -> str:
        """The suffix of an optimizer state of this rank's part; empty if this rank steps the full parameter."""
        axes = [self.ranks] if self.is_cut else []
        axes += [shards] if self.row.flat is not None and (shards := self._sharers.shards).size > 1 else []
        if not axes:
            return ""
        return f"@{'.'.join(str(axis.rank) for axis in axes)}of{'.'.join(str(axis.size) for axis in axes)}"

    @property
    def in_slice(self) -> "Part":
        """The same elements as a part of the slice, in place of the full parameter."""
        cut = Cut(mesh_axis=self.row.cut.mesh_axis)
        return replace(self, row=replace(self.row, shape=self.shape, cut=cut))

    @property
    def full(self) -> "Part":
        """The full parameter, as a single rank has it."""
        return Part(replace(self.row, cut=COPIED, owner=0, flat=None))

    def pieces(self) -> list[Piece]:
        """Returns the boxes of the full tensor on this rank. A slice is one box for each of its blocks. A shard is one
        box for each box that its elements fill in the slice, split by blocks again."""
        elements, shape = self.elements, self.shape
        boxes = [((0,) * len(shape), shape)] if elements is None else list(boxes_of(*elements, shape))
        pieces = [
            Piece(offset, box, (0,) * len(box), elements and _range(offset, box, shape, elements[0]), box)
            for offset, box in boxes
        ]
        if not self.is_cut:
            return pieces
        start, split = 0, list[Piece]()  # the start of a block in the slice
        for first, last in self.row.cut.bounds(*self.ranks):
            split += [block for piece in pieces for block in self._within(piece, start, first, last - first)]
            start += last - first
        return split

    def _within(self, piece: Piece, start: int, first: int, length: int) -> Iterator[Piece]:
        """Yields the part of a piece in a block, if it is not empty.

        Args:
            piece: with its offset in the slice.
            start: of the block in the slice.
            first: of the block in the full tensor.
            length: of the block in the slice.
        """
        dim = self.row.cut.dim
        assert dim is not None
        at = piece.offset[dim]
        begin, end = max(start, at), min(start + length, at + piece.shape[dim])
        shape = (*piece.shape[:dim], end - begin, *piece.shape[dim + 1 :])
        if begin < end and 0 not in shape:
            offset = (*piece.offset[:dim], begin - start + first, *piece.offset[dim + 1 :])
            corner = (*piece.corner[:dim], begin - at, *piece.corner[dim + 1 :])
            yield piece._replace(offset=offset, shape=shape, corner=corner)


def _range(offset: Shape, box: Shape, shape: Shape, start: int) -> tuple[int, int]:
    """Returns the elements of a box in a shard that begins at element `start` of a slice."""
    first = 0
    for at, length in zip(offset, shape, strict=True):
        first = first * length + at
    return first - start, first - start + prod(box)


def boxes_of(start: int, end: int, shape: Sequence[int]) -> Iterator[tuple[Shape, Shape]]:
    """Yields the boxes of consecutive elements of a flattened tensor, as offsets and shapes.

    The boxes of a matrix are full rows, the end of the row before them, and the beginning of the row after them.

    Args:
        start, end: the first and the last element, exclusive.
        shape: of the tensor.
    """
    if start == end:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (end - start,) * len(shape)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row  # full rows
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
        rests = (start, first * row), (last * row, end)
    else:
        border = min(first * row, end)
        rests = (start, border), (border, end)
    for begin, stop in rests:
        for offset, box in boxes_of(begin % row, begin % row + stop - begin, shape[1:]):
            yield (begin // row, *offset), (1, *box)
