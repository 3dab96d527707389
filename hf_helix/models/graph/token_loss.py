"""A loss of log-probabilities of tokens, by code of the caller's, within the unit of the head.

In:   the statistics of a micro-batch's logits, from every rank; the tensors of its batch.
Out:  the loss times its factor, followed by the figures of every token, as one vector; the vector taken apart.
Must hold: every rank of a batch computes the same loss, of all tokens. Figures have no gradient. The function of the
caller's runs in every window, also in one that is only measured, so it must not change anything outside.

    statistics of a rank -> gathered over tp, joined -> gathered over cp -> function(log-probabilities, batch) -> vector
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_helix.models.graph.context import TokenLoss
from hf_helix.models.stock.batch_inputs import SequenceCut, targets_of
from hf_helix.operators.vocabulary.log_probs import LogProbs, log_probs_of
from hf_helix.operators.vocabulary.loss import IGNORED
from hf_helix.operators.vocabulary.statistics import LOSS, join_numbers, losses

BATCH, SCALE = "token_batch", "token_scale"
"""Side inputs: the tensors of the batch, and the factor of the loss."""

NUM_FIGURES = len(LogProbs._fields)
"""How many numbers a token has after the loss."""


def token_side_inputs(batch: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Returns the side inputs of `token_loss` for a micro-batch; `scale` is the factor of a loss of the full batch."""
    return {BATCH: {name: value for name, value in batch.items() if isinstance(value, Tensor)}, SCALE: scale}


def joined_statistics(of_ranks: Tensor) -> Tensor:
    """Returns the statistics of all rows [1, numbers, sequence, rows] from the statistics of every rank's rows [ranks,
    numbers, sequence, rows]; only those of a loss have a gradient."""
    numbers = of_ranks.unbind(1)
    figures = [each.detach() for each in numbers[len(LOSS) :]]
    return torch.stack(join_numbers([*numbers[: len(LOSS)], *figures])[0]).unsqueeze(0)


def token_loss(
    of_parts: Tensor,
    token_batch: Mapping[str, Tensor],
    token_scale: float,
    *,
    loss: TokenLoss,
    length: int,
    cut: SequenceCut,
) -> Tensor:
    """Returns the loss of a micro-batch and the figures of its tokens [1 + NUM_FIGURES * rows * sequence].

    Args:
        of_parts: joined statistics of the tokens of every context-parallel rank [ranks, numbers, tokens, rows].
        token_batch, token_scale: side inputs.
        loss: the function; without gradients, as in evaluation, it is not called, and the loss is 0.
        length: of the vocabulary.
        cut: of the sequence.
    """
    targets = targets_of(token_batch)
    whole = cut.join(of_parts.transpose(1, 2).flatten(0, 1))[: targets.shape[1]]
    joined, ignored = whole.permute(1, 2, 0).unbind(), targets == IGNORED
    with torch.no_grad():
        known = log_probs_of(joined, length, loss.outputs)
    found = LogProbs._make(
        None if each is None else each.masked_fill(ignored, 0) for each in known._replace(log_probs=-losses(joined))
    )
    value = found.log_probs.new_zeros(())
    if torch.is_grad_enabled():
        value = token_scale * loss.function(_shifted(found), token_batch)
    # Losses of context-parallel ranks are added up; each has the loss of all tokens, and the gradient of its own.
    value = value - value.detach() * (1 - 1 / cut.cp_size)
    zeros = torch.zeros_like(found.log_probs)
    figures = torch.stack([zeros if each is None else each.to(zeros.dtype) for each in found]).detach()
    return torch.cat((value.reshape(1), figures.flatten() / cut.cp_size))


def token_figures(values: Tensor, rows: int, length: int) -> tuple[LogProbs, Tensor]:
    """Returns the figures of tokens [rows, length - 1], and what follows them.

    Args:
        values: from `token_loss`, perhaps with more numbers at the end.
        rows, length: the shape of the token ids.
    """
    count = 1 + NUM_FIGURES * rows * length
    found = LogProbs._make(values[1:count].view(NUM_FIGURES, rows, length))
    return _shifted(found._replace(is_top1=found.is_top1 > 0.5)), values[count:]  # type: ignore[operator]


def _shifted(found: LogProbs) -> LogProbs:
    """Returns the figures of all tokens but the last, which has no target."""
    return LogProbs._make(None if each is None else each[:, :-1] for each in found)
