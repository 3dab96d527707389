"""Whole parameters on one rank each, for optimizers that read matrices.

In:   the parameters of an optimizer, each with the elements that this rank holds.
Out:  for every parameter the rank that steps it; there the full value and the full gradient; afterwards the new values
      on every rank that holds elements.
Must hold: every rank finds the same assignment and the same rounds. A parameter is stepped once, by a rank that holds
elements of it, and every element travels to this rank once. The bytes of an exchange leave and arrive in rounds, so
that one round travels while another is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.parameters.host_shard import arrived
from hf_helix.operators.parameters.parts import views_of
from hf_helix.planning.parameters import Part, Shape
from hf_helix.runtime.streams.streams import Streams

Box = tuple[Shape, Shape]
"""Elements of a full tensor: the offset of a box, and its shape."""

NUM_ROUNDS, MOST_ELEMENTS = 8, 2**24
"""Rounds of the rank with the most elements, and the elements of a round that has several parameters: a rank has the
full values and gradients of two rounds at a time."""

ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Holding:
    """A rank's elements of a parameter.

    Attributes:
        shape: of the full parameter.
        boxes: the elements.
        counts: whether a sum over all ranks counts these elements: of replicas, one counts.
        is_full: whether the rank holds the full parameter in its shape.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    counts: bool
    is_full: bool

    @classmethod
    def of(cls, part: Part) -> Holding:
        """Returns a rank's holding of a parameter that it steps."""
        boxes = tuple((piece.offset, piece.shape) for piece in part.pieces() if prod(piece.shape))
        return cls(part.row.shape, boxes, part.counts, part.is_full and bool(boxes))


@dataclass(frozen=True)
class Whole:
    """A parameter that one rank steps whole.

    Attributes:
        shape: of the full parameter.
        boxes: the elements of each rank.
        rank: the rank that steps the parameter.
        sources: the ranks from which its elements come, each element from one.
    """

    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, ...], ...]
    rank: int
    sources: tuple[int, ...]

    @property
    def holders(self) -> list[int]:
        """The ranks with elements."""
        return [rank for rank, boxes in enumerate(self.boxes) if boxes]


def cost_of(shape: Sequence[int]) -> int:
    """Returns the cost of a step: the multiplications of a product of a matrix with itself."""
    return prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1)


def assign(holdings: Mapping[str, Sequence[Holding | None]], known: Mapping[str, Whole]) -> dict[str, Whole]:
    """Returns the assignment of parameters to ranks, even in cost: the costliest first, each to the rank among its
    holders with the least so far.

    Args:
        holdings: of every parameter, by name, what each rank holds; None for nothing.
        known: earlier assignments, which stay.
    """
    result = {name: known[name] for name in holdings if name in known}
    rows = {name: [held if held and held.boxes else None for held in row] for name, row in holdings.items()}
    shapes = {name: next(held.shape for held in row if held) for name, row in rows.items() if any(row)}
    loads = [0] * max(map(len, rows.values()), default=0)
    for whole in result.values():
        loads[whole.rank] += cost_of(whole.shape)
    for name, shape in sorted(shapes.items(), key=lambda each: -cost_of(each[1])):
        if name in result:
            continue
        row = rows[name]
        rank = min((rank for rank, held in enumerate(row) if held), key=lambda each: (loads[each], each))
        loads[rank] += cost_of(shape)
        boxes = tuple(held.boxes if held else () for held in row)
        counted = [each for each, held in enumerate(row) if held and held.counts]
        result[name] = Whole(shape, boxes, rank, tuple(_nearest(boxes, each, rank) for each in counted))
    return {name: result[name] for name in holdings if name in result}


def _nearest(boxes: Sequence[Sequence[Box]], source: int, rank: int) -> int:
    """Returns the rank with the elements of `source` in the smallest common block with a rank: blocks of 2, 4, 8, ...
    ranks lie inside a host or a replica."""
    return min((each for each, held in enumerate(boxes) if held == boxes[source]), key=lambda each: each ^ rank)


