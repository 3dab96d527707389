"""Embedding lookup and cross-entropy over a vocabulary cut by rows.

In:   token ids, or logits of this rank's slice of the vocabulary [sequence, batch, slice].
Out:  partial embeddings, whose sum over the ranks is the embedding; statistics from which every rank computes the loss.
Must hold: no rank ever holds the logits of the full vocabulary, and of its own slice only one copy, in their own type.
The loss is Transformers' ForCausalLMLoss, or its LabelSmoother, computed in fp32.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.base import Computation, OperatorContext, Tensors
from hf_helix.operators.vocab_tiles import CHUNK, HeadInTiles, Tile

IGNORED = -100


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
    local = ids - first_row
    inside = (local >= 0) & (local < rows)
    padding = None if padding_row is None or not 0 <= padding_row - first_row < rows else padding_row - first_row
    embeddings = embedding(local.clamp(0, rows - 1), weight, padding)
    return embeddings.masked_fill(~inside.unsqueeze(-1), 0)


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


class TokenStatistics(Computation):
    """Per token, from this rank's logits: their maximum, the sum of exp(logit - maximum), the target's logit.

    With label smoothing, the third is this rank's part of (1 - smoothing) * target's logit + smoothing * mean logit:
    the logarithm of the full sum is common to all terms, so the smoothed loss is the plain loss with this part in place
    of the target's logit.

    With figures, two more: the mean logit by their probabilities, and whether the target's is the largest.

    With a head in tiles (`hf_helix.operators.vocab_tiles`), logits of a large micro-batch exist for a tile at a time.
    In place of logits there are the hidden states [sequence, batch, hidden], and backward returns their gradient, and
    adds to those of the head.

    Side input `targets` [sequence, batch]; logits [sequence, batch, slice] to [1, 3 or 5, sequence, batch], gathered
    along the first dimension. At most a chunk of tokens is computed in fp32 at a time.

    Args:
        first_row: the first vocabulary row of this rank's slice.
        num_rows: of the full vocabulary.
        smoothing: the part of a target for an even share over the vocabulary.
        overwrites: whether the gradient may overwrite the logits, which have no other reader.
        figures: whether to compute statistics of entropy and accuracy.
        wrap: changes the functions that run, such as `compiled`.
        head: makes logits tile by tile; None for logits that are made before.
    """

    def __init__(
        self,
        first_row: int,
        num_rows: int,
        smoothing: float = 0.0,
        overwrites: bool = False,
        figures: bool = False,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
        head: HeadInTiles | None = None,
    ) -> None:
        self.head = head
        self.first_row = first_row
        self.smoothing = smoothing
        self.share = smoothing / num_rows
        self.figures = figures
        self.overwrites = overwrites
        self._statistics = wrap(chunk_statistics)
        self._gradient = wrap(chunk_gradient)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return () if self.head is None else self.head.parameters

    @property
    def cast_parameters(self) -> tuple[Tensor, ...]:
        return self.parameters

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        (logits,) = inputs
        if self.head is not None and ctx.saves_for_backward and self.head.is_used(ctx):
            return self._forward_in_tiles(ctx, self.head, logits)
        statistics = torch.empty(
            (5 if self.figures else 3, *logits.shape[:-1]), dtype=torch.float32, device=logits.device
        )
        for rows, targets, out in self._chunks(logits, ctx.side["targets"], statistics):
            out.copy_(self._statistics(rows, targets, self.smoothing, self.share, self.figures))
        if ctx.saves_for_backward:
            ctx.saved = logits, statistics[1]
        return (statistics.unsqueeze(0),)

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        if self.head is not None and self.head.is_used(ctx):
            return self._backward_in_tiles(ctx, self.head, gradients[0])
        (logits, totals), ctx.saved = ctx.saved, None
        # The maximum is a constant: the sums are rescaled by it, which leaves the loss as it is.
        _, of_total, of_target = gradients[0].squeeze(0)[:3]
        factors = torch.stack((of_total * totals, of_target))
        result = logits if self.overwrites else torch.empty_like(logits)
        written = result.view(-1, logits.shape[-1]).split(self._chunk_of(logits))
        chunks = self._chunks(logits, ctx.side["targets"], factors)
        for (rows, targets, factor), out in zip(chunks, written, strict=True):
            out.copy_(self._gradient(rows, targets, factor, self.smoothing, self.share))
        return (result,)

    def _forward_in_tiles(self, ctx: OperatorContext, head: HeadInTiles, hidden: Tensor) -> Tensors:
        """Returns the statistics; keeps the hidden states, and every tile's part of the sums."""
        tiles, targets = list(head.tiles(ctx, hidden)), ctx.side["targets"]
        shape = tiles[-1].number + 1, 5 if self.figures else 3, targets.numel()
        of_tiles = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        for tile in tiles:
            ids = self._ids_in(tile, targets)
            logits = head.logits(ctx, tile.products())
            found = self._statistics(logits, ids, self.smoothing, self.share, self.figures)
            of_tiles[tile.number, :, tile.tokens] = found
        joined, totals = join_statistics(of_tiles)
        ctx.saved = hidden, totals
        return (joined.view(1, -1, *targets.shape),)

    def _backward_in_tiles(self, ctx: OperatorContext, head: HeadInTiles, gradient: Tensor) -> Tensors:
        (hidden, totals), ctx.saved = ctx.saved, None
        _, of_total, of_target = gradient.squeeze(0)[:3].flatten(1)
        result = head.new_gradient(hidden)
        for tile in head.tiles(ctx, hidden):
            ids = self._ids_in(tile, ctx.side["targets"])
            factors = torch.stack((of_total * totals[tile.number], of_target))[:, tile.tokens]
            change = partial(self._gradient, targets=ids, factors=factors, smoothing=self.smoothing, share=self.share)
            head.add_gradients(tile, head.of_products(ctx, tile.products(), change), result)
        return (ctx.precision.cast_for_matmul(result.to(hidden.dtype)).view_as(hidden),)

    def _ids_in(self, tile: Tile, targets: Tensor) -> Tensor:
        """Returns the targets of a tile's tokens, counted from its first row."""
        return targets.reshape(-1)[tile.tokens] - (self.first_row + tile.rows.start)

    def _chunks(self, logits: Tensor, targets: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields logits [tokens, slice], targets [tokens] counted from this rank's first row, and values [...,
        tokens]."""
        size = self._chunk_of(logits)
        return zip(
            logits.reshape(-1, logits.shape[-1]).split(size),
            (targets - self.first_row).reshape(-1).split(size),
            values.flatten(1).split(size, -1),
            strict=True,
        )

    def _chunk_of(self, logits: Tensor) -> int:
        """Returns the number of tokens of a chunk; chunks are even, so that a compiler sees one shape, or two."""
        tokens = logits.numel() // logits.shape[-1]
        parts = -(-logits.numel() // CHUNK.get(logits.device.type, CHUNK["cuda"]))
        return max(1, -(-tokens // max(1, parts)))


# Compiled by torch 2.11 to 2.13, a function that writes to its arguments loses its writes once a second shape comes, so
# these two return their results.


def chunk_statistics(rows: Tensor, targets: Tensor, smoothing: float, share: float, figures: bool = False) -> Tensor:
    """Returns the statistics of logits [tokens, slice], see `TokenStatistics` [3 or 5, tokens]. Targets [tokens] count
    from the first row of the slice, and may lie outside the slice; `smoothing` is the part of a target for an even
    share, `share` each row's."""
    # softmax reads the logits in their own type, in one kernel; the largest probability is exp(0) by the sum.
    probabilities = torch.softmax(rows, -1, dtype=torch.float32)
    largest, place = probabilities.max(-1, keepdim=True)
    column, inside = _columns(rows, targets)
    target = rows.gather(-1, column).float().masked_fill(~inside, 0).squeeze(-1)
    if smoothing:
        target = (1 - smoothing) * target + share * rows.sum(-1, dtype=torch.float32)
    found = [rows.gather(-1, place).squeeze(-1).float(), largest.reciprocal().squeeze(-1), target]
    if figures:
        found += [probabilities.mul_(rows).sum(-1), ((place == column) & inside).squeeze(-1).float()]
    return torch.stack(found)


