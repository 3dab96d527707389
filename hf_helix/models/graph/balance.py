"""The load-balancing loss of a mixture of experts: a product of two means over all tokens and all layers.

In:   the logits of every layer's router, and the tokens that count.
Out:  the value `balance` [1, 2, experts], the two sums of the layers so far, passed on with the activations; the loss
      with the load-balancing loss added.
Must hold: equal to `load_balancing_loss_func` of Transformers over the full micro-batch, also over tp and cp.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, __version__

from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.experts import counted_in
from hf_helix.models.stock.peft import unwrapped
from hf_helix.operators.base import Tensors
from hf_helix.operators.experts.moe import COUNTED, RouterMeter, counted_tokens

BALANCE = "balance"
"""The value that enters and leaves every unit."""

ROWS, BALANCE_SCALE = "counted_rows", "balance_scale"
"""Side inputs: how many tokens of the batch count, and the factor of a loss of the batch as a whole."""

LOSS = "load_balancing_loss_func"
"""The function of a model's file in Transformers that computes the loss."""


@dataclass(frozen=True)
class Balance:
    """The load-balancing loss of a model.

    Attributes:
        num_experts: of every router.
        choices: how many of a token's most probable experts count as its load.
        num_layers: how many routers there are.
        coefficient: the factor of the loss.
    """

    num_experts: int
    choices: int
    num_layers: int
    coefficient: float

    def start(self, b: Builder) -> str:
        """Adds the sums over no layer, in the unit of the embedding."""
        shape = (1, 2, self.num_experts)

        def nothing(counted: Tensor) -> Tensor:
            return torch.zeros(shape, device=counted.device)

        return b.autograd(BALANCE, nothing, side=(COUNTED,))

    def add_loss(self, b: Builder, loss: str, balance: str) -> str:
        """Adds the load-balancing loss to the loss, in the unit of the head; without its factors, it is the last of the
        figures after the loss, if there are figures.

        Args:
            b: the builder of the head.
            loss: the loss of the tokens.
            balance: the sums of all layers.
        """
        for name, axis in (("tp", b.tp), ("cp", b.cp)):
            balance = b.replicate(f"{BALANCE}.{name}", balance, axis)
        given = None if b.loss_tweaks.token_loss is None else b.loss_tweaks.token_loss.router_coefficient
        layers, weight, cp_size = self.num_layers, self.coefficient if given is None else given, b.cp.size
        b.num_figures += b.loss_tweaks.lists_figures

        def add(loss: Tensor, sums: Tensor, counted_rows: Tensor, balance_scale: float) -> Tensor:
            shares = sums.sum(0) / (counted_rows * layers)
            unweighted = sums.shape[-1] * (shares[0] * shares[1]).sum()
            extra = weight * balance_scale * unweighted
            # Each cp rank has the sums of the full sequence; losses of the ranks are added up, gradients are not.
            extra = extra - extra.detach() * (1 - 1 / cp_size)
            if not loss.dim():
                return loss + extra
            return torch.cat((loss[:1] + extra, loss[1:], unweighted.detach()[None] / cp_size))

        return b.autograd("loss.balanced", add, loss, balance, side=(ROWS, BALANCE_SCALE))

    def empty(self, device: torch.device) -> Tensor:
        """Allocates the two sums that a layer passes on."""
        return torch.empty((1, 2, self.num_experts), device=device)


def add_part(b: Builder, balance: str, part: str | None) -> str:
    """Adds the sums of a layer's routers to the sums of the layers before, in the unit of the layer.

    Args:
        b: the builder of the layer.
        balance: the sums of the layers before.
        part: the sums of this layer; None for a layer without a router.
    """
    if part is None:
        return b.autograd(f"{BALANCE}.pass", torch.clone, balance)
    return b.add(f"{BALANCE}.add", balance, part)


def balance_side_inputs(batch: Mapping[str, Any], batch_scale: float) -> dict[str, Any]:
    """Returns the side inputs of `Balance.add_loss` for a micro-batch; `batch_scale` is the factor of a loss of the
    full batch."""
    return {ROWS: counted_in(batch).sum(), BALANCE_SCALE: batch_scale}


def part_of(logits: Tensor, counted: Tensor, choices: int) -> Tensor:
    """Returns sums over tokens [1, 2, experts]: of the most probable experts, and of all experts' probabilities, from
    logits [tokens, experts] and 1 for tokens that count, else 0 [tokens]; see `counted_tokens`."""
    probabilities = logits.softmax(-1).float()
    counted = counted.float().unsqueeze(-1)
    best = probabilities.detach().topk(choices, -1).indices
    loads = torch.zeros_like(probabilities).scatter_(1, best, 1.0)
    return torch.stack(((loads * counted).sum(0), (probabilities * counted).sum(0))).unsqueeze(0)


