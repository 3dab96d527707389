"""Gradient reduction: all-reduce of buckets, reduce-scatter of flat parameters, and the norm of the whole gradient.

In:   buckets of parameters (see `hf_helix.runtime.gradients.buckets`) with the gradients of a window on this rank, and
      the mesh.
Out:  without ZeRO complete gradients on every rank. With ZeRO `shard.grad`, the average over the data-parallel ranks
      for this rank's part of every parameter, and no gradient on the parameters; on the host where the shard is. One
      norm, equal on every rank.
Must hold: sums run in float32 at least, in the same order on every rank and every time. A parameter without a gradient
on this rank has none on the others, and its shards get none. The norm counts replicas once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_helix.operators.base import TransferFn
from hf_helix.operators.communication.collectives import prepare_reduce_scatter
from hf_helix.operators.communication.emulated_link import EmulatedLink, all_reduce
from hf_helix.operators.param_shard import EXPERTS, TP, VOCABULARY, Placement
from hf_helix.operators.side_by_side import contiguous_view
from hf_helix.operators.unit import Unit
from hf_helix.operators.zero.flat_parameter import FlatParameter
from hf_helix.operators.zero.host_shard import OnHost, arrived, host_memory, on_host
from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.gradients.buckets import Bucket, gradient_buckets
from hf_helix.runtime.streams import Event, Streams


class FlatParameterGradients:
    """The gradients of a flat parameter, in a flat buffer of the same layout.

    Gradients in float32 move to the buffer at once: their old memory is free, and sums over other axes run in the
    buffer. Gradients in half precision stay in place until the reduce-scatter.
    """

    def __init__(self, flat: FlatParameter) -> None:
        self._flat = flat
        self._with_gradient = [parameter for parameter in flat.placements if parameter.grad is not None]

    @classmethod
    def take(cls, flat: FlatParameter) -> FlatParameterGradients | None:
        """Returns the gradients of a flat parameter; None where no parameter has a gradient."""
        made = cls(flat)
        if not made._with_gradient:
            return None
        made._gather()
        return made

    def _gather(self) -> None:
        gradients: list[Any] = [parameter.grad for parameter in self._with_gradient]
        dtype = gradients[0].dtype
        summed_in = _summed_in(dtype)
        self._buffer = torch.zeros(self._flat.length, dtype=summed_in, device=self._flat.device)
        views = self._flat.views(self._buffer)
        self._places: list[Any] = [views[parameter] for parameter in self._with_gradient]
        self._is_moved = summed_in is dtype
        if self._is_moved:
            torch._foreach_copy_(self._places, gradients)
            for parameter, place in zip(self._with_gradient, self._places, strict=True):
                parameter.grad = place

    def reduce_scatter(self, divisor: int, link: EmulatedLink | None = None) -> TransferFn:
        """Gives the shards their gradients, not filled yet, and returns a function to fill them with sums / `divisor`,
        over the ranks of a copy and then over the copies (`link` is the emulated link between these). Shards on the
        host get theirs in `copy_to_host`. Collective."""
        local: list[Any] = [parameter.grad for parameter in self._with_gradient]
        shard, scatter = self._buffer, None
        if self._flat.reduce_axis.size > 1:
            shard, scatter = prepare_reduce_scatter(self._flat.reduce_axis, self._buffer)
        sums = self._parts_of(shard)
        self._result = shard if self._is_moved else torch.empty_like(shard, dtype=self._with_gradient[0].dtype)
        gradients = self._parts_of(self._result)
        for parameter in self._with_gradient:
            parameter.grad = None
        count = 0 if self._flat.host is None else len(gradients)
        self._norms = torch.empty(count, dtype=self._result.dtype, device=self._flat.device).unbind()
        if self._flat.host is None:
            self._give(gradients)

        def work() -> None:
            if not self._is_moved:
                torch._foreach_copy_(self._places, local)
            if scatter is not None:
                scatter()
            if self._flat.copies is not None and self._flat.copies.group is not None:
                all_reduce(shard, self._flat.copies.group, link)
            if divisor > 1:
                shard.div_(divisor)
            if not self._is_moved:
                torch._foreach_copy_(gradients, sums)
            for norm, part in zip(self._norms, gradients, strict=False):
                torch.linalg.vector_norm(part, out=norm)

        return work

    def copy_to_host(self) -> TransferFn:
        """Gives the shards on the host their gradients, not filled yet, and returns a function to copy these there,
        after `reduce_scatter` has filled them on the device."""
        host, result = self._flat.host, self._result
        assert host is not None
        self.on_host = host_memory(result.shape, result.dtype, self._flat.device)
        self.parts, after = self._parts_of(self.on_host), self.on_host._version + 1
        for part, norm in zip(self.parts, self._norms, strict=True):
            on_host[part] = OnHost(after, norm)
        self._give(self.parts)
        return lambda: host.link.down(self.on_host, result)

    def _parts_of(self, shard: Tensor) -> list[Any]:
        parts = self._flat.split_shard(shard)
        return [parts[parameter] for parameter in self._with_gradient]

    def _give(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self._with_gradient, gradients, strict=True):
            self._flat.shards[parameter].grad = gradient


# -- reduction of buckets, norm of the gradient ----------------------------------------------------------------------

MAX_COPIES = 2
"""How many buckets may have a copy in flight when the next copy is made, where streams hold memory: the buffers of flat
parameters, and upcasts of gradients in half precision."""

Placements = Mapping[nn.Parameter, Placement]


class GradientReducer:
    """Reduces the gradients of one window over the ranks, while backward still runs.

    The program says when the last gradient of a bucket has been issued. The steps for a bucket:

        tp         sum of the ranks' gradients for their parts of the sequence, in line with other tp collectives
        dp and cp  sum over the parts of a sequence and average over the batches, on the stream of gradients

    Buckets do not depend on the plan, so neither do the sums. Gradients in float32 are reduced in place, after a move
    to one buffer unless they lie in one buffer already.
    """

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, streams: Streams) -> None:
        self._mesh = mesh
        self._streams = streams
        self._pending = dict(enumerate(buckets))
        self._events: list[Event] = []
        self._down: dict[int, tuple[FlatParameterGradients, Event]] = {}  # reduced, and not on their way to the host
        while streams.late:
            streams.wait(streams.late.pop())

    def copy_bucket(self, number: int) -> None:
        """Copies the reduced gradients of a bucket to the host, if the host steps them. The host waits for them when it
        reads them, see `arrived`."""
        gradients, reduced = self._down.pop(number, (None, None))
        if gradients is None or reduced is None:
            return
        event = self._streams.issue(Kind.DOWN, gradients.copy_to_host(), [reduced], "gradients.down")
        for part in gradients.parts:
            on_host[part].wait = functools.partial(self._streams.wait_on_host, event)
        self._streams.late.append(event)

    def reduce_bucket(self, number: int) -> None:
        """Reduces a bucket whose gradients are complete on this rank."""
        bucket = self._pending.pop(number)
        if bucket.flat is None:
            self._reduce(bucket.placements)
        else:
            self._reduce_to_shards(number, bucket.flat)

    def finish(self) -> None:
        """Reduces the remaining buckets, such as those of tensor parallelism alone, and lets the compute stream wait
        until every gradient is complete; gradients on the host may still be on their way."""
        for number in list(self._pending):
            self.reduce_bucket(number)
        for number in list(self._down):
            self.copy_bucket(number)
        for event in self._events:
            self._streams.wait(event)
        self._events = []

    def _reduce(self, placements: Placements) -> None:
        tp = self._mesh.tp
        summed: list[Event] = []
        averaged = [self._averaged(placements, over) for over in sorted({each.over for each in placements.values()})]
        for parameters, group in averaged:
            if group is not None:
                _move_to_one_buffer(parameters)
        if tp.group is not None:
            parts = [parameter for parameter, placement in placements.items() if placement.sums_gradient]
            self._events += (summed := self._issue(tp.kind, parts, tp.group, 1, (), "gradients.sum"))
        for parameters, group in averaged:
            divisor = self._mesh.dp_size
            self._events += self._issue(Kind.GRADIENTS, parameters, group, divisor, summed, "gradients.average")

    def _reduce_to_shards(self, number: int, flat: FlatParameter) -> None:
        self._limit_copies()
        gradients = FlatParameterGradients.take(flat)
        if gradients is None:
            return
        parts = [parameter for parameter, placement in flat.placements.items() if placement.sums_gradient]
        tp = self._mesh.tp
        summed = self._issue(tp.kind, parts, tp.group, 1, (), "gradients.sum") if tp.group is not None else []
        work = gradients.reduce_scatter(self._mesh.dp_size, self._mesh.link)
        kind = flat.reduce_axis.kind
        event = self._streams.issue(kind, work, summed, "gradients.scatter")
        if flat.host is not None:
            self._down[number] = gradients, event
        self._events.append(event)

    def _averaged(self, placements: Placements, over: str) -> tuple[list[nn.Parameter], dist.ProcessGroup | None]:
        """Returns the parameters that are cut over an axis, and the group of their replicas."""
        members = {parameter: placement for parameter, placement in placements.items() if placement.over == over}
        return list(members), self._mesh.replica_group_of(next(iter(members.values())))

    def _issue(
        self,
        kind: Kind,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        divisor: int,
        after: Sequence[Event],
        label: str,
    ) -> list[Event]:
        if group is None and divisor == 1:
            return []
        if any(_summed_in(dtype) is not dtype for dtype in _by_type(parameters)):
            self._limit_copies()
        by_type = _by_type(parameters).values()
        sums = [_summing([p.grad for p in group_of], group, divisor, self._mesh.link) for group_of in by_type]
        return [self._streams.issue(kind, reduce, after, label) for reduce in sums]

    def _limit_copies(self) -> None:
        """Waits for earlier reductions before the next copy: until a wait, streams of a GPU hold the memory."""
        while self._streams.holds_memory and len(self._events) > MAX_COPIES:
            self._streams.wait(self._events.pop(0))


def reduce_all_gradients(units: Mapping[int, Unit], mesh: Mesh, streams: Streams) -> None:
    """Reduces all gradients now, without overlap."""
    GradientReducer(gradient_buckets(units, mesh), mesh, streams).finish()


@contextlib.contextmanager
def set_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Returns a context for a window that keeps the gradients of earlier windows apart. Earlier gradients are reduced
    already, so they are added after the reductions of this window."""
    held = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    for parameter in held:
        parameter.grad = None
    try:
        yield
    finally:
        arrived([*held.values(), *(parameter.grad for parameter in held)])
        for parameter, earlier in held.items():
            parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)


