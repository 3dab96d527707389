"""Measurements of a run with a loss of its own: plans are chosen by measurement, diagnostics run, training stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import arguments, llama
from torch.nn import functional

from hf_helix import HelixConfig, HelixTrainer


def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def follow(folder: str, helix: dict[str, Any], plan: str) -> dict[str, Any]:
    torch.manual_seed(0)
    rows = [torch.randint(1, 131, (12 + 2 * (number % 3),)) for number in range(24)]
    training = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 4}
    trainer = HelixTrainer(
        model=llama(num_hidden_layers=4),
        args=arguments(folder, **training, learning_rate=1e-3),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=lambda batch: {
            key: torch.nn.utils.rnn.pad_sequence([each[key] for each in batch], batch_first=True) for key in batch[0]
        },
        compute_loss_func=loss_of,
        helix_config=HelixConfig(plan=plan, cache=False, **helix),
    )
    trainer.train()
    overlap, memory = trainer.measure_overlap(repeats=1), trainer.measure_memory()
    trainer.trace(Path(folder) / "trace.json")
    return {
        "log": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "hidden": [entry.get("helix/overlapped_fraction") for entry in trainer.state.log_history if "loss" in entry],
        "rule": trainer.plan.rule,
        "tuned": trainer.tuning is not None,
        "overlap": overlap.communication,
        "memory": memory,
        "grads": [name for name, each in trainer.model.named_parameters() if each.grad is not None],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("helix", "ranks"), [({"tp_size": 2}, 2), ({"pp_size": 2}, 2), ({"tp_size": 2, "pp_size": 2}, 4)], ids=str
)
def test_measured_plans(helix: dict[str, Any], ranks: int, cluster_of: Any, tmp_path: Path) -> None:
    cluster = cluster_of(ranks)
    wanted = cluster.run(follow, folder=str(tmp_path / "greedy"), helix=helix, plan="greedy")
    measured = cluster.run(follow, folder=str(tmp_path / "dhelix"), helix=helix, plan="dhelix")
    assert (tmp_path / "dhelix" / "trace.json").stat().st_size
    for found, unmeasured in zip(measured, wanted, strict=True):
        assert found["log"] == pytest.approx(unmeasured["log"], rel=1e-5)
        assert (found["rule"], found["tuned"]) == ("dhelix", True)
        assert (unmeasured["rule"], unmeasured["tuned"]) == ("greedy", False)
        if "tp_size" in helix:  # the figures are those of collectives
            assert any(fraction is not None for fraction in found["hidden"])
            assert found["overlap"] > 0
        assert min(found["memory"]) > 0
        assert not found["grads"]
