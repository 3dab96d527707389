"""Model FLOPs against those counted by hand and by torch; peaks of devices by their names."""

from typing import Any

import pytest
import torch
from support.derived_models import small
from support.models import VOCABULARY, llama, tiny
from torch.utils.flop_counter import FlopCounterMode

from hf_helix.report.flops import peak_tflops, token_flops

# A layer: q and o 32 x 32, k and v 32 x 16 (2 of 4 heads of 8), three of 32 x 57.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 57
HEAD = 32 * VOCABULARY


def test_frozen_weights_have_no_weight_gradients() -> None:
    """4 for each that a token meets; the copies that PEFT keeps of what it trains compute nothing."""
    model = llama(num_hidden_layers=1)
    model.requires_grad_(False)
    assert token_flops(model).linear == 4 * (LAYER + HEAD)
    adapters = 3 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 57))  # of rank 3
    adapted = tiny(num_hidden_layers=1, lora={"modules_to_save": ["lm_head"]}).get_base_model()
    assert token_flops(adapted).linear == 4 * LAYER + 6 * (adapters + HEAD)


def test_heads_of_several_sizes() -> None:
    """The dimensions of the heads of each layer, as their projections have them."""
    model = small("Gemma4ForCausalLM")
    widths = [layer.self_attn.q_proj.out_features for layer in model.model.layers]
    assert len({*widths}) > 1
    assert token_flops(model).attention_per_length == 12 * sum(widths)


def test_layers_of_several_kinds() -> None:
    """Convolutions have three dimensions and are no experts; only layers with attention attend; towers do not count."""
    model = small("Lfm2ForCausalLM", tie_word_embeddings=False)
    layers, head = model.model.layers, model.lm_head.weight.numel()
    matrices = sum(p.numel() for p in layers.parameters() if p.dim() > 1)
    assert any(p.dim() == 3 for p in layers.parameters())
    flops = token_flops(model)
    assert flops.linear == 6 * (matrices + head)
    assert flops.attention_per_length == 12 * model.config.layer_types.count("full_attention") * 64


@pytest.mark.parametrize(
    "model",
    [
        *({"family": family} for family in ("llama", "gpt2", "gpt_neox", "phimoe", "qwen3_moe")),
        {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ],
    ids=str,
)
def test_torch_counts_the_same(model: dict[str, Any]) -> None:
    """Eager attention computes every score, so all of `full`, and half of them count as causal; the rest is rotary
    angles. Of the experts, only those that tokens choose compute."""
    length = 33
    made = tiny(**model, attn_implementation="eager")
    made.set_experts_implementation("eager")  # torch does not count what grouped GEMMs do
    ids = torch.ones(2, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        made(input_ids=ids, labels=ids).loss.backward()
    flops = token_flops(made)
    assert counter.get_total_flops() == pytest.approx(2 * length * flops.full(length), rel=1e-3)
    assert flops.causal(length) == flops.full(length) - flops.attention_per_length * length / 2


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA A40", 149.7),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("", None),
        *((name, None) for name in ("NVIDIA L40", "NVIDIA A10G", "NVIDIA RTX A4000")),  # names like others
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
