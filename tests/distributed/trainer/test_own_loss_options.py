"""Options of the trainer beside a loss of the user's own: what the stock Trainer makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import arguments, llama
from transformers import Trainer

from hf_helix import HelixConfig, HelixTrainer


def focal(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    tokens = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -((1 - tokens.exp()) ** 2 * tokens).sum() / num_items_in_batch


def follow(folder: str, helix: dict[str, Any] | None, kind: str) -> list[dict[str, float]]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(1, 64, (12,), generator=generator) for _ in range(16)]
    given = {"label_smoothing_factor": 0.1} if kind == "smoothing" else {"bf16": True}
    usual = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 1e-3}
    options: dict[str, Any] = {
        "args": arguments(folder, **usual, **given),
        "train_dataset": [{"input_ids": each, "labels": each.clone()} for each in ids],
        "compute_loss_func": focal,
    }
    make = lambda: llama(num_hidden_layers=2)  # noqa: E731
    options |= {"model_init": make} if kind == "model_init" else {"model": make()}
    if helix is None:
        trainer = Trainer(**options)
    else:
        trainer = HelixTrainer(**options, helix_config=HelixConfig(plan="greedy", cache=False, **helix))
    trainer.train()
    return [
        {name: entry[name] for name in ("loss", "grad_norm") if name in entry} for entry in trainer.state.log_history
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smoothing", "model_init"])
def test_as_the_stock_trainer(kind: str, cluster_of: Any, tmp_path: Path) -> None:
    wanted = follow(str(tmp_path / "stock"), None, kind)
    for result in cluster_of(2).run(follow, folder=str(tmp_path / "helix"), helix={"tp_size": 2}, kind=kind):
        for found, stock in zip(result, wanted, strict=True):
            assert found == pytest.approx(stock, rel=1e-4 if kind == "smoothing" else 2e-2)


def test_plans_of_measured_times_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"args": arguments(str(tmp_path)), "compute_loss_func": focal}
    with pytest.raises(ValueError, match=r"plan='search' with a loss of one's own: .*; use plan='greedy', or profile="):
        HelixTrainer(model=llama(), helix_config=HelixConfig(plan="search"), **options)
