"""Phi-3.5-MoE: layer norms, and a router that picks one expert after the other.

In:   `PhimoeForCausalLM`.
Out:  the operators of `Mixture`.
Must hold: the router (sparsemixer) draws its second experts in training, also without jitter.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_helix.models.families.mixture import Mixture
from hf_helix.models.graph.masks import SlidingWindow


class Phimoe(Mixture):
    """`PhimoeForCausalLM`."""

    model_class = "PhimoeForCausalLM"

    def router(self, mlp: Any) -> nn.Module:
        return mlp.router

    def jitter(self, mlp: Any) -> float:
        return mlp.input_jitter_noise

    def draws(self, mlp: Any) -> bool:
        return True

    def sliding_window(self, attn: Any) -> SlidingWindow:
        return attn.config.sliding_window
