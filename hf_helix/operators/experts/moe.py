"""Mixture of experts as operators: rows to the ranks of their experts, and back; counts of the router.

In:   tokens of this rank [n, batch, hidden], or flattened [n * batch, hidden]; the experts chosen for each token [n *
      batch, k], and their weights.
Out:  the rows of this rank's experts, sorted by expert; back, the weighted sum over a token's choices.
Must hold: without a capacity, no token is dropped and shapes follow from the router's choices, so the host reads the
counts of rows once a layer; with a capacity, shapes follow from the number of tokens, and the host waits for nothing.
Sums run in a fixed order: of a token over its choices, in the higher precision of the weights and the output; of an
expert's weights over ranks and tokens.

A row is a token for one of its choices. The operators on the way of the rows:

    Permute         [tokens, hidden] -> rows sorted by expert, and how many each expert gets
    ExchangeCounts  how many rows will come from every rank, without a capacity
    AllToAll        to the ranks that hold the experts
    SortByExpert    sorted by rank, then expert -> only by expert
    experts         grouped GEMMs, with input and weight gradients apart (`grouped_linear`)
    SortByExpert    back
    AllToAll        back
    Unpermute       weighted sum over a token's choices

With a capacity, `PermuteToCapacity` and `UnpermuteFromCapacity` replace `Permute` and `Unpermute`: every expert gets as
many rows from every rank, [experts, capacity, hidden], empty rows zero.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.base import Communication, Computation, OperatorContext, Tensors, TransferFn
from hf_helix.operators.communication.transport import Axis
from hf_helix.planning.graph.operator import Part

# -- counts of rows on the host --------------------------------------------------------------------------------------


class HostCopy:
    """Numbers on their way from the device to the host."""

    def __init__(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._buffer = torch.empty(shape, dtype=torch.long, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None
        self._numbers: Any = None

    def queue(self, *parts: Tensor) -> None:
        """Queues the copy of all parts on the current stream."""
        for buffer, part in zip(self._buffer, parts, strict=True):
            buffer.copy_(part, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    @property
    def numbers(self) -> Any:
        """The numbers as nested lists. The first time, the host waits for the copy."""
        if self._numbers is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._numbers = self._buffer.tolist()
        return self._numbers


class EvenRowCounts:
    """Numbers of rows if nothing is computed, on the meta device: an equal number for every expert, the remainder
    for the first experts; `imbalance` is the factor of rows for this rank's experts."""

    imbalance = 1.0

    def __init__(self, num_rows: int, ranks: int, experts: int) -> None:
        each, over = divmod(num_rows, ranks * experts)
        counts = [each + (place < over) for place in range(ranks * experts)]
        given = [counts[rank * experts : (rank + 1) * experts] for rank in range(ranks)]
        self.numbers = [given, [[math.ceil(count * self.imbalance) for count in given[0]]] * ranks]


@contextmanager
def assuming(imbalance: float) -> Iterator[None]:
    """Returns a context in which experts on the meta device get `imbalance` times an even share of rows, see
    `EvenRowCounts`."""
    before, EvenRowCounts.imbalance = EvenRowCounts.imbalance, imbalance
    try:
        yield
    finally:
        EvenRowCounts.imbalance = before


class RowCounts:
    """The counts of a layer, by micro-batch: rows given to every rank and expert, and got [ranks, experts of each]."""

    def expect(self, ctx: OperatorContext, counts: Tensor, num_ways: int = 2) -> HostCopy | None:
        """Returns the destination for the counts of a micro-batch; None if the host knows them.

        Args:
            ctx: of the micro-batch.
            counts: of one direction [ranks, experts of each].
            num_ways: 2 for given and got rows; 1 if these are the same.
        """
        if self in ctx.shared or counts.is_meta:
            return None
        ctx.shared[self] = copy = HostCopy((num_ways, *counts.shape), counts.device)
        return copy

    def by_rank(self, ctx: OperatorContext, rows: Tensor, given: Tensor, got: Tensor) -> tuple[list[int], list[int]]:
        """Returns how many rows go to every rank, and how many come from it.

        Args:
            ctx: of the micro-batch.
            rows: the rows to send, at the first call.
            given, got: [ranks, experts of each]; read if no copy was expected.
        """
        given_rows, got_rows = self._numbers(ctx, len(rows), given, got)
        return [sum(row) for row in given_rows], [sum(row) for row in got_rows]

    def by_expert(self, ctx: OperatorContext, rows: Tensor, sizes: Tensor) -> list[int]:
        """Returns how many rows each expert of this rank has.

        Args:
            ctx: of the micro-batch.
            rows: of all experts.
            sizes: the result on the device [experts]; read if no copy was expected.
        """
        return [sum(column) for column in zip(*self._numbers(ctx, len(rows), sizes.unsqueeze(0))[-1], strict=True)]

    def _numbers(self, ctx: OperatorContext, num_rows: int, *ways: Tensor) -> Any:
        if ways[0].is_meta:
            return ctx.shared.setdefault(self, EvenRowCounts(num_rows, *ways[0].shape)).numbers
        copy = self.expect(ctx, ways[0], len(ways))
        if copy is not None:
            copy.queue(*ways)
        return ctx.shared[self].numbers


