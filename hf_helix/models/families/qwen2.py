"""Qwen2: Llama with biases on queries, keys and values, and sliding windows layer by layer.

In:   `Qwen2ForCausalLM`.
Out:  the operators of `Dense`, whose linears take their biases from the modules.
"""

from __future__ import annotations

from hf_helix.models.families.dense import Dense


class Qwen2(Dense):
    """`Qwen2ForCausalLM`."""

    model_class = "Qwen2ForCausalLM"
