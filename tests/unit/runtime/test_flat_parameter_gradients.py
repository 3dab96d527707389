"""Gradients of a flat are in its piece as soon as they are summed; what they were in before is free."""

import weakref

import pytest
import torch
from torch import nn

from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.operators.param_shard import COPIED
from hf_helix.operators.zero.flat_parameter import FlatParameter
from hf_helix.runtime.gradients.reduce import FlatParameterGradients


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
    gradients = FlatParameterGradients(flat)
    taken = gradients.take()
    assert taken is not None
    assert all((result() is None) == (dtype is torch.float32) for result in left)
    for work in (gradients.reduce_scatter(taken), gradients.complete(2)[1]):
        work()
    del work
    assert all(result() is None for result in left)
    assert flat.shards[unused].grad is None
    for parameter, value in zip((first, last), values, strict=True):
        assert parameter.grad is None
        grad = flat.shards[parameter].grad
        assert grad is not None
        assert torch.equal(grad, (value.float() / 2).to(dtype).flatten())
