"""The granularity of optimizers: by the code of their steps, not by their bases."""

from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Adafactor

from hf_helix.config import HelixConfig
from hf_helix.integrations.optimizers import check_made_optimizer, granularity_of


class Named(torch.optim.AdamW):
    """Other defaults, and methods outside of a step."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr, betas=(0.8, 0.9))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)

    def rate(self) -> float:
        return float(self.param_groups[0]["lr"])


class OwnStep(Named):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnPart(torch.optim.SGD):
    def _init_group(self, *given: Any) -> Any:
        return super()._init_group(*given)


class Declared(OwnStep):
    granularity = "element"


class Below(Declared):
    """Another step than the declared one."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Mixin:
    def step(self, closure: Any = None) -> Any:
        return None


class Mixed(Mixin, torch.optim.AdamW):  # type: ignore[misc]
    pass


class OwnScheduleFree(AdamWScheduleFree):  # type: ignore[misc]
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "granularity"),
    [
        (torch.optim.AdamW, "element"),
        (Named, "element"),
        (OwnStep, "model"),
        (OwnPart, "model"),
        (Declared, "element"),
        (type("Inherits", (Declared,), {}), "element"),
        (Below, "model"),
        (Mixed, "model"),
        (AdamWScheduleFree, "element"),
        (OwnScheduleFree, "model"),
        (torch.optim.Muon, "matrix"),
        (Adafactor, "matrix"),
        (type("OwnAdafactor", (Adafactor,), {"_rms": staticmethod(lambda tensor: tensor)}), "model"),
        (torch.optim.LBFGS, "model"),
        (lambda params: torch.optim.AdamW(params), "model"),
    ],
)
def test_the_granularity_follows_the_code_of_the_step(kind: Any, granularity: str) -> None:
    assert granularity_of(kind) == granularity
    if isinstance(kind, type) and not issubclass(kind, (torch.optim.LBFGS, torch.optim.Muon, Adafactor)):
        optimizer = kind([nn.Parameter(torch.ones(2))], lr=1e-3)  # torch wraps the steps of classes with an instance
        assert granularity_of(kind) == granularity_of(optimizer) == granularity


def test_a_step_replaced_on_an_optimizer_counts() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    LambdaLR(optimizer, lambda step: 1.0)  # counts steps, by a wrapper
    assert granularity_of(optimizer) == "element"
    optimizer.step = lambda closure=None: None  # type: ignore[assignment, method-assign]
    assert granularity_of(optimizer) == "model"
    optimizer.granularity = "element"  # type: ignore[attr-defined]
    assert granularity_of(optimizer) == "element"


def test_a_step_replaced_in_a_class_of_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.Adamax, "step", lambda self, closure=None: None)
    assert granularity_of(torch.optim.Adamax) == "model"


def test_the_refusal_names_the_method_and_the_remedy() -> None:
    with pytest.raises(ValueError, match="OwnPart") as caught:
        check_made_optimizer(OwnPart([nn.Parameter(torch.ones(2))], lr=0.1), HelixConfig(tp_size=2))
    first = str(caught.value).splitlines()[0]
    for words in ("its _init_group is not the one of SGD", "tp_size=2", "`granularity = 'element'` into class OwnPart"):
        assert words in first
