"""Transports over process groups of torch.distributed: one for NCCL and backends like it, one for gloo.

In:   the process groups of an axis; buffers, allocated before.
Out:  the same buffers, filled.
Must hold: rank order everywhere, so that every rank and every run gets the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import final

import torch.distributed as dist
from torch import Tensor

from hf_helix.operators.communication.transport import Transport

# Renamed in torch 2.13, where the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ProcessGroupTransport(Transport):
    """A transport over the process group of an axis.

    Args:
        group: the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def reduce_scatter(self, out: Tensor, value: Tensor) -> None:
        _reduce_scatter(out, value, group=self.group)

    def shift(self, out: Tensor, value: Tensor) -> None:
        self._pass_on(out, value, 1)

    def shift_back(self, out: Tensor, value: Tensor) -> None:
        self._pass_on(out, value, -1)

    @abstractmethod
    def _pass_on(self, out: Tensor, value: Tensor, step: int) -> None:
        """Sends a value so many ranks further round the axis, and receives that of the rank as many before."""


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
        # A group adds up from rank to rank in the type of the values; a local sum rounds once.
        return value.element_size() < 4

    def _pass_on(self, out: Tensor, value: Tensor, step: int) -> None:
        # An all-to-all with the neighbours alone, over the one communicator of the group and on the current stream;
        # NCCL's isend and irecv would run on a stream of the group's own.
        sent, arriving = [0] * self.size, [0] * self.size
        sent[(self.rank + step) % self.size] = value.numel()
        arriving[(self.rank - step) % self.size] = out.numel()
        dist.all_to_all_single(out.view(-1), value.view(-1), arriving, sent, group=self.group)


@final
class GlooTransport(ProcessGroupTransport):
    """The collectives of gloo, over two groups, so that both directions of a link are used at once.

    A gloo connection carries one direction at a time: ranks of even number send over the first group, the others over
    the second. The reduce-scatter of gloo is an all-reduce with a copy at issue, twice the bytes of an exchange.

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
        """Sends block i to rank i and receives block i from it, for every other rank; empty ones are not sent."""
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
