"""Qwen3-MoE: layers with and without experts."""

from __future__ import annotations

from typing import Any

from hf_helix.models.families.mixture import Mixture
from hf_helix.models.families.qwen import Qwen3


class Qwen3Moe(Mixture, Qwen3):
    """`Qwen3MoeForCausalLM`: norms on queries and keys, layers with and without experts."""

    model_class = "Qwen3MoeForCausalLM"

    def num_experts(self, config: Any) -> int:
        return config.num_experts

    def is_sparse(self, layer: Any) -> bool:
        return hasattr(layer.mlp, "experts")
