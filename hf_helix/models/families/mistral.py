"""Mistral: Llama with one sliding window for all layers.

In:   `MistralForCausalLM`.
Out:  the operators of `Dense`.
"""

from __future__ import annotations

from typing import Any

from hf_helix.models.families.dense import Dense
from hf_helix.models.graph.masks import SlidingWindow


class Mistral(Dense):
    """`MistralForCausalLM`."""

    model_class = "MistralForCausalLM"

    def sliding_window(self, attn: Any) -> SlidingWindow:
        return attn.config.sliding_window
