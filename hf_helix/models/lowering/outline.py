"""The forms in which operators call glue and dropout of a model.

In:   a function over values as a trace has them [batch, sequence, ...], or a module whose code drops out by itself.
Out:  the same over values as operators hand them on [tokens, batch, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from hf_helix.models.graph.balance import RouterRecord
from hf_helix.models.lowering.glue import Glue, Share, build_segment_function
from hf_helix.models.placement.inference import Inference
from hf_helix.models.placement.placed import FREE, PARTIAL, SHARD, ValuePlacement, is_canonical, is_sum
from hf_helix.models.trace.leaves import ATTENTION, DROPOUT, ELEMENTWISE, EXPERTS, NORM
from hf_helix.models.trace.trace import Underivable, args_of, has_value, is_tensor
from hf_helix.operators.base import Tensors
from hf_helix.operators.moe.dispatch import COUNTED


class BatchFirstSegment:
    """Glue that needs to know which token stands where: it gets values [batch, sequence, ...] without padding."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, *values: Tensor, length: int, **side: Tensor) -> Tensor:
        padded = values[0].shape[0]
        result = self.function(*(value[:length].transpose(0, 1) for value in values), **side).transpose(0, 1)
        extra = padded - result.shape[0]
        if extra <= 0:
            return result
        return nn.functional.pad(result, (0, 0) * (result.dim() - 1) + (0, extra))


@dataclass(frozen=True)
class LocalPositionsSegment:
    """Glue that reads the positions of tokens [tokens of all ranks, batch or 1]: it gets those of this rank's."""

    function: Callable[..., Any]
    rank: int

    def __call__(self, *values: Tensor, places: Tensor) -> Any:
        count = values[0].shape[0]
        return self.function(*values, places=places[self.rank * count :][:count])


@dataclass(frozen=True)
class Routing:
    """Glue that chooses experts, of which a record is kept.

    Attributes:
        function: returns the weights of choices and the choices [tokens, k], then the logits where they are known.
        record: keeps what the router says.
        layer: says whether it is in training.
    """

    function: Callable[..., Any]
    record: RouterRecord
    layer: nn.Module

    def __call__(self, *values: Tensor, counted: Tensor, **side: Tensor) -> Tensors:
        weights, chosen, *said = self.function(*values, **side)
        logits = said[0].flatten(0, -2) if said else None
        part = self.record.keep(logits, chosen, {COUNTED: counted}, self.layer.training)
        return (weights, *part, chosen)


@dataclass(frozen=True)
class DropoutIn:
    """Dropout by a function in the code of a module, which says whether it is in training."""

    module: nn.Module
    p: float

    @property
    def training(self) -> bool:
        return self.module.training


# -- outline -------------------------------------------------------------------------------------------------------
# The outline of a unit: which nodes of a trace are values between operators, and which glue belongs to which.
#
# In:   the inference of a trace, the nodes that are there at the start, and the node that the unit gives.
# Out:  an `SegmentPlan`, made once for all layers of a kind.
# Must hold: glue that one operator alone needs belongs to it; a sum that is only a term of another sum is part of
# that.


VIEWS = ("view", "reshape", "transpose", "unsqueeze", "getitem", "split", "slice", "chunk", "expand", "permute")
"""Parts of the names of operations that cost nothing."""


