"""Log-probabilities of tokens, and statistics of their distributions, from hidden states and a head cut by vocabulary.

In:   hidden states [..., hidden], equal on all ranks, and this rank's rows of the head.
Out:  per token, equal on all ranks: what TRL's fused head (`add_fused_lm_head`) computes from the full head.
Must hold: logits exist for one tile of tokens and rows at a time, in the type of the product; in fp32 for fewer. The
ranks exchange seven numbers per token, and sum the gradient of the hidden states, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.linears.accumulate import add_product
from hf_helix.operators.vocab_slices import VocabDivision, all_gather, start_sum
from hf_helix.operators.vocab_tiles import CHUNK, tiles_of

ROWS = 32768
"""The most rows of the head in a tile; as TRL's."""


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
    """

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0
    outputs: tuple[str, ...] = ("log_probs",)
    rows: int = ROWS

    def logits(self, products: Tensor) -> tuple[Tensor, Tensor | float]:
        """Returns logits in fp32, and their derivative by the products."""
        logits, slope = products.float() * self.scale, self.scale / self.temperature
        if self.softcap is None:
            return logits.div_(self.temperature), slope
        bent = logits.div_(self.softcap).tanh_()
        return bent * (self.softcap / self.temperature), (1 - bent * bent).mul_(slope)


class LogProbs(NamedTuple):
    """Per token; None where not wanted. Log-probabilities and entropies have a gradient."""

    log_probs: Tensor
    entropy: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None


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
    flat, division = hidden.reshape(-1, hidden.shape[-1]), VocabDivision(axis, length)
    results = _LogProbs.apply(flat, weight, bias, targets.reshape(-1), division, options)
    shaped: Any = [None if each is None else each.view(targets.shape) for each in results]
    return LogProbs(*shaped)


def _pieces(products: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields tokens of a tile, few enough for computation in fp32."""
    size = max(1, CHUNK.get(products.device.type, CHUNK["cuda"]) // products.shape[-1])
    for start in range(0, len(products), size):
        piece = slice(start, min(start + size, len(products)))
        yield piece, products[piece]


class _Statistics:
    """Per token, over some rows: the largest logit z, sums of e = exp(z - largest), e * z, e * e and z, the target's
    logit (zero where it is in other rows), and the largest logit of the rows before the target's."""

    def __init__(self, values: Tensor) -> None:
        self.values = values  # [7, tokens]
        self.maximum, self.before, self.total, self.weighted, self.squared, self.plain, self.target = values

    @classmethod
    def none(cls, tokens: int, device: torch.device) -> _Statistics:
        values = torch.zeros(7, tokens, dtype=torch.float32, device=device)
        values[:2] = -torch.inf
        return cls(values)

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, wanted: tuple[str, ...]) -> _Statistics:
        """Returns the statistics of logits [tokens, rows]; targets count from the first row."""
        result, size = cls.none(len(logits), logits.device), logits.shape[-1]
        result.maximum.copy_(logits.amax(-1))
        place = targets.unsqueeze(-1)
        inside = (place >= 0) & (place < size)
        result.target.copy_(logits.gather(-1, place.clamp(0, size - 1)).masked_fill(~inside, 0).squeeze(-1))
        if "mean_logits" in wanted:
            result.plain.copy_(logits.sum(-1))
        if "is_top1" in wanted:
            is_before = torch.arange(size, device=logits.device) < place
            result.before.copy_(torch.where(is_before, logits, -torch.inf).amax(-1))
        exponentials = (logits - result.maximum.unsqueeze(-1)).exp_()
        result.total.copy_(exponentials.sum(-1))
        if "log_sum_sq_probs" in wanted:
            result.squared.copy_(torch.linalg.vecdot(exponentials, exponentials))
        if "entropy" in wanted:
            result.weighted.copy_(torch.linalg.vecdot(exponentials, logits))
        return result

    @classmethod
    def joined(cls, values: Tensor) -> _Statistics:
        """Returns the statistics of all rows, from those of parts [parts, 7, tokens], summed in their order."""
        largest = values[:, :2].amax(0)
        factor = (values[:, 0] - largest[0]).exp_()
        ones = torch.ones_like(factor)
        factors = torch.stack((factor, factor, factor * factor, ones, ones), 1)
        return cls(torch.cat((largest, (values[:, 2:] * factors).sum(0))))


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        division: VocabDivision,
        options: HeadOptions,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        kind, wanted = hidden.device.type, options.outputs
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        local, first = _Statistics.none(len(hidden), hidden.device).values, division.bounds()[0]
        with torch.autocast(kind, enabled=False):
            for tile in tiles_of(hidden, weight, bias, dtype, options.rows):
                for piece, products in _pieces(tile.products()):
                    known, ids = local[:, tile.tokens][:, piece], targets[tile.tokens][piece]
                    found = _Statistics.of(options.logits(products)[0], ids - first - tile.rows.start, wanted)
                    known.copy_(_Statistics.joined(torch.stack((known, found.values))).values)
        every = _Statistics.joined(all_gather(local, division.axis))
        log_total = every.maximum + every.total.log()
        entropy = log_total - every.weighted / every.total if "entropy" in wanted else None
        squares = every.squared.log() - 2 * every.total.log() if "log_sum_sq_probs" in wanted else None
        mean = every.plain / division.length if "mean_logits" in wanted else None
        is_top = (every.target >= every.maximum) & (every.target > every.before) if "is_top1" in wanted else None
        ctx.save_for_backward(hidden, weight, bias, targets, log_total, entropy)
        ctx.division, ctx.options, ctx.dtype = division, options, dtype
        ctx.mark_non_differentiable(*(each for each in (squares, mean, is_top) if each is not None))
        return every.target - log_total, entropy, squares, mean, is_top

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight, bias, targets, log_total, entropy = ctx.saved_tensors
        targets = targets - ctx.division.bounds()[0]
        made = [
            torch.zeros(each.shape, dtype=torch.float32, device=each.device) if needed else None
            for each, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        per_token, waits = [gradients[0], gradients[1], log_total, entropy], []
        with torch.autocast(hidden.device.type, enabled=False):
            for tile in tiles_of(hidden, weight, bias, ctx.dtype, ctx.options.rows):
                gradient = tile.products()
                for piece, products in _pieces(gradient):
                    given = [None if each is None else each[tile.tokens][piece].float() for each in per_token]
                    ids = targets[tile.tokens][piece] - tile.rows.start
                    products.copy_(_gradient(products, ids, given, ctx.options))
                of_hidden, of_weight, of_bias = made
                if of_hidden is not None:
                    add_product(of_hidden[tile.tokens], gradient, tile.weight)
                    if tile.rows.stop == len(weight):  # overlapped with what follows
                        waits.append(start_sum(of_hidden[tile.tokens], ctx.division.axis))
                if of_weight is not None:
                    add_product(of_weight[tile.rows], gradient.t(), tile.hidden)
                if of_bias is not None:
                    of_bias[tile.rows] += gradient.sum(0, dtype=torch.float32)
        for wait in waits:
            wait()
        pairs = zip(made, (hidden, weight, bias), strict=True)
        return *(None if each is None else each.to(like.dtype) for each, like in pairs), None, None, None


def _gradient(products: Tensor, targets: Tensor, given: list[Tensor | None], options: HeadOptions) -> Tensor:
    """Returns the gradient of products [tokens, rows]. Targets count from the first row; `given` has per token the
    gradients of its log-probability and of its entropy, the logarithm of the sum of exponentials, and the entropy."""
    of_log_prob, of_entropy, log_total, entropy = (None if each is None else each.unsqueeze(-1) for each in given)
    logits, slope = options.logits(products)
    assert log_total is not None
    log_probs = logits.sub_(log_total)
    chances = log_probs.exp()
    result = torch.zeros_like(chances)
    if of_log_prob is not None:
        place = targets.unsqueeze(-1)
        inside = (place >= 0) & (place < products.shape[-1])
        result.addcmul_(chances, of_log_prob, value=-1)
        result.scatter_add_(-1, place.clamp(0, products.shape[-1] - 1), of_log_prob * inside)
    if of_entropy is not None:
        assert entropy is not None
        result.sub_(chances.mul_(of_entropy).mul_(log_probs.add_(entropy)))
    return result.mul_(slope)
