"""A loss of one's own in a loop around Accelerate: figures and weights of the loop around the unsplit model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support.loop_jobs import reset
from support.models import llama, sequences
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import default_data_collator

from hf_helix import HelixConfig, HelixPlugin
from hf_helix.runtime.divided import full_of


def focal(model: Any, batch: Any) -> torch.Tensor:
    logits, targets = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["input_ids"][:, 1:]
    taken = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1))
    return -((1 - taken.exp()) ** 2 * taken).mean() + 1e-4 * functional.normalize(model.lm_head.weight).sum()


def follow(helix: dict[str, Any] | None, num_batches: int = 2) -> tuple[list[float], list[torch.Tensor]]:
    """Three steps of `num_batches` batches, then an evaluation."""
    reset()
    torch.manual_seed(0)
    model: Any = llama(num_hidden_layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(sequences(6 * num_batches), 2, collate_fn=default_data_collator)
    figures = []
    if helix is None:
        windows = list(loader)
        for start in range(0, len(windows), num_batches):
            losses = [focal(model, batch) / num_batches for batch in windows[start : start + num_batches]]
            sum(losses, start=torch.zeros(())).backward()
            figures += [sum(losses).item(), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))]
            optimizer.step()
            optimizer.zero_grad()
        figures.append(focal(model, windows[0]).item())
        return figures, [each.detach() for each in model.parameters()]
    dp_size = helix.pop("dp_size", 1)
    plugin = HelixPlugin(HelixConfig(cache=False, plan="greedy", **helix))
    accelerator = Accelerator(parallelism_config=plugin, cpu=True, gradient_accumulation_steps=num_batches // dp_size)
    cut, optimizer, loader = plugin.prepare(accelerator, model, optimizer, loader, loss=focal)
    for window in cut.windows(loader):
        figures += [float(cut.train_window(window)), float(cut.clip_grad_norm_(0.5))]
        optimizer.step()
        optimizer.zero_grad()
    first = next(iter(loader))
    figures.append(float(cut.evaluate(first).loss))
    assert figures[-1] == pytest.approx(float(focal(cut.module, first)), rel=1e-6)  # gradients on
    return figures, [full_of(each) for each in cut.parameters()]


@pytest.mark.parametrize(
    ("helix", "ranks"),
    [
        ({"tp_size": 2}, 2),
        pytest.param({"pp_size": 2}, 2, marks=pytest.mark.slow),
        pytest.param({"shard_optimizer": True, "dp_size": 2}, 2, marks=pytest.mark.slow),
        pytest.param({"tp_size": 2, "pp_size": 2}, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_as_the_stock_loop(helix: dict[str, Any], ranks: int, cluster_of: Any) -> None:
    figures, weights = follow(None)
    for found, trained in cluster_of(ranks).run(follow, helix=helix):
        count = len(figures) - 1 if "dp_size" in helix else len(figures)  # the first batch of a rank is its own
        assert found[:count] == pytest.approx(figures[:count], rel=1e-4)
        for mine, stock in zip(trained, weights, strict=True):
            torch.testing.assert_close(mine, stock, rtol=1e-4, atol=2e-5)
