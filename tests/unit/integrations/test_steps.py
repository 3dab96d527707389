"""Calls before the steps of optimizers end with their owners."""

import gc
from typing import Any

import torch
from torch import nn

from hf_helix.integrations.steps import before_steps


class Owner:
    """Also an owner that a cycle of references keeps until a collection of garbage."""

    def __init__(self, said: list[str]) -> None:
        self.said, self.itself = said, self


def collect(owner: Owner, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    owner.said.append("step")
    gc.collect()
    return args, kwargs


def test_an_owner_may_end_while_hooks_run() -> None:
    parameter, said = nn.Parameter(torch.zeros(2)), list[str]()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    owners = [Owner(said) for _ in range(3)]
    for owner in owners:
        before_steps(owner, collect)
    del owners[1:], owner
    others = [optimizer.register_step_pre_hook(lambda *_: said.append("other")) for _ in range(2)]
    for _ in range(2):
        parameter.grad = torch.ones(2)
        optimizer.step()
    assert said[-3:] == ["step", "other", "other"]
    assert parameter.tolist() == [-2.0, -2.0]
    owners.clear()
    gc.collect()
    said.clear()
    optimizer.step()
    assert said == ["other", "other"]
    for each in others:
        each.remove()
