"""Tiny decoders with a block that `torch.export` cannot trace, as code outside of Transformers has them.

Named "support.block_models:function" for `tiny`.
"""

from typing import Any

import torch
from support.models import made
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

HOME = "support.block_models:"
NUM_EXPERTS, CHOICES = 8, 2

HITS: list[dict[int, set[int]]] = []
"""In this process, the experts that each call has used, by the number of the layer."""


class LoopedExperts(nn.Module):
    """Experts in a list, looped over by the data, as Mixtral was written; the router never chooses the last one."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.gate = nn.Linear(config.hidden_size, NUM_EXPERTS)
        self.experts = nn.ModuleList([LlamaMLP(config) for _ in range(NUM_EXPERTS)])
        self.dropout = nn.Dropout(getattr(config, "expert_dropout", 0.0))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states)
        router_logits[:, -1] = -torch.inf
        weights = functional.softmax(router_logits, dim=1, dtype=torch.float)
        weights, selected = torch.topk(weights, CHOICES, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(hidden_states.dtype)
        result = torch.zeros_like(hidden_states)
        mask = functional.one_hot(selected, num_classes=NUM_EXPERTS).permute(2, 1, 0)
        hit = mask.sum(dim=(-1, -2)).nonzero()
        for number in hit:
            expert = self.experts[number]
            choice, token = torch.where(mask[number].squeeze(0))
            current = self.dropout(expert(hidden_states[None, token].reshape(-1, hidden_dim)))
            result.index_add_(0, token, (current * weights[token, choice, None]).to(hidden_states.dtype))
        HITS.append({self.layer: set(hit.flatten().tolist())})
        return result.reshape(batch_size, sequence_length, hidden_dim), router_logits


class FirstOf(nn.Module):
    """The first result of a block, whose router logits nobody reads."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: Tensor) -> Tensor:
        result: Tensor = self.block(hidden_states)[0]
        return result


class BranchingMLP(LlamaMLP):
    """An MLP with another path for batches of large values; a second projection is used on that path only."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.other_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        if x.float().mean() > 0:
            result = result + self.other_proj(x)
        return result


class LoopedForCausalLM(LlamaForCausalLM):
    """Llama with `LoopedExperts`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.mlp = FirstOf(LoopedExperts(config, number))
        self.post_init()


class BranchingForCausalLM(LlamaForCausalLM):
    """Llama with `BranchingMLP` in all layers but the first."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers[1:]:
            layer.mlp = BranchingMLP(config)
        self.post_init()


def looped(**changes: Any) -> Any:
    """With routers far from ties."""
    model = made(LoopedForCausalLM, LlamaConfig, {"intermediate_size": 24, **changes})
    for layer in model.model.layers:
        nn.init.normal_(layer.mlp.block.gate.weight, std=0.5)
    return model


def branching(**changes: Any) -> Any:
    """With values that are large in some batches, and small in others."""
    return made(BranchingForCausalLM, LlamaConfig, changes)


def used_experts() -> list[tuple[int, list[int]]]:
    """The experts of each call since the last question, with the number of the layer, in order."""
    used = sorted((layer, sorted(experts)) for each in HITS for layer, experts in each.items())
    HITS.clear()
    return used
