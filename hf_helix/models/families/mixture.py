"""Decoders with a mixture of experts: attention as in Llama, and a router and experts instead of the MLP.

In:   a decoder layer whose `mlp` has a router (`router` or `gate`) and `experts` with 3-D weights.
Out:  operators of the router, of the way to the experts and back, and of the experts (paper, section 6.2.3).
Must hold: a token's experts and weights are those of the Transformers router; its random numbers depend on the run's
seed and the token's place only. The load-balancing loss is that of the whole micro-batch: its two sums over tokens and
layers travel with the activations, and the head adds the loss (`models.graph.balance`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_helix.models.batch_inputs import SequenceCut
from hf_helix.models.families.dense import Dense
from hf_helix.models.graph.balance import BALANCE, Balance, RouterRecord, add_part, balance_side_inputs
from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.graph.expert_layer import check_expert_count, declare_experts, expert_side_inputs
from hf_helix.operators.base import Tensors
from hf_helix.operators.moe.dispatch import COUNTED, RouterMeter
from hf_helix.operators.unit import Unit


class Mixture(Dense):
    """The base of the families with experts."""

    def router(self, mlp: Any) -> nn.Module:
        """Returns the router: tokens [tokens, hidden] to logits [tokens, experts], weights and experts [tokens, k]."""
        return mlp.gate

    def jitter(self, mlp: Any) -> float:
        """Returns the noise that the layer puts on its tokens in training, before the router adds any of its own."""
        return 0.0

    def draws(self, mlp: Any) -> bool:
        """Returns whether routing draws random numbers in training."""
        return self.jitter(mlp) > 0

    def num_experts(self, config: Any) -> int:
        """Returns the number of experts of a layer that has any."""
        return config.num_local_experts

    def is_sparse(self, layer: Any) -> bool:
        """Returns whether a layer has experts."""
        return True

    # -- declarations --------------------------------------------------------------------------------------------

    def layer(self, b: Builder, layer: Any) -> Unit:
        balanced = layer.self_attn.config.output_router_logits
        x = b.input("x")
        balance = b.input(BALANCE) if balanced else None
        x = self.attention(b, layer, x)
        if self.is_sparse(layer):
            h = b.norm("mlp.norm", layer.post_attention_layernorm, x, lowers=False)
            h, weights, chosen, part = self._route(b, layer, h, balanced)
            h = declare_experts(b, h, weights, chosen, layer.mlp.experts, b.meters[-1])
            x = b.add("mlp.add", x, h)
        else:
            x, part = self.mlp(b, layer, x), None
        return b.build(x, add_part(b, balance, part)) if balance else b.build(x)

    def _route(self, b: Builder, layer: Any, h: str, balanced: bool) -> tuple[str, str, str, str | None]:
        """Declares the router.

        Args:
            b: the builder of the layer.
            layer: the decoder layer.
            h: the normed tokens of this rank [n, batch, hidden].
            balanced: whether the load-balancing loss is computed.

        Returns:
            The tokens as experts get them, their weights, their experts and, where balanced, the layer's part of the
            two sums.
        """
        mlp, config = layer.mlp, layer.self_attn.config
        router, noise = self.router(mlp), self.jitter(mlp)
        meter = RouterMeter(self.num_experts(config), b.tp)
        b.meters.append(meter)
        record = RouterRecord(meter, config.num_experts_per_tok if balanced else None)

        def route(h: Tensor, **side: Any) -> Tensors:
            tokens = h.flatten(0, 1)
            if noise and mlp.training:
                tokens = tokens * torch.empty_like(tokens).uniform_(1.0 - noise, 1.0 + noise)
            logits, weights, chosen = router(tokens)
            part = record.keep(logits, chosen, side, mlp.training)
            jittered = (tokens.view_as(h),) if noise else ()
            return (*jittered, weights, *part, chosen)

        names = ["mlp.jittered"] * (noise > 0) + ["mlp.weights"] + ["mlp.balance"] * balanced
        outputs = b.segment_outputs(
            "mlp.router",
            route,
            names,
            h,
            side=(COUNTED,),
            uses=(router,),
            on_shard=True,
            draws=lambda: mlp.training and self.draws(mlp),
            non_differentiable=("mlp.chosen",),
        )
        values = dict(zip((*names, "mlp.chosen"), outputs, strict=True))
        return values.get("mlp.jittered", h), values["mlp.weights"], values["mlp.chosen"], values.get("mlp.balance")

    def balance(self, model: Any) -> Balance | None:
        """Returns the load-balancing loss; None where the model's configuration asks for none."""
        config = model.config
        if not config.output_router_logits:
            return None
        layers = sum(self.is_sparse(layer) for layer in self.layers(model))
        return Balance(
            self.num_experts(config), config.num_experts_per_tok, layers, coefficient=config.router_aux_loss_coef
        )

    # -- checks and side inputs ----------------------------------------------------------------------------------

    def check_experts(self, model: Any, sharing: ParallelContext) -> None:
        check_expert_count(self.num_experts(model.config), sharing)

    def kind_of(self, layer: Any) -> str:
        return "layer" if self.is_sparse(layer) else "layer.dense"

    def side_inputs(
        self,
        model: Any,
        batch: Mapping[str, Any],
        cut: SequenceCut,
        loss_scale: Tensor,
        batch_scale: float = 1.0,
    ) -> dict[str, Any]:
        return {
            **super().side_inputs(model, batch, cut, loss_scale),
            **expert_side_inputs(batch, cut),
            **balance_side_inputs(batch, batch_scale),
        }
