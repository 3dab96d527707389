"""Llama: 14 forward operators a layer with tensor parallelism, 10 without (list in paper section 4.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward
from transformers.utils.logging import get_logger

from hf_helix.adapters.base import ATTENTION, Builder, Family
from hf_helix.adapters.sequence import SequenceCut
from hf_helix.operators.attention import Exact, kernel_for
from hf_helix.operators.unit import Unit

logger = get_logger(__name__)


class Llama(Family):
    """`LlamaForCausalLM`, with grouped-query attention, any rope, any attention implementation of Transformers."""

    model_class = "LlamaForCausalLM"

    def layer(self, b: Builder, layer: Any) -> Unit:
        attn, mlp = layer.self_attn, layer.mlp
        x = b.input("x")

        h = b.local("attn.norm", layer.input_layernorm, x, on_shard=True)
        h = b.gather("attn.gather", h)
        q, k, v = b.column_parallel("attn.qkv", {"q": attn.q_proj, "k": attn.k_proj, "v": attn.v_proj}, h)
        if b.cp.size > 1:
            h = self._shared_attention(b, attn, q, k, v)
        else:
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

    def _shared_attention(self, b: Builder, attn: Any, q: str, k: str, v: str) -> str:
        """The same over a sequence that other ranks share."""

        def rotate(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = (_by_heads(value, attn.head_dim) for value in (q, k, v))
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            return q.contiguous(), torch.stack((k, v))

        rotated = ("attention.q", "attention.kv")
        q, kv = b.local_outputs("attention.rotate", rotate, rotated, q, k, v, side=("cos", "sin"))
        kernel = kernel_for(attn.config._attn_implementation, attn.q_proj.weight.device)
        return b.shared_attention("attention", q, kv, kernel, attn.scaling)

    def check_context(self, model: Any) -> None:
        implementation = model.config._attn_implementation
        if isinstance(kernel_for(implementation, model.device), Exact) and implementation != "eager":
            logger.warning(
                f"attention over a cut sequence is written out on {model.device.type}, with room for all products of "
                "queries and keys; attn_implementation='flash_attention_2' needs less"
            )
        if model.config.attention_dropout > 0:
            raise ValueError(
                f"attention_dropout={model.config.attention_dropout} is not built for a sequence that ranks share; "
                "with cp_size above 1 load the model with attention_dropout=0.0"
            )

    def context_inputs(self, model: Any, ids: Tensor, positions: Tensor, cut: SequenceCut) -> dict[str, Any]:
        # The rope of a long context depends on the largest position of the whole.
        cos, sin = model.model.rotary_emb(_like_embeddings(model, ids), position_ids=positions)
        return {"cos": cut.take(cos, 1), "sin": cut.take(sin, 1)}

    def attention_inputs(self, model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor) -> dict[str, Any]:
        embeddings = _like_embeddings(model, ids)
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
        q, k, v = (_by_heads(value[:length], module.head_dim) for value in (q, k, v))
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


def _by_heads(value: Tensor, head_dim: int) -> Tensor:
    """[sequence, batch, heads * head_dim] to [batch, heads, sequence, head_dim]."""
    return value.unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3)


def _like_embeddings(model: Any, ids: Tensor) -> Tensor:
    """A tensor of which only shape, type and device are read."""
    return model.model.embed_tokens.weight.new_empty(()).expand(*ids.shape, 1)
