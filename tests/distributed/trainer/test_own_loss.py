"""Losses of the user's own under HelixTrainer: figures, predictions and saved weights of the stock Trainer."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.marks import slow
from support.models import SMALL, arguments, tiny
from torch import Tensor
from torch.nn import functional
from transformers import (
    BartForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
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


def plain(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


RULES = {"focal": focal, "hidden states": distilled, "routers": routed, "calls between steps": plain}
RULES |= {"smoothing": focal, "model_init, bf16": focal}


class ZLoss:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 1e-3 * outputs.logits.float().logsumexp(-1).pow(2).mean()
        return (loss, outputs) if return_outputs else loss


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


class OfFixedWeights:
    """Functions of hidden states and of weights without gradients: detached, read as data, under no_grad, frozen."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        state, table, norm = outputs.hidden_states[-1], model.model.embed_tokens.weight, model.model.norm.weight
        with torch.no_grad():
            turned, doubled = table.T, 2 * norm
        scaled = state.clone()
        scaled.mul_(norm.detach())
        assert not turned.data.requires_grad
        values = [
            state * norm.detach() + doubled,
            state @ turned,
            functional.linear(state, table.data),
            torch.einsum("bsh,vh->bsv", state, table.detach()),
            torch.cat([state, norm.detach().expand_as(state)], -1),
            torch.where(norm.detach() > 0.99, state, doubled),
            scaled,
            state @ model.model.layers[-1].mlp.up_proj.weight.t(),
        ]
        loss = outputs.loss + sum((1 + place) * each.pow(2).mean() for place, each in enumerate(values))
        return (loss, outputs) if return_outputs else loss


FIXED = "of fixed weights"
MIXINS = {"z-loss": ZLoss, "of weights": Regularized, FIXED: OfFixedWeights}


class Curious(TrainerCallback):
    """Calls the model without `torch.no_grad()` at every point of a step."""

    def call(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        ids = torch.arange(1, 9).view(1, 8)
        assert model(input_ids=ids, labels=ids).loss > 0

    on_step_begin = on_substep_end = on_pre_optimizer_step = on_step_end = call


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


CLASSES = {"classes": LlamaForSequenceClassification, "a head of its own": WithValues, "a cosine head": CosineHead}


def rows(count: int, kind: str) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(1, 127, (14,), generator=generator) for _ in range(count)]
    return [
        {"input_ids": each, "labels": torch.tensor(number % 2) if kind == "classes" else each.clone()}
        for number, each in enumerate(ids)
    ]


def flattened(given: Any) -> list[Any]:
    return [leaf for each in given for leaf in flattened(each)] if isinstance(given, tuple) else [given]


def follow(folder: str, helix: dict[str, Any] | None, kind: str, plan: str = "greedy") -> dict[str, Any]:
    """The log, predictions and, under a plan that is measured, diagnostics behind the run."""
    torch.manual_seed(0)
    if kind == "routers":
        model: Any = tiny("mixtral", **SIZES, output_router_logits=True)
    else:
        config = LlamaConfig(**SIZES, output_hidden_states=kind == "hidden states")
        model = CLASSES.get(kind, LlamaForCausalLM)(config)
    if kind == "in the class":  # of every token itself, not of the next
        model = BartForCausalLM(default_config("BartForCausalLM", 4))
    if kind == FIXED:
        model.model.layers[-1].mlp.up_proj.weight.requires_grad_(False)
    if kind == "loss_function":
        model.loss_function = weighted
    training = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "learning_rate": 1e-3,
        "label_smoothing_factor": 0.1 if kind == "smoothing" else 0.0,
        "bf16": kind == "model_init, bf16",
    }
    options = {"args": arguments(folder, **training), "train_dataset": rows(24, kind)}
    options |= {"eval_dataset": rows(6, kind), "compute_loss_func": RULES.get(kind)}
    options |= {"model_init": lambda: LlamaForCausalLM(config)} if kind == "model_init, bf16" else {"model": model}
    options |= {"callbacks": [Curious()] if kind == "calls between steps" else []}
    base = Trainer if helix is None else HelixTrainer
    chosen: Any = type("Mine", (MIXINS[kind], base), {}) if kind in MIXINS else base
    given = {} if helix is None else {"helix_config": HelixConfig(plan=plan, cache=False, **helix)}
    trainer = chosen(**options, **given)
    trainer.train()
    predicted = trainer.predict(rows(6, kind))
    trainer.save_model(folder)
    names = ("loss", "grad_norm", "eval_loss")
    behind: dict[str, Any] = {}
    if plan != "greedy":
        trainer.trace(Path(folder) / "trace.json")
        behind = {"communication": trainer.measure_overlap(repeats=1).communication, "rule": trainer.plan.rule}
        behind["memory"] = trainer.measure_memory()
        behind["grads"] = [name for name, each in trainer.model.named_parameters() if each.grad is not None]
    return {
        **behind,
        "log": [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history],
        "predicted": [torch.as_tensor(each) for each in flattened(predicted.predictions)],
        "fused": trainer.helix.session.called_decoder.deferred_backward.num_fused if helix is not None else 6,
    }


