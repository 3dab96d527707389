"""Collectives as operators.

In:   a value, cut or to be cut along dimension 0 (the sequence).
Out:  the gathered, or the reduced and scattered value.
Must hold: sums run in the same order every time (in rank order but on NCCL in fp32), so every rank and every run gets
the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_helix.operators.base import Call, Communication, Tensors, Work
from hf_helix.operators.communication.transport import Axis
from hf_helix.planning.graph.operator import Part


class AllGather(Communication):
    """Shards [n, ...] to the whole [size * n, ...]; backward is a reduce-scatter."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, Work]:
        out, work = (prepare_reduce_scatter if part is Part.B else prepare_all_gather)(self.axis, *inputs)
        return (out,), work


class ReduceScatter(Communication):
    """Partial sums [size * n, ...] to this rank's shard [n, ...] of their sum; backward is an all-gather."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, Work]:
        out, work = (prepare_all_gather if part is Part.B else prepare_reduce_scatter)(self.axis, *inputs)
        return (out,), work


class AllGatherReplicated(Communication):
    """Like `AllGather`, for values that every rank then uses in the same way (the loss): backward takes the slice of
    this rank, and communicates nothing."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, Work]:
        if part is Part.B:
            return (inputs[0].chunk(self.axis.size)[self.axis.rank],), lambda: None
        out, work = prepare_all_gather(self.axis, *inputs)
        return (out,), work


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
