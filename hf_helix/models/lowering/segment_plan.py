"""The segment plan of a unit: the operators of the unit and the segment of the trace before each.

In:   the placements of a trace, the nodes at the start, and the node at the end of the unit.
Out:  a `SegmentPlan`, made once for all equal layers; forms in which operators call segments and dropout: the model's
      code has values [batch, sequence, ...], operators have values [tokens, batch, ...].
Must hold: a segment with a single reader belongs to the reader; a sum with a single reader, another sum, is part of the
other sum.

    x -> norm -> linear -> [view, rope, view] -> attention -> linear -> add
                           segment of attention
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from hf_helix.models.graph.balance import RouterRecord
from hf_helix.models.lowering.segment_function import SegmentFunction, SegmentWriter, Share
from hf_helix.models.placement.rules import Placements
from hf_helix.models.placement.value_placement import FREE, PARTIAL, SHARD, ValuePlacement, is_canonical, is_sum
from hf_helix.models.trace.opaque_calls import CallKind
from hf_helix.models.trace.trace import Underivable, args_of, has_value, is_tensor, reached
from hf_helix.operators.base import Tensors
from hf_helix.operators.experts.moe import COUNTED


@dataclass(frozen=True)
class BatchFirstSegment:
    """A segment over values [batch, sequence, ...] without padding, for code that needs the position of every token."""

    function: Callable[..., Tensor]

    def __call__(self, *values: Tensor, length: int, **side: Tensor) -> Tensor:
        padded = values[0].shape[0]
        result = self.function(*(value[:length].transpose(0, 1) for value in values), **side).transpose(0, 1)
        extra = max(0, padded - result.shape[0])
        return nn.functional.pad(result, (0, 0) * (result.dim() - 1) + (0, extra)) if extra else result


@dataclass(frozen=True)
class LocalPositionsSegment:
    """A segment with this rank's positions, out of `token_positions` [tokens of all ranks, batch or 1]."""

    function: Callable[..., Any]
    rank: int
    num_ranks: int

    def __call__(self, *values: Tensor, token_positions: Tensor) -> Any:
        count = values[0].shape[0] if values else token_positions.shape[0] // self.num_ranks
        return self.function(*values, token_positions=token_positions[self.rank * count :][:count])


@dataclass(frozen=True)
class Routing:
    """A segment that chooses experts, with a record of the choices.

    Attributes:
        function: returns weights and choices [tokens, k], then the logits if the trace has logits.
        record: of the router.
        layer: decides whether the record is of training.
    """

    function: Callable[..., Any]
    record: RouterRecord
    layer: nn.Module

    def __call__(self, *values: Tensor, counted: Tensor, **side: Tensor) -> Tensors:
        weights, chosen, *recorded = self.function(*values, **side)
        logits = recorded[0].flatten(0, -2) if recorded else None
        part = self.record.keep(logits, chosen, {COUNTED: counted}, self.layer.training)
        return (weights, *part, chosen)


@dataclass(frozen=True)
class DropoutIn:
    """Dropout called as a function by the code of a module; the module decides whether dropout is active."""

    module: nn.Module
    p: float

    @property
    def training(self) -> bool:
        return self.module.training


# -- segment plan --------------------------------------------------------------------------------------------------


VIEWS = ("view", "reshape", "transpose", "unsqueeze", "getitem", "split", "slice", "chunk", "expand", "permute")
"""Parts of the names of operations without cost."""


