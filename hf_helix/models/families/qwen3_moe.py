"""Qwen3-MoE: attention of Qwen3, layers with experts and layers without.

In:   `Qwen3MoeForCausalLM`.
Out:  the operators of `Mixture` for a layer with experts, those of `Dense` for one without.
"""

from __future__ import annotations

from typing import Any

from hf_helix.models.families.mixture import Mixture
from hf_helix.models.families.qwen3 import Qwen3


class Qwen3Moe(Mixture, Qwen3):
    """`Qwen3MoeForCausalLM`."""

    model_class = "Qwen3MoeForCausalLM"

    def num_experts(self, config: Any) -> int:
        return config.num_experts

    def is_sparse(self, layer: Any) -> bool:
        return hasattr(layer.mlp, "experts")
