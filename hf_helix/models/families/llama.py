"""Llama: `Dense` as it is.

In:   `LlamaForCausalLM`.
Out:  the operators of `Dense`.
"""

from __future__ import annotations

from hf_helix.models.families.dense import Dense


class Llama(Dense):
    """`LlamaForCausalLM`."""

    model_class = "LlamaForCausalLM"
