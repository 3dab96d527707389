"""Mixtral: experts in every layer, and one sliding window for all layers.

In:   `MixtralForCausalLM`.
Out:  the operators of `Mixture`.
"""

from __future__ import annotations

from typing import Any

from hf_helix.models.families.mixture import Mixture
from hf_helix.models.graph.masks import SlidingWindow


class Mixtral(Mixture):
    """`MixtralForCausalLM`."""

    model_class = "MixtralForCausalLM"

    def jitter(self, mlp: Any) -> float:
        return mlp.jitter_noise

    def sliding_window(self, attn: Any) -> SlidingWindow:
        return attn.config.sliding_window
