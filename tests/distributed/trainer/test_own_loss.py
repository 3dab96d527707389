"""Losses of the user's own under HelixTrainer: figures, predictions and saved weights of the stock Trainer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import SMALL, arguments, tiny
from torch import Tensor
from torch.nn import functional
from transformers import (
    BartForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
)

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.models.small_config import default_config

SIZES = {**SMALL, "pad_token_id": 0}


def focal(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    tokens = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -((1 - tokens.exp()) ** 2 * tokens).sum() / num_items_in_batch


def weighted(logits: Any, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    weights = torch.linspace(0.5, 1.5, vocab_size)
    rows = logits[:, :-1].reshape(-1, vocab_size).float()
    return functional.cross_entropy(rows, labels[:, 1:].reshape(-1), weight=weights)


def distilled(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Of every hidden state, and of the logits."""
    states = outputs.hidden_states
    near = [functional.cosine_similarity(a, b, -1).mean() for a, b in itertools.pairwise(states)]
    return focal(outputs, labels, num_items_in_batch) - 0.1 * sum(place * each for place, each in enumerate(near))


def routed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    squares = [each.float().logsumexp(-1).pow(2).mean() for each in outputs.router_logits]
    return focal(outputs, labels, num_items_in_batch) + outputs.aux_loss + 0.1 * sum(squares)


RULES = {"focal": focal, "hidden states": distilled, "routers": routed}


class ZLoss:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 1e-3 * outputs.logits.float().logsumexp(-1).pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class StockZLoss(ZLoss, Trainer):
    pass


class HelixZLoss(ZLoss, HelixTrainer):
    pass


class WithValues(LlamaForCausalLM):
    """A head of the user's own beside the language-model head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.values = torch.nn.Sequential(
            torch.nn.LayerNorm(config.hidden_size), torch.nn.Linear(config.hidden_size, 1)
        )
        self.post_init()

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return {"loss": loss + self.values(hidden).pow(2).mean(), "logits": logits}


def rows(count: int, kind: str) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(1, 127, (14,), generator=generator) for _ in range(count)]
    return [
        {"input_ids": each, "labels": torch.tensor(number % 2) if kind == "classes" else each.clone()}
        for number, each in enumerate(ids)
    ]


def flattened(given: Any) -> list[Any]:
    return [leaf for each in given for leaf in flattened(each)] if isinstance(given, tuple) else [given]


def follow(folder: str, helix: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    if kind == "routers":
        model: Any = tiny("mixtral", **SIZES, output_router_logits=True)
    else:
        classes = {"classes": LlamaForSequenceClassification, "a head of its own": WithValues}
        config = LlamaConfig(**SIZES, output_hidden_states=kind == "hidden states")
        model = classes.get(kind, LlamaForCausalLM)(config)
    if kind == "in the class":  # of every token itself, not of the next
        model = BartForCausalLM(default_config("BartForCausalLM", 4))
    if kind == "loss_function":
        model.loss_function = weighted
    training = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "learning_rate": 1e-3,
    }
    options = {"model": model, "args": arguments(folder, **training), "train_dataset": rows(24, kind)}
    options |= {"eval_dataset": rows(6, kind), "compute_loss_func": RULES.get(kind)}
    if helix is None:
        trainer: Any = (StockZLoss if kind == "z-loss" else Trainer)(**options)
    else:
        chosen = HelixZLoss if kind == "z-loss" else HelixTrainer
        trainer = chosen(**options, helix_config=HelixConfig(plan="greedy", cache=False, **helix))
    trainer.train()
    predicted = trainer.predict(rows(6, kind))
    trainer.save_model(folder)
    names = ("loss", "grad_norm", "eval_loss")
    return {
        "log": [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history],
        "predicted": [torch.as_tensor(each) for each in flattened(predicted.predictions)],
        "fused": trainer.helix.seam.called.num_fused if helix is not None else 6,
    }


@pytest.mark.parametrize(
    ("kind", "helix"),
    [("focal", {"tp_size": 2})]
    + [
        pytest.param(kind, helix, marks=pytest.mark.slow)
        for kind in (
            *("focal", "z-loss", "loss_function", "classes", "a head of its own", "hidden states", "routers"),
            "in the class",
        )
        for helix in ({"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2})
        if (kind, helix) not in (("focal", {"tp_size": 2}), ("in the class", {"cp_size": 2}))
    ]
    + [pytest.param("hidden states", {"pp_size": 2, "layers_per_stage": [1.5, 1, 1.5, 1]}, marks=pytest.mark.slow)],
    ids=str,
)
def test_as_the_stock_trainer(kind: str, helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    wanted = follow(str(tmp_path / "stock"), None, kind)
    for result in cluster_of(2).run(follow, folder=str(tmp_path / "helix"), helix=helix, kind=kind):
        for found, stock in zip(result["log"], wanted["log"], strict=True):
            assert found == pytest.approx(stock, rel=1e-4)
        torch.testing.assert_close(result["predicted"], wanted["predicted"], rtol=1e-4, atol=1e-5)
        assert len(wanted["predicted"]) == {"hidden states": 7, "routers": 7}.get(kind, 1)
        assert result["fused"] == wanted["fused"]
    saved, stock = (load_file(tmp_path / name / "model.safetensors") for name in ("helix", "stock"))
    assert saved.keys() == stock.keys()
    for name, value in stock.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=2e-5)


class OfEmbeddings(HelixTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        embeddings = torch.zeros(*inputs["input_ids"].shape, model.config.hidden_size)
        return model(inputs_embeds=embeddings).logits.mean()


def test_embeddings_in_place_of_tokens_are_refused(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), max_steps=1)
    options: dict[str, Any] = {"args": args, "train_dataset": rows(4, "focal"), "helix_config": HelixConfig()}
    with pytest.raises(ValueError, match="called with inputs_embeds, by the caller or by the model's own code"):
        OfEmbeddings(model=LlamaForCausalLM(LlamaConfig(**SIZES)), **options).train()
