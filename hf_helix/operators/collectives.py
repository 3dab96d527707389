"""Collectives of tensor and sequence parallelism as operators, and the transport that carries them.

In:   a value, cut or to be cut along dimension 0 (the sequence).
Out:  the gathered or the reduced and scattered value.
Must hold: sums run in rank order, so every rank and every run gets the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.operators.base import Call, Communication, Tensors, Work
from hf_helix.planning.graph import Kind, Part

# Renamed in torch 2.13, where the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Transport(ABC):
    """Moves data between the ranks of one group. `size` ranks; this one is `rank`."""

    size: int
    rank: int

    @abstractmethod
    def all_gather(self, out: Tensor, value: Tensor) -> None:
        """`out` [size * n, ...] becomes every rank's `value` [n, ...] in rank order."""

    @abstractmethod
    def exchange(self, out: Tensor, value: Tensor) -> None:
        """All-to-all: block i of `value` goes to rank i; `out` is what came, in rank order."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, value: Tensor) -> None:
        """`out` [n, ...] becomes this rank's block of the sum of every rank's `value` [size * n, ...]."""

    @abstractmethod
    def shift(self, out: Tensor, value: Tensor) -> None:
        """One step round the ring: `value` goes to the next rank, `out` is what comes from the one before."""

    @abstractmethod
    def shift_back(self, out: Tensor, value: Tensor) -> None:
        """One step the other way."""

    def prefers_exchange(self, value: Tensor) -> bool:
        """Whether a reduce-scatter is cheaper as an exchange and a local sum."""
        return False


class GroupTransport(Transport):
    """The collectives of a torch.distributed process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def all_gather(self, out: Tensor, value: Tensor) -> None:
        _all_gather(out, value, group=self.group)

    def exchange(self, out: Tensor, value: Tensor) -> None:
        dist.all_to_all_single(out, value, group=self.group)

    def reduce_scatter(self, out: Tensor, value: Tensor) -> None:
        _reduce_scatter(out, value, group=self.group)

    def shift(self, out: Tensor, value: Tensor) -> None:
        self._pass_on(out, value, 1)

    def shift_back(self, out: Tensor, value: Tensor) -> None:
        self._pass_on(out, value, -1)

    def _pass_on(self, out: Tensor, value: Tensor, step: int) -> None:
        ranks = dist.get_process_group_ranks(self.group)
        to, source = (ranks[(self.rank + way) % self.size] for way in (step, -step))
        operations = [dist.P2POp(dist.isend, value, to, self.group), dist.P2POp(dist.irecv, out, source, self.group)]
        _finish(dist.batch_isend_irecv(operations))


