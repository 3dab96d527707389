"""The way of tokens to their experts and back, on one rank and in pieces, against plain loops."""

import pytest
import torch
from torch import Tensor, nn

from hf_helix.operators.base import OperatorContext, explicit_gradients
from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.operators.experts.grouped_linear import GroupedLinear
from hf_helix.operators.experts.moe import (
    COUNTED,
    SHARD_TOKENS,
    PermuteToCapacity,
    RouterMeter,
    UnpermuteFromCapacity,
    capacity_of,
    counted_tokens,
)

EXPERTS, HIDDEN, LENGTH, BATCH, CHOICES = 5, 7, 6, 3, 2


def new_context(counted: Tensor | None = None, saves_for_backward: bool = True) -> OperatorContext:
    counted = torch.ones(LENGTH, BATCH, dtype=torch.long) if counted is None else counted
    return OperatorContext(
        {COUNTED: counted, SHARD_TOKENS: LENGTH * BATCH}, seed=0, saves_for_backward=saves_for_backward
    )


def chosen_by(kind: str) -> Tensor:
    """Experts of every token, no expert twice."""
    tokens = LENGTH * BATCH
    if kind == "all to one":
        return torch.tensor([[2, 0]]).repeat(tokens, 1)
    dice = torch.Generator().manual_seed(3)
    usable = EXPERTS - (kind == "one empty")
    return torch.stack([torch.randperm(usable, generator=dice)[:CHOICES] for _ in range(tokens)])


KINDS = ("uneven", "one empty", "all to one")


@pytest.fixture
def tokens() -> Tensor:
    return torch.randn(LENGTH, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def weights() -> Tensor:
    return torch.rand(LENGTH * BATCH, CHOICES, generator=torch.Generator().manual_seed(2))


def plain(tokens: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor, kept: Tensor | None = None) -> Tensor:
    """Token by token, choice by choice."""
    out = []
    for token, row in enumerate(tokens.flatten(0, 1)):
        parts = [
            weights[token, choice] * (matrices[expert] @ row)
            for choice, expert in enumerate(chosen[token].tolist())
            if kept is None or kept[token, choice]
        ]
        out.append(torch.stack(parts).sum(0) if parts else torch.zeros(matrices.shape[1]))
    return torch.stack(out).view(LENGTH, BATCH, -1)


def plainly_kept(chosen: Tensor, counted: Tensor, capacity: int) -> Tensor:
    """First choices before second ones, then the tokens in order; padding last."""
    room = [capacity] * EXPERTS
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    for real in (1, 0):
        for choice in range(CHOICES):
            for token in range(len(chosen)):
                expert = chosen[token, choice].item()
                if counted.flatten()[token] == real and room[expert]:
                    room[expert] -= 1
                    kept[token, choice] = True
    return kept


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1.0, 1.3, 5.0])
@pytest.mark.parametrize("padded", [False, True])
def test_with_a_capacity_the_rest_is_dropped(
    kind: str, factor: float, padded: bool, tokens: Tensor, weights: Tensor
) -> None:
    matrices = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))
    chosen = chosen_by(kind)
    counted = torch.ones(LENGTH, BATCH, dtype=torch.long)
    if padded:
        counted[-2:, 1:] = 0
    capacity = capacity_of(LENGTH * BATCH, CHOICES, EXPERTS, factor)
    kept = plainly_kept(chosen, counted, capacity)
    x, w, m = (value.clone().requires_grad_() for value in (tokens, weights, matrices.detach()))
    expected = plain(x, chosen, w, m, kept)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)

    meter = RouterMeter(EXPERTS, Axis.single())
    fill = PermuteToCapacity(EXPERTS, factor, Axis.single(), meter)
    linear, collect = GroupedLinear(matrices), UnpermuteFromCapacity()
    contexts = [new_context(counted) for _ in range(3)]
    with explicit_gradients():
        rows, places = fill.forward(contexts[0], tokens, chosen)
        assert rows.shape == (EXPERTS * capacity, HIDDEN)
        assert torch.equal(places >= 0, kept)
        assert meter.read(rows.device)[-1] == (~kept[counted.flatten() > 0]).sum()
        (made,) = linear.forward(contexts[1], rows)
        (out,) = collect.forward(contexts[2], made, weights, places)
        torch.testing.assert_close(out, expected)
        d_made, d_weights = collect.backward(contexts[2], gradient)
        (d_rows,) = linear.input_gradient(contexts[1], d_made)
        linear.weight_gradient(contexts[1], d_made, rows)
        (d_tokens,) = fill.backward(contexts[0], d_rows)
    expected_gradients = [torch.zeros_like(v) if v.grad is None else v.grad for v in (x, w, m)]
    torch.testing.assert_close([d_tokens, d_weights, matrices.grad], expected_gradients)


def test_with_room_for_all_nothing_is_dropped() -> None:
    """Every expert may be chosen by every token."""
    assert capacity_of(40, 2, 8, 4.0) == 40
    assert capacity_of(10, 2, 8, 1.0) == 3  # rounded up


def test_a_meter_counts_every_token_once() -> None:
    meter = RouterMeter(EXPERTS, Axis(SilentTransport(2, 1)))
    counted = torch.tensor([[1], [1], [1], [0]])
    mine = counted_tokens({COUNTED: counted}, meter.tp)
    assert mine.tolist() == [1, 0]
    logits = torch.randn(2, EXPERTS)
    meter.note(logits, torch.tensor([[0, 3], [3, 1]]), mine)
    load, (squares, tokens, dropped) = meter.read(logits.device).split((EXPERTS, 3))
    assert load.tolist() == [1, 0, 0, 1, 0]
    assert (tokens, dropped) == (1, 0)
    torch.testing.assert_close(squares, logits[0].logsumexp(0).square())
    assert not meter.read(logits.device).any()
    # A meter counts choices of a router whose logits are not known.
    meter = RouterMeter(EXPERTS, Axis.single())
    meter.note(None, torch.tensor([[0, 3], [3, 1]]), torch.tensor([1, 1]))
    load, (squares, tokens, _) = meter.read(torch.device("cpu")).split((EXPERTS, 3))
    assert load.tolist() == [1, 1, 0, 2, 0]
    assert squares.isnan()
    assert tokens == 2
