"""Arguments and results of functions of torch, with their tensors changed."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hf_helix.operators.torch_functions import map_tensors


class Pair(NamedTuple):
    first: Tensor
    second: int


@pytest.mark.parametrize(
    "value",
    [(torch.zeros(2), [3]), Pair(torch.zeros(2), 3), torch.Size([2, 3]), torch.ones(2, 2).max(0)],
    ids=["tuple", "named", "shape", "result of torch"],
)
def test_a_changed_value_has_its_type(value: Any) -> None:
    changed = map_tensors(value, lambda tensor: tensor + 1)
    assert type(changed) is type(value)
    for one, other in zip(changed, value, strict=True):
        assert torch.equal(one, other + 1) if isinstance(other, Tensor) else one == other
