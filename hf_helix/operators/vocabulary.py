"""The two ends of the model over a vocabulary cut by rows: embedding lookup and cross-entropy.

In:   token ids, or logits of this rank's slice of the vocabulary [sequence, batch, slice].
Out:  partial embeddings that sum to the whole over the ranks; statistics from which every rank computes the loss.
Must hold: no rank ever holds the logits of the whole vocabulary; the loss is Transformers' ForCausalLMLoss,
or its LabelSmoother.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100


def lookup(ids: Tensor, weight: Tensor, first_row: int, num_rows: int, padding_row: int | None) -> Tensor:
    """Embeddings of the ids that lie in this rank's rows, zeros for the others.

    Args:
        ids: [sequence, batch], over the whole vocabulary.
        weight: [rows, hidden], rows `first_row` and on of a table of `num_rows`.
        padding_row: the id whose row gets no gradient, as `nn.Embedding.padding_idx`; None for no such row.
    """
    rows = weight.shape[0]
    if rows == num_rows:
        return functional.embedding(ids, weight, padding_idx=padding_row)
    local = ids - first_row
    inside = (local >= 0) & (local < rows)
    padding = None if padding_row is None or not 0 <= padding_row - first_row < rows else padding_row - first_row
    found = functional.embedding(local.clamp(0, rows - 1), weight, padding_idx=padding)
    return found.masked_fill(~inside.unsqueeze(-1), 0)


def noisy(embeddings: Tensor, alpha: float, length: int) -> Tensor:
    """NEFTune (arXiv 2310.05914): uniform noise on every element, within alpha / sqrt(length * hidden).

    Args:
        embeddings: [tokens of this rank, batch, hidden].
        length: of the sequence as the collator made it, before it was cut or filled up.
    """
    bound = alpha / math.sqrt(length * embeddings.shape[-1])
    return embeddings + torch.empty_like(embeddings).uniform_(-bound, bound)


class _TokenStatistics(torch.autograd.Function):
    """Per token, from this rank's logits: their maximum, the sum of exp(logit - maximum), the target's logit.

    With label smoothing, the third is this rank's part of (1 - smoothing) * target's logit + smoothing * mean logit:
    the logarithm of the whole sum is common to all terms, so the smoothed loss is the plain one with this in its place.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first_row: int, smoothing: float, num_rows: int) -> Tensor:
        logits = logits.float()
        maximum = logits.amax(-1)
        total = (logits - maximum.unsqueeze(-1)).exp_().sum(-1)
        local = targets - first_row
        inside = (local >= 0) & (local < logits.shape[-1])
        column = local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        target = logits.gather(-1, column).squeeze(-1).masked_fill(~inside, 0)
        if smoothing:
            target = (1 - smoothing) * target + smoothing / num_rows * logits.sum(-1)
        ctx.smoothing, ctx.num_rows = smoothing, num_rows
        ctx.save_for_backward(logits, maximum, column, inside)
        return torch.stack((maximum, total, target))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        # The maximum is a constant: the sums are rescaled by it, which leaves the loss as it is.
        logits, maximum, column, inside = ctx.saved_tensors
        _, of_total, of_target = gradient
        result = (logits - maximum.unsqueeze(-1)).exp_().mul_(of_total.unsqueeze(-1))
        if ctx.smoothing:
            result.add_(of_target.unsqueeze(-1), alpha=ctx.smoothing / ctx.num_rows)
            of_target = (1 - ctx.smoothing) * of_target
        result.scatter_add_(-1, column, (of_target * inside).unsqueeze(-1))
        return result, None, None, None, None


def token_statistics(
    logits: Tensor, targets: Tensor, first_row: int, smoothing: float = 0.0, num_rows: int = 0
) -> Tensor:
    """[1, 3, sequence, batch]: see `_TokenStatistics`. The leading dimension is the one that ranks gather along.

    Args:
        smoothing: the part of a target that is spread evenly over the vocabulary of `num_rows`.
    """
    return _TokenStatistics.apply(logits, targets, first_row, smoothing, num_rows).unsqueeze(0)


def cross_entropy(statistics: Tensor, targets: Tensor, loss_scale: Tensor) -> Tensor:
    """The loss of a micro-batch, from the statistics of every rank [ranks, 3, sequence, batch].

    Args:
        targets: [sequence, batch], already shifted; -100 is ignored.
        loss_scale: what the sum over tokens is multiplied with, such as 1 / number of targets in the window.
    """
    maxima, totals, logits = statistics.unbind(1)
    maximum = maxima.detach().amax(0)
    total = (totals * (maxima.detach() - maximum).exp()).sum(0)
    per_token = maximum + total.log() - logits.sum(0)
    return torch.where(targets != IGNORED, per_token, 0.0).sum() * loss_scale