class SegmentPlan:
    """The operators of a unit, for all modules of one kind.

    Args:
        inference: the trace and its placements.
        share: which part a rank has of what is cut.
        start: the nodes whose values enter.
        target: the node whose value leaves.
    """

    def __init__(self, inference: Inference, share: Share, start: Sequence[Node], target: Node) -> None:
        self.inference = inference
        self.trace = inference.trace
        self.share = share
        self.start = tuple(start)
        self.target = target
        self.needed = self._behind(target)
        self.values: set[Node] = set(start)
        self.folded: set[Node] = set()
        self.routed: dict[Node, Node] = {}
        self.groups: dict[Node, set[Node]] = {}
        self._choose_values()
        self.flat = {*self.routed, *self.routed.values()}
        self._glue: dict[tuple[Node, ...], tuple[Glue, list[Node]]] = {}

    def _behind(self, node: Node) -> set[Node]:
        """Returns the nodes that one is computed from, and itself."""
        behind: set[Node] = set()
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node not in behind:
                behind.add(node)
                if node not in self.start:
                    waiting += [value for value in node.all_input_nodes if value not in behind]
        return behind

    # -- which nodes are values between operators ------------------------------------------------------------------

    def is_operator(self, node: Node) -> bool:
        """Returns whether a leaf is an operator by itself, and not part of the glue around it."""
        leaf = self.trace.leaf(node)
        if leaf is None or leaf.kind == ELEMENTWISE:
            return False
        if leaf.kind in (NORM, DROPOUT):
            return is_canonical(self.trace, node) and self.placed(node).dim is None and self.placed(node).where != FREE
        return True

    def is_residual(self, node: Node) -> bool:
        """Returns whether a node is a sum of values that are whole in their features."""
        if not is_canonical(self.trace, node) or not is_sum(self.trace, node):
            return False
        placed = self.placed(node)
        is_whole = placed.where in (SHARD, PARTIAL) and placed.dim is None
        return is_whole and all(self.placed(value).where != FREE for value in args_of(node))

    def _folds(self, node: Node) -> bool:
        """Returns whether a sum is only a term of another one, which then adds up all terms."""
        users = [user for user in node.users if user in self.needed]
        is_term = len(users) == 1 and self.is_residual(users[0])
        return is_term and node is not self.target and self.placed(node).where == SHARD

    def placed(self, node: Any) -> ValuePlacement:
        return self.inference.placed[node]

    def _choose_values(self) -> None:
        """Finds what is handed from operator to operator, and which operator all other glue belongs to."""
        order = [node for node in self.trace.nodes if node in self.needed and node not in self.start]
        for node in order:
            if self.is_operator(node):
                self.values.add(node)
            elif self.is_residual(node):
                (self.folded if self._folds(node) else self.values).add(node)
            leaf = self.trace.leaf(node)
            if leaf is not None and leaf.kind == EXPERTS:
                _, chosen, weights = args_of(node)[:3]
                self.routed[chosen] = weights
        for node in reversed(order):
            if node in self.values or node in self.folded or node not in self.inference.placed:
                continue
            if self.placed(node).where == FREE:
                continue
            users = [user for user in node.users if user in self.needed]
            must = node is self.target or any(self._must_be_value(node, user) for user in users)
            groups: set[Node] = set()
            for user in users:
                groups |= {self.routed.get(user, user)} if user in self.values else self.groups.get(user, set())
            if must or (len(groups) > 1 and self._is_worth_keeping(node)):
                if not is_tensor(node):
                    raise Underivable(f"{node.target} in {self.trace.path(node) or 'the layer'} gives several values")
                if not is_canonical(self.trace, node):
                    raise Underivable(
                        f"{node.target} in {self.trace.path(node) or 'the layer'} hands on a value that is not laid "
                        "out by tokens"
                    )
                self.values.add(node)
            self.groups[node] = {self.routed.get(node, node)} if node in self.values else groups

    def _must_be_value(self, node: Node, user: Node) -> bool:
        leaf = self.trace.leaf(user)
        if user in self.folded:
            return True
        if user in self.values:
            return (leaf is None and self.is_residual(user)) or (leaf is not None and leaf.kind != ATTENTION)
        if user not in self.inference.placed:
            return False
        return self.placed(user).where not in (FREE, self.placed(node).where) or self.placed(node).is_summand

    def _is_worth_keeping(self, node: Node) -> bool:
        """Returns whether a node that several operators need is computed once; a view is made again by each."""
        return not any(name in str(node.target) for name in VIEWS) and is_canonical(self.trace, node)

    def logits_of(self, chosen: Node) -> Node | None:
        """Returns the glue that is what a router says, from which it chooses experts; None where the trace has none."""
        behind = self._behind(chosen) - self.values
        candidates = [node for node in self.trace.logits if node in behind and is_canonical(self.trace, node)]
        if (
            len(candidates) != 1
            or self.placed(candidates[0]).where != SHARD
            or self.placed(candidates[0]).dim is not None
        ):
            return None
        return candidates[0]

    # -- glue ------------------------------------------------------------------------------------------------------

    def inputs_of(self, outputs: Sequence[Node]) -> list[Node]:
        """Returns the values that the glue before some nodes reads."""
        inputs: list[Node] = []
        seen: set[Node] = set()

        def visit(node: Node) -> None:
            if node in seen or not has_value(node):
                return
            seen.add(node)
            if node in self.values and node not in outputs:
                inputs.append(node)
                return
            for value in node.all_input_nodes:
                visit(value)

        for node in outputs:
            visit(node)
        return inputs

    def glue(self, outputs: Sequence[Node]) -> tuple[Glue, list[Node]]:
        """Returns the glue that computes some nodes, and the values that it reads."""
        key = tuple(outputs)
        if key not in self._glue:
            inputs = self.inputs_of(outputs)
            self._glue[key] = build_segment_function(self.inference, self.share, inputs, outputs, self.flat), inputs
        return self._glue[key]
