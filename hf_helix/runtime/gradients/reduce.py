"""Gradients in one piece that lies as a flat does, and their sums over the ranks that the flat is spread over.

In:   a flat whose parameters have the gradients that this rank has computed in a window.
Out:  `shard.grad`, the average over the data-parallel ranks, for the part of every parameter that this rank owns; the
      parameters have no gradients then.
Must hold: sums are taken in float32 at least, in the same order every time. A parameter without a gradient on this rank
has none on the others, and its shards get none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_helix.operators.base import TransferFn
from hf_helix.operators.communication.collectives import prepare_reduce_scatter
from hf_helix.operators.communication.emulated_link import EmulatedLink, all_reduce
from hf_helix.operators.param_shard import EXPERTS, TP, Placement
from hf_helix.operators.side_by_side import contiguous_view
from hf_helix.operators.unit import Unit
from hf_helix.operators.zero.flat_parameter import FlatParameter
from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.gradients.buckets import Bucket, gradient_buckets
from hf_helix.runtime.streams import Event, Streams


class FlatParameterGradients:
    """The gradients of a flat.

    Gradients in float32 are moved into the piece at once, so that sums over other axes run in it, and what they were in
    before is free then; those in half precision stay where they are until the piece is summed.

    Args:
        flat: what they are the gradients of.
    """

    def __init__(self, flat: FlatParameter) -> None:
        self._flat = flat
        self._with_gradient = [parameter for parameter in flat.placements if parameter.grad is not None]

    @classmethod
    def take(cls, flat: FlatParameter) -> FlatParameterGradients | None:
        """Returns the gradients of a flat; None where there are none."""
        made = cls(flat)
        if not made._with_gradient:
            return None
        made._gather()
        return made

    def _gather(self) -> None:
        gradients: list[Any] = [parameter.grad for parameter in self._with_gradient]
        dtype = gradients[0].dtype
        summed_in = torch.promote_types(dtype, torch.float32)
        self._whole = self._flat.shard.new_zeros(self._flat.length, dtype=summed_in)
        views = self._flat.views(self._whole)
        self._places: list[Any] = [views[parameter] for parameter in self._with_gradient]
        self._is_moved = summed_in is dtype
        if self._is_moved:
            torch._foreach_copy_(self._places, gradients)
            for parameter, place in zip(self._with_gradient, self._places, strict=True):
                parameter.grad = place

    def reduce_scatter(self, divisor: int) -> TransferFn:
        """Gives the shards their gradients, not yet filled, and returns the work that fills them. Collective.

        Args:
            divisor: what the sums are divided by.
        """
        local: list[Any] = [parameter.grad for parameter in self._with_gradient]
        stretch, scatter = prepare_reduce_scatter(self._flat.sums, self._whole)
        parts = self._flat.split_shard(stretch)
        sums: list[Any] = [parts[parameter] for parameter in self._with_gradient]
        gradients: list[Any] = [
            part if part.dtype is parameter.dtype else torch.empty_like(part, dtype=parameter.dtype)
            for parameter, part in zip(self._with_gradient, sums, strict=True)
        ]
        for parameter, gradient in zip(self._with_gradient, gradients, strict=True):
            parameter.grad = None
            self._flat.shards[parameter].grad = gradient

        def work() -> None:
            if not self._is_moved:
                torch._foreach_copy_(self._places, local)
            scatter()
            if divisor > 1:
                stretch.div_(divisor)
            if not self._is_moved:
                torch._foreach_copy_(gradients, sums)

        return work


# -- reduce --------------------------------------------------------------------------------------------------------
# Gradients over the ranks: their sums during a window, and the norm of the whole gradient.
#
# In:   buckets of parameters (see `hf_helix.runtime.gradients.buckets`), and the mesh.
# Out:  complete gradients on every rank; one norm, equal on every rank.
# Must hold: a parameter that several ranks copy counts once; sums come in the same order on every rank.


MAX_UPCASTS = 2
"""How many buckets in half precision may have a copy in float32 alive on CUDA when the next copy is made."""

Placements = Mapping[nn.Parameter, Placement]


class GradientReduction:
    """Sums the gradients of one window over the ranks, while backward still runs.

    The program says when the last gradient of a bucket has been issued. Of a bucket, what each rank saw of the sequence
    is summed over tp, in line with the other collectives there; then the sum over the parts of a sequence (cp) and the
    average over the batches (dp) are taken, on a stream of their own. What is in a bucket does not depend on the plan,
    so neither do the sums. Gradients in float32 are averaged where they lie: those of a bucket are put in one piece of
    memory first, unless they lie so already.

    Args:
        buckets: of this rank.
    """

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, streams: Streams) -> None:
        self._mesh = mesh
        self._streams = streams
        self._left = dict(enumerate(buckets))
        self._events: list[Event] = []

    def reduce_bucket(self, number: int) -> None:
        """Sums a bucket whose gradients are complete on this rank."""
        bucket = self._left.pop(number)
        if bucket.flat is None:
            self._reduce(bucket.placements)
        else:
            self._reduce_to_shards(bucket.flat)

    def finish(self) -> None:
        """Sums what is left, such as the few parts that only tensor parallelism sums, and lets the compute stream wait
        until every gradient is complete on every rank."""
        for number in list(self._left):
            self.reduce_bucket(number)
        for event in self._events:
            self._streams.wait(event)
        self._events = []

    def _reduce(self, placements: Placements) -> None:
        tp = self._mesh.tp
        summed: list[Event] = []
        averaged = [self._averaged(placements, over) for over in sorted({each.over for each in placements.values()})]
        for parameters, group in averaged:
            if group is not None:
                _put_in_one(parameters)
        if tp.group is not None:
            parts = [parameter for parameter, placement in placements.items() if placement.sums_gradient]
            summed = self._issue(tp.kind, parts, tp.group, 1, (), "gradients.sum")
        for parameters, group in averaged:
            self._issue(Kind.GRADIENTS, parameters, group, self._mesh.dp_size, summed, "gradients.average")

    def _reduce_to_shards(self, flat: FlatParameter) -> None:
        self._limit_copies(flat.placements)
        gradients = FlatParameterGradients.take(flat)
        if gradients is None:
            return
        parts = [parameter for parameter, placement in flat.placements.items() if placement.sums_gradient]
        tp = self._mesh.tp
        summed = self._issue(tp.kind, parts, tp.group, 1, (), "gradients.sum") if tp.group is not None else []
        work = gradients.reduce_scatter(self._mesh.dp_size)
        self._events.append(self._streams.issue(flat.reduce_axis.kind, work, summed, "gradients.scatter"))

    def _averaged(self, placements: Placements, over: str) -> tuple[list[nn.Parameter], dist.ProcessGroup | None]:
        """The parameters that lie over an axis, and who has copies of them."""
        alike = {parameter: placement for parameter, placement in placements.items() if placement.over == over}
        return list(alike), self._mesh.replica_group_of(next(iter(alike.values())))

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
        self._limit_copies(parameters)
        by_type = _by_type(parameters).values()
        works = [_summing([p.grad for p in alike], group, divisor, self._mesh.link) for alike in by_type]
        events = [self._streams.issue(kind, work, after, label) for work in works]
        self._events += events
        return events

    def _limit_copies(self, parameters: Iterable[nn.Parameter]) -> None:
        """Waits for earlier sums before gradients in half precision get copies in a higher one, which CUDA keeps until
        their sums have been waited for."""
        if self._mesh.device.type == "cuda" and any(_summed_in(dtype) is not dtype for dtype in _by_type(parameters)):
            while len(self._events) > MAX_UPCASTS:
                self._streams.wait(self._events.pop(0))


def reduce_all_gradients(units: Mapping[int, Unit], mesh: Mesh, streams: Streams) -> None:
    """Reduces all gradients now, without overlap.

    Args:
        units: of this rank.
        mesh: which ranks share what.
        streams: that the sums run on.
    """
    GradientReduction(gradient_buckets(units, mesh), mesh, streams).finish()


@contextlib.contextmanager
def set_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Returns a context for a window that keeps the gradients of earlier windows apart: those are summed over the ranks
    already, so they are added after the sums of this window."""
    held = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    for parameter in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, earlier in held.items():
            parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)


