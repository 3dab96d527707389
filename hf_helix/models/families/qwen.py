"""Qwen2 and Qwen3: Llama with biases, or with norms of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hf_helix.models.families.llama import Dense
from hf_helix.models.norms import normed


class Qwen2(Dense):
    """`Qwen2ForCausalLM`: biases on queries, keys and values; windows layer by layer."""

    model_class = "Qwen2ForCausalLM"


class Qwen3(Dense):
    """`Qwen3ForCausalLM`: a norm on every head of the queries and keys; windows layer by layer."""

    model_class = "Qwen3ForCausalLM"

    def rotate(self, attn: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(attn, normed(attn.q_norm, q), normed(attn.k_norm, k), cos, sin)

    def rotated_by(self, attn: Any) -> Sequence[nn.Module]:
        return attn.q_norm, attn.k_norm
