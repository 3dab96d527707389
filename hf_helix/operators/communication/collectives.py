"""Collectives as operators.

In:   a value, cut or to be cut along dimension 0 (the sequence).
Out:  the gathered, or the reduced and scattered value.
Must hold: sums run in the same order every time (in rank order but on NCCL in fp32), so every rank and every run gets
the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.operators.base import Call, Communication, Tensors, TransferFn
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.unit import Unit
from hf_helix.planning.graph.backward import RECEIVE, SEND, transfer_graphs
from hf_helix.planning.graph.operator import Part


class AllGather(Communication):
    """Shards [n, ...] to the whole [size * n, ...]; backward is a reduce-scatter."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        out, work = (prepare_reduce_scatter if part is Part.B else prepare_all_gather)(self.axis, *inputs)
        return (out,), work


class ReduceScatter(Communication):
    """Partial sums [size * n, ...] to this rank's shard [n, ...] of their sum; backward is an all-gather."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        out, work = (prepare_all_gather if part is Part.B else prepare_reduce_scatter)(self.axis, *inputs)
        return (out,), work


class AllGatherReplicated(Communication):
    """Like `AllGather`, for values that every rank then uses in the same way (the loss): backward takes the slice of
    this rank, and communicates nothing."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        if part is Part.B:
            return (inputs[0].chunk(self.axis.size)[self.axis.rank],), lambda: None
        out, work = prepare_all_gather(self.axis, *inputs)
        return (out,), work


def prepare_all_gather(axis: Axis, value: Tensor) -> tuple[Tensor, TransferFn]:
    """Shards [n, ...] to the whole [size * n, ...]: the output to come, and the work that fills it."""
    value = value.contiguous()
    out = value.new_empty((axis.size * value.shape[0], *value.shape[1:]))
    return out, lambda: axis.transport.all_gather(out, value)


def prepare_reduce_scatter(axis: Axis, value: Tensor) -> tuple[Tensor, TransferFn]:
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


# -- pipeline p2p --------------------------------------------------------------------------------------------------
# Pipeline communication as operators: what leaves a virtual stage goes to the next, its gradients come back.
#
# In:   what leaves a stage, or nothing where it arrives.
# Out:  nothing where it leaves, or what arrived.
# Must hold: on a way between two stages everything is sent and received in the same order, the schedule's; ways do
# not
# wait for each other. Shapes follow from the micro-batch, which every rank of a pipeline has, so they may differ from
# one
# to the next.


MakeBuffers = Callable[[Mapping[str, Any]], Tensors]
"""From the side inputs of a micro-batch, room for what passes from stage to stage."""


class P2PChannel(ABC):
    """The way between two neighbouring virtual stages on different ranks, as one of them sees it."""

    @abstractmethod
    def send(self, value: Tensor, forward: bool) -> None:
        """Gives a value, or (`forward` false) a gradient, to the other rank."""

    @abstractmethod
    def receive(self, out: Tensor, forward: bool) -> None:
        """Fills `out` with what the other rank sends."""


class GroupChannel(P2PChannel):
    """Point-to-point communication of torch.distributed, for gloo.

    Args:
        peer: the other rank, in the launcher's group.
        forward, backward: the groups that values and that gradients go over.
        tag: of the way, since with gloo several ways share a group.
    """

    def __init__(self, peer: int, forward: dist.ProcessGroup, backward: dist.ProcessGroup, tag: int) -> None:
        self._peer = peer
        self._groups = (backward, forward)
        self._tag = tag

    def send(self, value: Tensor, forward: bool) -> None:
        dist.send(value, self._peer, group=self._groups[forward], tag=2 * self._tag + forward)

    def receive(self, out: Tensor, forward: bool) -> None:
        dist.recv(out, self._peer, group=self._groups[forward], tag=2 * self._tag + forward)


class LaneChannel(P2PChannel):
    """A channel over groups of its two ranks alone, in which the sender broadcasts.

    Args:
        peer: the other rank, in the launcher's group.
        forward, backward: the groups that values and that gradients go over.
    """

    def __init__(self, peer: int, forward: dist.ProcessGroup, backward: dist.ProcessGroup) -> None:
        self._peer = peer
        self._groups = (backward, forward)

    def send(self, value: Tensor, forward: bool) -> None:
        dist.broadcast(value, dist.get_rank(), group=self._groups[forward])

    def receive(self, out: Tensor, forward: bool) -> None:
        dist.broadcast(out, self._peer, group=self._groups[forward])


class PipelineTransfer(Communication):
    """One end of a channel.

    Args:
        boundary: the number of the channel, that of the stage that it leads out of.
        make_buffers: allocates what is received.
    """

    def __init__(self, channel: P2PChannel, boundary: int, make_buffers: MakeBuffers) -> None:
        self.channel = channel
        self.boundary = boundary
        self.make_buffers = make_buffers

    def lane(self, part: Part) -> str:
        # Each direction of each channel has its own.
        return f"{self.boundary}{part.value}"

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        forward = part is Part.F
        if inputs:
            values = [value.contiguous() for value in inputs]
            return (), lambda: self.send(values, forward)
        outputs = self.make_buffers(call.side)
        return outputs, lambda: self.receive(outputs, forward)

    def send(self, values: Sequence[Tensor], forward: bool) -> None:
        """Gives everything that passes here to the other rank."""
        for value in values:
            self.channel.send(value, forward)

    def receive(self, outputs: Sequence[Tensor], forward: bool) -> None:
        """Fills room for everything that passes here."""
        for out in outputs:
            self.channel.receive(out, forward)


def transfer_unit(name: str, channel: P2PChannel, boundary: int, make_buffers: MakeBuffers, values: int = 1) -> Unit:
    """The unit at one end of a channel: `send` behind stage number `boundary`, or `receive` before the next.

    Args:
        values: how many pass.
    """
    assert name in (SEND, RECEIVE)
    transfer = PipelineTransfer(channel, boundary, make_buffers)
    label = f"{name}.{boundary}"
    return Unit(label=label, graphs=transfer_graphs(values)[name], operators={"transfer": transfer}, placements={})
