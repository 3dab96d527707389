"""A loss of log-probabilities of tokens, by code of the caller's, within the unit of the head.

In:   the statistics of a micro-batch's logits, from every rank; the tensors of its batch.
Out:  the loss times its factor, followed by the figures of every token, as one vector; the vector taken apart.
Must hold: every rank of a batch computes the same loss, of all tokens. Figures have no gradient. The function of the
caller's runs in every window, also in one that is only measured, so it must not change anything outside.

    statistics of a rank -> gathered over tp, joined; gathered over cp -> function(log-probabilities, batch) -> vector
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
    numbers, sequence, rows]."""
    return torch.stack(_joined(of_ranks)).unsqueeze(0)


def _joined(of_ranks: Tensor) -> list[Tensor]:
    """Returns each joined number [sequence, rows]; only the numbers of a loss have a gradient."""
    numbers = of_ranks.unbind(1)
    return join_numbers([*numbers[: len(LOSS)], *(each.detach() for each in numbers[len(LOSS) :])])[0]


def token_loss(
    of_ranks: Tensor,
    token_batch: Mapping[str, Tensor],
    token_scale: float,
    *,
    loss: TokenLoss,
    length: int,
    cut: SequenceCut,
) -> Tensor:
    """Returns the loss of a micro-batch and the figures of its tokens [1 + NUM_FIGURES * rows * sequence].

    Args:
        of_ranks: the statistics of every rank's rows [ranks, numbers, sequence, rows]; on a sequence that is cut,
            joined statistics of the tokens of every context-parallel rank.
        token_batch, token_scale: side inputs.
        loss: the function; without gradients, as in evaluation, it is not called, and the loss is 0.
        length: of the vocabulary.
        cut: of the sequence.
    """
    ignored = targets_of(token_batch) == IGNORED
    is_joined = cut.cp_size > 1
    numbers = cut.join(of_ranks.transpose(1, 2).flatten(0, 1)).unbind(1) if is_joined else _joined(of_ranks)
    numbers = [each[: ignored.shape[1]].t() for each in numbers]  # without padding
    with torch.no_grad():
        known = log_probs_of(numbers, length, loss.outputs)
    known = known._replace(log_probs=-losses(numbers))
    found = LogProbs(*[None if each is None else each.masked_fill(ignored, 0) for each in known])  # type: ignore[arg-type]
    value = found.log_probs.new_zeros(())
    if torch.is_grad_enabled():
        value = token_scale * loss.function(_shifted(found), token_batch)
    if is_joined:
        # Losses of context-parallel ranks are added up; each has the loss of all tokens, and the gradient of its own.
        value = value - value.detach() * (1 - 1 / cut.cp_size)
    zeros = torch.zeros_like(found.log_probs)
    figures = torch.stack([zeros if each is None else each.detach().to(zeros.dtype) for each in found])
    return torch.cat((value.reshape(1), figures.flatten() / cut.cp_size))


def token_figures(values: Tensor, rows: int, length: int) -> tuple[LogProbs, Tensor]:
    """Returns the figures of tokens [rows, length - 1], and the values after them.

    Args:
        values: from `token_loss`, perhaps with more numbers at the end.
        rows, length: the shape of the token ids.
    """
    count = 1 + NUM_FIGURES * rows * length
    *others, is_top1 = values[1:count].view(NUM_FIGURES, rows, length)
    return _shifted(LogProbs(*[*others, is_top1 > 0.5])), values[count:]


def _shifted(found: LogProbs) -> LogProbs:
    """Returns the figures of all tokens but the last, which has no target."""
    return LogProbs(*[None if each is None else each[:, :-1] for each in found])  # type: ignore[arg-type]
