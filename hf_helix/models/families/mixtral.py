"""Mixtral, and those that differ from it by a few lines.

In:   `MixtralForCausalLM`, `PhimoeForCausalLM`, `Qwen3MoeForCausalLM`.
Out:  the operators of `Mixture` for a layer with experts, those of `Dense` for one without.
Must hold: the router of Phi-3.5-MoE (sparsemixer) draws its second experts in training, also without jitter.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_helix.models.families.llama import Qwen3
from hf_helix.models.families.mixture import Mixture
from hf_helix.models.graph.masks import SlidingWindow


class Mixtral(Mixture):
    """Experts in every layer, and one sliding window for all layers."""

    model_class = "MixtralForCausalLM"

    def jitter(self, mlp: Any) -> float:
        return mlp.jitter_noise

    def sliding_window(self, attn: Any) -> SlidingWindow:
        return attn.config.sliding_window


class Phimoe(Mixture):
    """Layer norms, and a router that picks one expert after the other; one sliding window for all layers."""

    model_class = "PhimoeForCausalLM"

    def router(self, mlp: Any) -> nn.Module:
        return mlp.router

    def jitter(self, mlp: Any) -> float:
        return mlp.input_jitter_noise

    def draws(self, mlp: Any) -> bool:
        return True

    def sliding_window(self, attn: Any) -> SlidingWindow:
        return attn.config.sliding_window


class Qwen3Moe(Mixture, Qwen3):
    """Attention of Qwen3; layers with experts, and layers without."""

    model_class = "Qwen3MoeForCausalLM"

    def num_experts(self, config: Any) -> int:
        return config.num_experts

    def is_sparse(self, layer: Any) -> bool:
        return hasattr(layer.mlp, "experts")