# -- operators -------------------------------------------------------------------------------------------------------

COUNTED = "counted"
"""Side input: True for tokens without padding, of the ranks that share a sequence over tp [tokens of all, batch]."""

SHARD_TOKENS = "shard_tokens"
"""Side input: the tokens of a rank, the most over the ranks that share experts."""


def capacity_of(tokens: int, choices: int, experts: int, factor: float) -> int:
    """Returns the rows that an expert takes of one rank; the factor is the capacity, in parts of an even share of
    rows."""
    return math.ceil(factor * tokens * choices / experts)


def counted_tokens(side: Mapping[str, Any], tp: Axis) -> Tensor:
    """Returns 1 for this rank's tokens that count, 0 for padding [tokens]; `tp` has the ranks with the parts of a
    sequence."""
    counted: Tensor = side[COUNTED]
    return counted.chunk(tp.size)[tp.rank].flatten()


class RouterMeter:
    """The counts of a layer's router, added up on this rank's device until `read`.

    Args:
        num_experts: of the layer.
        tp: the ranks with the parts of a sequence.

    Attributes:
        sums: the result of `read`; None before the first micro-batch.
    """

    def __init__(self, num_experts: int, tp: Axis) -> None:
        self.tp = tp
        self.num_experts = num_experts
        self.sums: Tensor | None = None

    def note(self, logits: Tensor | None, chosen: Tensor, counted: Tensor) -> None:
        """Adds a micro-batch in training.

        Args:
            logits: of the router [tokens, experts]; None if unknown, then the squares are NaN.
            chosen: the chosen experts [tokens, k].
            counted: 1 for tokens that count, else 0 [tokens].
        """
        with torch.no_grad():
            load = torch.zeros(self.num_experts, device=chosen.device)
            load.index_add_(0, chosen.flatten(), counted.float().repeat_interleave(chosen.shape[1]))
            if logits is None:
                squares = load.new_full((), torch.nan)
            else:
                squares = logits.float().logsumexp(-1).square().mul(counted).sum()
            self._add(torch.cat((load, torch.stack((squares, counted.sum().float(), squares.new_zeros(()))))))

    def note_dropped(self, dropped: Tensor) -> None:
        """Adds a number of dropped rows."""
        sums = torch.zeros(self.num_experts + 3, device=dropped.device)
        sums[-1] = dropped
        self._add(sums)

    def read(self, device: torch.device) -> Tensor:
        """Returns since the last read: load of every expert, sum of squared log-sum-exps, tokens, rows dropped."""
        sums, self.sums = self.sums, None
        return torch.zeros(self.num_experts + 3, device=device) if sums is None else sums

    def _add(self, sums: Tensor) -> None:
        self.sums = sums if self.sums is None else self.sums + sums


class ExchangeCounts(Communication):
    """From the rows of this rank for each expert to the rows of every rank for each of this rank's experts.

    Value: [experts]. Output: [ranks, experts / ranks]. Neither has a gradient. Both are copied to the host.
    """

    def __init__(self, axis: Axis, row_counts: RowCounts | None = None) -> None:
        self.axis = axis
        self.row_counts = row_counts or RowCounts()

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        (counts,) = inputs
        out = torch.empty_like(counts).view(self.axis.size, -1)
        copy = self.row_counts.expect(ctx, out)

        def exchange_and_copy() -> None:
            self.axis.transport.exchange(out, counts.view_as(out))
            if copy is not None:
                copy.queue(counts.view_as(out), out)

        return (out,), exchange_and_copy