def rounds_of(wholes: Iterable[tuple[int, Whole]]) -> list[list[int]]:
    """Returns the parameters of each round, by their numbers: each rank steps about as many elements in every round.

    Args:
        wholes: numbers and parameters, in the order of the optimizer.
    """
    totals: dict[int, int] = {}
    begins: list[tuple[int, int, int]] = []
    for number, whole in wholes:
        begin = totals.get(whole.rank, 0)
        totals[whole.rank] = begin + prod(whole.shape)
        begins.append((number, whole.rank, begin))
    length = min(MOST_ELEMENTS, max(1, -(-max(totals.values(), default=0) // NUM_ROUNDS)))
    by_rank: dict[int, dict[int, list[int]]] = {}
    for number, rank, begin in begins:
        by_rank.setdefault(rank, {}).setdefault(begin // length, []).append(number)
    rounds: list[list[int]] = [[] for _ in range(max(map(len, by_rank.values()), default=0))]
    for chunks in by_rank.values():
        for place, chunk in enumerate(chunks.values()):
            rounds[place] += chunk
    return [sorted(numbers) for numbers in rounds]


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of the optimizer on this rank.

    Attributes:
        whole: its assignment.
        parameter: as this rank steps it by elements: the parameter, its slice or its shard; a stand-in on a rank that
            is neither its source nor a holder.
        part: its elements; None if another pipeline rank has them.
        is_full: whether this rank holds the full parameter.
    """

    whole: Whole
    parameter: nn.Parameter
    part: Part | None = None
    is_full: bool = False

    def pieces(self, held: Tensor) -> list[Tensor]:
        """Views of this rank's elements, in the order of its boxes."""
        assert self.part is not None
        return [view for view in views_of(self.part, held).values() if view.numel()]


class Exchange:
    """Exchanges of elements between all ranks, which run while this rank computes.

    Args:
        axis: all ranks.
        device: of messages, and of full tensors.
        streams: of the transfers.
    """

    def __init__(self, axis: Axis, device: torch.device, streams: Streams) -> None:
        self.rank = axis.rank
        self._axis, self._device, self._streams = axis, device, streams

    def gather(self, members: Sequence[Member], gradients: Mapping[Tensor, Tensor]) -> Callable[[], list[Tensor]]:
        """Starts to send values and gradients to the ranks that step them. Collective.

        Args:
            members: of a round.
            gradients: of this rank's elements, by parameter; without one, it is zero.

        Returns:
            The function that waits, and returns the arrived pieces for `full`.
        """
        sent: list[tuple[int, Tensor]] = []
        arriving: list[tuple[int, Sequence[int], torch.dtype]] = []
        for member in members:
            whole, parameter = member.whole, member.parameter
            if whole.rank == self.rank:
                arriving += [
                    (source, shape, parameter.dtype)
                    for source in whole.sources
                    if source != self.rank
                    for _ in ("value", "gradient")
                    for _, shape in whole.boxes[source]
                ]
            elif self.rank in whole.sources:
                for held in _held(parameter, gradients):
                    sent += [(whole.rank, piece) for piece in member.pieces(held)]
        return self._start(sent, arriving)

    def full(
        self, members: Sequence[Member], gradients: Mapping[Tensor, Tensor], pieces: Sequence[Tensor]
    ) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
        """Returns the full value and the full gradient of every parameter of a round that this rank steps, and does not
        hold in full.

        Args:
            members, gradients: as given to `gather`.
            pieces: as it returned them.
        """
        arriving, result = iter(pieces), dict[nn.Parameter, tuple[Tensor, Tensor]]()
        for member in members:
            whole, parameter = member.whole, member.parameter
            if whole.rank != self.rank or member.is_full:
                continue
            value = torch.empty(whole.shape, dtype=parameter.dtype, device=self._device)
            result[parameter] = value, gradient = value, torch.empty_like(value)
            for source in whole.sources:
                for full, held in zip((value, gradient), _held(parameter, gradients), strict=True):
                    own = iter(member.pieces(held)) if source == self.rank else arriving
                    for place in _places(full, whole.boxes[source]):
                        place.copy_(next(own))
        return result

    def scatter(self, members: Sequence[Member], full: Mapping[nn.Parameter, Tensor]) -> Callable[[], None]:
        """Starts to send new values to the ranks that hold elements; this rank's own get them now. Collective.

        Args:
            members: of a round.
            full: the new values of the parameters that this rank steps.

        Returns:
            The function that waits, and writes the arrived values.
        """
        sent: list[tuple[int, Tensor]] = []
        arriving: list[tuple[int, Sequence[int], torch.dtype]] = []
        places: list[Tensor] = []
        for member in members:
            whole, held = member.whole, member.parameter.detach()
            if whole.rank == self.rank:
                value = full[member.parameter]
                for holder in whole.holders:
                    elements = list(_places(value, whole.boxes[holder]))
                    if holder != self.rank:
                        sent += [(holder, piece) for piece in elements]
                    elif not member.is_full:
                        _copy(member.pieces(held), elements)
            elif boxes := whole.boxes[self.rank]:
                places += member.pieces(held)
                arriving += [(whole.rank, shape, held.dtype) for _, shape in boxes]
        wait = self._start(sent, arriving)
        return lambda: _copy(places, wait())

    def _start(
        self, sent: Sequence[tuple[int, Tensor]], arriving: Sequence[tuple[int, Sequence[int], torch.dtype]]
    ) -> Callable[[], list[Tensor]]:
        """Starts an exchange of tensors, each with its rank; returns the function that waits for the arriving ones."""
        axis, streams = self._axis, self._streams
        out = _Message([(to, each.shape, each.dtype) for to, each in sent], axis.size, self._device)
        into = _Message(arriving, axis.size, self._device)
        if axis.size == 1:
            return list
        _copy(out.tensors, [each for _, each in sent])
        carry = axis.transport.exchange_rows
        transfer = lambda: carry(into.bytes, out.bytes, into.counts, out.counts)  # noqa: E731
        event = streams.issue(axis.kind, transfer, (), "gradients.matrices")

        def wait() -> list[Tensor]:
            streams.wait(event)
            return into.tensors

        return wait


class _Message:
    """Bytes from other ranks, or for them, in their order, with room for tensors.

    Attributes:
        bytes: the message.
        counts: the bytes of each rank.
        tensors: views of the message, in the given order.
    """

    def __init__(
        self, slots: Sequence[tuple[int, Sequence[int], torch.dtype]], size: int, device: torch.device
    ) -> None:
        lengths = [prod(shape) * dtype.itemsize for _, shape, dtype in slots]
        starts, self.counts, end = [0] * len(slots), [0] * size, 0
        for place in sorted(range(len(slots)), key=lambda each: slots[each][0]):
            starts[place] = end
            room = -(-lengths[place] // ALIGNMENT) * ALIGNMENT
            self.counts[slots[place][0]] += room
            end += room
        self.bytes = torch.empty(end, dtype=torch.uint8, device=device)
        self.tensors = [
            self.bytes[start : start + length].view(dtype).view(*shape)
            for start, length, (_, shape, dtype) in zip(starts, lengths, slots, strict=True)
        ]


def _held(parameter: Tensor, gradients: Mapping[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns this rank's elements of a value and of its gradient."""
    gradient = gradients.get(parameter)
    arrived([gradient])
    return parameter.detach(), torch.zeros_like(parameter).detach() if gradient is None else gradient.detach()


def _places(full: Tensor, boxes: Sequence[Box]) -> Iterator[Tensor]:
    """Yields views of boxes of a full tensor."""
    for offset, shape in boxes:
        yield full[tuple(slice(at, at + length) for at, length in zip(offset, shape, strict=True))]


def _copy(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)
