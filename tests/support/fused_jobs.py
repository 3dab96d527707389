"""Phi-3, declared for tests: queries, keys and values of unequal widths in one linear, gate and up in another.

Importing this registers the family, and makes `support.models.tiny("phi3")` known. For a `Cluster`, the functions are
those of other modules, named "support.fused_jobs:function".
"""

from __future__ import annotations

from typing import Any

from support.loading_jobs import start_in_every_way
from support.models import FAMILIES, made
from support.pipeline_jobs import windows
from support.resume_jobs import run
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM

from hf_helix import register_model
from hf_helix.models.attention import Attention, Heads, by_heads, declare_attention
from hf_helix.models.builder import Builder
from hf_helix.models.families.dense import Dense

__all__ = ["run", "start_in_every_way", "windows"]


class FusedPhi3(Dense):
    """As Llama, with fused projections."""

    model_class = "Phi3ForCausalLM"

    def self_attention(self, b: Builder, attn: Any, h: str) -> str:
        counts = (attn.config.num_attention_heads, attn.num_key_value_heads, attn.num_key_value_heads)
        widths = [count * attn.head_dim for count in counts]

        def heads(fused: Tensor, cos: Tensor, sin: Tensor) -> Heads:
            parts = fused.split([width // b.tp.size for width in widths], -1)
            q, k, v = (by_heads(part.contiguous(), attn.head_dim) for part in parts)
            return *self.rotate(attn, q, k, cos, sin), v

        (h,) = b.column_parallel("attn.qkv", {"fused": attn.qkv_proj}, h, blocks=widths)
        h = declare_attention(b, Attention(attn, heads, attn.config.sliding_window), h)
        return b.row_parallel("attn.out", attn.o_proj, h)

    def mlp(self, b: Builder, layer: Any, x: str) -> str:
        mlp = layer.mlp

        def act(fused: Tensor) -> Tensor:
            gate, up = fused.chunk(2, -1)
            return up * mlp.activation_fn(gate)

        h = b.norm("mlp.norm", layer.post_attention_layernorm, x)
        h = b.all_gather("mlp.gather", h)
        (h,) = b.column_parallel("mlp.up", {"fused": mlp.gate_up_proj}, h, blocks=[mlp.config.intermediate_size] * 2)
        h = b.segment("mlp.act", act, h, uses=(mlp.activation_fn,))
        h = b.row_parallel("mlp.down", mlp.down_proj, h)
        h = b.reduce_scatter("mlp.scatter", h)
        return b.add("mlp.add", x, h)


def phi3(**changes: Any) -> Phi3ForCausalLM:
    """Twice as many queries as keys; a width of the MLP that ranks cannot share evenly."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return made(Phi3ForCausalLM, Phi3Config, {"bos_token_id": 1, "eos_token_id": 2, **dropout, **changes})


FAMILIES["phi3"] = phi3
register_model(FusedPhi3())