def _by_type(parameters: Iterable[nn.Parameter]) -> dict[torch.dtype, list[Any]]:
    """Returns the parameters with a gradient, by the type of the gradient."""
    by_type: dict[torch.dtype, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_type.setdefault(parameter.grad.dtype, []).append(parameter)
    return by_type


def _move_to_one_buffer(parameters: Iterable[nn.Parameter]) -> None:
    """Moves gradients to one buffer that an all-reduce can take; `parameter.grad` becomes a view of the buffer.

    Gradients in half precision stay in place, since their sums run in float32.
    """
    for dtype, members in _by_type(parameters).items():
        gradients = [parameter.grad for parameter in members]
        if _summed_in(dtype) is not dtype or contiguous_view(gradients) is not None:
            continue
        parts = _parts(gradients, dtype)
        torch._foreach_copy_(parts, gradients)
        for parameter, part in zip(members, parts, strict=True):
            parameter.grad = part


def _summing(
    gradients: Sequence[Tensor], group: dist.ProcessGroup | None, divisor: int, link: EmulatedLink | None
) -> Callable[[], object]:
    """Returns a function to sum gradients over a group, as a single buffer, and to divide them."""
    if group is None:  # experts without replicas
        return lambda: torch._foreach_div_(list(gradients), divisor)
    dtype, buffer = _summed_in(gradients[0].dtype), contiguous_view(gradients)
    if buffer is not None and buffer.dtype is dtype:
        return lambda: _sum(buffer, group, divisor, link)
    parts = _parts(gradients, dtype)

    def work() -> None:
        torch._foreach_copy_(parts, list(gradients))
        total = contiguous_view(parts)
        assert total is not None
        _sum(total, group, divisor, link)
        torch._foreach_copy_(list(gradients), parts)

    return work


def _sum(total: Tensor, group: dist.ProcessGroup, divisor: int, link: EmulatedLink | None) -> None:
    """Sums over a group and divides, in place."""
    if total.is_cuda and divisor == dist.get_world_size(group):
        dist.all_reduce(total, dist.ReduceOp.AVG, group=group)
        return
    all_reduce(total, group, link)
    if divisor > 1:
        total.div_(divisor)


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """The type of sums: ranks add up one after the other, and half precision would round every time."""
    return torch.promote_types(dtype, torch.float32)


def _parts(gradients: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Allocates one buffer for gradients, and returns the part of each."""
    lengths = [gradient.numel() for gradient in gradients]
    buffer = gradients[0].new_empty(sum(lengths), dtype=dtype)
    return [part.view(gradient.shape) for gradient, part in zip(gradients, buffer.split(lengths), strict=True)]


def gradient_norm(placements: Placements, mesh: Mesh, flats: Sequence[FlatParameter] = ()) -> Tensor:
    """Returns the 2-norm of the gradient of the whole model, as `clip_grad_norm_` would return it. Collective."""
    total = _squares_of(placements, flats, lambda placement: placement.dim is None, mesh.device)
    for over, axis in (((TP, VOCABULARY), mesh.tp), ((EXPERTS,), mesh.experts)):
        is_cut = functools.partial(_is_cut_over, over)
        cut = _squares_of(placements, flats, is_cut, mesh.device)
        if axis.group is not None:
            dist.all_reduce(cut, group=axis.group)
        total += cut
    if mesh.pipe.group is not None:  # every element is on one rank of the pipeline
        dist.all_reduce(total, group=mesh.pipe.group)
    return total.sqrt()


def _is_cut_over(over: Collection[str], placement: Placement) -> bool:
    return placement.dim is not None and placement.over in over


def _squares_of(
    placements: Placements, flats: Sequence[FlatParameter], chosen: Callable[[Placement], bool], device: torch.device
) -> Tensor:
    """Returns the sum of squares over the gradients of parameters with a chosen placement. Collective over the ranks
    that shard them."""
    flat_of = {parameter: flat for flat in flats for parameter in flat.placements}
    parts: dict[dist.ProcessGroup | None, list[Tensor | None]] = {None: []}  # by the ranks that shard them
    for parameter in (parameter for parameter, placement in placements.items() if chosen(placement)):
        flat = flat_of.get(parameter)
        stepped, group = (parameter, None) if flat is None else (flat.shards[parameter], flat.reduce_axis.group)
        parts.setdefault(group, []).append(stepped.grad)
    total = _squares(parts.pop(None)).to(device)
    for group, gradients in parts.items():
        part = _squares(gradients).to(device)
        dist.all_reduce(part, group=group)
        total += part
    return total


def _squares(gradients: Iterable[Tensor | None]) -> Tensor:
    norms = [_norm_or_itself(gradient) for gradient in gradients if gradient is not None]
    return torch.nn.utils.get_total_norm(norms).float().square()


def _norm_or_itself(gradient: Tensor) -> Tensor:
    """Returns the norm of an unchanged gradient on the host, which the device has taken; otherwise the gradient."""
    known = on_host.get(gradient)
    if known is not None and (known.wait is not None or known.version == gradient._version):
        return known.norm
    return gradient
