"""Phi-3.5-MoE: layer norms, and a router that picks its experts one after the other."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_helix.models.families.mixture import Mixture


class Phimoe(Mixture):
    """`PhimoeForCausalLM`: sparsemixer routing, which draws its second experts in training."""

    model_class = "PhimoeForCausalLM"

    def router(self, mlp: Any) -> nn.Module:
        return mlp.router

    def jitter(self, mlp: Any) -> float:
        return mlp.input_jitter_noise

    def draws(self, mlp: Any) -> bool:
        return True

    def window(self, attn: Any) -> int | None:
        return attn.config.sliding_window
