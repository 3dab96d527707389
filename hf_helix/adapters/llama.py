"""Llama: 14 forward operators a layer with tensor parallelism, 10 without (list in paper section 4.2)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from hf_helix.adapters.base import ATTENTION, Builder, Family
from hf_helix.operators.unit import Unit


class Llama(Family):
    """`LlamaForCausalLM`, with grouped-query attention, any rope, any attention implementation of Transformers."""

    model_class = "LlamaForCausalLM"

    def layer(self, b: Builder, layer: Any) -> Unit:
        attn, mlp = layer.self_attn, layer.mlp
        x = b.input("x")

        h = b.local("attn.norm", layer.input_layernorm, x, on_shard=True)
        h = b.gather("attn.gather", h)
        q, k, v = b.column_parallel("attn.qkv", {"q": attn.q_proj, "k": attn.k_proj, "v": attn.v_proj}, h)
        h = b.local(
            "attention",
            _Attention(attn),
            q,
            k,
            v,
            side=("cos", "sin", "mask", "positions"),
            draws=lambda: attn.training and attn.attention_dropout > 0,
            effort=ATTENTION,
        )
        h = b.row_parallel("attn.out", attn.o_proj, h)
        h = b.scatter("attn.scatter", h)
        x = b.add("attn.add", x, h)

        h = b.local("mlp.norm", layer.post_attention_layernorm, x, on_shard=True)
        h = b.gather("mlp.gather", h)
        gate, up = b.column_parallel("mlp.up", {"gate": mlp.gate_proj, "up": mlp.up_proj}, h)
        h = b.local("mlp.act", lambda gate, up: mlp.act_fn(gate) * up, gate, up)
        h = b.row_parallel("mlp.down", mlp.down_proj, h)
        h = b.scatter("mlp.scatter", h)
        return b.build(b.add("mlp.add", x, h))

    def attention_inputs(self, model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor) -> dict[str, Any]:
        # Only shape, type and device of the embeddings are read.
        embeddings = model.model.embed_tokens.weight.new_empty(()).expand(*ids.shape, 1)
        cos, sin = model.model.rotary_emb(embeddings, position_ids=positions)
        causal = create_causal_mask(
            config=model.config,
            inputs_embeds=embeddings,
            attention_mask=mask,
            past_key_values=None,
            position_ids=positions,
        )
        return {"cos": cos, "sin": sin, "mask": causal, "positions": positions}


class _Attention:
    """Rope and the attention interface over this rank's heads: q, k, v [sequence, batch, heads * head_dim].

    Attention itself never sees the padding that makes the sequence divide: a row that may attend to nothing (padding
    on the left) averages over all keys in some implementations.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, mask: Any, positions: Tensor
    ) -> Tensor:
        module = self.module
        padded, length = q.shape[0], positions.shape[-1]
        q, k, v = (self._by_heads(value[:length]) for value in (q, k, v))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager_attention_forward)
        out, _ = attend(
            module,
            q,
            k,
            v,
            mask,
            dropout=module.attention_dropout if module.training else 0.0,
            scaling=module.scaling,
            position_ids=positions,
        )
        out = out.flatten(2).transpose(0, 1)
        return functional.pad(out, (0, 0, 0, 0, 0, padded - length)) if padded > length else out.contiguous()

    def _by_heads(self, value: Tensor) -> Tensor:
        """[sequence, batch, heads * head_dim] to [batch, heads, sequence, head_dim]."""
        return value.unflatten(-1, (-1, self.module.head_dim)).permute(1, 2, 0, 3)
