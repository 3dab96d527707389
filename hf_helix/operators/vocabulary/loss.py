"""The loss of a head cut by vocabulary: statistics on every rank, one exchange, the loss on all.

In:   logits of this rank's slice of the vocabulary [sequence, batch, slice], or hidden states and the head's rows.
Out:  statistics, from which every rank computes the loss.
Must hold: no rank ever holds the logits of the full vocabulary, and of its own slice only one copy, in their own type.
The loss is Transformers' ForCausalLMLoss, or its LabelSmoother, computed in fp32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.base import Computation, OperatorContext, Tensors
from hf_helix.operators.vocabulary.head import HeadInTiles
from hf_helix.operators.vocabulary.statistics import (
    LOSS,
    RIGHT,
    entropies,
    gradient,
    hand_gradients,
    join,
    losses,
    statistics,
    statistics_of,
    whole_tile,
)

IGNORED = -100


class TokenStatistics(Computation):
    """The statistics of a loss, from this rank's logits; see `hf_helix.operators.vocabulary.statistics`.

    Side input `targets` [sequence, batch]; logits [sequence, batch, slice] to [1, 3 to 7, sequence, batch], gathered
    along the first dimension. With a head in tiles (`hf_helix.operators.vocabulary.head`), a large micro-batch has
    hidden states [sequence, batch, hidden] in place of logits; backward returns their gradient, and adds to those of
    the head.

    Args:
        first_row: the first vocabulary row of this rank's slice.
        num_rows: of the full vocabulary.
        smoothing: the part of a target for an even share over the vocabulary.
        overwrites: whether the gradient may overwrite the logits, which have no other reader.
        wanted: the numbers of the statistics, of which the first three are always there.
        wrap: changes the functions that run, such as `compiled`.
        head: makes logits tile by tile; None for logits that are made before.
    """

    def __init__(
        self,
        first_row: int,
        num_rows: int,
        smoothing: float = 0.0,
        overwrites: bool = False,
        wanted: Sequence[int] = LOSS,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
        head: HeadInTiles | None = None,
    ) -> None:
        self.head = head
        self.first_row = first_row
        self.overwrites = overwrites
        smoothed = {"smoothing": smoothing, "share": smoothing / num_rows}
        self._statistics = partial(wrap(statistics), wanted=wanted, **smoothed)
        self._gradient = partial(wrap(gradient), **smoothed)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return () if self.head is None else self.head.parameters

    @property
    def cast_parameters(self) -> tuple[Tensor, ...]:
        return self.parameters

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        (value,), ids = inputs, self._ids(ctx)
        if (head := self._head(ctx)) is not None and (head.keeps_few or ctx.saves_for_backward):
            of = lambda products, ids: self._statistics(head.logits(ctx, products), ids)  # noqa: E731
            result, totals = statistics_of(head.tiles(ctx, value), ids, head.parts(), of)
        else:
            logits = value.reshape(-1, value.shape[-1])
            result, totals = statistics_of(whole_tile(logits), ids, 1, self._statistics)
        if ctx.saves_for_backward:
            ctx.saved = value, totals
        return (result.view(1, -1, *ctx.side["targets"].shape),)

    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        (value, totals), ctx.saved = ctx.saved, None
        known = self._ids(ctx), gradients[0].squeeze(0).flatten(1)[: len(LOSS)], totals  # figures have no gradient
        if (head := self._head(ctx)) is None:
            result, logits = value if self.overwrites else torch.empty_like(value), value.reshape(-1, value.shape[-1])
            hand_gradients(whole_tile(logits, result.view(logits.shape)), *known, self._gradient)
            return (result,)

        def of(products: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
            return head.of_products(ctx, products, partial(self._gradient, ids=ids, factors=factors))

        sums = head.sums(value)
        hand_gradients(head.tiles(ctx, value, sums), *known, of)
        assert sums.hidden is not None
        return (ctx.precision.cast_for_matmul(sums.hidden.to(value.dtype)).view_as(value),)

    def _head(self, ctx: OperatorContext) -> HeadInTiles | None:
        return self.head if self.head is not None and self.head.is_used(ctx) else None

    def _ids(self, ctx: OperatorContext) -> Tensor:
        """Returns the targets [tokens], counted from this rank's first row."""
        ids: Tensor = ctx.side["targets"]
        return (ids - self.first_row).reshape(-1)


def cross_entropy(statistics: Tensor, targets: Tensor, loss_scale: Tensor) -> Tensor:
    """Returns the loss of a micro-batch, from the statistics of every rank [ranks, 3 or 5, sequence, batch], shifted
    targets [sequence, batch] (-100 is ignored), and the factor of the sum over tokens. With figures the result is [3]:
    the loss, the summed entropy of its tokens, and the number of right predictions."""
    joined = join(statistics)[0].unbind()
    loss = torch.where(targets != IGNORED, losses(joined), 0.0).sum() * loss_scale
    if len(joined) == len(LOSS):
        return loss
    figures = entropies(joined).detach(), joined[RIGHT].detach()
    return torch.stack((loss, *(torch.where(targets != IGNORED, each, 0.0).sum() for each in figures)))
