"""Transports: they carry values between the ranks of an axis; for NCCL and similar backends, for gloo, and for no
group.

In:   the process groups of an axis; buffers, allocated before.
Out:  the same buffers, filled.
Must hold: rank order everywhere, so that every rank and every run gets the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.planning.graph.operator import Kind


class Transport(ABC):
    """Moves data between the `size` ranks of one group, of which this is `rank`.

    `group` is the process group, or None if no data moves.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None = None

    @abstractmethod
    def all_gather(self, out: Tensor, value: Tensor) -> None:
        """Fills `out` [size * n, ...] with every rank's `value` [n, ...] in rank order."""

    @abstractmethod
    def exchange(self, out: Tensor, value: Tensor) -> None:
        """All-to-all: block i of `value` goes to rank i; `out` receives blocks in rank order."""

    @abstractmethod
    def exchange_rows(self, out: Tensor, value: Tensor, arriving: Sequence[int], sent: Sequence[int]) -> None:
        """All-to-all with blocks of unequal length, rank by rank.

        Args:
            out: receives blocks in rank order: [sum(arriving), ...].
            value: the blocks for the ranks, in rank order: [sum(sent), ...].
            arriving: the number of rows from each rank.
            sent: the number of rows to each rank.
        """

    @abstractmethod
    def reduce_scatter(self, out: Tensor, value: Tensor) -> None:
        """Fills `out` [n, ...] with this rank's block of the sum of every rank's `value` [size * n, ...]."""

    def start_sum(self, value: Tensor) -> Callable[[], object]:
        """Starts the sum of every rank's contiguous value, in place; returns the function that waits for the sum."""
        return lambda: None  # no data moves

    @abstractmethod
    def shift(self, out: Tensor, value: Tensor) -> None:
        """A ring step: `value` goes to the next rank, `out` receives from the previous."""

    @abstractmethod
    def shift_back(self, out: Tensor, value: Tensor) -> None:
        """A ring step in the other direction: `value` goes to the previous rank, `out` receives from the next."""

    def prefers_exchange(self, value: Tensor) -> bool:
        """Returns whether a reduce-scatter is better done as an exchange and a local sum."""
        return False


class SilentTransport(Transport):
    """Stands for a group of `size` ranks without moving data between them: for timing only computation.

    Values stay finite and shapes right; results mean nothing.

    Args:
        size, rank: of the group.
        like: the transport of the group, so that the computation around it stays the same.
    """

    def __init__(self, size: int, rank: int, like: Transport | None = None) -> None:
        self.size = size
        self.rank = rank
        self._like = like

    def all_gather(self, out: Tensor, value: Tensor) -> None:
        out.view(self.size, *value.shape).copy_(value.expand(self.size, *value.shape))

    def exchange(self, out: Tensor, value: Tensor) -> None:
        out.copy_(value)

    shift = shift_back = exchange

    def exchange_rows(self, out: Tensor, value: Tensor, arriving: Sequence[int], sent: Sequence[int]) -> None:
        rows = min(len(out), len(value))
        out[:rows].copy_(value[:rows])
        out[rows:].zero_()

    def reduce_scatter(self, out: Tensor, value: Tensor) -> None:
        out.copy_(value[: out.shape[0]])

    def prefers_exchange(self, value: Tensor) -> bool:
        return self._like is not None and self._like.prefers_exchange(value)


@dataclass(frozen=True)
class Move:
    """A use of a transport: the method, shape and type of its output and of its input, and row counts."""

    name: str
    out: tuple[torch.Size, torch.dtype]
    value: tuple[torch.Size, torch.dtype]
    rows: tuple[Sequence[int], ...] = ()


