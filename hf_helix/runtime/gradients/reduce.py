"""Gradient reduction: all-reduce of buckets, reduce-scatter of flat parameters, and the norm of the whole gradient.

In:   buckets of parameters (see `hf_helix.runtime.gradients.buckets`) with the gradients of a window on this rank, and
      the mesh.
Out:  without ZeRO complete gradients on every rank. With ZeRO `shard.grad`, the average over the data-parallel ranks
      for this rank's part of every parameter, and no gradient on the parameters; on the host if the shard is there. One
      norm, equal on every rank.
Must hold: sums run in float32 at least, in the same order on every rank and every time. A parameter without a gradient
on this rank has none on the others, and its shards get none; but for conditional ones (experts that are chosen by the
data), which add zeros, and have no gradient if no rank had one. The norm counts replicas once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_helix.operators.base import TransferFn
from hf_helix.operators.communication.collectives import prepare_reduce_scatter
from hf_helix.operators.communication.emulated_link import EmulatedLink, all_reduce
from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.parameters.host_shard import OnHost, host_memory, on_host
from hf_helix.operators.side_by_side import contiguous_view
from hf_helix.operators.units.rows import Rows, parameter_rows
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.parameters import Parameter, Part
from hf_helix.planning.window.passes import MAX_COPIES
from hf_helix.runtime.distributed.mesh import Mesh, world_size
from hf_helix.runtime.gradients.buckets import BoundBucket, bound_buckets
from hf_helix.runtime.streams.streams import Event, Streams


class FlatParameterGradients:
    """The gradients of a flat parameter in a window: of parameters, in a flat buffer of the same layout, and in the end
    of shards.

    Gradients in float32 move to the buffer at once: their old memory is free, and sums over other axes run in the
    buffer. Gradients in half precision stay in place until the reduce-scatter. Several reductions of a window add up in
    the shard.
    """

    def __init__(self, flat: FlatParameter) -> None:
        self.flat = flat
        self._microbatch: int | None = None  # of `parameter.grad`; None if no operator has added yet
        self._others: dict[int, list[Tensor | None]] = {}  # by micro-batch, gradients apart from `parameter.grad`
        self._reduced: dict[nn.Parameter, torch.dtype] = {}  # the parameters with a gradient, and its type
        self._total: Tensor | None = None

    @property
    def has_total(self) -> bool:
        """Whether there is a total of this rank."""
        return self._total is not None

    def switch_to(self, microbatch: int) -> None:
        """Makes `parameter.grad` the gradients of a micro-batch: weight gradients that were put off may follow
        gradients of later micro-batches, and sums must not depend on that."""
        before, self._microbatch = self._microbatch, microbatch
        if before == microbatch or (before is None and microbatch not in self._others):
            return
        if before is not None:
            self._others[before] = [parameter.grad for parameter in self.flat.placements]
        now = self._others.pop(microbatch, [None] * len(self.flat.placements))
        for parameter, gradient in zip(self.flat.placements, now, strict=True):
            parameter.grad = gradient

    def take(self) -> TakenGradients | None:
        """Takes the gradients of parameters for a reduction; returns None if there are none."""
        members = [parameter for parameter in self.flat.placements if parameter.grad is not None]
        if not members:
            return None
        gradients: list[Any] = [parameter.grad for parameter in members]
        dtype = gradients[0].dtype
        self._reduced |= dict.fromkeys(members, dtype)
        summed_in = _summed_in(dtype)
        buffer = torch.zeros(self.flat.length, dtype=summed_in, device=self.flat.device)
        views = self.flat.views(buffer)
        places: list[Any] = [views[parameter] for parameter in members]
        if summed_in is dtype:
            torch._foreach_copy_(places, gradients)
            for parameter, place in zip(members, places, strict=True):
                parameter.grad = place
        return TakenGradients(members, buffer, places)

    def reduce_scatter(self, taken: TakenGradients) -> TransferFn:
        """Returns a function to add the gradients that were taken, summed over the ranks of a copy, to this rank's
        total. Collective."""
        local: list[Any] = [parameter.grad for parameter in taken.parameters]
        places, shard, scatter = taken.places, taken.buffer, None
        if self.flat.reduce_axis.size > 1:
            shard, scatter = prepare_reduce_scatter(self.flat.reduce_axis, taken.buffer)
        before = self._total
        self._total = shard if before is None else before
        for parameter in taken.parameters:
            parameter.grad = None
        self._microbatch = None

        def work() -> None:
            if local[0].dtype is not shard.dtype:
                torch._foreach_copy_(places, local)
            if scatter is not None:
                scatter()
            if before is not None:
                before.add_(shard)

        return work

    def complete(self, divisor: int, link: EmulatedLink | None = None) -> tuple[CompleteGradients, TransferFn]:
        """Returns the gradients of shards, not filled yet, and a function to fill them with this rank's total over the
        copies / `divisor` (`link` is the emulated link between these). Shards on the host get theirs in `copy_to_host`.
        Collective."""
        total, dtype = self._total, next(iter(self._reduced.values()))
        assert total is not None
        result = total if total.dtype is dtype else torch.empty_like(total, dtype=dtype)
        sums, gradients = self._parts_of(total), self._parts_of(result)
        count = 0 if self.flat.host is None else len(gradients)
        norms = torch.empty(count, dtype=dtype, device=self.flat.device).unbind()
        if self.flat.host is None:
            self._give(gradients)

        def work() -> None:
            if self.flat.copies is not None and self.flat.copies.group is not None:
                all_reduce(total, self.flat.copies.group, link)
            if divisor > 1:
                total.div_(divisor)
            if result is not total:
                torch._foreach_copy_(gradients, sums)
            for norm, part in zip(norms, gradients, strict=False):
                torch.linalg.vector_norm(part, out=norm)

        return CompleteGradients(result, norms), work

    def copy_to_host(self, complete: CompleteGradients) -> tuple[list[Tensor], TransferFn]:
        """Gives the shards on the host their gradients, not filled yet; returns these, and a function to copy them
        there from the device, after the function of `complete` has filled them."""
        host, result = self.flat.host, complete.result
        assert host is not None
        there = host_memory(result.shape, result.dtype, self.flat.device)
        parts, after = self._parts_of(there), there._version + 1
        for part, norm in zip(parts, complete.norms, strict=True):
            on_host[part] = OnHost(after, norm)
        self._give(parts)
        return parts, lambda: host.link.down(there, result)

    def _parts_of(self, shard: Tensor) -> list[Any]:
        parts = self.flat.split_shard(shard)
        return [parts[parameter] for parameter in self._reduced]

    def _give(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self._reduced, gradients, strict=True):
            self.flat.shards[parameter].grad = gradient


class TakenGradients(NamedTuple):
    """Gradients of parameters before their reduction."""

    parameters: list[nn.Parameter]
    buffer: Tensor  # of the layout of the flat parameter
    places: list[Any]  # views of the buffer: the gradients, or the places of gradients in half precision


class CompleteGradients(NamedTuple):
    """Gradients of shards on the device."""

    result: Tensor  # all in one
    norms: Sequence[Tensor]  # of each, if the shards are on the host


# -- reduction of buckets, norm of the gradient ----------------------------------------------------------------------


class GradientReducer:
    """Reduces the gradients of one window over the ranks, while backward still runs.

    The program says when the last gradient of a bucket has been issued. The steps for a bucket:

        tp         sum of the ranks' gradients for their parts of the sequence, in line with other tp collectives
        dp and cp  sum over the parts of a sequence and average over the batches, on the stream of gradients

    Buckets do not depend on the plan, so neither do the sums. Gradients in float32 are reduced in place, after a move
    to one buffer unless they lie in one buffer already.

    Args:
        buckets: of this rank.
        mesh, streams: of this rank.
        numbers: from the traffic of the layout, by unit, to its bucket, as an index into `buckets`.
        often: the buckets of flat parameters that every micro-batch reduces.
        note: called for every parameter whose gradient is about to be reduced.

    Attributes:
        last: the last micro-batch of the window; None while it is not known, and others follow.
    """

    def __init__(
        self,
        buckets: Sequence[BoundBucket],
        mesh: Mesh,
        streams: Streams,
        numbers: Mapping[int, int] | None = None,
        often: Iterable[int] = (),
        last: int | None = 0,
        note: Callable[[nn.Parameter], object] | None = None,
    ) -> None:
        self._note = note
        self._numbers = numbers or {}
        self.last = last
        self._mesh = mesh
        self._streams = streams
        self._pending = dict(enumerate(buckets))
        flats = {number: bucket.flat for number, bucket in self._pending.items() if bucket.flat is not None}
        self._flats = {number: FlatParameterGradients(flat) for number, flat in flats.items()}
        self._often = frozenset(often)
        self._conditional = {number: _conditional(bucket.rows) for number, bucket in self._pending.items()}
        self._used: dict[nn.Parameter, bool] = {}  # the conditional parameters, and whether this rank had a gradient
        self._events: list[Event] = []
        self._down: dict[int, tuple[CompleteGradients, Event]] = {}  # reduced, and not on their way to the host
        while streams.late:
            streams.wait(streams.late.pop())

    def issue(self, traffic: int, kind: Kind, microbatch: int) -> None:
        """Reduces a bucket whose gradients of the window, or of the micro-batch, are complete on this rank, or copies
        the reduced gradients to the host, if the host steps them.

        Args:
            traffic: its unit in the layout; nothing happens if no bucket is this traffic, as in `switch_to`.
            kind: of the operator, `DOWN` for the copy.
            microbatch: the last with gradients in it.
        """
        number = self._numbers.get(traffic)
        if number is None:
            return
        if kind is Kind.DOWN:
            self._copy_bucket(number)
        elif number in self._often and microbatch != self.last:
            self._reduce_to_shards(number, self._flats[number].flat)
        elif self.last is not None:
            self._reduce_bucket(number)

    def switch_to(self, traffic: int, microbatch: int) -> None:
        """Makes `parameter.grad` the gradients of a micro-batch, for a bucket that every micro-batch reduces."""
        if traffic in self._numbers:
            self._flats[self._numbers[traffic]].switch_to(microbatch)

    def _copy_bucket(self, number: int) -> None:
        """Copies the reduced gradients of a bucket to the host, which waits for them when it reads them, see
        `arrived`."""
        if number not in self._down:
            return
        complete, reduced = self._down.pop(number)
        parts, work = self._flats[number].copy_to_host(complete)
        event = self._streams.issue(Kind.DOWN, work, [reduced], "gradients.down")
        for part in parts:
            on_host[part].wait = functools.partial(self._streams.wait_on_host, event)
        self._streams.late.append(event)

    def _reduce_bucket(self, number: int) -> None:
        bucket = self._pending.pop(number)
        if bucket.flat is None:
            self._fill(number)
            self._note_all(bucket.rows)
            self._reduce(bucket.rows)
        else:
            self._reduce_to_shards(number, bucket.flat, is_last=True)

    def finish(self) -> None:
        """Reduces the remaining buckets, such as buckets only of tensor parallelism, and makes the compute stream wait
        until every gradient is complete; gradients on the host may still be on their way."""
        with self._streams.window():
            for number in list(self._pending):
                self._reduce_bucket(number)
            for number in list(self._down):
                self._copy_bucket(number)
            for event in self._events:
                self._streams.wait(event)
            self._forget_unused()
        self._events = []

    def _fill(self, number: int) -> None:
        """Gives the conditional parameters of a bucket zeros if they have no gradient on this rank."""
        for parameter in self._conditional[number]:
            has_gradient = parameter.grad is not None
            self._used[parameter] = has_gradient or self._used.get(parameter, False)
            if not has_gradient:
                parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)

    def _forget_unused(self) -> None:
        """Takes the gradients of conditional parameters away that had one on no rank. Collective if there are any, and
        waits for the device."""
        parameters = [each for each in chain.from_iterable(self._conditional.values()) if each in self._used]
        if not parameters:
            return
        used = torch.tensor([self._used[parameter] for parameter in parameters], device=self._mesh.device).float()
        for group in (self._mesh.tp.group, self._mesh.replica_group):
            if group is not None:
                dist.all_reduce(used, group=group)
        shards = {p: shard for each in self._flats.values() for p, shard in each.flat.shards.items()}
        for parameter, number in zip(parameters, used.tolist(), strict=True):
            if not number:
                shards.get(parameter, parameter).grad = None

    def abandon(self) -> None:
        """Waits for the reductions of a window that ends early, whose gradients nobody reads."""
        with self._streams.window():
            for event in self._events:
                self._streams.wait(event)
        self._events = []

    def _reduce(self, rows: Mapping[nn.Parameter, Parameter]) -> None:
        tp = self._mesh.tp
        summed: list[Event] = []
        averaged = [self._averaged(rows, over) for over in sorted({row.cut.mesh_axis for row in rows.values()})]
        for parameters, group in averaged:
            if group is not None:
                _move_to_one_buffer(parameters)
        if tp.group is not None:
            parts = [parameter for parameter, row in rows.items() if row.cut.sums_gradient]
            self._events += (summed := self._issue(tp.kind, parts, tp.group, 1, (), "gradients.sum"))
        for parameters, group in averaged:
            divisor = self._mesh.dp_size
            self._events += self._issue(Kind.GRADIENTS, parameters, group, divisor, summed, "gradients.average")

    def _reduce_to_shards(self, number: int, flat: FlatParameter, is_last: bool = False) -> None:
        """Reduces the gradients that have added up since the last reduction, and with the last completes the sums."""
        gradients, tp = self._flats[number], self._mesh.tp
        self._limit_copies(always=number in self._often)
        self._fill(number)
        self._note_all(flat.placements)
        works, summed = list[TransferFn](), list[Event]()
        taken = gradients.take()
        if taken is not None:
            parts = [parameter for parameter, cut in flat.placements.items() if cut.sums_gradient]
            summed = self._issue(tp.kind, parts, tp.group, 1, (), "gradients.sum") if tp.group is not None else []
            works.append(gradients.reduce_scatter(taken))
        complete = None
        if is_last and gradients.has_total:
            complete, fill = gradients.complete(self._mesh.dp_size, self._mesh.link)
            works.append(fill)
        if not works:
            return

        def work() -> None:
            for each in works:
                each()

        event = self._streams.issue(flat.reduce_axis.kind, work, summed, "gradients.scatter")
        if complete is not None and flat.host is not None:
            self._down[number] = complete, event
        self._events.append(event)

    def _note_all(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._note is not None:
            for parameter in parameters:
                self._note(parameter)

    def _averaged(
        self, rows: Mapping[nn.Parameter, Parameter], axis: str
    ) -> tuple[list[nn.Parameter], dist.ProcessGroup | None]:
        """Returns the parameters that are cut over an axis, and the group of their replicas."""
        members = [parameter for parameter, row in rows.items() if row.cut.mesh_axis == axis]
        return members, self._mesh.replica_group_of(rows[members[0]].cut)

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
        by_type = _by_type(parameters)
        if any(_summed_in(dtype) is not dtype for dtype in by_type):
            self._limit_copies()
        sums = [_summing([p.grad for p in members], group, divisor, self._mesh.link) for members in by_type.values()]
        return [self._streams.issue(kind, reduce, after, label) for reduce in sums]

    def _limit_copies(self, always: bool = False) -> None:
        """Waits for earlier reductions before the next copy: until a wait, streams of a GPU hold the memory. `always`
        waits on a CPU as well, whose reductions of many micro-batches may be late."""
        while (always or self._streams.holds_memory) and len(self._events) > MAX_COPIES:
            self._streams.wait(self._events.pop(0))


def reduce_all_gradients(units: Mapping[int, Unit], mesh: Mesh, streams: Streams) -> None:
    """Reduces all gradients now, without overlap."""
    GradientReducer(bound_buckets(parameter_rows(units), units, mesh.place), mesh, streams).finish()


def _conditional(rows: Rows) -> list[nn.Parameter]:
    """Returns the parameters that the data decide whether they get a gradient."""
    return [parameter for parameter, row in rows.items() if row.is_conditional]


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


def gradient_norm(parts: Mapping[nn.Parameter, Part], device: torch.device) -> Tensor:
    """Returns the 2-norm of the gradient of the whole model, as `clip_grad_norm_` would return it. Collective.

    Args:
        parts: of this rank, by the parameters that an optimizer steps.
        device: of messages.
    """
    norms = [
        _norm_or_itself(parameter.grad)
        for parameter, part in parts.items()
        if part.counts and parameter.grad is not None
    ]
    total = torch.nn.utils.get_total_norm(norms).to(device, torch.float32).square()
    if world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


def _norm_or_itself(gradient: Tensor) -> Tensor:
    """Returns the norm of an unchanged gradient on the host, which the device has taken; otherwise the gradient."""
    known = on_host.get(gradient)
    if known is not None and (known.wait is not None or known.version == gradient._version):
        return known.norm
    return gradient
