"""Routers balanced without a loss: the callback of the recipe moves biases as hooks on the stock model do."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import build
from support.marks import slow
from support.paths import ROOT
from transformers import DeepseekV3ForCausalLM, TrainerCallback

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "cp2": {"cp_size": 2},
    "dp2": {},
    "ep2": {"ep_size": 2},
    "shard_parameters": {"shard_parameters": True},
}
RATE = 0.05


class Counts(TrainerCallback):
    """On the stock model: counts what routers choose by hooks, and moves their biases."""

    def __init__(self, model: Any) -> None:
        self.routers = [layer.mlp.gate for layer in model.model.layers[1:]]
        self.loads = [torch.zeros(8) for _ in self.routers]
        for router, load in zip(self.routers, self.loads, strict=True):
            router.register_forward_hook(lambda router, given, found, load=load: self.count(load, found[-1]))

    def count(self, load: torch.Tensor, chosen: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            load += torch.bincount(chosen.flatten(), minlength=len(load))

    def on_step_end(self, *given: Any, **kwargs: Any) -> None:
        for router, load in zip(self.routers, self.loads, strict=True):
            for expert, count in enumerate(load.tolist()):
                step = (count < load.mean()) * RATE - (count > load.mean()) * RATE
                router.e_score_correction_bias[expert] += step
            load.zero_()


def follow(folder: str, layout: str = "", plan: str = "greedy") -> dict[str, Any]:
    """Losses and biases; without a layout of the stock Trainer."""
    sys.path.insert(0, str(ROOT / "recipes"))
    from balance import BalanceExperts, tiny

    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(tiny())
    for layer in model.model.layers[1:]:
        torch.nn.init.normal_(layer.mlp.gate.weight, std=0.5)
    tokens = torch.randint(2, 512, (40, 16), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    replicas = layout in ("dp2", "ep2", "shard_parameters")
    training = {"max_steps": 4, "learning_rate": 2e-3, "gradient_accumulation_steps": 1 if replicas else 2}
    training |= {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    helix = {"plan": plan, "tuning_share": 1.0, **LAYOUTS[layout]} if layout else None
    trainer = build(folder, helix, training, model=model, train_dataset=rows, eval_dataset=rows[:4])
    trainer.add_callback(BalanceExperts(trainer, RATE) if layout else Counts(model))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    routers = [layer.mlp.gate for layer in trainer.model.model.layers[1:]]
    return {"losses": losses, "biases": [router.e_score_correction_bias.tolist() for router in routers]}


@pytest.mark.parametrize(
    ("layout", "plan"),
    [
        slow("pp2", "greedy"),
        ("ep2", "greedy"),
        slow("pp2", "auto"),
        *(slow(layout, "greedy") for layout in ("tp2", "cp2", "dp2", "shard_parameters")),
    ],
)
def test_biases_move_as_in_the_stock_trainer(layout: str, plan: str, cluster_of: Any, tmp_path: Path) -> None:
    expected = follow(str(tmp_path / "stock"))
    assert len({value for each in expected["biases"] for value in each}) > 3
    for result in cluster_of(2).run(follow, folder=str(tmp_path / "ours"), layout=layout, plan=plan):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        for found, wanted in zip(result["biases"], expected["biases"], strict=True):
            assert found == pytest.approx(wanted, abs=1e-6)
