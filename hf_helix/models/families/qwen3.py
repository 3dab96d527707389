"""Qwen3: Llama with a norm on every head of queries and keys, and sliding windows layer by layer.

In:   `Qwen3ForCausalLM`.
Out:  the operators of `Dense`; the norms run in the operator of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hf_helix.models.families.dense import Dense
from hf_helix.models.graph.norms import normed


class Qwen3(Dense):
    """`Qwen3ForCausalLM`."""

    model_class = "Qwen3ForCausalLM"

    def rotate(self, attn: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(attn, normed(attn.q_norm, q), normed(attn.k_norm, k), cos, sin)

    def rotated_by(self, attn: Any) -> Sequence[nn.Module]:
        return attn.q_norm, attn.k_norm