def bytes_moved(
    name: str, out: Tensor, value: Tensor, size: int, rank: int, rows: Sequence[Sequence[int]] = ()
) -> tuple[int, int]:
    """Returns the bytes that a rank sends, and the bytes that it receives, in a use of a transport.

    Args:
        name: the method.
        out, value: its output and input.
        size, rank: of the transport.
        rows: of `exchange_rows`, the arriving and the sent rows.
    """
    others = size - 1
    if name == "all_gather":
        return value.nbytes * others, value.nbytes * others
    if name == "start_sum":  # a ring
        return 2 * value.nbytes * others // size, 2 * value.nbytes * others // size
    if name in ("exchange", "reduce_scatter"):
        return value.nbytes * others // size, value.nbytes * others // size
    if name == "exchange_rows":
        arriving, sent = rows
        row = value[:1].nbytes or out[:1].nbytes
        return row * (sum(sent) - sent[rank]), row * (sum(arriving) - arriving[rank])
    assert name in ("shift", "shift_back"), name
    return value.nbytes, out.nbytes


class TransportByName(Transport):
    """A transport whose methods all do the same with their names."""

    @abstractmethod
    def move(self, name: str, out: Tensor, value: Tensor, *rows: Sequence[int]) -> None:
        """Runs a method; `rows` are the row counts of `exchange_rows`."""

    @final
    def all_gather(self, out: Tensor, value: Tensor) -> None:
        self.move("all_gather", out, value)

    @final
    def exchange(self, out: Tensor, value: Tensor) -> None:
        self.move("exchange", out, value)

    @final
    def exchange_rows(self, out: Tensor, value: Tensor, arriving: Sequence[int], sent: Sequence[int]) -> None:
        self.move("exchange_rows", out, value, arriving, sent)

    @final
    def reduce_scatter(self, out: Tensor, value: Tensor) -> None:
        self.move("reduce_scatter", out, value)

    @final
    def shift(self, out: Tensor, value: Tensor) -> None:
        self.move("shift", out, value)

    @final
    def shift_back(self, out: Tensor, value: Tensor) -> None:
        self.move("shift_back", out, value)


class TransportWrapper(TransportByName):
    """A transport around another transport, which moves the data."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.size = inner.size
        self.rank = inner.rank

    def start_sum(self, value: Tensor) -> Callable[[], object]:
        return self.inner.start_sum(value)

    def prefers_exchange(self, value: Tensor) -> bool:
        return self.inner.prefers_exchange(value)


@final
class Recorder(TransportWrapper):
    """Records the uses of another transport, and counts the bytes that this rank sends."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.moved: list[Move] = []
        self.bytes_sent = 0

    def move(self, name: str, out: Tensor, value: Tensor, *rows: Sequence[int]) -> None:
        self.moved.append(Move(name, (out.shape, out.dtype), (value.shape, value.dtype), rows))
        self.bytes_sent += bytes_moved(name, out, value, self.size, self.rank, rows)[0]
        getattr(self.inner, name)(out, value, *rows)

    def start_sum(self, value: Tensor) -> Callable[[], object]:
        self.bytes_sent += bytes_moved("start_sum", value, value, self.size, self.rank)[0]
        return self.inner.start_sum(value)


class Axis:
    """A dimension of the mesh from the view of operators. A silent transport may replace the transport."""

    def __init__(self, transport: Transport, kind: Kind = Kind.INTRA_NODE) -> None:
        self.transport = transport
        self.kind = kind

    @property
    def size(self) -> int:
        return self.transport.size

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None for a single rank."""
        return self.transport.group

    @classmethod
    def single(cls) -> Axis:
        """Returns an axis of a single rank, whose operators do not communicate."""
        return cls(SilentTransport(1, 0))


@dataclass(frozen=True)
class ReplicaAxes:
    """The axes over the replicas of a parameter, if these shard it (ZeRO).

    Attributes:
        gather: for gathers of weights.
        reduce: for gradient reduction. Under ZeRO-3, gathers and reductions run on two streams, and each has a
            transport of its own.
        copies: over the ranks with other copies of the same shard (HSDP); None for a single copy.
    """

    gather: Axis
    reduce: Axis
    copies: Axis | None = None

    def map(self, change: Callable[[Axis], Axis]) -> ReplicaAxes:
        """Returns the axes changed by a function; equal axes stay equal."""
        gather = change(self.gather)
        reduce = gather if self.reduce is self.gather else change(self.reduce)
        return ReplicaAxes(gather, reduce, self.copies and change(self.copies))


# -- group transports ----------------------------------------------------------------------------------------------

# Renamed in torch 2.13; the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ProcessGroupTransport(Transport):
    """A transport over the process group of an axis."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def reduce_scatter(self, out: Tensor, value: Tensor) -> None:
        _reduce_scatter(out, value, group=self.group)

    def start_sum(self, value: Tensor) -> Callable[[], object]:
        work = dist.all_reduce(value, group=self.group, async_op=True)
        return (lambda: None) if work is None else work.wait

    def shift(self, out: Tensor, value: Tensor) -> None:
        self._pass_on(out, value, 1)

    def shift_back(self, out: Tensor, value: Tensor) -> None:
        self._pass_on(out, value, -1)

    @abstractmethod
    def _pass_on(self, out: Tensor, value: Tensor, step: int) -> None:
        """Sends a value `step` ranks further round the axis, and receives the value of the rank `step` before."""


