"""The names of a unit's values during declaration, and the declaration of routers and experts.

In:   the segment plan of a unit, and the builder for its operators.
Out:  names of values and operators; segments as functions; the operators of routers and experts, with meters and, for a
      load-balancing loss, the names of the sums of each router.
Must hold: a value is gathered or scattered once, before its first reader. Every choice of experts is counted; a sum is
over the values that Transformers records as `router_logits`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

from hf_helix.models.graph.balance import RouterRecord
from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.experts import DOWN, declare_experts
from hf_helix.models.lowering.segment_function import SegmentFunction
from hf_helix.models.lowering.segment_plan import BatchFirstSegment, LocalPositionsSegment, Routing, SegmentPlan
from hf_helix.models.placement.value_placement import FULL, PARTIAL, SHARD, features_of, is_canonical, name_of
from hf_helix.models.stock.peft import unwrapped
from hf_helix.models.trace.opaque_calls import CallKind, OpaqueCall
from hf_helix.models.trace.trace import BATCH, SEQUENCE, TOKEN_POSITIONS, Underivable, args_of
from hf_helix.operators.experts.moe import COUNTED, RouterMeter
from hf_helix.planning.parameters import Cut


class ValueNames:
    """The names of the values of one module.

    Args:
        plan: of the unit.
        start: the names of the values that enter.
        choices: see `RouterRecord`.

    Attributes:
        parts: the names of the routers' sums for the load-balancing loss.
        meters: the counters of each choice of experts.
    """

    def __init__(
        self, plan: SegmentPlan, b: Builder, module: Any, start: dict[Node, str], choices: int | None = None
    ) -> None:
        self.plan = plan
        self.trace = plan.trace
        self.b = b
        self.module = module
        self.names: dict[tuple[Node, str], str] = {}
        self.shown: dict[Node, Node] = {}
        self.used: set[str] = set()
        self.choices = choices
        self.parts: list[str] = []
        self.meters: dict[Node, RouterMeter] = {}
        for node, name in start.items():
            self.names[node, plan.placement(node).where] = name

    def value(self, node: Node, where: str) -> str:
        """Returns the name of a value in a form (SHARD, FULL or PARTIAL), and declares the necessary communication."""
        node = self.shown.get(node, node)
        known = self.names.get((node, where))
        if known is not None:
            return known
        have = self.plan.placement(node).where
        if have == PARTIAL and where == SHARD:
            name = self.b.reduce_scatter(self._name(node, "scatter"), self.names[node, PARTIAL])
        elif where == FULL and have != FULL:
            name = self.b.all_gather(self._name(node, "gather"), self.value(node, SHARD))
        elif where == SHARD and have == FULL and self.plan.placement(node).dim is None:
            name = self.b.take_part(self._name(node, "part"), self.names[node, FULL])
        else:
            raise Underivable(f"{node.name} in {self.trace.path(node)} would have to be cut again")
        self.names[node, where] = name
        return name

    def _shows(self, node: Node) -> bool:
        """Returns whether a node is a view with the layout that another value has between operators: tokens in one
        dimension or in two. Such views need no operator.
        """
        source = args_of(node)[0] if name_of(node) in ("view", "reshape", "_unsafe_view") else None
        if source not in self.plan.values or {node, source} & self.plan.flat:
            return False
        mine, other = self.plan.placement(node), self.plan.placement(source)
        if mine.where != other.where or mine.dim is not None or other.dim is not None:
            return False
        if not is_canonical(self.trace, node) or features_of(self.trace, node) != features_of(self.trace, source):
            return False
        self.shown[node] = self.shown.get(source, source)
        return True

    def _function(
        self, segment: SegmentFunction, outputs: Sequence[Node], inputs: Sequence[Node], mixes: bool = False
    ) -> tuple[Callable[..., Any], tuple[str, ...]]:
        """Returns a segment as a function over values [tokens, batch, ...], and the names of its side inputs."""
        bound = segment.bind(self.module)
        side = tuple(name for name in segment.side if name != TOKEN_POSITIONS)
        if not side and not mixes:
            return (
                LocalPositionsSegment(bound, self.b.tp.rank, self.b.tp.size) if segment.side else bound
            ), segment.side
        flat = [value for value in (*inputs, *outputs) if self.trace.shape(value)[:2] != (BATCH, SEQUENCE)]
        if len(outputs) > 1 or flat:
            path = self.trace.path(flat[0]) if flat else None
            raise Underivable("rows of tokens meet what belongs to positions", path)
        return BatchFirstSegment(bound), (*side, "length")

    def _used_by(self, segment: SegmentFunction) -> dict[str, Any]:
        """Returns the modules and parameters of a segment for `Builder.autograd`: `uses` (full on all ranks) and
        `cut`."""
        decided = self.plan.placements.decisions.cut.items()
        cut = {
            self.trace.attributes[node]: Cut(dim=dim, blocks=blocks if len(blocks) > 1 else ())
            for node, (dim, blocks) in decided
            if node in self.trace.attributes
        }
        parameters = segment.parameters(self.module)
        adapters = {name: segment.adapters(self.module, name) for name, _ in parameters}
        if refused := [name for name in cut if adapters.get(name)]:
            raise Underivable(f"tp_size cuts {refused[0]}, which has adapters of its own (target_parameters)")
        whole = [p for name, parameter in parameters if name not in cut for p in (parameter, *adapters[name])]
        return {
            "uses": [*segment.read(self.module), *whole],
            "cut": [(parameter, cut[name]) for name, parameter in parameters if name in cut],
        }

    def _is_there(self, node: Node) -> bool:
        return any((node, where) in self.names for where in (SHARD, FULL, PARTIAL))

    def _set(self, node: Node, name: str) -> None:
        self.names[node, self.plan.placement(node).where] = name

    def _name(self, node: Node, suffix: str = "") -> str:
        """Returns an unused name for an operator: the path of the module and the operation."""
        kind = self.trace.kind_of(node)
        if kind is not None:
            base = self.trace.path_of(node) or kind.value
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


class Experts(ValueNames):
    """Declares routers and experts."""

    def _router(self, weights: Node, chosen: Node) -> None:
        """Declares a choice of experts; the weights have a gradient, the choices have none."""
        logits = self.plan.logits_of(chosen)
        outputs = [weights, chosen] if logits is None else [weights, chosen, logits]
        segment, inputs = self.plan.segment(outputs)
        names = [self.value(value, SHARD) for value in inputs]
        function, side = self._function(segment, outputs, inputs)
        of_logits = () if logits is None else (self.choices, self.b.loss_tweaks.ends_at_decoder)
        record = RouterRecord(self._meter(chosen), *of_logits)
        name = self._name(weights)
        value, *parts, choice = self.b.autograd_outputs(
            name,
            Routing(function, record, self.module),
            [f"{name}.weights", *record.names(self.b, name)],
            *names,
            side=(*side, COUNTED),
            **self._used_by(segment),
            on_shard=True,
            non_differentiable=[f"{name}.chosen"],
        )
        self.parts += parts
        self._set(weights, value)
        self._set(chosen, choice)

    def _meter(self, chosen: Node) -> RouterMeter:
        """Returns a counter of the choices of experts."""
        experts = next(user for user in chosen.users if self.trace.kind_of(user) is CallKind.EXPERTS)
        module = unwrapped(self.module.get_submodule(self.trace.path_of(experts))).module
        count = len(module.get_parameter(DOWN))
        self.meters[chosen] = RouterMeter(count, self.b.tp)
        self.b.meters.append(self.meters[chosen])
        return self.meters[chosen]

    def _experts(self, node: Node, opaque: OpaqueCall) -> None:
        tokens, chosen, weights = args_of(node)[:3]
        if len(self.trace.shape(node)) != 2:
            raise Underivable("its experts take tokens that are not flat")
        h, weighed, which = (self.value(value, SHARD) for value in (tokens, weights, chosen))
        module, meter = self.module.get_submodule(opaque.path), self.meters.get(chosen)
        try:
            result = declare_experts(self.b, h, weighed, which, module, meter, name=self._name(node))
        except ValueError as error:  # of a form that is not built
            raise Underivable(str(error)) from error
        self._set(node, result)