def _by_type(parameters: Iterable[nn.Parameter]) -> dict[torch.dtype, list[Any]]:
    """Returns the parameters that have a gradient, by its type."""
    by_type: dict[torch.dtype, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_type.setdefault(parameter.grad.dtype, []).append(parameter)
    return by_type


def _put_in_one(parameters: Iterable[nn.Parameter]) -> None:
    """Moves gradients into one piece of memory that can be summed as it is; `parameter.grad` becomes a view of it.

    Gradients in half precision stay where they are, since they are summed in float32.
    """
    for dtype, alike in _by_type(parameters).items():
        gradients = [parameter.grad for parameter in alike]
        if _summed_in(dtype) is not dtype or contiguous_view(gradients) is not None:
            continue
        parts = _parts(gradients, dtype)
        torch._foreach_copy_(parts, gradients)
        for parameter, part in zip(alike, parts, strict=True):
            parameter.grad = part


def _summing(
    gradients: Sequence[Tensor], group: dist.ProcessGroup | None, divisor: int, link: EmulatedLink | None
) -> Callable[[], object]:
    """Returns the work that sums gradients over a group, in one piece, and divides them."""
    if group is None:  # experts that no other rank has a copy of
        return lambda: torch._foreach_div_(list(gradients), divisor)
    dtype, whole = _summed_in(gradients[0].dtype), contiguous_view(gradients)
    if whole is not None and whole.dtype is dtype:
        return lambda: _sum(whole, group, divisor, link)
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
    """Ranks add up one after the other, so half precision would round every time."""
    return torch.promote_types(dtype, torch.float32)


def _parts(gradients: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Allocates one piece of memory for gradients, and returns the part of each."""
    lengths = [gradient.numel() for gradient in gradients]
    flat = gradients[0].new_empty(sum(lengths), dtype=dtype)
    return [part.view(gradient.shape) for gradient, part in zip(gradients, flat.split(lengths), strict=True)]


def gradient_norm(placements: Placements, mesh: Mesh, flats: Sequence[FlatParameter] = ()) -> Tensor:
    """The 2-norm of the gradient of the whole model, as `clip_grad_norm_` would return it. Collective.

    Args:
        placements: the parameters of this rank.
        mesh: which ranks share what.
        flats: those that parameters are in which are spread.
    """
    whole = _squares_of(placements, flats, lambda placement: placement.dim is None, mesh.device)
    for over, axis in ((TP, mesh.tp), (EXPERTS, mesh.experts)):
        is_cut = functools.partial(_is_cut_over, over)
        cut = _squares_of(placements, flats, is_cut, mesh.device)
        if axis.group is not None:
            dist.all_reduce(cut, group=axis.group)
        whole += cut
    if mesh.pipe.group is not None:  # every parameter is on one rank of the pipeline
        dist.all_reduce(whole, group=mesh.pipe.group)
    return whole.sqrt()


def _is_cut_over(over: str, placement: Placement) -> bool:
    return placement.dim is not None and placement.over == over


def _squares_of(
    placements: Placements, flats: Sequence[FlatParameter], chosen: Callable[[Placement], bool], device: torch.device
) -> Tensor:
    """The sum of squares over the gradients of parameters that lie in a certain way. Collective over the ranks that
    these are spread over."""
    total = _squares(parameter.grad for parameter, placement in placements.items() if chosen(placement)).to(device)
    for axis in dict.fromkeys(flat.reduce_axis for flat in flats if any(map(chosen, flat.placements.values()))):
        shards = (
            shard.grad
            for flat in flats
            if flat.reduce_axis is axis
            for parameter, shard in flat.shards.items()
            if chosen(flat.placements[parameter])
        )
        part = _squares(shards).to(device)
        dist.all_reduce(part, group=axis.group)
        total += part
    return total


def _squares(gradients: Iterable[Tensor | None]) -> Tensor:
    norm = torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
    return norm.float().square()
