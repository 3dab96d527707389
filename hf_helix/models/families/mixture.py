"""Decoders with a mixture of experts: attention as in Llama, and a router and experts instead of the MLP.

In:   a decoder layer whose `mlp` has a router (`router` or `gate`) and `experts` with 3-D weights.
Out:  operators of the router, of the way to the experts and back, and of the experts (paper, section 6.2.3).
Must hold: a token's experts and weights are those of the Transformers router; its random numbers depend on the run's
seed and the token's place only. The load-balancing loss is that of the whole micro-batch: its two sums over tokens and
layers travel with the activations as the value `balance` [1, 2, experts], and the head adds the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_helix.models.builder import Builder, ParallelContext
from hf_helix.models.expert_layer import check_expert_count, counted_in, declare_experts, expert_side_inputs
from hf_helix.models.families.dense import Dense
from hf_helix.models.sequence_sharding import SequenceCut
from hf_helix.operators.base import Tensors
from hf_helix.operators.moe.dispatch import COUNTED, RouterMeter
from hf_helix.operators.unit import Unit

ROWS, BALANCE_SCALE = "counted_rows", "balance_scale"


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
        balance = b.input("balance") if balanced else None
        x = self.attention(b, layer, x)
        if not self.is_sparse(layer):
            return b.build(
                self.mlp(b, layer, x), *([b.segment("balance.pass", torch.clone, balance)] if balance else [])
            )
        h = b.norm("mlp.norm", layer.post_attention_layernorm, x, lowers=False)
        h, weights, chosen, part = self._route(b, layer, h, balanced)
        h = declare_experts(b, h, weights, chosen, layer.mlp.experts, b.meters[-1])
        x = b.add("mlp.add", x, h)
        return b.build(x, b.add("balance.add", balance, part)) if balance and part else b.build(x)

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

        def route(h: Tensor, **side: Any) -> Tensors:
            tokens = h.flatten(0, 1)
            if noise and mlp.training:
                tokens = tokens * torch.empty_like(tokens).uniform_(1.0 - noise, 1.0 + noise)
            logits, weights, chosen = router(tokens)
            counted = meter.mine(side)
            if mlp.training and torch.is_grad_enabled():  # once, where backward runs it again
                meter.note(logits, chosen, counted)
            part = (_balance(logits, counted, chosen.shape[1]),) if balanced else ()
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
            plain=("mlp.chosen",),
        )
        values = dict(zip((*names, "mlp.chosen"), outputs, strict=True))
        return values.get("mlp.jittered", h), values["mlp.weights"], values["mlp.chosen"], values.get("mlp.balance")

    def embedding(self, b: Builder, model: Any) -> Unit:
        x = b.reduce_scatter("scatter", b.lookup("lookup", model.get_input_embeddings()))
        if not model.config.output_router_logits:
            return b.build(x)
        shape = (1, 2, self.num_experts(model.config))

        def nothing(counted: Tensor) -> Tensor:
            return torch.zeros(shape, device=counted.device)

        return b.build(x, b.segment("balance", nothing, side=(COUNTED,)))

    def head(self, b: Builder, model: Any) -> Unit:
        if not model.config.output_router_logits:
            return super().head(b, model)
        x, balance = b.input("x"), b.input("balance")
        loss = self.loss(b, model, x)
        for name, axis in (("tp", b.tp), ("cp", b.cp)):
            balance = b.replicate(f"balance.{name}", balance, axis)
        layers = sum(self.is_sparse(layer) for layer in self.layers(model))
        weight, cp_size = model.config.router_aux_loss_coef, b.cp.size

        def add(loss: Tensor, sums: Tensor, counted_rows: Tensor, balance_scale: float) -> Tensor:
            shares = sums.sum(0) / (counted_rows * layers)
            extra = weight * balance_scale * sums.shape[-1] * (shares[0] * shares[1]).sum()
            # Ranks that share a sequence each have all of it; their losses are added up, their gradients are not.
            return loss + extra - extra.detach() * (1 - 1 / cp_size)

        return b.build(b.segment("loss.balanced", add, loss, balance, side=(ROWS, BALANCE_SCALE)))

    # -- checks and side inputs ----------------------------------------------------------------------------------

    def check_experts(self, model: Any, sharing: ParallelContext) -> None:
        check_expert_count(self.num_experts(model.config), sharing)

    def kind_of(self, layer: Any) -> str:
        return "layer" if self.is_sparse(layer) else "layer.dense"

    def loss_adds_up(self, model: Any) -> bool:
        return not model.config.output_router_logits

    def empty(self, model: Any, tp_size: int) -> Callable[[Mapping[str, Any]], Tensors]:
        of_layers = super().empty(model, tp_size)
        if not model.config.output_router_logits:
            return of_layers
        shape = (1, 2, self.num_experts(model.config))
        return lambda side: (*of_layers(side), torch.empty(shape, device=side["ids"].device))

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
            ROWS: counted_in(batch).sum(),
            BALANCE_SCALE: batch_scale,
        }


def _balance(logits: Tensor, counted: Tensor, choices: int) -> Tensor:
    """Sums over tokens that the load-balancing loss needs [1, 2, experts]: of the most probable experts, of all
    experts' probabilities (`load_balancing_loss_func` of Transformers)."""
    probabilities = logits.softmax(-1).float()
    counted = counted.float().unsqueeze(-1)
    best = probabilities.detach().topk(choices, -1).indices
    loads = torch.zeros_like(probabilities).scatter_(1, best, 1.0)
    return torch.stack(((loads * counted).sum(0), (probabilities * counted).sum(0))).unsqueeze(0)
