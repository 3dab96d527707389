"""GPT-2: learned positions, layer norms, `Conv1D` with queries, keys and values in one, biases, dropout.

In:   `GPT2LMHeadModel`.
Out:  14 forward operators a layer with tensor parallelism, 10 without; more with dropout.
Must hold: dropout is drawn for this rank's part of the sequence, or for its heads, so no two ranks draw the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import eager_attention_forward

from hf_helix.models.derived.family import Family, check_cuts
from hf_helix.models.graph.attention import Attention, Heads, by_heads, causal_masks, declare_attention
from hf_helix.models.graph.builder import Builder
from hf_helix.operators.units.unit import Unit


class GPT2(Family):
    """`GPT2LMHeadModel`, without cross-attention."""

    model_class = "GPT2LMHeadModel"

    def layers(self, model: Any) -> Sequence[nn.Module]:
        return model.transformer.h

    def final_norm(self, model: Any) -> nn.Module:
        return model.transformer.ln_f

    def embedding(self, b: Builder, model: Any) -> Unit:
        body, tp = model.transformer, b.tp

        def add_positions(x: Tensor, token_positions: Tensor) -> Tensor:
            return x + body.wpe(token_positions.chunk(tp.size)[tp.rank])

        x = b.reduce_scatter("scatter", b.lookup("lookup", body.wte))
        x = b.autograd("positions", add_positions, x, side=("token_positions",), uses=(body.wpe,), on_shard=True)
        return b.build(b.dropout("dropout", body.drop, x))

    def layer(self, b: Builder, layer: Any) -> Unit:
        attn, mlp = layer.attn, layer.mlp
        x = b.input("x")

        h = b.norm("attn.norm", layer.ln_1, x)
        h = b.all_gather("attn.gather", h)
        (h,) = b.column_parallel("attn.qkv", {"fused": attn.c_attn}, h, blocks=[attn.split_size] * 3)
        h = declare_attention(b, _attention(attn), h, side=())
        h = b.row_parallel("attn.out", attn.c_proj, h)
        h = b.reduce_scatter("attn.scatter", h)
        h = b.dropout("attn.dropout", attn.resid_dropout, h)
        x = b.add("attn.add", x, h)

        h = b.norm("mlp.norm", layer.ln_2, x)
        h = b.all_gather("mlp.gather", h)
        (h,) = b.column_parallel("mlp.up", {"up": mlp.c_fc}, h)
        h = b.autograd("mlp.act", mlp.act, h)
        h = b.row_parallel("mlp.down", mlp.c_proj, h)
        h = b.reduce_scatter("mlp.scatter", h)
        h = b.dropout("mlp.dropout", mlp.dropout, h)
        return b.build(b.add("mlp.add", x, h))

    def check(self, config: Any, tp_size: int) -> None:
        if config.add_cross_attention:
            raise ValueError(
                "add_cross_attention=True is not built: a batch brings nothing to attend to across; "
                "load the model with add_cross_attention=False"
            )
        lengths = {"vocab_size": config.vocab_size, "n_inner": config.n_inner or 4 * config.n_embd}
        check_cuts(tp_size, {"attention heads (n_head)": config.n_head}, lengths)

    def num_positions(self, model: Any) -> int | None:
        return int(model.transformer.wpe.weight.shape[0])

    def check_context(self, model: Any) -> None:
        """Does nothing: the declaration of attention refuses a model that cannot be cut like this."""

    def side_inputs(self, model: Any, batch: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        if batch.get("token_type_ids") is not None:
            raise ValueError(
                "the batch has token_type_ids, whose embeddings GPT-2 would add and which are not built; leave them "
                "out: tokenizer(..., return_token_type_ids=False)"
            )
        return super().side_inputs(model, batch, *args, **kwargs)

    def attention_inputs(
        self, model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor, documents: Tensor | None
    ) -> dict[str, Any]:
        return {"masks": causal_masks(model, [None], ids, mask, documents), "positions": positions}


def _attention(attn: Any) -> Attention:
    def heads(fused: Tensor) -> Heads:
        q, k, v = (by_heads(value, attn.head_dim) for value in fused.chunk(3, -1))
        return q, k, v

    def upcast(_: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        return attn._upcast_and_reordered_attn(q, k, v, mask)

    eager = upcast if attn.reorder_and_upcast_attn else eager_attention_forward
    # Upcast, it is the same in another precision.
    return Attention(attn, heads, eager=eager, dropout=attn.attn_dropout.p, is_plain=True)
