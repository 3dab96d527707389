"""Mixtures of experts in a layer: what chooses experts, and the experts themselves.

In:   the nodes of a choice of experts and of a call of fused experts.
Out:  their operators, the meters of routers and, where the loss is balanced, the names of the sums that routers bring.
Must hold: every choice of experts is counted; a sum is of what Transformers records as `router_logits`.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from hf_helix.models.graph.balance import RouterRecord
from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.expert_form import DOWN
from hf_helix.models.graph.expert_layer import declare_experts
from hf_helix.models.lowering.forms import Routing
from hf_helix.models.lowering.outline import Outline
from hf_helix.models.lowering.values import Values
from hf_helix.models.placement.placed import SHARD
from hf_helix.models.trace.leaves import EXPERTS, Leaf
from hf_helix.models.trace.trace import Underivable, args_of
from hf_helix.operators.moe.dispatch import COUNTED, RouterMeter


class Experts(Values):
    """Declares routers and experts.

    Args:
        outline: see `Values`.
        b: see `Values`.
        module: see `Values`.
        start: see `Values`.
        choices: see `RouterRecord`.

    Attributes:
        parts: the names of the sums that routers bring to the load-balancing loss.
        meters: what counts each choice of experts.
    """

    def __init__(
        self, outline: Outline, b: Builder, module: Any, start: dict[Node, str], choices: int | None = None
    ) -> None:
        super().__init__(outline, b, module, start)
        self.choices = choices
        self.parts: list[str] = []
        self.meters: dict[Node, RouterMeter] = {}

    def _router(self, weights: Node, chosen: Node) -> None:
        """Declares what chooses experts: the weights of choices, and the choices, which have no gradient."""
        logits = self.outline.logits_of(chosen)
        outputs = [weights, chosen] if logits is None else [weights, chosen, logits]
        glue, inputs = self.outline.glue(outputs)
        names = [self.value(value, SHARD) for value in inputs]
        function, side = self._function(glue, outputs, inputs)
        is_summed = logits is not None and self.choices is not None
        record = RouterRecord(self._meter(chosen), self.choices if is_summed else None)
        name = self._name(weights)
        value, *parts, choice = self.b.segment_outputs(
            name,
            Routing(function, record, self.module),
            [f"{name}.weights", *([f"{name}.balance"] if is_summed else [])],
            *names,
            side=(*side, COUNTED),
            **self._used_by(glue),
            on_shard=True,
            non_differentiable=[f"{name}.chosen"],
        )
        self.parts += parts
        self._set(weights, value)
        self._set(chosen, choice)

    def _meter(self, chosen: Node) -> RouterMeter:
        """Returns what counts the choices of experts."""
        leaf = next(leaf for user in chosen.users if (leaf := self.trace.leaf(user)) and leaf.kind == EXPERTS)
        count = len(self.module.get_submodule(leaf.path).get_parameter(DOWN))
        self.meters[chosen] = RouterMeter(count, self.b.tp)
        self.b.meters.append(self.meters[chosen])
        return self.meters[chosen]

    def _experts(self, node: Node, leaf: Leaf) -> None:
        tokens, chosen, weights = args_of(node)[:3]
        if len(self.trace.shape(node)) != 2:
            raise Underivable("its experts take tokens that are not flat")
        h, weighed, which = (self.value(value, SHARD) for value in (tokens, weights, chosen))
        module, meter = self.module.get_submodule(leaf.path), self.meters.get(chosen)
        self._set(node, declare_experts(self.b, h, weighed, which, module, meter, name=self._name(node)))