class SegmentPlan:
    """The operators of a unit, for all equal modules.

    Args:
        placements: of the trace.
        share: the rank's position.
        start: the nodes of the values that enter.
        target: the node of the value that leaves.
        handed: the node of a further value that leaves, without gradient; None for none.
    """

    def __init__(
        self, placements: Placements, share: Share, start: Sequence[Node], target: Node, handed: Node | None = None
    ) -> None:
        self.placements = placements
        self.trace = placements.trace
        self.share = share
        self.start = tuple(start)
        self.target = target
        self.handed = handed
        self.needed = self._ancestors(target) if handed is None else self._ancestors(target, handed)
        self.values: set[Node] = set(start)
        self.folded: set[Node] = set()
        self.routed: dict[Node, Node] = {}
        self.groups: dict[Node, set[Node]] = {}
        self._choose_values()
        self.flat = {*self.routed, *self.routed.values()}
        self._segments: dict[tuple[tuple[Node, ...], tuple[Node, ...] | None], tuple[SegmentFunction, list[Node]]] = {}

    def _ancestors(self, *nodes: Node) -> set[Node]:
        """Returns nodes and all nodes before them."""
        return {*reached(nodes, lambda node: () if node in self.start else node.all_input_nodes)}

    # -- values between operators ------------------------------------------------------------------------------------

    def is_operator(self, node: Node) -> bool:
        """Returns whether an opaque call is an operator by itself, and not part of a segment."""
        kind = self.trace.kind_of(node)
        if kind in (None, CallKind.ELEMENTWISE, CallKind.GATED_NORM):
            return False
        if kind in (CallKind.NORM, CallKind.DROPOUT):
            placement = self.placement(node)
            return is_canonical(self.trace, node) and placement.dim is None and placement.where != FREE
        return True

    def is_residual(self, node: Node) -> bool:
        """Returns whether a node is a sum of two values with all their features."""
        if not is_canonical(self.trace, node) or not is_sum(self.trace, node):
            return False
        placement = self.placement(node)
        is_whole = placement.where in (SHARD, PARTIAL) and placement.dim is None
        return is_whole and all(self.placement(value).where != FREE for value in args_of(node))

    def _folds(self, node: Node) -> bool:
        """Returns whether a sum is only a term of another sum, which then adds all terms."""
        users = [user for user in node.users if user in self.needed]
        is_term = len(users) == 1 and self.is_residual(users[0])
        return is_term and node is not self.target and self.placement(node).where == SHARD

    def placement(self, node: Any) -> ValuePlacement:
        return self.placements.values[node]

    def _choose_values(self) -> None:
        """Chooses the values between operators, and for every other node the operators that need the node."""
        order = [node for node in self.trace.nodes if node in self.needed and node not in self.start]
        for node in order:
            if self.is_operator(node):
                self.values.add(node)
            elif self.is_residual(node):
                (self.folded if self._folds(node) else self.values).add(node)
            if self.trace.kind_of(node) is CallKind.EXPERTS:
                _, chosen, weights = args_of(node)[:3]
                self.routed[chosen] = weights
        for node in reversed(order):
            if node in self.values or node in self.folded or node not in self.placements.values:
                continue
            if self.placement(node).where == FREE:
                continue
            with self.trace.following(node):
                self._choose_value(node)

    def _choose_value(self, node: Node) -> None:
        users = [user for user in node.users if user in self.needed]
        must = node in (self.target, self.handed) or any(self._must_be_value(node, user) for user in users)
        groups: set[Node] = set()
        for user in users:
            groups |= {self.routed.get(user, user)} if user in self.values else self.groups.get(user, set())
        if must or (len(groups) > 1 and self._is_worth_keeping(node)):
            where = self.trace.path(node) or "the layer"
            if not is_tensor(node):
                raise Underivable(f"{node.target} in {where} gives several values")
            if not is_canonical(self.trace, node):
                raise Underivable(f"{node.target} in {where} hands on a value that is not laid out by tokens")
            self.values.add(node)
        self.groups[node] = {self.routed.get(node, node)} if node in self.values else groups

    def _must_be_value(self, node: Node, user: Node) -> bool:
        kind = self.trace.kind_of(user)
        if user in self.folded or node in self.placements.decisions.gathered or self.placement(node).is_summand:
            return True
        if user in self.values:
            takes_any = kind in (CallKind.ATTENTION, CallKind.MIXER, CallKind.BLOCK)
            return self.is_residual(user) if kind is None else not takes_any
        if user not in self.placements.values:
            return False
        return self.placement(user).where not in (FREE, self.placement(node).where)

    def _is_worth_keeping(self, node: Node) -> bool:
        """Returns whether a node with several readers is computed once; a view is computed by each reader."""
        return not any(name in str(node.target) for name in VIEWS) and is_canonical(self.trace, node)

    def logits_of(self, chosen: Node) -> Node | None:
        """Returns the node of a router's logits before a choice of experts; None for a trace without logits."""
        ancestors = self._ancestors(chosen) - self.values
        candidates = [node for node in self.trace.logits if node in ancestors and is_canonical(self.trace, node)]
        if len(candidates) != 1:
            return None
        placement = self.placement(candidates[0])
        return candidates[0] if placement.where == SHARD and placement.dim is None else None

    # -- segments --------------------------------------------------------------------------------------------------

    def inputs_of(self, outputs: Sequence[Node]) -> list[Node]:
        """Returns the values that the segment before the outputs reads."""

        def is_input(node: Node) -> bool:
            return node in self.values and node not in outputs

        read = reached(outputs, lambda node: () if is_input(node) else filter(has_value, node.all_input_nodes))
        return [*filter(is_input, read)]

    def segment(
        self, outputs: Sequence[Node], inputs: Sequence[Node] | None = None
    ) -> tuple[SegmentFunction, list[Node]]:
        """Returns the segment that computes the outputs, and the values that the segment reads: those between operators
        unless given."""
        key = tuple(outputs), None if inputs is None else tuple(inputs)
        if key not in self._segments:
            inputs = self.inputs_of(outputs) if inputs is None else list(inputs)
            function = SegmentWriter(self.placements, self.share, self.flat).write(inputs, outputs)
            self._segments[key] = function, inputs
        return self._segments[key]
