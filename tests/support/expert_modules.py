"""Modules of fused experts of Transformers, tiny and by themselves, and units that have nothing else."""

import copy
import importlib
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.versions import since
from torch import Tensor, nn

from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.graph.experts import declare_experts
from hf_helix.operators.experts.moe import COUNTED, SHARD_TOKENS
from hf_helix.operators.units.unit import Unit

NUM_EXPERTS, HIDDEN, INTERMEDIATE, CHOICES = 6, 8, 12, 2

OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), NUM_EXPERTS),
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size"), INTERMEDIATE),
    "ffn_hidden_size": INTERMEDIATE,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_hidden_act": "relu2",
    "ffn_act_fn": {"name": "silu"},
    "swiglu_limit": 2.0,
    "swiglu_alpha": 1.7,
    "mlp_gate_softcap": 3.0,
    "mlp_up_softcap": 3.0,
    "mlp_softcap": 3.0,
    "post_norm_eps": 1e-6,
    "moe_latent_size": None,
    "zero_expert_num": 2,
    "_experts_implementation": "eager",
}

SINCE = {
    "aria": since("5.18", "Aria's experts in tensors of three dimensions"),
    "muse_spark": since("5.20", "MuseSparkExperts"),
}
"""Families whose experts came, or came to their form, after the oldest Transformers that is supported."""


def cases_of(families: Iterable[str]) -> list[Any]:
    """Families as cases of a test: those that the installed Transformers is too old for are skipped."""
    return [pytest.param(name, marks=SINCE[name]) if name in SINCE else name for name in families]


def experts_of(family: str, name: str, **changes: Any) -> Any:
    """A class of a family's file in Transformers, with weights that make its output about as large as its input."""
    kind = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    made: nn.Module = kind(SimpleNamespace(**{**OPTIONS, **changes}))
    dice = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in made.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 3 else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=dice) * 2 * scale)
    return made


def tokens_of(rows: int, batch: int, seed: int = 0) -> dict[str, Tensor]:
    """Tokens, their choices and weights; expert 1 gets no token, and what comes back of each has a gradient."""
    dice = torch.Generator().manual_seed(seed)
    usable = torch.tensor([expert for expert in range(NUM_EXPERTS) if expert != 1])
    picks = [usable[torch.randperm(len(usable), generator=dice)[:CHOICES]] for _ in range(rows * batch)]
    return {
        "x": torch.randn(rows, batch, HIDDEN, generator=dice),
        "weights": torch.rand(rows * batch, CHOICES, generator=dice),
        "chosen": torch.stack(picks),
        "gradient": torch.randn(rows, batch, HIDDEN, generator=dice),
    }


def unit_of_experts(module: Any, sharing: ParallelContext, name: str = "experts") -> Unit:
    """Experts alone: their tokens and weights enter, and side input `chosen` has the choices."""
    b = Builder("layer", "layers.0", sharing)
    x, weights = b.input("x"), b.input("weights")
    (chosen,) = b.autograd_outputs(
        "choose", lambda chosen: (chosen,), (), side=("chosen",), non_differentiable=("picked",)
    )
    return b.build(declare_experts(b, x, weights, chosen, module, name=name))


def side_of(given: dict[str, Tensor], tp_size: int = 1) -> dict[str, Any]:
    """The side inputs of tokens that all count."""
    rows, batch = given["x"].shape[:2]
    return {
        COUNTED: torch.ones(rows * tp_size, batch, dtype=torch.long),
        SHARD_TOKENS: rows * batch,
        "chosen": given["chosen"],
    }


def by_itself(module: Any, given: dict[str, Tensor], autocast: bool = False) -> dict[str, Tensor]:
    """What the module's own forward gives, and the gradients of its tokens, weights and parameters."""
    alone = copy.deepcopy(module)
    x, weights = given["x"].clone().requires_grad_(), given["weights"].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = alone(x.flatten(0, 1), given["chosen"], weights).view_as(x)
    out.backward(given["gradient"].to(out.dtype))
    result = {"out": out.detach(), "d.x": x.grad, "d.weights": weights.grad}
    for name, parameter in alone.named_parameters():
        result[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return {name: value for name, value in result.items() if value is not None}
