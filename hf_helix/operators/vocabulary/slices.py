"""Computations on slices of a vocabulary, under autograd.

In:   a tensor of this rank's slice [..., slice], and the axis of the ranks with the other slices.
Out:  the results of the full tensor [..., vocabulary]: sums, extrema, elements, losses; equal on all ranks.
Must hold: all ranks compute with equal results, so the gradient of a result is not summed again; the gradient of a
tensor that is equal on all ranks and used with slices is. Results are summed in rank order, gradients in the order of
the backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.vocabulary.statistics import (
    LOSS,
    gradient,
    hand_gradients,
    join,
    log_total,
    losses,
    places,
    statistics,
    statistics_of,
    type_of_sums,
    whole_tile,
)
from hf_helix.planning.parameters import cut_bounds

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class VocabDivision:
    """The division of a vocabulary of `length` tokens over the ranks of an axis."""

    axis: Axis
    length: int

    def bounds(self, rank: int | None = None) -> tuple[int, int]:
        """Returns the slice of a rank; of this rank if None."""
        return cut_bounds(self.length, self.axis.size, self.axis.rank if rank is None else rank)

    def size(self, rank: int | None = None) -> int:
        """Returns the length of the slice of a rank; of this rank if None."""
        first, end = self.bounds(rank)
        return end - first

    def slice(self, full: Tensor) -> Tensor:
        """Returns this rank's slice of a full tensor."""
        first, end = self.bounds()
        return full[..., first:end]

    def gather(self, local: Tensor) -> Tensor:
        """Returns the full tensor [..., length] of every rank's slice."""
        parts = all_gather(functional.pad(local, (0, self.size(0) - local.shape[-1])), self.axis)
        return torch.cat([part[..., : self.size(rank)] for rank, part in enumerate(parts)], -1)

    def local(self, ids: Tensor) -> Tensor:
        """Returns ids, counted from the first of this rank's rows.

        Raises:
            IndexError: an id is not in the vocabulary (on a CPU, since a look costs nothing there).
        """
        if ids.device.type == "cpu" and bool(((ids < 0) | (ids >= self.length)).any()):
            raise IndexError(f"token ids from {ids.min()} to {ids.max()}: give ids from 0 to {self.length - 1}")
        return ids - self.bounds()[0]

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each id's place in this rank's slice, and whether it lies there. For an id outside of the vocabulary
        see `local`; on a GPU, the kernel that reads the place fails, as in torch."""
        place, inside = places(self.local(ids), self.size())
        return place.masked_fill((ids < 0) | (ids >= self.length), self.size()), inside


def all_gather(value: Tensor, axis: Axis) -> Tensor:
    """Returns every rank's value, in rank order [ranks, ...]."""
    value = value.detach()
    out = value.new_empty((axis.size, *value.shape))
    if value.numel():
        sent, into = value.contiguous().view(-1), out.view(-1)
        if value.dtype is torch.bool:
            sent, into = sent.view(torch.uint8), into.view(torch.uint8)
        axis.transport.all_gather(into, sent)
    return out


def sum_over(value: Tensor, axis: Axis) -> Tensor:
    """Returns the sum of every rank's value, equal on all ranks."""
    value = value.clone(memory_format=torch.contiguous_format)
    start_sum(value, axis)()
    return value


def start_sum(value: Tensor, axis: Axis) -> Callable[[], object]:
    """Starts the sum of every rank's contiguous value, in place; returns the function that waits for the sum."""
    return axis.transport.start_sum(value)


