"""Tiny models whose families are derived. Named "support.derived_models:function" for `tiny`."""

import functools
from typing import Any

import torch
import transformers
from support.models import VOCABULARY, made
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from hf_helix.models.small_config import default_config

HOME = "support.derived_models:"
"""What the names of these functions begin with where `tiny` is told one."""

OF_GEMMA2 = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 7, "attn_implementation": "eager"}


def gemma2(**changes: Any) -> Gemma2ForCausalLM:
    """Caps that matter, windows on every other layer, a scaled embedding that is tied, norms behind both halves."""
    caps = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5}
    return made(Gemma2ForCausalLM, Gemma2Config, {**OF_GEMMA2, **caps, **changes})


def phi3(**changes: Any) -> Phi3ForCausalLM:
    """Fused projections whose blocks differ in length, and a part of each head that is not rotated."""
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return made(Phi3ForCausalLM, Phi3Config, {**ids, "sliding_window": 7, **changes})


def qwen2_moe(**changes: Any) -> Qwen2MoeForCausalLM:
    """A shared expert with a gate beside routed ones."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return made(Qwen2MoeForCausalLM, Qwen2MoeConfig, {**experts, "shared_expert_intermediate_size": 40, **changes})


def gemma3(**changes: Any) -> Gemma3ForCausalLM:
    """Two ropes, windows on every other layer, norms of queries and keys, a scaled embedding that is tied."""
    kinds = ["sliding_attention", "full_attention"] * 4
    layers = {"layer_types": kinds[: changes.get("num_hidden_layers", 3)], "sliding_window": 7}
    return made(Gemma3ForCausalLM, Gemma3TextConfig, {"head_dim": 8, "query_pre_attn_scalar": 8, **layers, **changes})


def olmo2(**changes: Any) -> Olmo2ForCausalLM:
    """Norms over all heads of queries and keys, and norms behind both halves."""
    return made(Olmo2ForCausalLM, Olmo2Config, {"bos_token_id": 1, "eos_token_id": 2, **changes})


def gpt_oss(**changes: Any) -> GptOssForCausalLM:
    """Attention sinks, windows on every other layer, experts with biases."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "attn_implementation": "eager"}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40}
    kinds = ["sliding_attention", "full_attention"] * 4
    layers = {"layer_types": kinds[: changes.get("num_hidden_layers", 3)], "sliding_window": 7}
    return made(GptOssForCausalLM, GptOssConfig, {"head_dim": 8, **rope, **experts, **layers, **changes})


def deepseek_v3(**changes: Any) -> DeepseekV3ForCausalLM:
    """Latent attention; a dense layer, then experts in groups with a shared one, by routers with biases."""
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    layers = {"first_k_dense_replace": 1, "moe_intermediate_size": 24, "num_key_value_heads": 4}
    return made(DeepseekV3ForCausalLM, DeepseekV3Config, {**latent, **experts, **layers, **changes})


def small(name: str, **changes: Any) -> Any:
    """A small model of a class, with a layer of every kind that the class has."""
    attention, layers = changes.pop("attn_implementation", None), changes.pop("num_hidden_layers", 3)
    config = default_config(name, layers)
    config.get_text_config().update({"vocab_size": VOCABULARY, **changes})
    config._attn_implementation = attention
    torch.manual_seed(0)
    return getattr(transformers, name)(config)


qwen3_next = functools.partial(small, "Qwen3NextForCausalLM")  # one linear for queries, keys, values and gates
qwen3_5 = functools.partial(small, "Qwen3_5ForCausalLM")
qwen3_5_moe = functools.partial(small, "Qwen3_5MoeForCausalLM")
olmo_hybrid = functools.partial(small, "OlmoHybridForCausalLM")  # three convolutions, norms behind the mixers
kimi_linear = functools.partial(small, "KimiLinearForCausalLM")  # a decay for every feature, latent attention
bailing_hybrid = functools.partial(small, "BailingHybridForCausalLM")
nemotron_h = functools.partial(small, "NemotronHForCausalLM")  # several groups of state features, a mixer a layer
granite_moe_hybrid = functools.partial(small, "GraniteMoeHybridForCausalLM")  # one group
bamba = functools.partial(small, "BambaForCausalLM")  # layers return pairs
falcon_h1 = functools.partial(small, "FalconH1ForCausalLM")  # attention beside the mixer, multipliers in a buffer
mamba2 = functools.partial(small, "Mamba2ForCausalLM")  # no attention at all
mamba = functools.partial(small, "MambaForCausalLM")  # a scan by channel, whose state features all channels share
falcon_mamba = functools.partial(small, "FalconMambaForCausalLM")  # norms of time steps and state features
jamba = functools.partial(small, "JambaForCausalLM")
lfm2 = functools.partial(small, "Lfm2ForCausalLM")  # short convolutions
lfm2_moe = functools.partial(small, "Lfm2MoeForCausalLM")
lfm3 = functools.partial(small, "Lfm3ForCausalLM")

glm4_moe = functools.partial(small, "Glm4MoeForCausalLM")
olmoe = functools.partial(small, "OlmoeForCausalLM")
bitnet = functools.partial(small, "BitNetForCausalLM")  # a norm between attention and the linear behind
modernbert = functools.partial(small, "ModernBertDecoderForCausalLM")  # a norm of embeddings

HYBRIDS = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "nemotron_h"),
    *("granite_moe_hybrid", "bamba", "falcon_h1", "mamba2", "mamba", "falcon_mamba", "jamba"),
    *("lfm2", "lfm2_moe", "lfm3"),
)
"""The functions of classes with recurrent layers."""


qwen3_5_text = functools.partial(small, "Qwen3_5ForConditionalGeneration")
gemma3_text = functools.partial(small, "Gemma3ForConditionalGeneration")
llava_text = functools.partial(small, "LlavaForConditionalGeneration")
kimi_text = functools.partial(small, "Kimi_K25ForConditionalGeneration")  # padding in the places of images
TEXT_PARTS = ("qwen3_5_text", "gemma3_text", "llava_text", "kimi_text")
"""The functions of classes with towers beside their text."""


def by_length(**changes: Any) -> Gemma2ForCausalLM:
    """A Gemma 2 that was patched to compute something that depends on how many tokens it is given at once."""
    model = gemma2(**changes)
    for layer in model.model.layers:
        layer.mlp.forward = functools.partial(_by_length, layer.mlp.forward)
    return model


def _by_length(before: Any, x: Any) -> Any:
    return before(x) + x.shape[1] / 8