@final
class GroupTransport(ProcessGroupTransport):
    """The collectives of a torch.distributed process group (NCCL)."""

    def all_gather(self, out: Tensor, value: Tensor) -> None:
        _all_gather(out, value, group=self.group)

    def exchange(self, out: Tensor, value: Tensor) -> None:
        dist.all_to_all_single(out, value, group=self.group)

    def exchange_rows(self, out: Tensor, value: Tensor, arriving: Sequence[int], sent: Sequence[int]) -> None:
        dist.all_to_all_single(out, value, list(arriving), list(sent), group=self.group)

    def prefers_exchange(self, value: Tensor) -> bool:
        # NCCL adds up from rank to rank in the type of the values; a local sum rounds once.
        return value.element_size() < 4

    def _pass_on(self, out: Tensor, value: Tensor, step: int) -> None:
        # An all-to-all with only the neighbours, over the one communicator of the group and on the current stream;
        # NCCL's isend and irecv would run on a stream of the group's own.
        sent, arriving = [0] * self.size, [0] * self.size
        sent[(self.rank + step) % self.size] = value.numel()
        arriving[(self.rank - step) % self.size] = out.numel()
        dist.all_to_all_single(out.view(-1), value.view(-1), arriving, sent, group=self.group)


@final
class GlooTransport(ProcessGroupTransport):
    """The collectives of gloo, over two groups, for both directions of a link at once.

    A gloo connection carries one direction at a time: ranks of even number send over the first group, the others over
    the second, over the same ranks. The reduce-scatter of gloo is an all-reduce with a copy at issue, twice the bytes
    of an exchange.
    """

    def __init__(self, group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._lanes = (group, other)
        self._ranks = dist.get_process_group_ranks(group)

    def all_gather(self, out: Tensor, value: Tensor) -> None:
        blocks = out.chunk(self.size)
        pending = self._start([value] * self.size, blocks)
        blocks[self.rank].copy_(value)
        _finish(pending)

    def exchange(self, out: Tensor, value: Tensor) -> None:
        self._swap(value.chunk(self.size), out.chunk(self.size))

    def exchange_rows(self, out: Tensor, value: Tensor, arriving: Sequence[int], sent: Sequence[int]) -> None:
        self._swap(value.split(list(sent)), out.split(list(arriving)))

    def prefers_exchange(self, value: Tensor) -> bool:
        return True

    def _pass_on(self, out: Tensor, value: Tensor, step: int) -> None:
        to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
        arrives = dist.irecv(out, self._ranks[source], group=self._lanes[source % 2])
        _finish([arrives, dist.isend(value, self._ranks[to], group=self._lanes[self.rank % 2])])

    def _swap(self, sent: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
        pending = self._start(sent, arrived)
        arrived[self.rank].copy_(sent[self.rank])
        _finish(pending)

    def _start(self, sent: Sequence[Tensor], arrived: Sequence[Tensor]) -> list[dist.Work | None]:
        """Sends block i to rank i and receives block i from it, for every other rank, without empty blocks."""
        pending = []
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            if arrived[source].numel():
                pending.append(dist.irecv(arrived[source], self._ranks[source], group=self._lanes[source % 2]))
            if sent[to].numel():
                pending.append(dist.isend(sent[to], self._ranks[to], group=self._lanes[self.rank % 2]))
        return pending


def _finish(pending: Sequence[dist.Work | None]) -> None:
    for work in pending:
        if work is not None:
            work.wait()