@dataclass(frozen=True)
class RouterRecord:
    """A layer's record of its router: figures for the logs; for a balanced loss the two sums, for a loss of the
    caller's own the logits.

    Attributes:
        meter: adds up the figures.
        choices: the number of a token's most probable experts that count as load; None if the loss is not balanced.
        shows: whether the logits are a value of the graph, see `Graph.shown`.
    """

    meter: RouterMeter
    choices: int | None = None
    shows: bool = False

    def names(self, b: Builder, name: str) -> list[str]:
        """Returns the names of what `keep` returns, which begin with a name."""
        if self.shows:
            b.shown.append(f"{name}.logits")
            return b.shown[-1:]
        return [] if self.choices is None else [f"{name}.balance"]

    def keep(self, logits: Tensor | None, chosen: Tensor, side: Mapping[str, Any], is_training: bool) -> Tensors:
        """Returns the two sums [1, 2, experts], or the logits; nothing if none of them is read.

        Args:
            logits: of the router for this rank's tokens [n * batch, experts]; None if the logits are not known.
            chosen: the chosen experts [n * batch, k].
            side: the side inputs of the micro-batch.
            is_training: whether figures are added up.
        """
        counted = counted_tokens(side, self.meter.tp)
        if is_training and torch.is_grad_enabled():  # once: recompute in backward runs it with gradients
            self.meter.note(logits, chosen, counted)
        if logits is None or self.shows:
            return () if logits is None else (logits,)
        return () if self.choices is None else (part_of(logits, counted, self.choices),)


@dataclass(frozen=True)
class Router:
    """A submodule with logits for a model's load-balancing loss.

    Attributes:
        path: the name of the submodule in the model.
        module: the submodule.
        index: of the output with the logits [tokens, experts].
    """

    path: str
    module: nn.Module
    index: int


def routers_of(model: nn.Module) -> list[Router]:
    """Returns the submodules whose outputs Transformers records as `router_logits`; the one in use of PEFT's copies."""
    wrapped = [unwrapped(module) for module in model.modules() if hasattr(module, "modules_to_save")]
    idle = {id(copy) for inside in wrapped for copy in inside.copies if copy is not inside.module}
    return [router for router in _routers(model, "", []) if id(router.module) not in idle]


def balance_of(model: Any) -> Balance | None:
    """Returns the load-balancing loss added by a Transformers model's own forward; None for a model without.

    Raises:
        ValueError: the model's loss differs from Mixtral's, or reads logits that no router of the model returns.
    """
    forward = inspect.unwrap(type(model).forward)
    if not getattr(model.config, "output_router_logits", False) or LOSS not in forward.__code__.co_names:
        return None
    num_routers = len(routers_of(model))
    if not num_routers:
        raise ValueError(
            f"{type(model).__name__} of Transformers {__version__} adds a load-balancing loss, but records no "
            "router_logits that it could read; use model.config.output_router_logits = False, or a Transformers that "
            "records them"
        )
    balance = Balance(model.num_experts, model.num_experts_per_tok, num_routers, float(model.router_aux_loss_coef))
    if difference := _difference_from(forward.__globals__[LOSS], balance):
        raise ValueError(
            f"the load-balancing loss of {type(model).__name__} is not that of Mixtral, which is the one that is "
            f"built; use model.config.output_router_logits = False (tried on small logits: {difference})"
        )
    return balance


def _routers(module: nn.Module, path: str, recorders: list[Any]) -> Iterator[Router]:
    """Yields the routers of a module."""
    if isinstance(module, PreTrainedModel):
        given = module.can_record_outputs.get("router_logits", [])
        recorders = given if isinstance(given, list) else [given]
    for name, child in module.named_children():
        yield from _routers(child, f"{path}.{name}" if path else name, recorders)
    for recorder in recorders:
        within = recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{path}."
        if isinstance(module, recorder.target_class) and within:
            yield Router(path, module, recorder.index)


def _difference_from(function: Any, balance: Balance) -> str:
    """Returns how a function differs from the load-balancing loss of the operators, by a trial call; "" if equal."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(6, balance.num_experts, generator=generator) for _ in range(2)]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    parts = torch.stack([part_of(logits, mask.flatten(), balance.choices) for logits in layers])
    loads, probabilities = parts.sum((0, 1)) / (mask.sum() * len(layers))
    expected = balance.num_experts * (loads * probabilities).sum()
    try:
        computed = function(tuple(layers), balance.num_experts, balance.choices, mask)
    except Exception as error:  # the function takes other arguments, or logits of another shape
        return f"{type(error).__name__}: {error}"
    return "" if torch.allclose(computed, expected) else f"{float(computed):.6g}, and {float(expected):.6g} is built"
