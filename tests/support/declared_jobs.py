"""Families that are declared for tests alone, because they need more of the builder than those of the package.

Importing this registers them, under classes of their own: those of Transformers stay what they are. `tiny` makes their
models by name, "support.declared_jobs:phi3". For a `Cluster`, the functions are those of other modules, named
"support.declared_jobs:function", so that its processes import this one.
"""

from __future__ import annotations

from typing import Any

import torch
from support.loading_jobs import start_in_every_way
from support.models import made
from support.pipeline_jobs import windows
from support.resume_jobs import run
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from hf_helix import register_model
from hf_helix.models.families.llama import Llama
from hf_helix.models.graph.attention import Attention, Heads, by_heads, declare_attention
from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.rope import rotate
from hf_helix.operators.param_shard import cut_bounds
from hf_helix.operators.unit import Unit

__all__ = ["run", "start_in_every_way", "windows"]


class FusedPhi3Config(Phi3Config):
    """Of `FusedPhi3ForCausalLM`, for the auto classes."""

    model_type = "fused_phi3"


class FusedPhi3ForCausalLM(Phi3ForCausalLM):
    """Phi-3 under a name that no other family has."""

    config_class = FusedPhi3Config


class NormedOlmo2ForCausalLM(Olmo2ForCausalLM):
    """OLMo 2 under a name that no other family has."""


class HalfReplicatedOlmo2ForCausalLM(NormedOlmo2ForCausalLM):
    """The same model, declared in another way."""


class FusedPhi3(Llama):
    """As Llama, with queries, keys and values of unequal widths in one linear, and gate and up in another."""

    model_class = "FusedPhi3ForCausalLM"

    def self_attention(self, b: Builder, attn: Any, h: str) -> str:
        counts = (attn.config.num_attention_heads, attn.num_key_value_heads, attn.num_key_value_heads)
        widths = [count * attn.head_dim for count in counts]

        def heads(fused: Tensor, cos: Tensor, sin: Tensor) -> Heads:
            parts = fused.split([width // b.tp.size for width in widths], -1)
            q, k, v = (by_heads(part.contiguous(), attn.head_dim) for part in parts)
            return *rotate(q, k, cos, sin), v

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


def phi3(**changes: Any) -> FusedPhi3ForCausalLM:
    """Twice as many queries as keys; a width of the MLP that ranks cannot share evenly."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return made(FusedPhi3ForCausalLM, FusedPhi3Config, {"bos_token_id": 1, "eos_token_id": 2, **dropout, **changes})


class NormedOlmo2(Llama):
    """Norms of queries and keys over all heads, a scaled embedding, and an MLP on a rank's part of the sequence."""

    model_class = "NormedOlmo2ForCausalLM"

    def embedding(self, b: Builder, model: Any) -> Unit:
        table = model.get_input_embeddings()
        x = b.reduce_scatter("scatter", b.lookup("lookup", table, plain=True))
        return b.build(b.segment("scale", lambda x: x * Scaled.scale, x))

    def attention(self, b: Builder, layer: Any, x: str) -> str:
        h = b.all_gather("attn.gather", x)
        h = self.self_attention(b, layer.self_attn, h)
        h = b.reduce_scatter("attn.scatter", h)
        h = b.norm("attn.norm", layer.post_attention_layernorm, h, lowers=False)
        return b.add("attn.add", x, h)

    def self_attention(self, b: Builder, attn: Any, h: str) -> str:
        def heads(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Heads:
            q, k, v = (by_heads(value, attn.head_dim) for value in (q, k, v))
            return *rotate(q, k, cos, sin), v

        q, k, v = b.column_parallel("attn.qkv", {"q": attn.q_proj, "k": attn.k_proj, "v": attn.v_proj}, h)
        q, k = norm_over_heads(b, "attn.q_norm", attn.q_norm, q), norm_over_heads(b, "attn.k_norm", attn.k_norm, k)
        h = declare_attention(b, Attention(attn, heads), q, k, v)
        return b.row_parallel("attn.out", attn.o_proj, h)

    def mlp(self, b: Builder, layer: Any, x: str) -> str:
        mlp = layer.mlp
        gate, up = b.replicated_linear("mlp.up", {"gate": mlp.gate_proj, "up": mlp.up_proj}, x)
        h = b.segment("mlp.act", lambda gate, up: mlp.act_fn(gate) * up, gate, up, uses=(mlp.act_fn,))
        (h,) = b.replicated_linear("mlp.down", {"down": mlp.down_proj}, h)
        h = b.norm("mlp.norm", layer.post_feedforward_layernorm, h, lowers=False)
        return b.add("mlp.add", x, h)


class HalfReplicatedOlmo2(NormedOlmo2):
    """With gates that every rank computes for the whole sequence, and of which it uses those of its features."""

    model_class = "HalfReplicatedOlmo2ForCausalLM"

    def mlp(self, b: Builder, layer: Any, x: str) -> str:
        mlp = layer.mlp
        first, last = cut_bounds(mlp.config.intermediate_size, b.tp.size, b.tp.rank)
        h = b.all_gather("mlp.gather", x)
        (gate,) = b.replicated_linear("mlp.gate", {"gate": mlp.gate_proj}, h)
        (up,) = b.column_parallel("mlp.up", {"up": mlp.up_proj}, h)
        h = b.segment("mlp.act", lambda gate, up: mlp.act_fn(gate[..., first:last]) * up, gate, up, uses=(mlp.act_fn,))
        h = b.row_parallel("mlp.down", mlp.down_proj, h)
        h = b.reduce_scatter("mlp.scatter", h)
        h = b.norm("mlp.norm", layer.post_feedforward_layernorm, h, lowers=False)
        return b.add("mlp.add", x, h)


def norm_over_heads(b: Builder, name: str, norm: Any, value: str) -> str:
    """Adds an RMS norm over the features of all ranks, of which this one has a share."""
    width, eps = len(norm.weight), norm.variance_epsilon

    def normed(value: Tensor, total: Tensor) -> Tensor:
        return (norm.weight * (value.float() * torch.rsqrt(total / width + eps))).to(value.dtype)

    squares = b.segment(f"{name}.squares", lambda value: value.float().pow(2).sum(-1, keepdim=True), value)
    return b.segment(name, normed, value, b.sum_over_ranks(f"{name}.sum", squares), cut=(norm.weight,))


class Scaled(nn.Embedding):
    """An embedding that does more than look up."""

    scale = 3.0

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.embed_scale = nn.Buffer(torch.tensor(self.scale), persistent=False)  # as PEFT looks for it

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale


def olmo2(half_replicated: bool = False, **changes: Any) -> NormedOlmo2ForCausalLM:
    """With a bias in one linear of each MLP, and a scaled embedding in place of its own."""
    kind = HalfReplicatedOlmo2ForCausalLM if half_replicated else NormedOlmo2ForCausalLM
    model = made(kind, Olmo2Config, {"eos_token_id": 2, **changes})
    generator = torch.Generator().manual_seed(7)
    for layer in model.model.layers:
        layer.mlp.down_proj.bias = nn.Parameter(torch.randn(model.config.hidden_size, generator=generator) * 0.1)
    table = model.model.embed_tokens
    scaled = Scaled(table.num_embeddings, table.embedding_dim, table.padding_idx)
    scaled.weight = table.weight
    model.model.embed_tokens = scaled
    return model


AutoConfig.register("fused_phi3", FusedPhi3Config)
AutoModelForCausalLM.register(FusedPhi3Config, FusedPhi3ForCausalLM)
register_model(NormedOlmo2())
register_model(HalfReplicatedOlmo2())
register_model(FusedPhi3())
