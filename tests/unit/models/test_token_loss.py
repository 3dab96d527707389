"""A loss of log-probabilities in the head's unit: figures, loss and gradient are those of whole logits."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_helix.models.graph.context import LossTweaks, TokenLoss
from hf_helix.models.graph.token_loss import joined_statistics, token_figures, token_loss
from hf_helix.models.stock.batch_inputs import SequenceCut
from hf_helix.operators.base import OperatorContext
from hf_helix.operators.vocabulary.log_probs import LogProbs
from hf_helix.operators.vocabulary.loss import IGNORED, TokenStatistics
from hf_helix.planning.parameters import cut_bounds

WORDS, ROWS, LENGTH, SCALE = 11, 2, 7, 0.25
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def batch_of(seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [rows, sequence, words] and a batch with some labels ignored."""
    torch.manual_seed(seed)
    ids = torch.randint(WORDS, (ROWS, LENGTH))
    labels = ids.masked_fill(torch.rand(ROWS, LENGTH) < 0.3, IGNORED)
    return 3 * torch.randn(ROWS, LENGTH, WORDS), {"input_ids": ids, "labels": labels, "weights": torch.rand(ROWS)}


def weighted(found: LogProbs, batch: Mapping[str, Tensor]) -> Tensor:
    return -(found.log_probs.sum(1) * batch["weights"]).sum().square()


def whole(logits: Tensor, batch: Mapping[str, Tensor]) -> LogProbs:
    """The figures by plain functions of torch."""
    targets = batch["labels"][:, 1:]
    logits, counted, ids = logits[:, :-1], targets != IGNORED, targets.clamp(min=0)
    logs = logits.log_softmax(-1)
    of_tokens = (
        logs.gather(-1, ids[..., None]).squeeze(-1),
        -(logs.exp() * logs).sum(-1),
        logs.exp().square().sum(-1).log(),
        logits.mean(-1),
        logits.argmax(-1) == ids,
    )
    return LogProbs._make(each.masked_fill(~counted, 0) for each in of_tokens)


class Cut:
    """Context-parallel ranks, each with the vocabulary in `tp_size` slices, in one process."""

    def __init__(
        self, logits: Tensor, batch: Any, outputs: tuple[str, ...], tp_size: int = 1, cp_size: int = 1
    ) -> None:
        loss, self.shape = TokenLoss(weighted, outputs), (tp_size, cp_size)
        wanted, cuts = (
            LossTweaks(token_loss=loss).wanted,
            [SequenceCut(tp_size, cp_size, rank) for rank in range(cp_size)],
        )
        targets = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        bounds = [cut_bounds(WORDS, tp_size, rank) for rank in range(tp_size)]
        self.operators = [TokenStatistics(first, WORDS, wanted=wanted) for first, _ in bounds]
        self.contexts = [
            [OperatorContext({"targets": cut.take(targets, 1, IGNORED).t()}, 0, True) for _ in bounds] for cut in cuts
        ]
        self.of_ranks = []
        for cut, contexts in zip(cuts, self.contexts, strict=True):
            mine = cut.take(logits, 1).transpose(0, 1)
            pieces = zip(self.operators, contexts, bounds, strict=True)
            parts = [
                operator.forward(ctx, mine[..., first:last].contiguous())[0] for operator, ctx, (first, last) in pieces
            ]
            self.of_ranks.append(torch.cat(parts).requires_grad_(torch.is_grad_enabled()))
        joined = torch.cat([joined_statistics(each) for each in self.of_ranks]) if cp_size > 1 else self.of_ranks[0]
        self.values = [token_loss(joined, batch, SCALE, loss=loss, length=WORDS, cut=cut) for cut in cuts]

    def gradient(self) -> Tensor:
        """The gradient of the loss by the logits [rows, sequence, words]: each rank has that of its own tokens."""
        result = []
        for value, of_rank, contexts in zip(self.values, self.of_ranks, self.contexts, strict=True):
            (of_statistics,) = torch.autograd.grad(value[0], of_rank, retain_graph=True)
            pieces = zip(self.operators, contexts, of_statistics.split(1), strict=True)
            result.append(torch.cat([operator.backward(ctx, piece)[0] for operator, ctx, piece in pieces], -1))
        return SequenceCut(*self.shape).join(torch.cat(result)).transpose(0, 1)[:, :LENGTH]


@pytest.mark.parametrize(("tp_size", "cp_size"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_figures_and_loss_are_those_of_whole_logits(tp_size: int, cp_size: int) -> None:
    logits, batch = batch_of(0)
    cut = Cut(logits, batch, OUTPUTS, tp_size, cp_size)
    summed = torch.stack(cut.values).sum(0)
    found, rest = token_figures(summed.detach(), ROWS, LENGTH)
    assert rest.shape == (0,)
    for name, mine, stock in zip(LogProbs._fields, found, whole(logits, batch), strict=True):
        assert mine is not None
        assert mine.dtype == stock.dtype
        torch.testing.assert_close(mine, stock, rtol=1e-5, atol=1e-5, msg=name)
    loss = SCALE * weighted(whole(logits.requires_grad_(), batch), batch)
    torch.testing.assert_close(summed[0], loss)
    torch.testing.assert_close(cut.gradient(), torch.autograd.grad(loss, logits)[0], rtol=1e-4, atol=1e-5)


def test_the_loss_is_not_called_without_gradients() -> None:
    logits, batch = batch_of(1)
    del batch["weights"]
    with torch.no_grad():
        (values,) = Cut(logits, batch, ()).values
    assert values[0] == 0
    found, _ = token_figures(values, ROWS, LENGTH)
    torch.testing.assert_close(found.log_probs, whole(logits, batch).log_probs, rtol=1e-5, atol=1e-5)


def test_numbers_after_the_figures_are_handed_on() -> None:
    logits, batch = batch_of(2)
    (values,) = Cut(logits, batch, OUTPUTS).values
    assert torch.equal(token_figures(torch.cat((values, torch.ones(2))), ROWS, LENGTH)[1], torch.ones(2))