class AllToAll(Communication):
    """Rows to the ranks of their experts, or (`back`) from there; gradients in the other direction.

    Values: rows, and without a capacity the number of rows of this rank for each expert [experts], and of every rank
    for each of this rank's experts [ranks, experts / ranks].
    """

    def __init__(self, axis: Axis, back: bool = False, row_counts: RowCounts | None = None) -> None:
        self.axis = axis
        self.back = back
        self.row_counts = row_counts or RowCounts()

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        rows, *counts = inputs
        rows = rows.contiguous()
        transport = self.axis.transport
        if not counts:
            out = torch.empty_like(rows)
            return (out,), lambda: transport.exchange(out, rows)
        given, gets = self.row_counts.by_rank(ctx, rows, *(count.view(self.axis.size, -1) for count in counts))
        sent, arriving = (given, gets) if self.back is (part is Part.B) else (gets, given)
        out = rows.new_empty(sum(arriving), rows.shape[-1])
        return (out,), lambda: transport.exchange_rows(out, rows, arriving, sent)


class SortByExpert(Computation):
    """Rows sorted by rank, then expert, to rows sorted by expert, or (`back`) the other way.

    Values: rows, and without a capacity the number of rows of every rank for each of this rank's experts [ranks,
    experts]. Outputs: rows; on the way there without a capacity also the number of rows of each expert [experts],
    without gradient.
    """

    def __init__(self, ranks: int, experts: int, back: bool = False) -> None:
        self.ranks = ranks
        self.experts = experts
        self.back = back

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        rows, *counts = inputs
        if not counts:
            return (self._swap(rows, self.back),)
        order = self._order(counts[0], len(rows))
        if ctx.saves_for_backward:
            ctx.saved = order
        if self.back:
            return (_scatter(rows, order),)
        return rows[order], counts[0].sum(0)

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        (rows,) = gradients
        order, ctx.saved = ctx.saved, None
        if order is None:
            return (self._swap(rows, not self.back),)
        return (rows[order] if self.back else _scatter(rows, order),)

    def _swap(self, rows: Tensor, back: bool) -> Tensor:
        first = (self.experts, self.ranks) if back else (self.ranks, self.experts)
        return rows.unflatten(0, (*first, -1)).transpose(0, 1).flatten(0, 2).contiguous()

    def _order(self, counts: Tensor, length: int) -> Tensor:
        """Returns for every row in the order of experts its index in the order of ranks."""
        experts = torch.arange(self.experts, device=counts.device).repeat(self.ranks)
        return experts.repeat_interleave(counts.flatten(), output_size=length).argsort(stable=True)


def _scatter(rows: Tensor, order: Tensor) -> Tensor:
    out = torch.empty_like(rows)
    out[order] = rows
    return out


# -- permutation ---------------------------------------------------------------------------------------------------


class Permute(Computation):
    """Values: tokens [..., hidden], chosen experts [n * batch, k].

    Outputs: rows sorted by expert [n * batch * k, hidden]; without gradients, the index of each row among the tokens'
    choices, and the number of rows of each expert.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        tokens, chosen = inputs
        choices = chosen.shape[1]
        places = chosen.flatten().argsort(stable=True)
        counts = _is_of(chosen.flatten(), self.num_experts).sum(0)
        if ctx.saves_for_backward:
            ctx.saved = places, choices, tokens.shape, tokens.dtype
        return ctx.precision.cast_for_matmul(tokens).flatten(0, -2)[places // choices], places, counts

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        (rows,) = gradients
        places, choices, shape, dtype = ctx.saved
        ctx.saved = None
        by_token = torch.empty_like(rows)
        by_token[places] = rows
        return (by_token.unflatten(0, (-1, choices)).sum(1, dtype=dtype).view(shape),)


class Unpermute(Computation):
    """Values: rows as `Permute` left them, weights [tokens, k], the places. Output: [n, batch, hidden] of type `dtype`,
    in which sums are taken at the least."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        rows, weights, places = inputs
        by_token = torch.empty_like(rows)
        by_token[places] = rows
        by_token = by_token.unflatten(0, weights.shape)
        if ctx.saves_for_backward:
            ctx.saved = by_token, weights, places
        return (_weighted_sum(ctx, by_token, weights, self.dtype),)

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        gradient = gradients[0].flatten(0, -2).unsqueeze(1)
        by_token, weights, places = ctx.saved
        ctx.saved = None
        rows = (gradient * weights.unsqueeze(-1)).to(by_token.dtype).flatten(0, 1)[places]
        return rows, (by_token * gradient).sum(-1).to(weights.dtype)