TP, PP, CP = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}
SLOW = [
    *(
        (kind, TP)
        for kind in ("z-loss", "loss_function", "a head of its own", "hidden states", "routers", "of weights")
    ),
    *((kind, PP) for kind in ("focal", "classes", "a cosine head", "routers", "of weights", "in the class")),
    *((kind, CP) for kind in ("focal", "classes", "hidden states", "of weights")),
    *((kind, TP) for kind in ("calls between steps", "smoothing", "model_init, bf16")),
    ("hidden states", {**PP, "layers_per_stage": [1.5, 1, 1.5, 1]}),
    *((FIXED, helix) for helix in (TP, CP)),
]
FAR = {"model_init, bf16": (2e-2, 2e-2), "a cosine head": (1e-4, 1e-4)}
"""How far figures may be away, and weights, where it is more than usual."""


@pytest.mark.parametrize(("kind", "helix"), [("focal", TP), (FIXED, PP), *(slow(*case) for case in SLOW)], ids=str)
def test_as_the_stock_trainer(kind: str, helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    wanted, (rel, near) = follow(str(tmp_path / "stock"), None, kind), FAR.get(kind, (1e-4, 2e-5))
    for result in cluster_of(2).run(follow, folder=str(tmp_path / "helix"), helix=helix, kind=kind):
        for found, stock in zip(result["log"], wanted["log"], strict=True):
            assert found == pytest.approx(stock, rel=rel)
        torch.testing.assert_close(result["predicted"], wanted["predicted"], rtol=rel, atol=near / 2)
        assert len(wanted["predicted"]) == {"hidden states": 7, "routers": 7, FIXED: 7}.get(kind, 1)
        assert result["fused"] == wanted["fused"]
    saved, stock = (load_file(tmp_path / name / "model.safetensors") for name in ("helix", "stock"))
    assert saved.keys() == stock.keys()
    for name, value in stock.items():
        torch.testing.assert_close(saved[name], value, rtol=rel, atol=near)


@pytest.mark.slow
def test_copies_of_shards(cluster_of: Any, tmp_path: Path) -> None:
    """A loss of one's own may call a frozen model, which is cut without a shard of optimizer states."""
    helix = {"tp_size": 2, "shard_optimizer": True, "dp_replicate_size": 2}
    four = cluster_of(4).run(follow, folder=str(tmp_path / "copies"), helix=helix, kind="focal")
    two = cluster_of(4).run(follow, folder=str(tmp_path / "plain"), helix={"tp_size": 2}, kind="focal")
    for found, plainly in zip(four[0]["log"], two[0]["log"], strict=True):
        assert found == pytest.approx(plainly, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["shard_optimizer", "shard_parameters"])
def test_fixed_weights_of_shards(shards: str, cluster_of: Any, tmp_path: Path) -> None:
    """Weights that data-parallel ranks shard can be read without gradients."""
    sharded, plainly = (
        cluster_of(2).run(follow, folder=str(tmp_path / str(number)), helix=helix, kind=FIXED)
        for number, helix in enumerate(({shards: True}, {}))
    )
    for found, wanted in zip(sharded[0]["log"], plainly[0]["log"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)


def test_shards_are_refused_where_the_loss_reads_weights(cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "helix": {"shard_parameters": True}, "kind": "of weights"}
    said = "the loss reads the trained parameter model.embed_tokens.weight, but"
    cluster_of(2).assert_raises(follow, said, raises="RuntimeError", **job)


@pytest.mark.slow
@pytest.mark.parametrize(("helix", "ranks"), [(TP, 2), ({**TP, **PP}, 4)], ids=str)
def test_measured_plans(helix: dict[str, Any], ranks: int, cluster_of: Any, tmp_path: Path) -> None:
    """A plan that is measured in the midst of a run changes nothing else; diagnostics behind the run neither."""
    greedy, measured = (
        cluster_of(ranks).run(follow, folder=str(tmp_path / plan), helix=helix, kind="focal", plan=plan)
        for plan in ("greedy", "dhelix")
    )
    assert (tmp_path / "dhelix" / "trace.json").stat().st_size
    for found, unmeasured in zip(measured, greedy, strict=True):
        for mine, others in zip(found["log"], unmeasured["log"], strict=True):
            assert mine == pytest.approx(others, rel=1e-4)
        assert found["rule"] == "dhelix"
        assert found["communication"] > 0
        assert min(found["memory"]) > 0
        assert not found["grads"]


class OfEmbeddings(HelixTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        embeddings = torch.zeros(*inputs["input_ids"].shape, model.config.hidden_size)
        return model(inputs_embeds=embeddings).logits.mean()


def test_embeddings_in_place_of_tokens_are_refused(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), max_steps=1)
    options: dict[str, Any] = {"args": args, "train_dataset": rows(4, "focal"), "helix_config": HelixConfig()}
    with pytest.raises(ValueError, match="called with inputs_embeds, by the caller or by the model's own code"):
        OfEmbeddings(model=LlamaForCausalLM(LlamaConfig(**SIZES)), **options).train()
