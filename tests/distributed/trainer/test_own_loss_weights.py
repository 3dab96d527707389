"""Losses that read weights, and calls outside of losses: gradients and figures of the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import SMALL, arguments
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from hf_helix import HelixConfig, HelixTrainer


class CosineHead(LlamaForCausalLM):
    """Logits of normalized weights, and a mixture of two heads with learned weights."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.shares = torch.nn.Parameter(torch.tensor([0.3, -0.2]))
        self.post_init()

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        weight = functional.normalize(self.lm_head.weight, dim=-1)
        one, other = self.shares.softmax(0)
        logits = one * 8 * functional.linear(hidden, weight) + other * self.lm_head(hidden)
        return {"loss": self.loss_function(logits, labels, self.config.vocab_size, **kwargs), "logits": logits}


class Regularized:
    """The distance of every weight from 0.01, by a coefficient of its own."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss
        for number, weight in enumerate(model.parameters()):
            loss = loss + 1e-3 * (number % 3) * (weight - 0.01).pow(2).sum()
        query = model.model.layers[1].self_attn.q_proj.weight
        loss = loss + 1e-2 * (query @ query.T - torch.eye(len(query))).norm()
        return (loss, outputs) if return_outputs else loss


class StockRegularized(Regularized, Trainer):
    pass


class HelixRegularized(Regularized, HelixTrainer):
    pass


class Curious(TrainerCallback):
    """Calls the model without `torch.no_grad()` at every point of a step."""

    def call(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        ids = torch.arange(1, 9).view(1, 8)
        assert model(input_ids=ids, labels=ids).loss > 0

    on_step_begin = on_substep_end = on_pre_optimizer_step = on_step_end = call


def follow(folder: str, helix: dict[str, Any] | None, kind: str) -> list[dict[str, float]]:
    torch.manual_seed(0)
    model: Any = (CosineHead if kind == "cosine" else LlamaForCausalLM)(LlamaConfig(**SMALL))
    own, stock = (HelixRegularized, StockRegularized) if kind == "regularized" else (HelixTrainer, Trainer)
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-3}
    rows = [torch.randint(1, 131, (14,)) for _ in range(12)]
    options: dict[str, Any] = {
        "model": model,
        "args": arguments(folder, **steps),
        "train_dataset": [{"input_ids": row, "labels": row} for row in rows],
        "callbacks": [Curious()] if kind == "curious" else [],
    }
    if kind == "curious":
        options["compute_loss_func"] = lambda outputs, labels, **_: functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )
    if helix is not None:
        trainer: Any = own(**options, helix_config=HelixConfig(plan="greedy", cache=False, **helix))
    else:
        trainer = stock(**options)
    trainer.train()
    names = ("loss", "grad_norm")
    log = [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]
    trainer.save_model(folder)
    return log


@pytest.mark.parametrize(
    ("kind", "helix"),
    [
        pytest.param(kind, helix, marks=pytest.mark.slow)
        for kind in ("cosine", "regularized", "curious")
        for helix in ({"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2})
    ],
    ids=str,
)
def test_as_the_stock_trainer(kind: str, helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    wanted = follow(str(tmp_path / "stock"), None, kind)
    for found in cluster_of(2).run(follow, folder=str(tmp_path / "helix"), helix=helix, kind=kind):
        for mine, stock in zip(found, wanted, strict=True):
            assert mine == pytest.approx(stock, rel=1e-4)


def test_shards_are_refused(cluster_of: Any, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "helix": {"shard_parameters": True}, "kind": "regularized"}
    for failure in cluster_of(2).errors(follow, **options):
        assert "the loss reads the trained parameter model.embed_tokens.weight, but" in failure.message
