"""Linears that read one value are one GEMM forward, one for I and one for W where their weights are lowered."""

import pytest
import torch
from support.dispatched import Calls
from torch import Tensor, nn

from hf_helix.operators.base import OperatorContext, Precision
from hf_helix.operators.linears.linear import Linear
from hf_helix.operators.side_by_side import contiguous_columns, contiguous_rows, join_columns

SIZES = (6, 2, 2)
WIDTH = 16  # much wider than what goes out: gradients in one piece are faster


def products(calls: Calls) -> int:
    return sum(name in ("mm", "addmm", "addmm_", "linear") for name in calls.names)


def linears(bias: bool = False, seed: int = 0) -> list[nn.Linear]:
    torch.manual_seed(seed)
    return [nn.Linear(WIDTH, size, bias=bias) for size in SIZES]


def directions(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 3, size, generator=generator).bfloat16() for size in SIZES]


def window(operator: Linear, precision: Precision, count: int = 2) -> list[list[Tensor]]:
    """Outputs and input gradients of micro-batches; every W last."""
    result, values = [], torch.randn(count, 5, 3, WIDTH, generator=torch.Generator().manual_seed(9))
    with precision.weights.kept():
        for k, value in enumerate(values):
            ctx = OperatorContext({}, 0, True, precision)
            outputs = operator.forward(ctx, value)
            result.append([*outputs, *operator.input_gradient(ctx, *directions(k))])
        for k, value in enumerate(values):
            operator.weight_gradient(OperatorContext({}, 0, True, precision), *directions(k), value)
    return result


@pytest.mark.parametrize("bias", [False, True])
def test_one_gemm_each_and_the_results_of_several(bias: bool) -> None:
    """Beside the same linears each by itself, in the same precision."""
    together, apart = linears(bias), linears(bias)
    with Calls() as calls:
        result = window(Linear(together), Precision("cpu", torch.bfloat16))
    assert products(calls) == 2 * 3
    by_linear = [_alone(linear, place) for place, linear in enumerate(apart)]
    for k, values in enumerate(result):
        for place, (output, _) in enumerate(by[k] for by in by_linear):
            torch.testing.assert_close(values[place], output)
        total = sum(by[k][1].float() for by in by_linear)
        torch.testing.assert_close(values[-1].float(), total, rtol=2e-2, atol=2e-2)
    for one, other in zip(together, apart, strict=True):
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            assert mine.grad is not None
            assert mine.grad.dtype is torch.float32
            torch.testing.assert_close(mine.grad, theirs.grad)


def _alone(linear: nn.Linear, place: int) -> list[tuple[Tensor, Tensor]]:
    """One of the linears as an operator of its own: output and input gradient by micro-batch."""
    operator, precision, result = Linear([linear]), Precision("cpu", torch.bfloat16), []
    values = torch.randn(2, 5, 3, WIDTH, generator=torch.Generator().manual_seed(9))
    for k, value in enumerate(values):
        ctx, gradient = OperatorContext({}, 0, True, precision), directions(k)[place]
        (output,) = operator.forward(ctx, value)
        (of_input,) = operator.input_gradient(ctx, gradient)
        operator.weight_gradient(ctx, gradient, value)
        result.append((output, of_input))
    return result


