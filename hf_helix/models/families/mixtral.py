"""Mixtral: experts in every layer."""

from __future__ import annotations

from typing import Any

from hf_helix.models.families.mixture import Mixture


class Mixtral(Mixture):
    """`MixtralForCausalLM`."""

    model_class = "MixtralForCausalLM"

    def jitter(self, mlp: Any) -> float:
        return mlp.jitter_noise

    def window(self, attn: Any) -> int | None:
        return attn.config.sliding_window
