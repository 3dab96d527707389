"""Statistics of parts join to those of the whole vocabulary, and have its gradient, however the rows are divided."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.vocabulary.slices import VocabDivision, log_sum_exp, loss_of_ids
from hf_helix.operators.vocabulary.statistics import (
    LOSS,
    PLAIN,
    RIGHT,
    SQUARED,
    TOTAL,
    WEIGHTED,
    entropies,
    factors_of,
    gradient,
    join,
    losses,
    statistics,
)

TOKENS, ROWS = 9, 40
CUTS = [(0, 40), (0, 1, 23, 24, 40), tuple(range(41))]


def logits_and_ids() -> tuple[Tensor, Tensor]:
    """Of some tokens, two logits are the largest; of others, the target is the first or the second of these."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(TOKENS, ROWS, generator=generator)
    ids = torch.randint(ROWS, (TOKENS,), generator=generator)
    logits[:4, 5] = logits[:4, 30] = 20.0
    ids[:4] = torch.tensor([5, 30, 5, 7])
    ids[4] = logits[4].argmax()
    return logits, ids


def parts_of(cuts: tuple[int, ...]) -> list[slice]:
    return [slice(first, end) for first, end in pairwise(cuts)]


@pytest.mark.parametrize("cuts", CUTS)
def test_joined_parts_are_the_whole(cuts: tuple[int, ...]) -> None:
    logits, ids = logits_and_ids()
    parts = [statistics(logits[:, part], ids - part.start) for part in parts_of(cuts)]
    joined, probabilities = join(torch.stack(parts))[0], logits.softmax(-1)
    expected = {
        "losses": (losses(joined), functional.cross_entropy(logits, ids, reduction="none")),
        "entropies": (entropies(joined), torch.distributions.Categorical(logits=logits).entropy()),
        "squares": (joined[SQUARED] / joined[TOTAL] ** 2, probabilities.square().sum(-1)),
        "sums": (joined[PLAIN], logits.sum(-1)),
        "right": (joined[RIGHT], (logits.argmax(-1) == ids).float()),
    }
    assert joined[RIGHT].tolist()[:5] == [1, 0, 1, 0, 1]
    for name, (mine, whole) in expected.items():
        torch.testing.assert_close(mine, whole, rtol=2e-6, atol=1e-5, msg=name)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cuts", CUTS)
def test_the_gradient_is_that_of_the_whole(cuts: tuple[int, ...], smoothing: float) -> None:
    logits, ids = logits_and_ids()
    share, factors = smoothing / ROWS, torch.linspace(-1, 2, TOKENS)
    of = {"smoothing": smoothing, "share": share}
    parts = torch.stack(
        [statistics(logits[:, part], ids - part.start, (*LOSS, WEIGHTED), **of) for part in parts_of(cuts)]
    )
    joined, totals = join(parts)
    leaf = joined.clone().requires_grad_()
    (losses(leaf) * factors + entropies(leaf) * factors.flip(0)).sum().backward()
    mine = [
        gradient(logits[:, part], ids - part.start, factors_of(leaf.grad, total), **of)
        for part, total in zip(parts_of(cuts), totals, strict=True)
    ]
    whole = logits.clone().requires_grad_()
    loss = functional.cross_entropy(whole, ids, reduction="none", label_smoothing=smoothing)
    (loss * factors + torch.distributions.Categorical(logits=whole).entropy() * factors.flip(0)).sum().backward()
    torch.testing.assert_close(torch.cat(mine, -1), whole.grad, rtol=1e-5, atol=2e-6)


def test_statistics_that_nobody_wants_are_zero() -> None:
    logits, ids = logits_and_ids()
    some, every = statistics(logits, ids, (*LOSS, SQUARED)), statistics(logits, ids)
    assert len(statistics(logits, ids, LOSS)) == 3
    assert len(some) == 1 + SQUARED
    assert torch.equal(some[[*LOSS, SQUARED]], every[[*LOSS, SQUARED]])
    assert not some[[WEIGHTED, RIGHT]].any()


def test_a_part_may_be_hidden() -> None:
    """Code of users masks tokens of the vocabulary with -inf, perhaps all of a rank."""
    logits, ids = logits_and_ids()
    logits[:, :23], ids = -torch.inf, ids.clamp(min=23)
    parts = [statistics(logits[:, part], ids - part.start, LOSS, masked=True) for part in parts_of(CUTS[1])]
    joined, totals = join(torch.stack(parts).requires_grad_())
    torch.testing.assert_close(losses(joined), functional.cross_entropy(logits, ids, reduction="none"))
    (of,) = torch.autograd.grad(losses(joined).sum(), joined)
    hidden = gradient(logits[:, :1], ids, factors_of(of, totals[0].detach()), masked=True)
    assert torch.equal(hidden, torch.zeros_like(hidden))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(ROWS,), (0, ROWS), (TOKENS, ROWS)])
def test_shapes_and_types_of_a_loss(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """In fp32 at least; of doubles, in doubles."""
    logits, ids = logits_and_ids()
    logits, ids = (logits[0], ids[0]) if len(shape) == 1 else (logits[: shape[0]], ids[: shape[0]])
    results = []
    for number in range(2):
        leaf = logits.to(dtype).requires_grad_()
        if number == 0:
            loss = loss_of_ids(leaf, ids, VocabDivision(Axis.single(), ROWS), of_logits=True, reduction="sum")
            total = log_sum_exp(leaf, Axis.single()).sum()
        else:
            exact = leaf if dtype is torch.float64 else leaf.float()
            loss, total = functional.cross_entropy(exact, ids, reduction="sum"), exact.logsumexp(-1).sum()
        (loss + total).backward()
        results.append((loss.detach(), total.detach(), leaf.grad))
    rounding = 1e-12 if dtype is torch.float64 else 1e-6
    for mine, stock in zip(*results, strict=True):
        assert mine.dtype is stock.dtype
        error = 1e-2 if mine.dtype is torch.bfloat16 else rounding  # two gradients of half precision are added
        torch.testing.assert_close(mine, stock, rtol=error, atol=error)


@pytest.mark.parametrize("ids", [[1, ROWS], [-3, 0]])
def test_ids_outside_of_the_vocabulary(ids: list[int]) -> None:
    with pytest.raises(IndexError, match=f"give ids from 0 to {ROWS - 1}"):
        loss_of_ids(torch.zeros(2, ROWS), torch.tensor(ids), VocabDivision(Axis.single(), ROWS), of_logits=True)