class GlooTransport(GroupTransport):
    """gloo, over two groups so that both directions of a link are used at once.

    A gloo connection carries one direction at a time; ranks of even number send over the first group, the others over
    the second. Its reduce-scatter is an all-reduce with a copy at issue, twice the bytes of an exchange.

    Args:
        group: the group of the axis.
        other: a second group over the same ranks.
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
        sent, arrived = value.chunk(self.size), out.chunk(self.size)
        pending = self._start(sent, arrived)
        arrived[self.rank].copy_(sent[self.rank])
        _finish(pending)

    def prefers_exchange(self, value: Tensor) -> bool:
        return True

    def _pass_on(self, out: Tensor, value: Tensor, step: int) -> None:
        to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
        arrives = dist.irecv(out, self._ranks[source], group=self._lanes[source % 2])
        _finish([arrives, dist.isend(value, self._ranks[to], group=self._lanes[self.rank % 2])])

    def _start(self, sent: Sequence[Tensor], arrived: Sequence[Tensor]) -> list[dist.Work | None]:
        """Send block i to rank i and receive block i from it, for every other rank."""
        pending = []
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            pending.append(dist.irecv(arrived[source], self._ranks[source], group=self._lanes[source % 2]))
            pending.append(dist.isend(sent[to], self._ranks[to], group=self._lanes[self.rank % 2]))
        return pending


def _finish(pending: Sequence[dist.Work | None]) -> None:
    for work in pending:
        if work is not None:
            work.wait()


class SilentTransport(Transport):
    """Stands for a group of `size` ranks without moving anything between them: for timing computation alone.

    Values stay finite and shapes right; results mean nothing. `moved` lists what would have been carried, and
    `bytes_sent` counts what this rank would have sent.
    """

    def __init__(self, size: int, rank: int, prefers_exchange: bool = False) -> None:
        self.size = size
        self.rank = rank
        self._prefers_exchange = prefers_exchange
        self.moved: list[tuple[str, torch.Size, torch.Size]] = []
        self.bytes_sent = 0

    def all_gather(self, out: Tensor, value: Tensor) -> None:
        self._note("all_gather", out, value, value.nbytes * (self.size - 1))
        out.view(self.size, *value.shape).copy_(value.expand(self.size, *value.shape))

    def exchange(self, out: Tensor, value: Tensor) -> None:
        self._note("exchange", out, value, value.nbytes * (self.size - 1) // self.size)
        out.copy_(value)

    def reduce_scatter(self, out: Tensor, value: Tensor) -> None:
        self._note("reduce_scatter", out, value, value.nbytes * (self.size - 1) // self.size)
        out.copy_(value[: out.shape[0]])

    def shift(self, out: Tensor, value: Tensor) -> None:
        self._note("shift", out, value, value.nbytes)
        out.copy_(value)

    def shift_back(self, out: Tensor, value: Tensor) -> None:
        self._note("shift_back", out, value, value.nbytes)
        out.copy_(value)

    def prefers_exchange(self, value: Tensor) -> bool:
        return self._prefers_exchange

    def _note(self, name: str, out: Tensor, value: Tensor, sent: int) -> None:
        self.moved.append((name, out.shape, value.shape))
        self.bytes_sent += sent


class Axis:
    """One dimension of the mesh as operators see it. The transport can be exchanged for a silent one.

    Args:
        kind: of its communication: local where the ranks share a host, else cross-node.
    """

    def __init__(self, transport: Transport, kind: Kind = Kind.LOCAL) -> None:
        self.transport = transport
        self.kind = kind

    @property
    def size(self) -> int:
        return self.transport.size

    @property
    def rank(self) -> int:
        return self.transport.rank

    @classmethod
    def single(cls) -> Axis:
        """An axis of one rank; no operator of it communicates."""
        return cls(SilentTransport(1, 0))


class Gather(Communication):
    """Shards [n, ...] to the whole [size * n, ...]; backward is a reduce-scatter."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, Work]:
        out, work = (prepare_reduce_scatter if part is Part.B else prepare_all_gather)(self.axis, *inputs)
        return (out,), work


class Scatter(Communication):
    """Partial sums [size * n, ...] to this rank's shard [n, ...] of their sum; backward is an all-gather."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, Work]:
        out, work = (prepare_reduce_scatter if part is Part.F else prepare_all_gather)(self.axis, *inputs)
        return (out,), work


class GatherReplicated(Communication):
    """Like `Gather`, for values that every rank then uses in the same way (the loss): backward takes its own slice."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, Work]:
        out, work = prepare_all_gather(self.axis, *inputs)
        return (out,), work

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        return (gradients[0].chunk(self.axis.size)[self.axis.rank],)


def prepare_all_gather(axis: Axis, value: Tensor) -> tuple[Tensor, Work]:
    """Shards [n, ...] to the whole [size * n, ...]: the output to come, and the work that fills it."""
    value = value.contiguous()
    out = value.new_empty((axis.size * value.shape[0], *value.shape[1:]))
    return out, lambda: axis.transport.all_gather(out, value)


def prepare_reduce_scatter(axis: Axis, value: Tensor) -> tuple[Tensor, Work]:
    """Partial sums [size * n, ...] to this rank's shard [n, ...] of their sum; as `prepare_all_gather`."""
    value = value.contiguous()
    transport = axis.transport
    out = value.new_empty((value.shape[0] // axis.size, *value.shape[1:]))
    if not transport.prefers_exchange(value):
        return out, lambda: transport.reduce_scatter(out, value)
    arrived = torch.empty_like(value)

    def exchange_and_sum() -> None:
        transport.exchange(arrived, value)
        torch.sum(arrived.view(axis.size, *out.shape), 0, out=out)

    return out, exchange_and_sum
