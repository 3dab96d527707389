"""Tiny models whose families are derived. Named "support.derived_models:function" for `tiny`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from support.models import llama, made
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.models.gemma2 import modeling_gemma2

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


def patched(patch: str, **changes: Any) -> Gemma2ForCausalLM:
    """A Gemma 2 with code in the place of its own, see `PATCHES`."""
    model = gemma2(**changes)
    for number, layer in enumerate(model.model.layers):
        PATCHES[patch](layer, number)
    return model


def patched_llama(**changes: Any) -> LlamaForCausalLM:
    """A declared class with code in the place of its own on one instance, which is therefore derived."""
    model = llama(**changes)
    of_instance(model.model.layers[0], 0)
    return model


def by_length(**changes: Any) -> Gemma2ForCausalLM:
    """A Gemma 2 that was patched to compute something that depends on how many tokens it is given at once."""
    model = gemma2(**changes)
    for layer in model.model.layers:
        layer.mlp.forward = functools.partial(_by_length, layer.mlp.forward)
    return model


def _by_length(before: Any, x: Any) -> Any:
    return before(x) + x.shape[1] / 8


def halved(self: Any, x: Any) -> Any:
    return 0.5 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def of_instance(layer: Any, number: int) -> None:
    layer.mlp.forward = types.MethodType(halved, layer.mlp)


def by_number(layer: Any, number: int) -> None:
    """One code, which closes over what differs from layer to layer."""
    before, factor = layer.mlp.forward, 2.0 + number
    layer.mlp.forward = lambda x: factor * before(x)


def of_layer(layer: Any, number: int) -> None:
    before = layer.forward

    def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states + 0.5 * before(hidden_states, *args, **kwargs)

    layer.forward = forward


class Gated(modeling_gemma2.Gemma2MLP):
    """Another class in the place of the model's."""

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x) * self.up_proj(x)))


def of_class(layer: Any, number: int) -> None:
    layer.mlp.__class__ = Gated


def called(layer: Any, number: int) -> None:
    """Norms and activations run as they are."""
    norm, act = layer.post_feedforward_layernorm, layer.mlp.act_fn
    norm.forward = lambda x: 0.25 * type(norm).forward(norm, x)
    act.register_forward_hook(lambda _, __, result: 2 * result)


PATCHES: dict[str, Callable[[Any, int], None]] = {
    "instance": of_instance,
    "number": by_number,
    "layer": of_layer,
    "class": of_class,
    "called": called,
}
