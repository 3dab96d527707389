"""The cut vocabulary is Transformers' own: slices of logits give ForCausalLMLoss or LabelSmoother, slices of the table
nn.Embedding.

The ranks are simulated in one process: every slice is computed by itself, and what ranks would exchange is joined by
hand.
"""

import pytest
import torch
from support.dispatched import Largest
from torch import Tensor
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from hf_helix.operators.base import OperatorContext, explicit_gradients
from hf_helix.operators.vocabulary.lookup import embedding
from hf_helix.operators.vocabulary.loss import IGNORED, TokenStatistics, cross_entropy
from hf_helix.operators.vocabulary.statistics import CHUNK, FIGURES
from hf_helix.planning.parameters import cut_bounds

SIZES = [1, 2, 3, 5]
VOCABULARY, SEQUENCE, BATCH = 23, 11, 3  # 23 divides by no size but 1
NUM_ITEMS = 41


def logits_and_labels(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """[batch, sequence, vocabulary] and [batch, sequence], a quarter of the labels ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(BATCH, SEQUENCE, VOCABULARY, generator=generator, dtype=torch.float64) * scale
    labels = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    labels[torch.rand(BATCH, SEQUENCE, generator=generator) < 0.25] = IGNORED
    return logits.to(dtype), labels


def whole(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the stock functions."""
    logits, num_items = logits.clone().requires_grad_(), torch.tensor(NUM_ITEMS)
    if smoothing:
        smoother = LabelSmoother(smoothing)
        loss = smoother({"logits": logits}, labels, shift_labels=True, num_items_in_batch=num_items)
    else:
        loss = ForCausalLMLoss(logits, labels, VOCABULARY, num_items_in_batch=num_items)
    loss.backward()
    return loss.detach(), logits.grad


def in_slices(
    logits: Tensor, labels: Tensor, size: int, smoothing: float = 0.0, overwrites: bool = False
) -> tuple[Tensor, Tensor]:
    """Loss and gradient by way of `size` slices, put together again."""
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORED).t().contiguous()
    bounds = [cut_bounds(VOCABULARY, size, rank) for rank in range(size)]
    slices = [logits.transpose(0, 1)[..., first:last].contiguous() for first, last in bounds]
    contexts = [OperatorContext({"targets": targets}, 0, True) for _ in bounds]
    operators = [TokenStatistics(first, VOCABULARY, smoothing, overwrites) for first, _ in bounds]
    with explicit_gradients():
        pieces = [op.forward(ctx, piece)[0] for op, ctx, piece in zip(operators, contexts, slices, strict=True)]
    gathered = torch.cat(pieces).requires_grad_()
    loss = cross_entropy(gathered, targets, torch.tensor(1 / NUM_ITEMS))
    loss.backward()
    with explicit_gradients():
        result = [
            op.backward(ctx, gradient)[0]
            for op, ctx, gradient in zip(operators, contexts, gathered.grad.split(1), strict=True)
        ]
    assert all(gradient.dtype == logits.dtype for gradient in result)
    assert all((gradient is piece) == overwrites for gradient, piece in zip(result, slices, strict=True))
    return loss.detach(), torch.cat(result, -1).transpose(0, 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunk", [2**20, 30])
def test_entropy_and_accuracy(size: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the same loss. Of two largest logits, the first is the prediction."""
    monkeypatch.setitem(CHUNK, "cpu", chunk)
    logits, labels = logits_and_labels(scale=3.0)
    largest = logits[:, :-1].max(-1)
    labels[:, 1::2] = largest.indices[:, ::2]
    logits[0, :-1, -1], labels[0, 1:] = largest.values[0], VOCABULARY - 1
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORED).t().contiguous()
    pieces = []
    for first, last in (cut_bounds(VOCABULARY, size, rank) for rank in range(size)):
        statistics = TokenStatistics(first, VOCABULARY, smoothing=0.1, wanted=FIGURES)
        pieces += statistics.forward(
            OperatorContext({"targets": targets}, 0, False), logits.transpose(0, 1)[..., first:last]
        )
    loss, entropy, right = cross_entropy(torch.cat(pieces), targets, torch.tensor(1 / NUM_ITEMS))
    counted, distribution = targets != IGNORED, torch.distributions.Categorical(logits=logits.transpose(0, 1))
    assert distance(loss, whole(logits, labels, 0.1)[0]) <= 1e-6
    assert distance(entropy, distribution.entropy()[counted].sum()) <= 1e-6
    assert right == (logits.transpose(0, 1).argmax(-1) == targets)[counted].sum() > 0


def distance(result: Tensor, expected: Tensor) -> float:
    """Relative to the expected norm."""
    result, expected = result.double(), expected.double()
    return ((result - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_memory(dtype: torch.dtype, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token the bits are the same; in fp32 there is a chunk, and the gradient may take the logits' place."""
    logits, labels = logits_and_labels(dtype, scale=3.0)
    loss, gradient = in_slices(logits, labels, 1, smoothing)
    monkeypatch.setitem(CHUNK, "cpu", 4 * VOCABULARY)
    for overwrites in (False, True):
        with Largest(torch.float32) as largest:
            result = in_slices(logits, labels, 1, smoothing, overwrites)
        assert torch.equal(result[0], loss)
        assert torch.equal(result[1], gradient)
        if dtype == torch.bfloat16:
            assert 3 * VOCABULARY <= largest.elements <= 3 * SEQUENCE * BATCH < SEQUENCE * BATCH * VOCABULARY


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", ["everywhere", "first slice only", "last column only"])
def test_huge_logits(size: int, place: str) -> None:
    """Slices whose maxima lie 1e4 apart neither overflow nor lose their gradient to NaN."""
    logits, labels = logits_and_labels(scale=1e4 if place == "everywhere" else 1.0)
    if place == "first slice only":
        logits[..., :4] += 1e4
    elif place == "last column only":
        logits[..., -1] -= 1e4
    (expected, expected_gradient), (result, gradient) = whole(logits, labels), in_slices(logits, labels, size)
    assert torch.isfinite(gradient).all()
    assert distance(result, expected) <= 1e-6
    # An fp32 logit of 1e4 is exact to 1e-3 only, and so is its softmax.
    assert distance(gradient, expected_gradient) <= (1e-6 if place == "everywhere" else 1e-3)


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_with_a_gradient_takes_rows(dtype: torch.dtype, padding: int | None) -> None:
    """The bits of `nn.Embedding` over micro-batches with and without repeated ids; nothing is as large as the table."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(400, 5, generator=generator).to(dtype)
    given, stock = table.clone().requires_grad_(), table.clone().requires_grad_()
    for highest in (400, 20, 400, 1):
        ids = torch.randint(highest, (20, 4), generator=generator)
        gradient = torch.randn(20, 4, 5, generator=generator).to(dtype)
        functional.embedding(ids, stock, padding_idx=padding).backward(gradient)
        is_first = given.grad is None
        with Largest(torch.float32) as largest:
            embedding(ids, given, padding).backward(gradient)
        assert torch.equal(given.grad, stock.grad)
        assert is_first or largest.elements <= ids.numel() * 5
