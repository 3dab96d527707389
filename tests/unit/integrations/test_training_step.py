"""An emulated link is settled where plans are chosen, and for a step by hand before its window: never inside of one."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from transformers import Trainer
from trl import SFTTrainer

from hf_helix.integrations.trainer.stock import StockTrainer
from hf_helix.integrations.trainer.training_step import WindowHooks, trains_as_fetched
from hf_helix.runtime.failures.values import Health


class Engine:
    """Notes the calls that settle the link, tune and train, in order."""

    mesh = SimpleNamespace(dp_size=1, ranks_per_batch=1)
    ends_at_decoder = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.session, self.checks = self, MagicMock()

    def settle_link(self, batches: list[Any], scale: Any, step: int) -> None:
        self.calls.append(f"settle for {len(batches)}")

    def tune(self, batches: list[Any], scale: Any, step: int, steps_left: int | None) -> None:
        self.calls.append(f"tune for {len(batches)}")

    def train_window(self, batches: list[Any], scale: Any, step: int, *options: Any) -> list[Tensor]:
        if any("fails" in batch for batch in batches):
            raise RuntimeError("no")
        self.calls.append(f"train {len(batches)}")
        return [torch.tensor(1.0) for _ in batches]


class Stock:
    """The methods of the stock Trainer that collect a window."""

    def get_batch_samples(self, batches: Any, count: int, device: torch.device) -> tuple[list[Any], int]:
        return list(batches), 6


class Hooks(WindowHooks, Stock):
    def __init__(self) -> None:
        device = torch.device("cpu")
        self.helix: Any = Engine()
        self.args: Any = SimpleNamespace(average_tokens_across_devices=True, device=device, process_index=0)
        self.state: Any = SimpleNamespace(global_step=0, max_steps=4)
        self.helix_config: Any = SimpleNamespace(ranks_per_batch=1)
        self.model = self.optimizer = None
        self.model_accepts_loss_kwargs = True
        self._stock, self._health = StockTrainer(), Health(device)
        self._prepare_inputs = lambda batch: batch


def batch(**more: Any) -> dict[str, Any]:
    ids = torch.arange(6).reshape(1, 6)
    return {"input_ids": ids, "labels": ids, **more}


def test_a_link_is_settled_before_a_window() -> None:
    hooks = Hooks()
    hooks.training_step(torch.nn.Identity(), batch())
    assert hooks.helix.calls == ["settle for 1", "train 1"]
    # A step of a fetched window only trains.
    hooks = Hooks()
    samples, items = hooks.get_batch_samples(iter([batch(), batch()]), 2, torch.device("cpu"))
    for each in samples:
        hooks.training_step(torch.nn.Identity(), each, items)
    assert hooks.helix.calls == ["tune for 2", "train 2"]
    # A step by hand that fails leaves no window behind.
    hooks = Hooks()
    with pytest.raises(RuntimeError, match="no"):
        hooks.training_step(torch.nn.Identity(), batch(fails=True))
    hooks.training_step(torch.nn.Identity(), batch())
    assert hooks.helix.calls == ["settle for 1", "settle for 1", "train 1"]


class Watched(SFTTrainer):  # type: ignore[misc]
    """A step of one's own, which may change batches."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class Prepared(Trainer):
    """Batches that are changed after they are fetched."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs)


@pytest.mark.parametrize(
    ("bases", "expected"),
    [((WindowHooks, Trainer), True), ((WindowHooks, SFTTrainer), True), ((WindowHooks, Prepared), False)],
    ids=lambda given: given if isinstance(given, bool) else given[1].__name__,
)
def test_windows_are_compared_again_if_a_class_may_change_them(bases: tuple[type, ...], expected: bool) -> None:
    assert trains_as_fetched(type("Ours", bases, {})) is expected


def test_a_step_in_front_may_change_windows() -> None:
    step = {"training_step": Watched.training_step}
    assert not trains_as_fetched(type("Ours", (WindowHooks, SFTTrainer), step))
    assert trains_as_fetched(type("Ours", (WindowHooks, Watched), {}))  # behind ours, it runs with single batches
