"""Llama: norm, attention, residual; norm, gated MLP, residual.

In:   `LlamaForCausalLM`, or a model with the submodule names of Llama.
Out:  14 forward operators a layer with tensor parallelism, 10 without (paper, section 4.2).
Must hold: layers of one model have equal graphs, whatever their windows.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hf_helix.models.derived.family import Family
from hf_helix.models.graph.attention import (
    Attention,
    Heads,
    SlidingWindow,
    by_heads,
    causal_masks,
    declare_attention,
    like_embeddings,
)
from hf_helix.models.graph.builder import Builder
from hf_helix.models.stock.batch_inputs import SequenceCut
from hf_helix.models.stock.stock_modules import is_silu, rotate
from hf_helix.operators.explicit import GatedSilu
from hf_helix.operators.units.unit import Unit


class Llama(Family):
    """`LlamaForCausalLM`, with any rope and any attention implementation of Transformers; the base of its relatives."""

    model_class = "LlamaForCausalLM"

    def layer(self, b: Builder, layer: Any) -> Unit:
        x = b.input("x")
        x = self.attention(b, layer, x)
        x = self.mlp(b, layer, x)
        return b.build(x)

    def attention(self, b: Builder, layer: Any, x: str) -> str:
        """Declares the first half of a layer, residual included.

        Args:
            b: collects the operators of the layer.
            layer: the Hugging Face layer.
            x: the name of the value that enters, [sequence / tp_size, batch, hidden].
        """
        h = b.norm("attn.norm", layer.input_layernorm, x)
        h = b.all_gather("attn.gather", h)
        h = self.self_attention(b, layer.self_attn, h)
        h = b.reduce_scatter("attn.scatter", h)
        return b.add("attn.add", x, h)

    def self_attention(self, b: Builder, attn: Any, h: str) -> str:
        """Declares attention between the collectives: takes the whole sequence, gives partial sums.

        Args:
            b: collects the operators of the layer.
            attn: the layer's attention module.
            h: the name of the normed value, [sequence, batch, hidden].
        """

        def heads(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Heads:
            # Attention keeps the values for backward; as a slice, they would keep queries and keys alive with them.
            q, k, v = (by_heads(value, attn.head_dim) for value in (q, k, v.contiguous()))
            return *rotate(q, k, cos, sin), v

        q, k, v = b.column_parallel("attn.qkv", {"q": attn.q_proj, "k": attn.k_proj, "v": attn.v_proj}, h)
        h = declare_attention(b, Attention(attn, heads, self.sliding_window(attn)), q, k, v)
        return b.row_parallel("attn.out", attn.o_proj, h)

    def mlp(self, b: Builder, layer: Any, x: str) -> str:
        """Declares the second half of a layer, residual included.

        Args:
            b: collects the operators of the layer.
            layer: the Hugging Face layer.
            x: the name of the value that enters, [sequence / tp_size, batch, hidden].
        """
        mlp = layer.mlp
        h = b.norm("mlp.norm", layer.post_attention_layernorm, x)
        h = b.all_gather("mlp.gather", h)
        gate, up = b.column_parallel("mlp.up", {"gate": mlp.gate_proj, "up": mlp.up_proj}, h)
        silu = GatedSilu(lambda: is_silu(mlp.act_fn))
        h = b.autograd("mlp.act", lambda gate, up: mlp.act_fn(gate) * up, gate, up, uses=(mlp.act_fn,), explicit=silu)
        h = b.row_parallel("mlp.down", mlp.down_proj, h)
        h = b.reduce_scatter("mlp.scatter", h)
        return b.add("mlp.add", x, h)

    def sliding_window(self, attn: Any) -> SlidingWindow:
        """Returns the number of tokens that a token attends to, itself included; None for all before it."""
        return getattr(attn, "sliding_window", None)

    def side_modules(self, model: Any) -> Sequence[nn.Module]:
        return (model.model.rotary_emb,)

    def check_context(self, model: Any) -> None:
        """Does nothing: the declaration of attention refuses a model that cannot be cut like this."""

    def context_inputs(self, model: Any, ids: Tensor, positions: Tensor, cut: SequenceCut) -> dict[str, Any]:
        # The rope of a long context depends on the largest position of the whole.
        cos, sin = model.model.rotary_emb(like_embeddings(model, ids), position_ids=positions)
        return {"cos": cut.take(cos, 1), "sin": cut.take(sin, 1)}

    def attention_inputs(
        self, model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor, documents: Tensor | None
    ) -> dict[str, Any]:
        cos, sin = model.model.rotary_emb(like_embeddings(model, ids), position_ids=positions)
        windows = [self.sliding_window(layer.self_attn) for layer in self.layers(model)]
        masks = causal_masks(model, windows, ids, mask, documents)
        return {"cos": cos, "sin": sin, "masks": masks, "positions": positions}
