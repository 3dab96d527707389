"""A loss in tiles of tokens and words is that of the stock functions, and no tensor is as large as the logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.dispatched import Largest
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from hf_helix.operators.autograd_operator import AutogradOperator
from hf_helix.operators.base import OperatorContext, explicit_gradients
from hf_helix.operators.linears.linear import Linear
from hf_helix.operators.vocabulary import head as vocab_tiles
from hf_helix.operators.vocabulary.head import Deferred, HeadInTiles
from hf_helix.operators.vocabulary.loss import IGNORED, TokenStatistics, cross_entropy
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.parameters import cut_bounds

SEQUENCE, BATCH, HIDDEN, WORDS = 11, 3, 8, 301
LOGITS = SEQUENCE * BATCH * WORDS
Change = Callable[[Tensor], Tensor]


def softcap(logits: Tensor) -> Tensor:
    """As Gemma's."""
    return torch.tanh(logits / 3.0) * 3.0


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, nn.Linear]:
    """Hidden states [sequence, batch, hidden], targets, and a head with a bias."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(WORDS, (SEQUENCE, BATCH), generator=generator)
    targets[torch.rand(SEQUENCE, BATCH, generator=generator) < 0.25] = IGNORED
    head = nn.Linear(HIDDEN, WORDS)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return hidden, targets, head.to(dtype)


def stock(
    dtype: torch.dtype, change: Change | None, smoothing: float, computed_in: torch.dtype | None = None
) -> list[Tensor]:
    """The loss, and the gradients of hidden states, weight and bias."""
    hidden, targets, head = inputs(dtype)
    hidden, head = hidden.to(computed_in or dtype), head.to(computed_in or dtype)
    logits = head(hidden.requires_grad_())
    logits, count = logits if change is None else change(logits), (targets != IGNORED).sum()
    if smoothing:
        loss = LabelSmoother(smoothing)({"logits": logits}, targets, num_items_in_batch=count)
    else:
        loss = ForCausalLMLoss(logits, None, WORDS, num_items_in_batch=count, shift_labels=targets)
    loss.backward()
    return [loss.detach(), hidden.grad, head.weight.grad, head.bias.grad]


def of_ranks(dtype: torch.dtype, change: Change | None, smoothing: float, size: int) -> list[Tensor]:
    """The same through the operators of `size` ranks, simulated in one process; two micro-batches, of which the first
    leaves gradients that the second adds to."""
    hidden, targets, head = inputs(dtype)
    side, count = {"targets": targets}, (targets != IGNORED).sum()
    ranks = []
    for first, last in (cut_bounds(WORDS, size, rank) for rank in range(size)):
        part = nn.Linear(HIDDEN, last - first, dtype=dtype)
        part.weight.data, part.bias.data = head.weight.data[first:last], head.bias.data[first:last]
        linear = Linear([part])
        tiles = HeadInTiles(part, linear.parameters, change, recomputes=True)
        chain: list[Any] = [Deferred(linear, tiles)]
        if change is not None:
            chain.append(Deferred(AutogradOperator(change, elementwise=True), tiles))
        chain.append(TokenStatistics(first, WORDS, smoothing, change is None, head=tiles))
        ranks.append((part, chain))
    for _ in range(2):
        contexts = [[OperatorContext(side, 0, True) for _ in chain] for _, chain in ranks]
        statistics, of_hidden = [], torch.zeros_like(hidden, dtype=torch.float32)
        with explicit_gradients():
            for (_, chain), of_rank in zip(ranks, contexts, strict=True):
                value = hidden
                for operator, ctx in zip(chain, of_rank, strict=True):
                    (value,) = operator.method_of(Part.F)(ctx, value)
                statistics.append(value)
        gathered = torch.cat(statistics).requires_grad_()
        loss = cross_entropy(gathered, targets, 1 / count)
        loss.backward()
        with explicit_gradients():
            for (_, chain), of_rank, gradient in zip(ranks, contexts, gathered.grad.split(1), strict=True):
                for operator, ctx in zip(chain[:0:-1], of_rank[:0:-1], strict=True):
                    (gradient,) = operator.method_of(Part.B)(ctx, gradient)
                of_hidden += chain[0].method_of(Part.I)(of_rank[0], gradient)[0]
                chain[0].method_of(Part.W)(of_rank[0], gradient, hidden)
    weights, biases = zip(*((part.weight.grad / 2, part.bias.grad / 2) for part, _ in ranks), strict=True)
    return [loss.detach(), of_hidden, torch.cat(weights), torch.cat(biases)]


@pytest.fixture
def in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WHOLE", 0), ("TOKENS", 7), ("ROWS", 30)):
        monkeypatch.setattr(vocab_tiles, name, value)


@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize(
    ("change", "smoothing", "size"), [(None, 0.0, 1), (softcap, 0.1, 1), (None, 0.1, 2), (softcap, 0.0, 3)]
)
def test_fp32(change: Change | None, smoothing: float, size: int) -> None:
    expected = stock(torch.float32, change, smoothing)
    for mine, theirs in zip(of_ranks(torch.float32, change, smoothing, size), expected, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize("change", [None, softcap])
def test_bf16_is_as_exact_as_stock(change: Change | None) -> None:
    """Errors are at most twice those of the stock functions in bf16, of the same bf16 inputs."""
    exact = [each.double() for each in stock(torch.bfloat16, change, 0.0, torch.float64)]
    for mine, theirs, truth in zip(
        of_ranks(torch.bfloat16, change, 0.0, 2), stock(torch.bfloat16, change, 0.0), exact, strict=True
    ):
        assert (mine.double() - truth).norm() <= 2 * (theirs.double() - truth).norm() + 1e-5 * truth.norm()


def test_no_tensor_is_as_large_as_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    with Largest() as whole:
        of_ranks(torch.bfloat16, softcap, 0.0, 1)
    assert whole.elements == LOGITS
    for name, value in (("WHOLE", LOGITS - 1), ("TOKENS", 7), ("ROWS", 30)):
        monkeypatch.setattr(vocab_tiles, name, value)
    with Largest() as tiled:
        of_ranks(torch.bfloat16, softcap, 0.0, 1)
    assert tiled.elements == HIDDEN * WORDS < LOGITS  # the weight


@pytest.mark.usefixtures("in_tiles")
def test_forward_alone_has_whole_logits() -> None:
    """Predictions read them."""
    hidden, targets, head = inputs(torch.float32)
    linear = Linear([head])
    tiles = HeadInTiles(head, linear.parameters, None)
    with explicit_gradients():
        (logits,) = Deferred(linear, tiles).method_of(Part.F)(OperatorContext({"targets": targets}, 0, False), hidden)
    assert torch.equal(logits, head(hidden))
