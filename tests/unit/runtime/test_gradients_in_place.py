"""Gradients are averaged where they lie: what is copied at all is copied once, and there is no second set of them."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.units import StandInGroup, unit_of
from torch import Tensor, nn

from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.planning import traffic
from hf_helix.planning.parameters import COPIED, Cut
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.distributed.pipe import Pipe
from hf_helix.runtime.gradients import reduce as gradients
from hf_helix.runtime.streams.streams import CpuStreams, Event

RANKS = 2


class AtOnce(CpuStreams):
    """Runs work when it is issued."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[Any] = []

    def issue(self, kind: Any, work: Callable[[], Any], after: Sequence[Event], label: str, lane: str = "") -> Any:
        work()
        return label

    def wait(self, event: Any) -> None:
        self.waited.append(event)


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What goes over the ranks, each of which brings the same."""
    result: list[Tensor] = []

    def all_reduce(value: Tensor, group: Any, link: Any) -> None:
        result.append(value)
        value.mul_(RANKS)

    monkeypatch.setattr(gradients, "all_reduce", all_reduce)
    return result


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    result = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in result:
        parameter.grad = torch.randn(parameter.shape, dtype=dtype)
    return result


def flat_of(parameter: nn.Parameter) -> FlatParameter:
    """A flat of its own, whose gradient stays."""
    axis, gradient = Axis(SilentTransport(RANKS, 0)), parameter.grad
    flat = FlatParameter(f"weights.{id(parameter)}", {parameter: COPIED}, axis, axis)
    flat.shard_in_place(torch.device("cpu"))
    parameter.grad = gradient
    return flat


def reduce(parameters: Sequence[nn.Parameter], flats: Sequence[FlatParameter] = ()) -> AtOnce:
    sizes, group, one, streams = (
        {"dp": RANKS, "pp": 1, "cp": 1, "tp": 1, "ep": 1},
        StandInGroup(RANKS),
        Axis.single(),
        AtOnce(),
    )
    given: Any = (sizes, torch.device("cpu"), None, one, Axis.single(), one, Pipe([0]), group, group, group, None)
    unit = unit_of({each: Cut(0, len(each)) if each.dim() > 1 else COPIED for each in parameters})
    unit = replace(unit, flat_parameters={flat.name: flat for flat in flats})
    gradients.reduce_all_gradients({0: unit}, Mesh(*given), streams)
    return streams


def test_a_bucket_becomes_one_piece_which_stays(summed: list[Tensor]) -> None:
    parameters = parameters_of((4, 3), (3,), (2, 3))
    before = [parameter.grad.clone() for parameter in parameters]
    reduce(parameters)
    (piece,) = summed
    assert piece.shape == (4 * 3 + 3 + 2 * 3,)
    for parameter, gradient in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)  # the average of equal ones
        assert parameter.grad.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()
        parameter.grad *= 2  # with gradients enabled, as a callback may
    reduce(parameters)
    assert summed[1].data_ptr() == piece.data_ptr()
    torch.optim.AdamW(parameters).step()


def test_what_lies_in_one_piece_is_not_copied(summed: list[Tensor]) -> None:
    """A gradient that fills a bucket, and those of linears that one product is for."""
    (alone,) = parameters_of((4, 3))
    place = alone.grad.data_ptr()
    reduce([alone])
    together, whole = parameters_of((4, 3), (2, 3)), torch.randn(6, 3)
    for parameter, part in zip(together, whole.split([4, 2]), strict=True):
        parameter.grad = part
    reduce(together)
    assert alone.grad.data_ptr() == place
    assert [value.data_ptr() for value in summed] == [place, whole.data_ptr()]


def test_half_precision_is_summed_in_a_higher_one(summed: list[Tensor]) -> None:
    parameters = parameters_of((4, 3), (3,), dtype=torch.bfloat16)
    before = [(parameter.grad, parameter.grad.clone()) for parameter in parameters]
    reduce(parameters)
    assert [value.dtype for value in summed] == [torch.float32]
    for parameter, (gradient, value) in zip(parameters, before, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)


@pytest.mark.parametrize(("spread", "dtype"), [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float32)])
def test_on_cuda_few_copies_are_alive(
    spread: bool, dtype: torch.dtype, summed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of buckets in half precision, or of flats."""
    monkeypatch.setattr(AtOnce, "holds_memory", True)
    monkeypatch.setattr(traffic, "BUCKET_BYTES", 1)
    order: list[str] = []
    module, name = (gradients.FlatParameterGradients, "take") if spread else (gradients, "_parts")
    copies, wait = getattr(module, name), AtOnce.wait
    monkeypatch.setattr(module, name, lambda *given: (order.append("copy"), copies(*given))[1])
    monkeypatch.setattr(AtOnce, "wait", lambda *given: (order.append("wait"), wait(*given))[1])
    parameters = parameters_of(*[(4, 3)] * 5, dtype=dtype)
    reduce(parameters, flats=[flat_of(parameter) for parameter in parameters] if spread else [])
    alive = [order[:place].count("copy") - order[:place].count("wait") for place in range(len(order) + 1)]
    assert max(alive) == gradients.MAX_COPIES + 1
    assert alive[-1] == 0


def test_who_has_no_gradient_gets_none(summed: list[Tensor]) -> None:
    parameters = parameters_of((4, 3), (3,), (2, 3))
    parameters[1].grad = None
    reduce(parameters)
    assert [value.shape for value in summed] == [(4 * 3 + 2 * 3,)]
    assert parameters[1].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_were_moved_take_no_memory(dtype: torch.dtype) -> None:
    """Those in half precision are read when the piece is summed, and are free behind that."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((7, 5), (3,), (64, 2))]
    axis = Axis(SilentTransport(1, 0))
    flat = FlatParameter("weights", dict.fromkeys(parameters, COPIED), axis, axis)
    flat.shard_in_place(torch.device("cpu"))
    first, unused, last = parameters
    left, values = [], []
    for parameter in (first, last):
        parameter.grad = torch.randn(parameter.shape).to(dtype)
        left.append(weakref.ref(parameter.grad))
        values.append(parameter.grad.clone())
    reduction = gradients.FlatParameterGradients(flat)
    taken = reduction.take()
    assert taken is not None
    assert all((result() is None) == (dtype is torch.float32) for result in left)
    for work in (reduction.reduce_scatter(taken), reduction.complete(2)[1]):
        work()
    del work
    assert all(result() is None for result in left)
    assert flat.shards[unused].grad is None
    for parameter, value in zip((first, last), values, strict=True):
        assert parameter.grad is None
        grad = flat.shards[parameter].grad
        assert grad is not None
        assert torch.equal(grad, (value.float() / 2).to(dtype).flatten())
