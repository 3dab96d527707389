"""GPT-NeoX (Pythia): layer norms, partial rope, queries, keys and values in one, biases, two ways of residuals.

In:   `GPTNeoXForCausalLM`.
Out:  with parallel residuals a layer that gathers and scatters once; else one like Llama's, which does so twice.
Must hold: dropout is drawn for this rank's part of the sequence, or for its heads, so no two ranks draw the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb, eager_attention_forward

from hf_helix.models.batch_inputs import SequenceCut
from hf_helix.models.family import Family, check_cuts
from hf_helix.models.graph.attention import Attention, Heads, by_heads, declare_attention
from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.masks import causal_masks, like_embeddings
from hf_helix.models.graph.shared_attention import check_shared
from hf_helix.operators.unit import Unit


class GPTNeoX(Family):
    """`GPTNeoXForCausalLM`, with `use_parallel_residual` or without."""

    model_class = "GPTNeoXForCausalLM"

    def layers(self, model: Any) -> Sequence[nn.Module]:
        return model.gpt_neox.layers

    def final_norm(self, model: Any) -> nn.Module:
        return model.gpt_neox.final_layer_norm

    def embedding(self, b: Builder, model: Any) -> Unit:
        x = b.reduce_scatter("scatter", b.lookup("lookup", model.get_input_embeddings()))
        return b.build(b.dropout("dropout", model.gpt_neox.emb_dropout, x))

    def layer(self, b: Builder, layer: Any) -> Unit:
        x = b.input("x")
        if not layer.use_parallel_residual:
            return b.build(_in_turn(b, layer, x))
        if layer.post_attention_dropout.p > 0 or layer.post_mlp_dropout.p > 0:
            return b.build(_side_by_side_with_dropout(b, layer, x))
        return b.build(_side_by_side(b, layer, x))

    def check(self, config: Any, tp_size: int) -> None:
        lengths = {name: getattr(config, name) for name in ("vocab_size", "intermediate_size")}
        check_cuts(tp_size, {"attention heads": config.num_attention_heads}, lengths)

    def side_modules(self, model: Any) -> Sequence[nn.Module]:
        return (model.gpt_neox.rotary_emb,)

    def check_context(self, model: Any) -> None:
        check_shared(model)

    def context_inputs(self, model: Any, ids: Tensor, positions: Tensor, cut: SequenceCut) -> dict[str, Any]:
        cos, sin = _rope(model, ids, positions)
        return {"cos": cut.take(cos, 1), "sin": cut.take(sin, 1)}

    def attention_inputs(
        self, model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor, documents: Tensor | None
    ) -> dict[str, Any]:
        cos, sin = _rope(model, ids, positions)
        masks = causal_masks(model, [None], ids, mask, documents)
        return {"cos": cos, "sin": sin, "masks": masks, "positions": positions}


def _in_turn(b: Builder, layer: Any, x: str) -> str:
    """Attention, residual, then MLP, residual."""
    h = b.norm("attn.norm", layer.input_layernorm, x)
    h = _attention(b, layer.attention, b.all_gather("attn.gather", h))
    h = b.dropout("attn.dropout", layer.post_attention_dropout, b.reduce_scatter("attn.scatter", h))
    x = b.add("attn.add", x, h)

    h = b.norm("mlp.norm", layer.post_attention_layernorm, x)
    h = _mlp(b, layer.mlp, b.all_gather("mlp.gather", h))
    h = b.dropout("mlp.dropout", layer.post_mlp_dropout, b.reduce_scatter("mlp.scatter", h))
    return b.add("mlp.add", x, h)


def _side_by_side(b: Builder, layer: Any, x: str) -> str:
    """Attention and MLP of the same value: one gather serves both, and their sum is scattered."""
    attention, mlp = _branches(b, layer, x)
    h = b.reduce_scatter("scatter", b.add("sum", attention, mlp))
    return b.add("add", x, h)


def _side_by_side_with_dropout(b: Builder, layer: Any, x: str) -> str:
    """Declares a layer whose branches each have dropout of their own, drawn once partial sums are added up."""
    attention, mlp = _branches(b, layer, x)
    attention = b.dropout("attn.dropout", layer.post_attention_dropout, b.reduce_scatter("attn.scatter", attention))
    mlp = b.dropout("mlp.dropout", layer.post_mlp_dropout, b.reduce_scatter("mlp.scatter", mlp))
    return b.add("add", x, b.add("sum", attention, mlp))


def _branches(b: Builder, layer: Any, x: str) -> tuple[str, str]:
    """Partial sums of attention and MLP. Every rank norms the whole sequence, and sees a part of the norms' gradients:
    that which comes through its heads and columns.
    """
    whole = b.all_gather("gather", x)
    attention = _attention(b, layer.attention, b.norm("attn.norm", layer.input_layernorm, whole))
    mlp = _mlp(b, layer.mlp, b.norm("mlp.norm", layer.post_attention_layernorm, whole))
    return attention, mlp


def _attention(b: Builder, attn: Any, h: str) -> str:
    """From the normed whole sequence to partial sums."""

    def heads(fused: Tensor, cos: Tensor, sin: Tensor) -> Heads:
        q, k, v = by_heads(fused, 3 * attn.head_size).chunk(3, -1)
        return *apply_rotary_pos_emb(q, k, cos, sin), v

    (h,) = b.column_parallel("attn.qkv", {"fused": attn.query_key_value}, h)
    h = declare_attention(b, Attention(attn, heads, eager=eager_attention_forward), h)
    return b.row_parallel("attn.out", attn.dense, h)


def _mlp(b: Builder, mlp: Any, h: str) -> str:
    (h,) = b.column_parallel("mlp.up", {"up": mlp.dense_h_to_4h}, h)
    return b.row_parallel("mlp.down", mlp.dense_4h_to_h, b.segment("mlp.act", mlp.act, h))


def _rope(model: Any, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of the whole sequence: a long rope depends on its largest position."""
    return model.gpt_neox.rotary_emb(like_embeddings(model, ids), position_ids=positions)
