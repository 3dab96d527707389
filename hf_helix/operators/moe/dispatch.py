"""Mixture of experts as operators: rows to the ranks of their experts, and back; what the router does is counted.

In:   rows of this rank sorted by expert, and without a capacity how many each expert gets [experts].
Out:  the rows of this rank's experts, sorted by expert; back, the rows as they were.
Must hold: without a capacity, no token is dropped and shapes follow from what the router chose, so the host reads once
a layer how many rows go where; with one, shapes follow from the number of tokens, and the host waits for nothing. Sums
run in a fixed order: of a token over its choices, of an expert's weights over ranks and tokens.

A row is a token once for each of its choices. The way of the rows, by the classes of the operators:

    Permute         [tokens, hidden] -> rows sorted by expert, and how many each expert gets (`permutation`)
    ExchangeCounts  how many rows will come from every rank, without a capacity
    AllToAll        to the ranks that hold the experts
    SortByExpert    sorted by rank, then expert -> by expert alone
    experts         grouped GEMMs, with input and weight gradients apart (`grouped_linear`)
    SortByExpert    back
    AllToAll        back
    Unpermute       weighted sum over a token's choices (`permutation`)

With a capacity, every expert gets as many rows from every rank: [experts, capacity, hidden], empty ones zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.base import Call, Communication, Computation, Tensors, Work
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.moe.row_counts import RowCounts
from hf_helix.planning.graph.operator import Part

COUNTED = "counted"
"""Side input: which tokens of the ranks that share a sequence over tp are no padding [tokens of all, batch]."""

SHARD_TOKENS = "shard_tokens"
"""Side input: the tokens of a rank, of the one that has most of those that share experts."""


def capacity_of(tokens: int, choices: int, experts: int, factor: float) -> int:
    """Returns the rows that an expert takes of one rank.

    Args:
        tokens: of the rank.
        choices: how many experts a token goes to.
        experts: how many there are, on all ranks.
        factor: the capacity, in parts of the rows of an expert where all get the same.
    """
    return math.ceil(factor * tokens * choices / experts)


def counted_tokens(side: Mapping[str, Any], tp: Axis) -> Tensor:
    """Returns which of this rank's tokens count [tokens], as 0 and 1: padding does not.

    Args:
        side: the side inputs of a micro-batch.
        tp: whose ranks have the parts of a sequence.
    """
    counted: Tensor = side[COUNTED]
    return counted.chunk(tp.size)[tp.rank].flatten()


class RouterMeter:
    """What a layer's router does, added up on this rank's device until it is read.

    Args:
        tp: whose ranks have the parts of a sequence.

    Attributes:
        sums: what `read` returns; None before the first micro-batch.
    """

    def __init__(self, num_experts: int, tp: Axis) -> None:
        self.tp = tp
        self.num_experts = num_experts
        self.sums: Tensor | None = None

    def mine(self, side: Mapping[str, Any]) -> Tensor:
        """Which of this rank's tokens count [tokens], as 0 and 1."""
        return counted_tokens(side, self.tp)

    def note(self, logits: Tensor | None, chosen: Tensor, counted: Tensor) -> None:
        """A micro-batch in training: what the router said [tokens, experts] and chose [tokens, k].

        Args:
            logits: what it said; None where that is not known, whose squares are no number then.
            chosen: what it chose.
            counted: which tokens count [tokens], as 0 and 1.
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
        """Rows for which an expert had no room."""
        sums = torch.zeros(self.num_experts + 3, device=dropped.device)
        sums[-1] = dropped
        self._add(sums)

    def read(self, device: torch.device) -> Tensor:
        """Since the last time: load of every expert, sum of squared log-sum-exps, tokens, rows dropped."""
        sums, self.sums = self.sums, None
        return torch.zeros(self.num_experts + 3, device=device) if sums is None else sums

    def _add(self, sums: Tensor) -> None:
        self.sums = sums if self.sums is None else self.sums + sums


class ExchangeCounts(Communication):
    """How many rows each expert gets of this rank, to how many each of this rank's experts gets of every rank.

    Value: [experts]. Output: [ranks, experts / ranks]. Nothing of it has a gradient. Both are copied to the host.
    """

    def __init__(self, axis: Axis, row_counts: RowCounts | None = None) -> None:
        self.axis = axis
        self.row_counts = row_counts or RowCounts()

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, Work]:
        (counts,) = inputs
        out = torch.empty_like(counts).view(self.axis.size, -1)
        reading = self.row_counts.expect(call, out)

        def exchange_and_copy() -> None:
            self.axis.transport.exchange(out, counts.view_as(out))
            if reading is not None:
                reading.copy(counts.view_as(out), out)

        return (out,), exchange_and_copy


class AllToAll(Communication):
    """Rows to the ranks of their experts, or (`back`) from there; gradients the other way.

    Values: rows, and without a capacity how many rows each expert gets of this rank [experts], and each of this rank's
    experts of every rank [ranks, experts / ranks].
    """

    def __init__(self, axis: Axis, back: bool = False, row_counts: RowCounts | None = None) -> None:
        self.axis = axis
        self.back = back
        self.row_counts = row_counts or RowCounts()

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, Work]:
        rows, *counts = inputs
        rows = rows.contiguous()
        transport = self.axis.transport
        if not counts:
            out = torch.empty_like(rows)
            return (out,), lambda: transport.exchange(out, rows)
        given, gets = self.row_counts.by_rank(call, rows, *(count.view(self.axis.size, -1) for count in counts))
        sent, arriving = (given, gets) if self.back is (part is Part.B) else (gets, given)
        out = rows.new_empty(sum(arriving), rows.shape[-1])
        return (out,), lambda: transport.exchange_rows(out, rows, arriving, sent)


class SortByExpert(Computation):
    """Rows sorted by rank, then expert, to rows sorted by expert, or (`back`) the other way.

    Values: rows, and without a capacity how many each of this rank's experts gets of every rank [ranks, experts].
    Outputs: rows; on the way there without a capacity also how many each expert gets [experts], without gradient.
    """

    def __init__(self, ranks: int, experts: int, back: bool = False) -> None:
        self.ranks = ranks
        self.experts = experts
        self.back = back

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        rows, *counts = inputs
        if not counts:
            return (self._swap(rows, self.back),)
        order = self._order(counts[0], len(rows))
        if call.training:
            call.saved = order
        if self.back:
            return (_scatter(rows, order),)
        return rows[order], counts[0].sum(0)

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        (rows,) = gradients
        order, call.saved = call.saved, None
        if order is None:
            return (self._swap(rows, not self.back),)
        return (rows[order] if self.back else _scatter(rows, order),)

    def _swap(self, rows: Tensor, back: bool) -> Tensor:
        first = (self.experts, self.ranks) if back else (self.ranks, self.experts)
        return rows.unflatten(0, (*first, -1)).transpose(0, 1).flatten(0, 2).contiguous()

    def _order(self, counts: Tensor, length: int) -> Tensor:
        """Returns for every row in the order of experts its place in the order of ranks."""
        experts = torch.arange(self.experts, device=counts.device).repeat(self.ranks)
        return experts.repeat_interleave(counts.flatten(), output_size=length).argsort(stable=True)


def _scatter(rows: Tensor, order: Tensor) -> Tensor:
    out = torch.empty_like(rows)
    out[order] = rows
    return out
