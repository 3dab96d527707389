"""Collectives and pipeline P2P transfers as operators.

In:   a value, cut along dimension 0 (the sequence) or to be cut; at the end of a virtual stage its outputs, at the
      begin of a stage nothing.
Out:  the gathered value, or the reduced and scattered value; at the end of a stage nothing, at the begin the received
      values.
Must hold: sums run in the same order every time (in rank order but on NCCL in fp32), so every rank and every run gets
the same bits. On a P2P link both ends send and receive in the schedule's order; links do not wait for each other.
Shapes follow from the micro-batch, which every rank of a pipeline has, so they may differ between micro-batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.operators.base import Communication, OperatorContext, Tensors, TransferFn
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.float8 import pack, unpack
from hf_helix.planning.graph.operator import Part


class OverAxis(Communication):
    """Communication between the ranks of an axis."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis


class AllGather(OverAxis):
    """Shards [n, ...] to the full value [size * n, ...]; backward is a reduce-scatter.

    Attributes:
        in_float8: returns whether the value travels in fp8, as products in fp8 read it.
    """

    in_float8: Callable[[], bool] | None = None

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        prepare = prepare_reduce_scatter if part is Part.B else prepare_all_gather
        if part is not Part.B and self.in_float8 is not None and self.in_float8():
            prepare = prepare_all_gather_in_float8
        out, transfer = prepare(self.axis, *inputs)
        return (out,), transfer


class ReduceScatter(OverAxis):
    """Partial sums [size * n, ...] to this rank's shard [n, ...] of their sum; backward is an all-gather."""

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        out, transfer = (prepare_all_gather if part is Part.B else prepare_reduce_scatter)(self.axis, *inputs)
        return (out,), transfer


class AllGatherReplicated(OverAxis):
    """Like `AllGather`, for values that every rank uses in the same way (the loss): backward takes this rank's slice,
    and communicates nothing."""

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        if part is Part.B:
            return (inputs[0].chunk(self.axis.size)[self.axis.rank],), lambda: None
        out, transfer = prepare_all_gather(self.axis, *inputs)
        return (out,), transfer


class Exchange(OverAxis):
    """All-to-all of values [size * n, ...]: block i goes to rank i, and the blocks of all ranks arrive in rank order;
    backward is the same exchange of gradients."""

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        values = [value.contiguous() for value in inputs]
        out, exchange = tuple([torch.empty_like(value) for value in values]), self.axis.transport.exchange

        def transfer() -> None:
            for arrived, value in zip(out, values, strict=True):
                exchange(arrived, value)

        return out, transfer


def prepare_all_gather(axis: Axis, value: Tensor) -> tuple[Tensor, TransferFn]:
    """Returns the full value [size * n, ...] of shards [n, ...], not filled yet, and the transfer that fills it."""
    value = value.contiguous()
    out = value.new_empty((axis.size * value.shape[0], *value.shape[1:]))
    return out, lambda: axis.transport.all_gather(out, value)


def prepare_all_gather_in_float8(axis: Axis, value: Tensor) -> tuple[Tensor, TransferFn]:
    """Does what `prepare_all_gather` does, for a value [n, ..., features] that is rounded to fp8, with a scale for each
    row of features. Every rank gets the rounded value in the type of the given one."""
    blocks, gather = prepare_all_gather(axis, pack(value))
    out = value.new_empty((axis.size * value.shape[0], *value.shape[1:]))

    def gather_and_unpack() -> None:
        gather()
        unpack(blocks, out)

    return out, gather_and_unpack


def prepare_reduce_scatter(axis: Axis, value: Tensor) -> tuple[Tensor, TransferFn]:
    """Returns this rank's shard [n, ...] of the sum of partial sums [size * n, ...]; as `prepare_all_gather`."""
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

MakeBuffers = Callable[[Mapping[str, Any]], Tensors]
"""From the side inputs of a micro-batch to buffers for a transfer between stages."""


class P2PChannel(ABC):
    """An end of the P2P link between two neighbouring virtual stages on different ranks."""

    @abstractmethod
    def send(self, value: Tensor, forward: bool) -> None:
        """Sends a value, or (`forward` false) a gradient, to the other rank."""

    @abstractmethod
    def receive(self, out: Tensor, forward: bool) -> None:
        """Fills `out` with a tensor from the other rank."""


class GroupChannel(P2PChannel):
    """Point-to-point communication of torch.distributed, for gloo.

    Args:
        peer: the other rank, in the launcher's group.
        forward, backward: the groups for values and for gradients.
        tag: of the link, since with gloo several links share a group.
    """

    def __init__(self, peer: int, forward: dist.ProcessGroup, backward: dist.ProcessGroup, tag: int = 0) -> None:
        self._peer = peer
        self._groups = (backward, forward)
        self._tag = tag

    def send(self, value: Tensor, forward: bool) -> None:
        dist.send(value, self._peer, group=self._groups[forward], tag=2 * self._tag + forward)

    def receive(self, out: Tensor, forward: bool) -> None:
        dist.recv(out, self._peer, group=self._groups[forward], tag=2 * self._tag + forward)


class LaneChannel(GroupChannel):
    """A channel over groups of only its two ranks; the sender broadcasts."""

    def send(self, value: Tensor, forward: bool) -> None:
        dist.broadcast(value, dist.get_rank(), group=self._groups[forward])

    def receive(self, out: Tensor, forward: bool) -> None:
        dist.broadcast(out, self._peer, group=self._groups[forward])


class PipelineTransfer(Communication):
    """An end of the channel after stage `boundary` as an operator; `make_buffers` allocates buffers for receives."""

    def __init__(self, channel: P2PChannel, boundary: int, make_buffers: MakeBuffers) -> None:
        self.channel = channel
        self.boundary = boundary
        self.make_buffers = make_buffers

    def lane(self, part: Part) -> str:
        # A lane for each direction of each channel.
        return f"{self.boundary}{part.value}"

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        forward = part is Part.F
        if inputs:
            values = [value.contiguous() for value in inputs]
            # Further values may be features, of which none may be left; only then are buffers worth a look.
            looks = forward and any(value.shape[1:] == values[0].shape[1:] and len(value) for value in values[1:])
            if looks and [out.shape for out in self.make_buffers(ctx.side)] != [value.shape for value in values]:
                raise ValueError(
                    "the first pipeline stage has fewer layers than images add features behind; give it more with "
                    "layers_per_stage"
                )
            return (), lambda: self.send(values, forward)
        made = self.make_buffers(ctx.side)
        outputs = made if forward else tuple([out for out in made if out.is_floating_point()])
        return outputs, lambda: self.receive(outputs, forward)

    def send(self, values: Sequence[Tensor], forward: bool) -> None:
        """Sends all values of a transfer."""
        for value in values:
            if value.numel():
                self.channel.send(value, forward)

    def receive(self, outputs: Sequence[Tensor], forward: bool) -> None:
        """Receives all values of a transfer."""
        for out in outputs:
            if out.numel():
                self.channel.receive(out, forward)
