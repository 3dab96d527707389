"""Models as scripts prepare them: parameters without a reader, several types, copies of routers, buffers that change.

Losses, norms and saved files against the stock Trainer on one process.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support.jobs import build
from support.marks import slow
from support.models import llama, sequences, tiny
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, TrainerCallback

STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "dp2": {},
    "ep2": {"ep_size": 2},
    "shard_optimizer": {"shard_optimizer": True},
    "shard_parameters": {"shard_parameters": True},
}
LAYERS = {"num_hidden_layers": 4}


def unread(family: str) -> Any:
    """With parameters that no code reads: beside the layers, in a layer, and at the top."""
    model = tiny(family, **LAYERS)
    torch.manual_seed(1)
    model.model.extra = nn.Linear(6, 7)
    model.model.layers[3].extra = nn.Linear(3, 5)
    model.extra = nn.Parameter(torch.ones(3))
    return model


def upcast(*words: str) -> Any:
    """In bf16, with some parameters in fp32."""
    model = tiny("llama", "bfloat16", **LAYERS)
    for name, parameter in model.named_parameters():
        if any(word in name for word in words):
            parameter.data = parameter.data.float()
    return model


def copied_gates() -> Any:
    """With LoRA, and copies of the routers that are trained in full."""
    model = tiny("qwen3_moe", output_router_logits=True, **LAYERS)
    torch.manual_seed(5)
    options = {"r": 3, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["gate"], "task_type": "CAUSAL_LM"}
    return get_peft_model(model, LoraConfig(init_lora_weights=False, **options))


def biased() -> Any:
    """With biases of routers that every rank draws for itself: rank 0's count."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_attention_heads": 4}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    more = {"vocab_size": 131, "num_key_value_heads": 4, "first_k_dense_replace": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**LAYERS, **sizes, **experts, **ranks, **more))
    drawn = torch.Generator().manual_seed(3 + rank())
    for layer in model.model.layers[1:]:
        nn.init.normal_(layer.mlp.gate.weight, std=0.5)
        layer.mlp.gate.e_score_correction_bias.normal_(std=0.3, generator=drawn)
    return model


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class MovesBiases(TrainerCallback):
    """Moves the biases of routers as the class is trained: in place, or by new tensors; every rank to other values."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        shift = torch.linspace(-1, 1, 8).roll(state.global_step + rank())
        for layer in model.model.layers[1:]:
            gate = layer.mlp.gate
            if state.global_step % 2:
                gate.e_score_correction_bias.add_(shift)
            else:
                gate.e_score_correction_bias = gate.e_score_correction_bias + shift


BF16 = {"bf16": True}
KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "unread": (lambda: unread("llama"), {}, {}),
    "unread, derived": (lambda: unread("starcoder2"), {}, {}),
    "norms": (lambda: upcast("norm"), BF16, {}),
    "head": (lambda: upcast("lm_head"), BF16, {}),
    "embedding": (lambda: upcast("embed", "norm"), BF16, {}),
    "norms without bf16": (lambda: upcast("norm"), {}, {}),
    "gates": (copied_gates, {}, {}),
    "biases": (biased, {}, {"callbacks": [MovesBiases()]}),
}


def follow(folder: str, kind: str, layout: str = "") -> dict[str, Any]:
    """Trains and saves; without a layout by the stock Trainer."""
    make, training, given = KINDS[kind]
    replicas = layout not in ("", "tp2", "pp2")
    training = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": 1 if replicas else 2,
        "learning_rate": 2e-3,
        **training,
    }
    helix = {"plan": "greedy", **LAYOUTS[layout]} if layout else None
    trainer = build(folder, helix, training, model=make(), train_dataset=sequences(60), **given)
    trainer.train()
    trainer.save_model(folder)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": [entry["loss"] for entry in logs], "norms": [float(entry["grad_norm"]) for entry in logs]}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("unread", "pp2"),
        *(slow("unread", layout) for layout in ("tp2", "dp2", "shard_optimizer", "shard_parameters")),
        *(slow("unread, derived", layout) for layout in ("tp2", "pp2", "shard_parameters")),
        ("norms", "pp2"),
        *(slow("norms", layout) for layout in ("tp2", "shard_optimizer", "shard_parameters")),
        *(slow("head", layout) for layout in ("tp2", "pp2", "shard_parameters")),
        *(slow("embedding", layout) for layout in ("tp2", "pp2", "shard_optimizer")),
        ("gates", "tp2"),
        *(slow("gates", layout) for layout in ("pp2", "ep2")),
        ("biases", "dp2"),
        *(slow("biases", layout) for layout in ("tp2", "pp2", "ep2")),
    ],
)
def test_a_prepared_model_trains_as_in_the_stock_trainer(
    kind: str, layout: str, cluster_of: Any, tmp_path: Path
) -> None:
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    expected = follow(str(stock), kind)
    tolerance = 2e-3 if KINDS[kind][1] else 1e-5
    for result in cluster_of(2).run(follow, folder=str(ours), kind=kind, layout=layout):
        assert result["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert result["norms"] == pytest.approx(expected["norms"], rel=10 * tolerance)
    (name,) = (path.name for path in stock.glob("*.safetensors"))
    saved, written = load_file(stock / name), load_file(ours / name)
    assert {key: (value.dtype, value.shape) for key, value in written.items()} == {
        key: (value.dtype, value.shape) for key, value in saved.items()
    }
    for key, value in saved.items():
        if "extra" in key or "e_score" in key:
            assert torch.equal(written[key], value), key


def test_types_that_transformers_cannot_mix_are_refused(cluster_of: Any, tmp_path: Path) -> None:
    said = cluster_of(2).assert_raises(
        follow, folder=str(tmp_path), kind="norms without bf16", layout="tp2", alike=True
    )
    first = said[0].splitlines()[0]
    for word in ("layers.0.input_layernorm.weight is torch.float32, others are torch.bfloat16", "bf16=True", "dtype="):
        assert word in first


def test_layers_that_write_to_a_buffer_are_refused(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=2)
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.register_buffer("count", torch.zeros(()))

        def forward(x: torch.Tensor, mlp: Any = mlp) -> torch.Tensor:
            mlp.count.add_(1)
            return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)) * mlp.count.clamp(max=1)

        mlp.forward = forward
    with pytest.raises(ValueError, match=r"writes to the buffer mlp\.count.*in a callback"):
        build(str(tmp_path), {}, model=model)
