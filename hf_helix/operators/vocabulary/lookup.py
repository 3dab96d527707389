"""Lookup in a table of embeddings that is cut by rows.

In:   token ids [sequence, batch], over the full vocabulary, and this rank's rows of the table.
Out:  partial embeddings, whose sum over the ranks is the embedding; noise on embeddings.
Must hold: bits equal `functional.embedding`'s. Backward makes no gradient of the size of a table that has one, if
few rows are looked up.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.vocabulary.statistics import places


def lookup(ids: Tensor, weight: Tensor, first_row: int, num_rows: int, padding_row: int | None) -> Tensor:
    """Returns embeddings of the ids in this rank's rows, zeros for the others.

    Args:
        ids: [sequence, batch], over the full vocabulary.
        weight: [rows, hidden], rows `first_row` and on of a table of `num_rows`.
        padding_row: the id whose row gets no gradient, as `nn.Embedding.padding_idx`; None for no such row.
    """
    rows = weight.shape[0]
    if rows == num_rows:
        return embedding(ids, weight, padding_row)
    place, inside = places(ids - first_row, rows)
    padding = None if padding_row is None or not 0 <= padding_row - first_row < rows else padding_row - first_row
    return embedding(place, weight, padding).masked_fill(~inside.unsqueeze(-1), 0)


def embedding(ids: Tensor, weight: Tensor, padding_row: int | None) -> Tensor:
    """Returns `functional.embedding`. Where the table has a gradient and most rows are not looked up, backward adds the
    rows of this batch to the gradient, and makes no gradient of the size of the table. The bits are the same.
    """
    is_trained = weight.grad_fn is None and weight.requires_grad and torch.is_grad_enabled()
    if is_trained and 4 * ids.numel() <= weight.shape[0]:
        found: Tensor = _Embedding.apply(ids, weight, padding_row)
        return found
    return functional.embedding(ids, weight, padding_idx=padding_row)


class _Embedding(torch.autograd.Function):
    """A lookup in a parameter."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_row: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        ctx.padding_row = -1 if padding_row is None else padding_row
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,), weight, (gradient,) = ctx.saved_tensors, ctx.weight, gradients
        add_rows = torch.ops.aten.embedding_dense_backward.default
        if weight.grad is None:
            return None, add_rows(gradient, ids, weight.shape[0], ctx.padding_row, False), None
        # Each different id gets a place in order of ids, without a question to the device about their number: further
        # places hold zeros, for the largest id.
        ids = ids.flatten()
        ordered, order = ids.sort()
        places = torch.empty_like(ids)
        places[order] = (ordered != ordered.roll(1)).index_fill(0, ids.new_zeros(1), False).cumsum(0)
        rows = ordered[-1:].repeat(ids.numel()).scatter(0, places, ids)
        gradient = gradient.reshape(-1, gradient.shape[-1])
        if ctx.padding_row >= 0:
            gradient = gradient.masked_fill((ids == ctx.padding_row).unsqueeze(-1), 0)
        weight.grad.index_add_(0, rows, add_rows(gradient, places, ids.numel(), -1, False))
        return None, None, None


def noisy(embeddings: Tensor, alpha: float, length: int) -> Tensor:
    """Returns embeddings [tokens of this rank, batch, hidden] with the noise of NEFTune (arXiv 2310.05914): uniform,
    within alpha / sqrt(length * hidden)."""
    bound = alpha / math.sqrt(length * embeddings.shape[-1])
    return embeddings + torch.empty_like(embeddings).uniform_(-bound, bound)
