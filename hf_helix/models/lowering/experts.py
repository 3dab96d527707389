"""The values of a unit while it is declared: their names, and the forms in which each is there.

In:   the outline of a unit, and the builder that its operators are declared on.
Out:  names of values and of operators; glue as functions.
Must hold: a value is gathered or scattered once, where it first meets what needs it in that form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

from hf_helix.models.graph.balance import RouterRecord
from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.experts import DOWN, declare_experts
from hf_helix.models.lowering.glue import Glue
from hf_helix.models.lowering.outline import BatchFirstSegment, LocalPositionsSegment, SegmentPlan, Routing
from hf_helix.models.placement.placed import PARTIAL, SHARD, WHOLE, features_of, is_canonical, name_of
from hf_helix.models.trace.leaves import EXPERTS, OpaqueCall
from hf_helix.models.trace.trace import BATCH, PLACES, SEQUENCE, Underivable, args_of
from hf_helix.operators.moe.dispatch import COUNTED, RouterMeter


class Values:
    """The names of the values of one module.

    Args:
        outline: the unit.
        b: its builder.
        module: the module.
        start: the names of the values that enter.
    """

    def __init__(self, outline: SegmentPlan, b: Builder, module: Any, start: dict[Node, str]) -> None:
        self.outline = outline
        self.trace = outline.trace
        self.b = b
        self.module = module
        self.names: dict[tuple[Node, str], str] = {}
        self.shown: dict[Node, Node] = {}
        self.used: set[str] = set()
        for node, name in start.items():
            self.names[node, outline.placed(node).where] = name

    def value(self, node: Node, where: str) -> str:
        """Returns the name of a value in some form, and declares the communication that gives it."""
        node = self.shown.get(node, node)
        known = self.names.get((node, where))
        if known is not None:
            return known
        have = self.outline.placed(node).where
        if have == PARTIAL and where == SHARD:
            name = self.b.reduce_scatter(self._name(node, "scatter"), self.names[node, PARTIAL])
        elif where == WHOLE and have != WHOLE:
            name = self.b.all_gather(self._name(node, "gather"), self.value(node, SHARD))
        else:
            raise Underivable(f"{node.name} in {self.trace.path(node)} would have to be cut again")
        self.names[node, where] = name
        return name

    def _shows(self, node: Node) -> bool:
        """Returns whether a node is a view with the layout that another value has between operators: tokens in one
        dimension or in two. Such views need no operator.
        """
        source = args_of(node)[0] if name_of(node) in ("view", "reshape", "_unsafe_view") else None
        if source not in self.outline.values or {node, source} & self.outline.flat:
            return False
        mine, other = self.outline.placed(node), self.outline.placed(source)
        if mine.where != other.where or mine.dim is not None or other.dim is not None:
            return False
        if not is_canonical(self.trace, node) or features_of(self.trace, node) != features_of(self.trace, source):
            return False
        self.shown[node] = self.shown.get(source, source)
        return True

    def _function(
        self, glue: Glue, outputs: Sequence[Node], inputs: Sequence[Node]
    ) -> tuple[Callable[..., Any], tuple[str, ...]]:
        """Returns the glue as a function over values as operators hand them on, and the side inputs that it takes."""
        bound = glue.bind(self.module)
        side = tuple(name for name in glue.side if name != PLACES)
        if not side:
            return (LocalPositionsSegment(bound, self.b.tp.rank) if glue.side else bound), glue.side
        if len(outputs) > 1 or any(self.trace.shape(value)[:2] != (BATCH, SEQUENCE) for value in (*inputs, *outputs)):
            raise Underivable("rows of tokens meet what belongs to positions")
        return BatchFirstSegment(bound), (*side, "length")

    def _used_by(self, glue: Glue) -> dict[str, Any]:
        """Returns what glue calls and reads, as `Builder.segment` takes it: what ranks have whole, and what is cut."""
        cut = {self.trace.attributes[node] for node in self.outline.inference.decisions.cut}
        parameters = glue.parameters(self.module)
        return {
            "uses": [*glue.called(self.module), *(parameter for name, parameter in parameters if name not in cut)],
            "cut": [parameter for name, parameter in parameters if name in cut],
        }

    def _is_there(self, node: Node) -> bool:
        return any((node, where) in self.names for where in (SHARD, WHOLE, PARTIAL))

    def _set(self, node: Node, name: str) -> None:
        self.names[node, self.outline.placed(node).where] = name

    def _name(self, node: Node, suffix: str = "") -> str:
        """Returns a name of an operator that is not taken: the path of the module, and what is done there."""
        leaf = self.trace.leaf(node)
        if leaf is not None:
            base = leaf.path or leaf.kind
        else:
            what = str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)
            path = self.trace.path(node)
            base = f"{path}.{what}" if path else what
        return self._free(f"{base}.{suffix}" if suffix else base)

    def _free(self, name: str) -> str:
        free, number = name, 1
        while free in self.used:
            number += 1
            free = f"{name}.{number}"
        self.used.add(free)
        return free


# -- experts -------------------------------------------------------------------------------------------------------
# Mixtures of experts in a layer: what chooses experts, and the experts themselves.
#
# In:   the nodes of a choice of experts and of a call of fused experts.
# Out:  their operators, the meters of routers and, where the loss is balanced, the names of the sums that routers
# bring.
# Must hold: every choice of experts is counted; a sum is of what Transformers records as `router_logits`.


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
        self, outline: SegmentPlan, b: Builder, module: Any, start: dict[Node, str], choices: int | None = None
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

    def _experts(self, node: Node, leaf: OpaqueCall) -> None:
        tokens, chosen, weights = args_of(node)[:3]
        if len(self.trace.shape(node)) != 2:
            raise Underivable("its experts take tokens that are not flat")
        h, weighed, which = (self.value(value, SHARD) for value in (tokens, weights, chosen))
        module, meter = self.module.get_submodule(leaf.path), self.meters.get(chosen)
        self._set(node, declare_experts(self.b, h, weighed, which, module, meter, name=self._name(node)))
