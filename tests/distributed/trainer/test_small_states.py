"""Optimizers of torchao with states in 8 and 4 bits: checkpoints of data-parallel ranks, and the run resumed.

torchao is not among the packages of `make install`: PEFT would import it in every process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import arguments, llama
from transformers import Trainer

from hf_helix import HelixConfig, HelixTrainer

TRAINING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "per_device_train_batch_size": 2}


def follow(folder: str, optim: str, resume: bool = False, stock: bool = False) -> list[float]:
    torch.manual_seed(0)
    rows = [torch.randint(1, 131, (16,)) for _ in range(32)]
    options: dict[str, Any] = {
        "model": llama(hidden_size=64, num_hidden_layers=2),
        "args": arguments(folder, optim=optim, gradient_accumulation_steps=2 if stock else 1, **TRAINING),
        "train_dataset": [{"input_ids": row, "labels": row} for row in rows],
    }
    trainer = Trainer(**options) if stock else HelixTrainer(**options, helix_config=HelixConfig(plan="greedy"))
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_checkpoints(optim: str, cluster_of: Any, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    stock = follow(str(tmp_path / "stock"), optim, stock=True)
    folder = str(tmp_path / "helix")
    whole = cluster_of(2).run(follow, folder=folder, optim=optim)
    resumed = cluster_of(2).run(follow, folder=folder, optim=optim, resume=True)
    for losses, again in zip(whole, resumed, strict=True):
        assert losses == pytest.approx(stock, rel=1e-4)
        assert again == losses