class PermuteToCapacity(Computation):
    """`Permute` with a capacity. Values: tokens [..., hidden], chosen experts [n * batch, k].

    An expert takes first choices before second choices, and of equal choices the tokens in order; padding comes last.
    Outputs: rows [experts * capacity, hidden]; without gradients, the row of each choice [tokens, k], -1 for a dropped
    choice.

    Args:
        num_experts: of the layer.
        factor: see `capacity_of`.
        tp: the ranks with the parts of a sequence.
        meter: counts dropped rows; None for no count.
    """

    def __init__(self, num_experts: int, factor: float, tp: Axis, meter: RouterMeter | None = None) -> None:
        self.num_experts = num_experts
        self.factor = factor
        self.tp = tp
        self.meter = meter

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        tokens, chosen = inputs
        choices = chosen.shape[1]
        capacity = capacity_of(ctx.side[SHARD_TOKENS], choices, self.num_experts, self.factor)
        counted = counted_tokens(ctx.side, self.tp).long().repeat(choices)
        expert = chosen.t().flatten()
        wanted = _is_of(expert, self.num_experts).long()
        first, last = wanted * counted.unsqueeze(1), wanted * (1 - counted).unsqueeze(1)
        before = torch.where(counted.unsqueeze(1) > 0, first.cumsum(0) - first, first.sum(0) + last.cumsum(0) - last)
        place = before.gather(1, expert.unsqueeze(1)).squeeze(1)
        taken = place < capacity
        row = torch.where(taken, expert * capacity + place, -1).view(choices, -1).t().contiguous()
        flat = ctx.precision.cast_for_matmul(tokens).flatten(0, -2)
        # The last row takes all dropped tokens.
        rows = flat.new_zeros(self.num_experts * capacity + 1, flat.shape[-1])
        for choice in row.unbind(1):
            rows[choice] = flat
        rows[-1] = 0
        if ctx.saves_for_backward:
            ctx.saved = row, tokens.shape, tokens.dtype
            if self.meter is not None:
                self.meter.note_dropped((counted * ~taken).sum())
        return rows[:-1], row

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        row, shape, dtype = ctx.saved
        ctx.saved = None
        padded = functional.pad(gradients[0], (0, 0, 0, 1))
        return (padded[row].sum(1, dtype=dtype).view(shape),)


class UnpermuteFromCapacity(Computation):
    """`Unpermute` with a capacity. Values: rows, weights, the row of each choice. Output: [n, batch, hidden]."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        rows, weights, row = inputs
        by_token = functional.pad(rows, (0, 0, 0, 1))[row]
        if ctx.saves_for_backward:
            ctx.saved = by_token, weights, row, len(rows)
        return (_weighted_sum(ctx, by_token, weights, self.dtype),)

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        gradient = gradients[0].flatten(0, -2)
        by_token, weights, row, length = ctx.saved
        ctx.saved = None
        rows = by_token.new_zeros(length + 1, gradient.shape[-1])
        for choice, weight in zip(row.unbind(1), weights.unbind(1), strict=True):
            rows[choice] = (gradient * weight.unsqueeze(-1)).to(rows.dtype)
        return rows[:-1], (by_token * gradient.unsqueeze(1)).sum(-1).to(weights.dtype)


def _is_of(expert: Tensor, num_experts: int) -> Tensor:
    """Whether a row is of an expert [rows, experts]. No wait for the device, unlike `bincount`."""
    return expert.unsqueeze(1) == torch.arange(num_experts, device=expert.device)


def _weighted_sum(ctx: OperatorContext, by_token: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sums [n, batch, hidden] of rows [tokens, k, hidden] times their weights [tokens, k]."""
    weights = weights.to(torch.promote_types(weights.dtype, dtype))
    sums = (by_token * weights.unsqueeze(-1)).sum(1).to(dtype)
    return sums.unflatten(0, (-1, ctx.side[COUNTED].shape[1]))
