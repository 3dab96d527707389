"""Tokens to rows for their experts, and back: a row is a token once for each of its choices.

In:   tokens of this rank [n, batch, hidden], or in one row after the other [n * batch, hidden]; the experts chosen for
      each [n * batch, k] and their weights.
Out:  rows in the order of the experts; back, the weighted sum over a token's choices.
Must hold: sums run over a token's choices in their order, in the higher precision of the weights and the output.

`Permute` and `Unpermute` drop no token. With a capacity, `PermuteToCapacity` and `UnpermuteFromCapacity` stand in their
place: every expert gets as many rows from every rank [experts, capacity, hidden], empty ones zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.base import Call, Computation, Tensors
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.moe.dispatch import COUNTED, SHARD_TOKENS, RouterMeter, capacity_of, counted_tokens


class Permute(Computation):
    """Values: tokens [..., hidden], chosen experts [n * batch, k].

    Outputs: rows sorted by expert [n * batch * k, hidden]; without gradients, the place of each row among the tokens'
    choices, and how many rows each expert gets.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        tokens, chosen = inputs
        choices = chosen.shape[1]
        places = chosen.flatten().argsort(stable=True)
        counts = _is_of(chosen.flatten(), self.num_experts).sum(0)
        if call.training:
            call.saved = places, choices, tokens.shape, tokens.dtype
        return call.precision.cast_for_matmul(tokens).flatten(0, -2)[places // choices], places, counts

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        (rows,) = gradients
        places, choices, shape, dtype = call.saved
        call.saved = None
        by_token = torch.empty_like(rows)
        by_token[places] = rows
        return (by_token.unflatten(0, (-1, choices)).sum(1, dtype=dtype).view(shape),)


class Unpermute(Computation):
    """Values: rows as `Permute` left them, weights [tokens, k], the places. Output: [n, batch, hidden].

    Args:
        dtype: of the output, in which sums are taken at the least.
        flat: whether the output is [n * batch, hidden].
    """

    def __init__(self, dtype: torch.dtype = torch.float32, flat: bool = False) -> None:
        self.dtype = dtype
        self.flat = flat

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        rows, weights, places = inputs
        by_token = torch.empty_like(rows)
        by_token[places] = rows
        by_token = by_token.unflatten(0, weights.shape)
        if call.training:
            call.saved = by_token, weights, places
        return (_weighted_sum(call, by_token, weights, self.dtype, self.flat),)

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        gradient = gradients[0].flatten(0, -2).unsqueeze(1)
        by_token, weights, places = call.saved
        call.saved = None
        rows = (gradient * weights.unsqueeze(-1)).to(by_token.dtype).flatten(0, 1)[places]
        return rows, (by_token * gradient).sum(-1).to(weights.dtype)


class PermuteToCapacity(Computation):
    """`Permute` with a capacity. Values: tokens [..., hidden], chosen experts [n * batch, k].

    An expert takes first choices before second ones, and of these the tokens in order; padding comes last.
    Outputs: rows [experts * capacity, hidden]; without gradients, the row of each choice [tokens, k], -1 where it was
    dropped.

    Args:
        num_experts: of the layer.
        factor: see `capacity_of`.
        tp: whose ranks have the parts of a sequence.
        meter: counts what is dropped; None where nobody asks.
    """

    def __init__(self, num_experts: int, factor: float, tp: Axis, meter: RouterMeter | None = None) -> None:
        self.num_experts = num_experts
        self.factor = factor
        self.tp = tp
        self.meter = meter

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        tokens, chosen = inputs
        choices = chosen.shape[1]
        capacity = capacity_of(call.side[SHARD_TOKENS], choices, self.num_experts, self.factor)
        counted = counted_tokens(call.side, self.tp).long().repeat(choices)
        expert = chosen.t().flatten()
        wanted = _is_of(expert, self.num_experts).long()
        first, last = wanted * counted.unsqueeze(1), wanted * (1 - counted).unsqueeze(1)
        before = torch.where(counted.unsqueeze(1) > 0, first.cumsum(0) - first, first.sum(0) + last.cumsum(0) - last)
        place = before.gather(1, expert.unsqueeze(1)).squeeze(1)
        taken = place < capacity
        row = torch.where(taken, expert * capacity + place, -1).view(choices, -1).t().contiguous()
        flat = call.precision.cast_for_matmul(tokens).flatten(0, -2)
        # One row more, which everything dropped is written to.
        rows = flat.new_zeros(self.num_experts * capacity + 1, flat.shape[-1])
        for choice in row.unbind(1):
            rows[choice] = flat
        rows[-1] = 0
        if call.training:
            call.saved = row, tokens.shape, tokens.dtype
            if self.meter is not None:
                self.meter.note_dropped((counted * ~taken).sum())
        return rows[:-1], row

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        row, shape, dtype = call.saved
        call.saved = None
        padded = functional.pad(gradients[0], (0, 0, 0, 1))
        return (padded[row].sum(1, dtype=dtype).view(shape),)


class UnpermuteFromCapacity(Computation):
    """`Unpermute` with a capacity. Values: rows, weights, the row of each choice. Output: [n, batch, hidden]."""

    def __init__(self, dtype: torch.dtype = torch.float32, flat: bool = False) -> None:
        self.dtype = dtype
        self.flat = flat

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        rows, weights, row = inputs
        by_token = functional.pad(rows, (0, 0, 0, 1))[row]
        if call.training:
            call.saved = by_token, weights, row, len(rows)
        return (_weighted_sum(call, by_token, weights, self.dtype, self.flat),)

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        gradient = gradients[0].flatten(0, -2)
        by_token, weights, row, length = call.saved
        call.saved = None
        rows = by_token.new_zeros(length + 1, gradient.shape[-1])
        for choice, weight in zip(row.unbind(1), weights.unbind(1), strict=True):
            rows[choice] = (gradient * weight.unsqueeze(-1)).to(rows.dtype)
        return rows[:-1], (by_token * gradient.unsqueeze(1)).sum(-1).to(weights.dtype)


def _is_of(expert: Tensor, num_experts: int) -> Tensor:
    """Whether a row is of an expert [rows, experts]. Nothing of it waits for the device, as `bincount` would."""
    return expert.unsqueeze(1) == torch.arange(num_experts, device=expert.device)


def _weighted_sum(call: Call, by_token: Tensor, weights: Tensor, dtype: torch.dtype, flat: bool) -> Tensor:
    """Returns the sums [n, batch, hidden] of rows [tokens, k, hidden] times their weights.

    Args:
        call: has the number of sequences of the batch.
        by_token: the rows.
        weights: [tokens, k].
        dtype: of the sums, which are taken in the higher precision of the weights and of this type.
        flat: whether the sums are [n * batch, hidden].
    """
    weights = weights.to(torch.promote_types(weights.dtype, dtype))
    sums = (by_token * weights.unsqueeze(-1)).sum(1).to(dtype)
    return sums if flat else sums.unflatten(0, (-1, call.side[COUNTED].shape[1]))
