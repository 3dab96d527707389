"""Log-probabilities of tokens, and statistics of their distributions, from hidden states and a head cut by vocabulary.

In:   hidden states [..., hidden], equal on all ranks, and this rank's rows of the head.
Out:  per token, equal on all ranks: what TRL's fused head (`add_fused_lm_head`) computes from the full head.
Must hold: logits exist for one tile of tokens and rows at a time, in the type of the product; in fp32 for fewer.
Backward multiplies once more, unless all logits are as few as those of a usual tile. The ranks exchange at most seven
numbers per token, and sum the gradient of the hidden states, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.vocabulary.head import ROWS, TOKENS, Sums, tiles_of_head
from hf_helix.operators.vocabulary.slices import VocabDivision, all_gather, start_sum
from hf_helix.operators.vocabulary.statistics import (
    LOSS,
    PLAIN,
    RIGHT,
    SQUARED,
    TOTAL,
    WEIGHTED,
    Tile,
    entropies,
    gradient,
    hand_gradients,
    join_numbers,
    losses,
    statistics,
    statistics_of,
)

_NUMBERS = {"entropy": WEIGHTED, "log_sum_sq_probs": SQUARED, "mean_logits": PLAIN, "is_top1": RIGHT}


def numbers_of(outputs: Collection[str]) -> tuple[int, ...]:
    """Returns the numbers of the statistics that log-probabilities and the figures of some names need."""
    return *LOSS, *(number for name, number in _NUMBERS.items() if name in outputs)


@dataclass(frozen=True)
class HeadOptions:
    """How logits are made of the products of hidden states and head: `cap * tanh(product * scale / cap) / temperature`.

    Attributes:
        temperature: the divisor.
        softcap: the bound of logits before the division; None for none.
        scale: the factor of the products.
        outputs: the figures wanted besides log-probabilities, of "entropy", "log_sum_sq_probs", "mean_logits" and
            "is_top1".
        rows: the most rows of the head in a tile.
        kept: the most logits that are kept for backward.
    """

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0
    outputs: tuple[str, ...] = ("log_probs",)
    rows: int = ROWS
    kept: int = TOKENS * ROWS

    @property
    def wanted(self) -> tuple[int, ...]:
        """The numbers of the statistics that the outputs need."""
        return numbers_of(self.outputs)

    @property
    def _is_plain(self) -> bool:
        """Whether logits are the products."""
        return self.softcap is None and self.scale == self.temperature == 1.0

    def statistics(self, products: Tensor, ids: Tensor) -> Tensor:
        """Returns the statistics of the logits [3 to 7, tokens] of products [tokens, rows]."""
        return statistics(self._with_slope(products)[0], ids, self.wanted)

    def of_products(self, products: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
        """Returns the gradient of products [tokens, rows], in their type."""
        logits, slope = self._with_slope(products)
        result = gradient(logits, ids, factors)
        return (result if self._is_plain else result.mul_(slope)).to(products.dtype)

    def _with_slope(self, products: Tensor) -> tuple[Tensor, Tensor | float]:
        """Returns logits in fp32, and their derivative by the products."""
        if self._is_plain:
            return products.float(), 1.0
        logits, slope = products.float() * self.scale, self.scale / self.temperature
        if self.softcap is None:
            return logits.div_(self.temperature), slope
        bent = logits.div_(self.softcap).tanh_()
        return bent * (self.softcap / self.temperature), (1 - bent * bent).mul_(slope)


class LogProbs(NamedTuple):
    """Per token; None if not wanted. Log-probabilities and entropies have a gradient."""

    log_probs: Tensor
    entropy: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None


def log_probs_of(joined: Sequence[Tensor], length: int, wanted: Collection[str]) -> LogProbs:
    """Returns log-probabilities and figures of some names from joined statistics.

    Args:
        joined: the statistics, each by itself [...], up to the last one needed, see `numbers_of`.
        length: of the vocabulary.
        wanted: the names of the figures.
    """
    known = [each.detach() for each in joined]
    return LogProbs(
        -losses(joined),
        entropies(joined) if "entropy" in wanted else None,
        known[SQUARED].log() - 2 * known[TOTAL].log() if "log_sum_sq_probs" in wanted else None,
        known[PLAIN] / length if "mean_logits" in wanted else None,
        known[RIGHT].bool() if "is_top1" in wanted else None,
    )


def vocab_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    axis: Axis,
    length: int,
    options: HeadOptions = HeadOptions(),
) -> LogProbs:
    """Returns log-probabilities of targets, and figures of the distributions that they are from.

    Args:
        hidden: [..., hidden], equal on all ranks; its gradient is summed over the ranks.
        weight: this rank's rows of the head [rows, hidden].
        bias: of these rows [rows].
        targets: token ids [...]; an id outside of the vocabulary gives a log-probability without meaning.
        axis: the ranks with the other rows.
        length: of the vocabulary.
        options: how logits are made, and the figures wanted.
    """
    ids = targets.reshape(-1) - VocabDivision(axis, length).bounds()[0]
    of_ranks = _Statistics.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, ids, axis, options)
    numbers = [number for part in of_ranks for number in part.unbind(1)]
    with torch.autocast(hidden.device.type, enabled=False):
        joined = [each.view(targets.shape) for each in join_numbers(numbers)[0]]
        return log_probs_of(joined, length, options.outputs)


class _Statistics(torch.autograd.Function):
    """Statistics of every rank's logits, from hidden states [tokens, hidden]: those of the loss [ranks, 3, tokens], and
    the others [ranks, 0 to 4, tokens], whose gradient takes time only if somebody reads them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        axis: Axis,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor]:
        kind, is_kept = hidden.device.type, len(hidden) * len(weight) <= options.kept
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.axis, ctx.options, ctx.rows = axis, options, len(weight) if is_kept else options.rows
        with torch.autocast(kind, enabled=False):
            tiles: Iterable[Tile] = tiles_of_head(hidden, weight, bias, ctx.dtype, ctx.rows)
            kept = [*tiles] if is_kept else []
            joined, totals = statistics_of(kept or tiles, ids, -(-len(weight) // ctx.rows), options.statistics)
        ctx.save_for_backward(hidden, weight, bias, ids, totals, *(tile.products for tile in kept))
        ctx.set_materialize_grads(False)
        of_ranks = all_gather(joined, axis)
        return of_ranks[:, : len(LOSS)].clone(), of_ranks[:, len(LOSS) :].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight, bias, ids, totals, *kept = ctx.saved_tensors
        operands = hidden, weight, bias
        options, waits = ctx.options, list[Callable[[], object]]()
        made = [
            torch.zeros(each.shape, dtype=torch.float32, device=each.device) if needed else None
            for each, needed in zip(operands, ctx.needs_input_grad, strict=False)
        ]

        def tiles() -> Iterator[Tile]:
            for tile in tiles_of_head(*operands, ctx.dtype, ctx.rows, Sums(*made), kept):
                yield tile
                if made[0] is not None and tile.first + ctx.rows >= len(weight):  # overlapped with the next
                    waits.append(start_sum(made[0][tile.tokens], ctx.axis))

        of_loss, of_others = (None if each is None else each[ctx.axis.rank] for each in gradients)
        of_statistics = totals.new_zeros(len(LOSS), len(hidden)) if of_loss is None else of_loss
        if of_others is not None and WEIGHTED in options.wanted:
            of_statistics = torch.cat((of_statistics, of_others[:1]))
        with torch.autocast(hidden.device.type, enabled=False):
            hand_gradients(tiles(), ids, of_statistics, totals, options.of_products)
        for wait in waits:
            wait()
        pairs = zip(made, operands, strict=True)
        return *(None if each is None else each.to(like.dtype) for each, like in pairs), None, None, None