def chunk_gradient(rows: Tensor, targets: Tensor, factors: Tensor, smoothing: float, share: float) -> Tensor:
    """Returns the gradient of the logits of some tokens, in their type; `factors` are that of the probabilities, and
    the gradient of the target's logit [2, tokens]."""
    of_all, of_target = factors.unsqueeze(-1)
    probabilities = torch.softmax(rows, -1, dtype=torch.float32)
    column, inside = _columns(rows, targets)
    gradient = probabilities.mul_(of_all)
    if smoothing:
        gradient.add_(of_target, alpha=share)
    return gradient.scatter_add_(-1, column, (1 - smoothing) * of_target * inside).to(rows.dtype)


def _columns(rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each target's column in this slice, and whether it lies in the slice, [tokens, 1] each."""
    targets = targets.unsqueeze(-1)
    inside = (targets >= 0) & (targets < rows.shape[-1])
    return targets.clamp(0, rows.shape[-1] - 1), inside


def cross_entropy(statistics: Tensor, targets: Tensor, loss_scale: Tensor) -> Tensor:
    """Returns the loss of a micro-batch, from the statistics of every rank [ranks, 3 or 5, sequence, batch], shifted
    targets [sequence, batch] (-100 is ignored), and the factor of the sum over tokens. With figures the result is [3]:
    the loss, the summed entropy of its tokens, and the number of right predictions."""
    (maximum, total, target, *figures), _ = join_statistics(statistics)
    whole = maximum + total.log()
    loss = torch.where(targets != IGNORED, whole - target, 0.0).sum() * loss_scale
    if not figures:
        return loss
    entropy, is_right = (whole - figures[0]).detach(), figures[1].detach()
    return torch.stack((loss, *(torch.where(targets != IGNORED, each, 0.0).sum() for each in (entropy, is_right))))


def join_statistics(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the statistics of all rows [3 or 5, ...] from those of parts of the rows [parts, 3 or 5, ...], and every
    part's sum of exponentials by the maximum of all [parts, ...]."""
    maxima, totals, targets, *figures = parts.unbind(1)
    maxima = maxima.detach()
    maximum = maxima.amax(0)
    totals = totals * (maxima - maximum).exp()
    joined = [maximum, totals.sum(0), targets.sum(0)]
    if figures:
        means, are_largest = figures
        joined.append((totals / joined[1] * means).sum(0))
        joined.append(are_largest.gather(0, maxima.argmax(0, keepdim=True)).squeeze(0))
    return torch.stack(joined), totals
