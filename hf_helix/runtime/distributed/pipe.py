"""The pipeline from the view of a rank: its ranks, its groups, and its P2P links.

In:   rows of ranks, and the backend for tensors between them.
Out:  a channel between any two virtual stages on neighbouring ranks.
Must hold: no P2P link waits for another, and both ends of a link communicate in the schedule's order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hf_helix.operators.communication.collectives import GroupChannel, LaneChannel, P2PChannel
from hf_helix.operators.communication.emulated_link import EmulatedLink, LinkedChannel
from hf_helix.runtime.distributed import groups


class Lane(NamedTuple):
    """A direction of a P2P link: from a rank of the pipeline to a neighbour, forward or backward. Of two links in the
    same direction, number 0 connects layers, and number 1 slices of the vocabulary."""

    source: int
    target: int
    backward: bool
    number: int = 0


class Pipe:
    """The pipeline from the view of a rank.

    Args:
        ranks: of the pipeline, in the launcher's group.
        group: over these ranks; None for a single rank.
        lanes: with gloo, which carries a single direction at a time over a connection: by the parity of the sender,
            groups over these ranks. With NCCL, which carries a single operation at a time over a communicator: groups
            of a sender and its receiver. So no link waits for another.
        link: the emulated link, if any.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None = None,
        lanes: Mapping[int, dist.ProcessGroup] | Mapping[Lane, dist.ProcessGroup] | None = None,
        link: EmulatedLink | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank()) if self.size > 1 else 0
        self.group = group if self.size > 1 else None
        self.lanes = lanes or {}
        self._link = link

    def over(self, link: EmulatedLink) -> Pipe:
        """Returns a pipe of these ranks and groups over an emulated link."""
        return Pipe(self.ranks, self.group, self.lanes, link)

    def channel(self, boundary: int, peer: int, outward: bool, number: int = 0) -> P2PChannel:
        """Returns this rank's end of the P2P link between virtual stages `boundary` and `boundary` + 1.

        Args:
            boundary: the number of the stage before the link.
            peer: the pipeline rank at the other end.
            outward: whether forward goes from this rank to the peer.
            number: see `Lane`.
        """
        source, target = (self.rank, peer) if outward else (peer, self.rank)
        directions = Lane(source, target, False, number), Lane(target, source, True, number)
        lanes: Mapping[Any, dist.ProcessGroup] = self.lanes
        channel: P2PChannel
        if directions[0] in lanes:
            channel = LaneChannel(self.ranks[peer], lanes[directions[0]], lanes[directions[1]])
        else:
            channel = GroupChannel(self.ranks[peer], lanes[source % 2], lanes[target % 2], boundary)
        return channel if self._link is None else LinkedChannel(channel, self._link)

    def connect(self, value: torch.Tensor) -> None:
        """Makes the communicators of NCCL for messages of a value's size, see the function `connect`."""
        if self.group is None:
            return
        dist.all_reduce(value, group=self.group)
        dist.broadcast(value, self.ranks[0], group=self.group)
        for lane, group in self.lanes.items():  # in one order on every rank, from the first pair of ranks on
            assert isinstance(lane, Lane), "gloo makes its connections with its groups"
            dist.broadcast(value, self.ranks[lane.source], group=group)


def make_pipe(grid: torch.Tensor, backend: str, links: int = 1) -> Pipe:
    """Returns the pipeline of this rank among the rows of `grid`, with this number of links in a direction between
    neighbours. Collective; all ranks make groups in the same order."""
    ranks = next(row for row in grid.reshape(-1, grid.shape[-1]).tolist() if dist.get_rank() in row)
    if len(ranks) == 1:
        return Pipe(ranks)
    group = groups.group_of(grid)
    if backend == groups.GLOO:
        return Pipe(ranks, group, {0: group, 1: groups.group_of(grid)})
    return Pipe(ranks, group, _lanes(grid, links))


def _lanes(grid: torch.Tensor, links: int) -> dict[Lane, dist.ProcessGroup]:
    """Returns a group for each direction of each P2P link of a pipeline, over its two ranks.

    Both ends of a link send and receive in the schedule's order, independent of other links. And such a group can
    broadcast, which NCCL does on the calling stream; point-to-point operations would run on a stream of the group's
    own, at normal priority, and one after the other if `device_id` has made its communicator.
    """
    lanes = {}
    for lower in range(grid.shape[-1] - 1):
        for ends in ((lower, lower + 1), (lower + 1, lower)):
            for backward, number in itertools.product((False, True), range(links)):
                for group in groups.make_groups(grid[..., lower : lower + 2], use=groups.LANE):  # none on other ranks
                    lanes[Lane(*ends, backward, number)] = group
    return lanes