class _Communicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, forward: Change, backward: Change) -> Tensor:
        ctx.change = backward
        return forward(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.change(gradients[0]), None, None


def _communicated(value: Tensor, forward: Change, backward: Change) -> Tensor:
    return _Communicated.apply(value, forward, backward)


def changed_gradient(value: Tensor, change: Change) -> Tensor:
    """Returns the value, in the same memory, whose gradient is changed by a function."""
    return _communicated(value, lambda each: each.view_as(each), change)


def summed_gradient(value: Tensor, axis: Axis) -> Tensor:
    """Returns a value that is equal on all ranks of an axis, for use in computations that differ between them: its
    gradient is the sum of theirs."""
    return value if axis.size == 1 else changed_gradient(value, lambda gradient: sum_over(gradient, axis))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.axis = axis
        return functional.linear(value, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (value, weight) = gradients, ctx.saved_tensors
        of_value = torch.matmul(gradient, weight) if ctx.needs_input_grad[0] else None
        wait = None if of_value is None else start_sum(of_value, ctx.axis)
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = rows.t() @ value.reshape(-1, value.shape[-1]) if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        if wait is not None:
            wait()
        return of_value, of_weight, of_bias, None


def sliced_linear(value: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
    """Returns this rank's slice of the outputs of a linear over a value [..., features] that is equal on all ranks. The
    sum of the value's gradient over the ranks is overlapped with the gradient of the weight, as in Megatron-LM."""
    kind = value.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        value, weight = value.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        result: Tensor = _Linear.apply(value, weight, bias, axis)
    return result


def gathered(local: Tensor, division: VocabDivision) -> Tensor:
    """Returns the full tensor of every rank's slice."""
    return _communicated(local, division.gather, division.slice)


def sliced(full: Tensor, division: VocabDivision) -> Tensor:
    """Returns this rank's slice of a tensor that is equal on all ranks."""
    return _communicated(full, lambda each: division.slice(each).clone(), division.gather)


def all_gathered(value: Tensor, axis: Axis) -> Tensor:
    """Returns every rank's value [ranks, ...]."""
    return _communicated(value, lambda each: all_gather(each, axis), lambda gradient: gradient[axis.rank])


def total(value: Tensor, axis: Axis) -> Tensor:
    """Returns the sum of every rank's value in rank order."""
    return all_gathered(value, axis).sum(0)


def upcast(value: Tensor) -> Tensor:
    """Returns a value in a type that sums are exact enough in; integers as they are."""
    return value.to(type_of_sums(value)) if value.is_floating_point() else value


class _Statistics(torch.autograd.Function):
    """Statistics [3, ...] of this rank's logits [..., slice], for targets [...] counted from its first row. Code of
    users may hide rows, even all of a rank."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, ids: Tensor) -> Tensor:
        tiles = whole_tile(local.reshape(-1, local.shape[-1]))
        result, totals = statistics_of(tiles, ids.reshape(-1), 1, partial(statistics, wanted=LOSS, masked=True))
        ctx.save_for_backward(local, ids, totals)
        return result.view(len(result), *ids.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        local, ids, totals = ctx.saved_tensors
        logits, of_statistics = local.reshape(-1, local.shape[-1]), gradients[0].reshape(len(LOSS), -1)
        result = torch.empty_like(logits)
        tiles, of = whole_tile(logits, result), partial(gradient, masked=True)
        hand_gradients(tiles, ids.reshape(-1), of_statistics, totals, of)
        return result.view(local.shape), None


def whole_statistics(local: Tensor, ids: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """Returns the statistics of a loss over the vocabulary [...] each, in a single exchange.

    Args:
        local: this rank's logits [..., slice].
        ids: the targets [...], counted from the first row of the slice.
        axis: the ranks with the other slices.
    """
    return join(all_gathered(_Statistics.apply(local, ids), axis))[0].unbind()


def log_sum_exp(local: Tensor, axis: Axis) -> Tensor:
    """Returns the logarithm of the sum of exponentials over the vocabulary [...], in fp32."""
    no_target = torch.full(local.shape[:-1], -1, device=local.device)
    return log_total(whole_statistics(local, no_target, axis))


def log_probabilities(local: Tensor, axis: Axis) -> Tensor:
    """Returns this rank's slice of the log-softmax, in fp32."""
    local = upcast(local)
    return local - summed_gradient(log_sum_exp(local, axis), axis).unsqueeze(-1)


def gather_ids(local: Tensor, ids: Tensor, division: VocabDivision) -> Tensor:
    """Returns the elements at token ids [..., n], as `torch.gather` along the vocabulary."""
    place, inside = division.places(ids)
    return total(local.gather(-1, place).masked_fill(~inside, 0), division.axis)


def extreme_ids(local: Tensor, division: VocabDivision, name: str) -> Tensor:
    """Returns the ids of the largest ("max") or smallest ("min") elements [..., 1], of equal ones the first."""
    values, places = getattr(torch, name)(local.detach(), -1, keepdim=True)
    values, places = all_gather(values, division.axis), all_gather(places + division.bounds()[0], division.axis)
    return places.gather(0, getattr(torch, f"arg{name}")(values, 0, keepdim=True)).squeeze(0)


def loss_of_ids(
    local: Tensor,
    target: Tensor,
    division: VocabDivision,
    *,
    of_logits: bool,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Returns `functional.cross_entropy` of logits [rows, slice] or [slice], or with `of_logits=False` `nll_loss` of
    log-probabilities, in fp32."""
    is_counted = target != ignore_index
    ids = target.masked_fill(~is_counted, 0)
    local_ids, even = division.local(ids), torch.ones(division.length, dtype=type_of_sums(local), device=local.device)
    of_classes = even if weight is None else weight
    weights = of_classes.gather(0, ids).masked_fill(~is_counted, 0)  # on a GPU, refuses ids outside of the vocabulary
    if not of_logits:
        picked = gather_ids(upcast(local), ids.unsqueeze(-1), division).squeeze(-1)
        loss = -picked.masked_fill(~is_counted, 0) * weights
    else:
        local = upcast(local) if label_smoothing else local  # the sum of two gradients is rounded once
        joined = whole_statistics(local, local_ids, division.axis)
        loss = losses(joined).masked_fill(~is_counted, 0) * weights
        if label_smoothing:
            of_slices = total((local * division.slice(of_classes)).sum(-1), division.axis)
            sums = (log_total(joined) * of_classes.sum() - of_slices).masked_fill(~is_counted, 0)
            loss = (1 - label_smoothing) * loss + label_smoothing * sums / division.length
    if reduction == "none":
        return loss
    return loss.sum() / weights.sum() if reduction == "mean" else loss.sum()
