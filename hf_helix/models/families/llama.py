"""Llama, and those that differ from it by a few lines.

In:   `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM`, `Qwen3ForCausalLM`.
Out:  the operators of `Dense`, whose linears take their biases from the modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hf_helix.models.families.dense import Dense
from hf_helix.models.graph.masks import SlidingWindow
from hf_helix.models.graph.norms import normed


class Llama(Dense):
    """`Dense` as it is."""

    model_class = "LlamaForCausalLM"


class Mistral(Dense):
    """One sliding window for all layers."""

    model_class = "MistralForCausalLM"

    def sliding_window(self, attn: Any) -> SlidingWindow:
        return attn.config.sliding_window


class Qwen2(Dense):
    """Biases on queries, keys and values; sliding windows layer by layer."""

    model_class = "Qwen2ForCausalLM"


class Qwen3(Dense):
    """A norm on every head of queries and keys, in the operator of attention; sliding windows layer by layer."""

    model_class = "Qwen3ForCausalLM"

    def rotate(self, attn: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(attn, normed(attn.q_norm, q), normed(attn.k_norm, k), cos, sin)

    def rotated_by(self, attn: Any) -> Sequence[nn.Module]:
        return attn.q_norm, attn.k_norm
