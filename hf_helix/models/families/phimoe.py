"""Phi-3.5-MoE: attention as in Llama, and a router with experts instead of the MLP; layer norms.

In:   `PhimoeForCausalLM`, whose layers have a router and `experts` with 3-D weights.
Out:  operators of the router, of the way to the experts and back, and of the experts (paper, section 6.2.3).
Must hold: a token's experts and weights come from the Transformers router (sparsemixer), which draws its second
experts in training, also without jitter; its random numbers depend on the run's seed and the token's place only. The
load-balancing loss covers the whole micro-batch: its two sums over tokens and layers travel with the activations,
and the head adds the loss (`models.graph.balance`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_helix.models.families.llama import Llama
from hf_helix.models.graph.attention import SlidingWindow
from hf_helix.models.graph.balance import BALANCE, Balance, RouterRecord, add_part, balance_side_inputs
from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.graph.experts import check_expert_count, declare_experts, expert_side_inputs
from hf_helix.models.stock.batch_inputs import SequenceCut
from hf_helix.operators.base import Tensors
from hf_helix.operators.experts.moe import COUNTED, RouterMeter
from hf_helix.operators.units.unit import Unit


class Phimoe(Llama):
    """`PhimoeForCausalLM`: experts in every layer, and one sliding window for all layers."""

    model_class = "PhimoeForCausalLM"

    def layer(self, b: Builder, layer: Any) -> Unit:
        balanced = layer.self_attn.config.output_router_logits and not b.loss_tweaks.ends_at_decoder
        x = b.input("x")
        balance = b.input(BALANCE) if balanced else None
        x = self.attention(b, layer, x)
        h = b.norm("mlp.norm", layer.post_attention_layernorm, x, lowers=False)
        h, weights, chosen, part = self._route(b, layer, h, balanced)
        h = declare_experts(b, h, weights, chosen, layer.mlp.experts, b.meters[-1])
        x = b.add("mlp.add", x, h)
        return b.build(x, add_part(b, balance, part)) if balance else b.build(x)

    def _route(self, b: Builder, layer: Any, h: str, balanced: bool) -> tuple[str, str, str, str | None]:
        """Declares the router of this rank's normed tokens [n, batch, hidden]; returns the tokens as experts get them,
        their weights, their experts and, if a loss is balanced, the layer's part of the two sums."""
        mlp, config = layer.mlp, layer.self_attn.config
        router, noise = mlp.router, mlp.input_jitter_noise
        meter = RouterMeter(config.num_local_experts, b.tp)
        b.meters.append(meter)
        record = RouterRecord(meter, config.num_experts_per_tok if balanced else None, b.loss_tweaks.ends_at_decoder)

        def route(h: Tensor, **side: Any) -> Tensors:
            tokens = h.flatten(0, 1)
            if noise and mlp.training:
                tokens = tokens * torch.empty_like(tokens).uniform_(1.0 - noise, 1.0 + noise)
            logits, weights, chosen = router(tokens)
            part = record.keep(logits, chosen, side, mlp.training)
            jittered = (tokens.view_as(h),) if noise else ()
            return (*jittered, weights, *part, chosen)

        names = ["mlp.jittered"] * (noise > 0) + ["mlp.weights", *record.names(b, "mlp")]
        outputs = b.autograd_outputs(
            "mlp.router",
            route,
            names,
            h,
            side=(COUNTED,),
            uses=(router,),
            on_shard=True,
            draws=lambda: mlp.training,
            non_differentiable=("mlp.chosen",),
        )
        values = dict(zip((*names, "mlp.chosen"), outputs, strict=True))
        return values.get("mlp.jittered", h), values["mlp.weights"], values["mlp.chosen"], values.get("mlp.balance")

    def balance(self, model: Any) -> Balance | None:
        """Returns the load-balancing loss; None if the model's configuration asks for none."""
        config = model.config
        if not config.output_router_logits:
            return None
        experts, layers = config.num_local_experts, len(self.layers(model))
        return Balance(experts, config.num_experts_per_tok, layers, coefficient=config.router_aux_loss_coef)

    def check_experts(self, model: Any, sharing: ParallelContext) -> None:
        check_expert_count(model.config.num_local_experts, sharing)

    def sliding_window(self, attn: Any) -> SlidingWindow:
        return attn.config.sliding_window

    def side_inputs(
        self, model: Any, batch: Mapping[str, Any], cut: SequenceCut, loss_scale: Tensor, batch_scale: float = 1.0
    ) -> dict[str, Any]:
        side = super().side_inputs(model, batch, cut, loss_scale)
        return {**side, **expert_side_inputs(batch, cut), **balance_side_inputs(batch, batch_scale)}