def test_wide_gradients_are_put_in_one_piece_by_nobody() -> None:
    """A copy of them would take longer than it saves. Where they lie so already, one product takes them."""
    several = [nn.Linear(8, size, bias=False) for size in SIZES]
    operator, precision = Linear(several), Precision("cpu", torch.bfloat16)
    value, whole = torch.randn(15, 8), torch.cat([gradient.flatten(0, 1) for gradient in directions(0)], 1)
    results = []
    for gradients, count in (
        (whole.split(SIZES, 1), 2),
        ([part.clone() for part in whole.split(SIZES, 1)], 6),
    ):
        with Calls() as calls, precision.weights.kept():
            (of_input,) = operator.input_gradient(OperatorContext({}, 0, True, precision), *gradients)
            operator.weight_gradient(OperatorContext({}, 0, True, precision), *gradients, value)
        assert products(calls) == count
        assert "cat" not in calls.names
        results.append((of_input.float(), *(linear.weight.grad for linear in several)))
        for linear in several:
            linear.weight.grad = None
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_gradients_are_ordinary_after_it() -> None:
    """They are slices of one piece, and may be dropped, zeroed, scaled and replaced one by one."""
    several = linears()
    operator, precision = Linear(several), Precision("cpu", torch.bfloat16)
    window(operator, precision)
    once = [linear.weight.grad.clone() for linear in several]
    several[0].weight.grad *= 2  # with gradients enabled, as a callback may
    several[1].weight.grad = None
    window(operator, precision)
    for linear, gradient, factor in zip(several, once, (3, 1, 2), strict=True):
        torch.testing.assert_close(linear.weight.grad, factor * gradient)
    torch.optim.AdamW([linear.weight for linear in several], lr=0.1).step()
    torch.optim.SGD([linear.weight for linear in several]).zero_grad(set_to_none=False)
    window(operator, precision)
    for linear, gradient in zip(several, once, strict=True):
        torch.testing.assert_close(linear.weight.grad, gradient)


@pytest.mark.parametrize("change", ["frozen", "another type"])
def test_linears_that_differ_stay_apart(change: str) -> None:
    several = linears()
    if change == "frozen":
        several[1].weight.requires_grad_(False)
    else:
        several[1].to(torch.float64)
    with Calls() as calls:
        result = window(Linear(several), Precision("cpu", torch.bfloat16), count=1)
    assert products(calls) == (3 + 3 + 2 if change == "frozen" else 9)
    assert [output.is_contiguous() for output in result[0]] == [True] * 4
    assert (several[1].weight.grad is None) == (change == "frozen")


def test_in_one_precision_they_stay_apart() -> None:
    """There is no copy of the weights that could hold them in one piece, and bits stay those of separate products."""
    with Calls() as calls:
        operator, ctx = Linear(linears()), OperatorContext({}, 0, True)
        operator.forward(ctx, torch.randn(5, 3, WIDTH))
        operator.input_gradient(ctx, *(gradient.float() for gradient in directions(0)))
    assert products(calls) == 6


def test_what_lies_side_by_side_is_seen_as_one_without_a_copy() -> None:
    whole = torch.arange(24.0).view(4, 6)
    columns, rows = whole.split([3, 1, 2], 1), whole.split([1, 3])
    for result, dim in ((contiguous_columns(columns), 1), (contiguous_rows(rows), 0)):
        assert result is not None
        assert torch.equal(result, whole), dim
        assert result.data_ptr() == whole.data_ptr()
    assert torch.equal(join_columns(columns[1:]), whole[:, 3:])
    assert torch.equal(contiguous_rows([whole[1], whole[2], whole[3]]), whole[1:].flatten())
    # What lies otherwise is not.
    whole = torch.arange(24.0).view(4, 6)
    left, middle, right = whole.split(2, 1)
    assert contiguous_columns([left, right]) is None
    assert contiguous_columns([middle, left]) is None
    assert contiguous_columns([left, middle.clone()]) is None
    assert torch.equal(join_columns([middle, left]), torch.cat([middle, left], 1))
    # Rows of one after the other are no columns beside one another.
    flat = torch.arange(24.0)
    assert contiguous_columns([flat[:12].view(4, 3), flat[3:15].view(4, 3)]) is None
    assert contiguous_rows([whole[:1], whole[2:]]) is None
    assert contiguous_rows([whole[1:], whole[:1]]) is None
    assert contiguous_rows([left, middle]) is None
    assert contiguous_rows([whole[:2], whole[2:].clone()]) is None


def test_a_transposed_sequence_is_one_product() -> None:
    """[tokens, 1, features] as attention leaves it, which `functional.linear` would take token by token."""
    value = torch.randn(1, 5, WIDTH).transpose(0, 1)
    (linear,) = linears()[:1]
    with Calls() as calls:
        (output,) = Linear([linear]).forward(OperatorContext({}, 0, True), value)
    assert products(calls) == 1
    assert "bmm" not in calls.names
    torch.testing.assert_close(output, linear(value).detach())
