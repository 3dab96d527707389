"""From an outline to a unit: every leaf and every piece of glue becomes an operator.

In:   the outline of a unit, one of the modules that it stands for, and the builder of the unit.
Out:  the operators, declared, and the name of what leaves.
Must hold: residual sums of partial values are added up before they are scattered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.fx import Node

from hf_helix.models.graph.attention import Attention, declare_attention
from hf_helix.models.graph.builder import Builder
from hf_helix.models.lowering.experts import Experts
from hf_helix.models.lowering.outline import DropoutIn, SegmentPlan
from hf_helix.models.placement.placed import COLUMN, PARTIAL, ROW, SHARD, WHOLE
from hf_helix.models.stock_modules import is_silu
from hf_helix.models.trace.leaves import (
    ATTENTION,
    DROPOUT,
    EXPERTS,
    LAYER,
    LINEAR,
    LOOKUP,
    NORM,
    OpaqueCall,
    MaskOf,
)
from hf_helix.models.trace.trace import Underivable, args_of
from hf_helix.operators.explicit import GatedSilu


def declare(outline: SegmentPlan, b: Builder, module: Any, start: dict[Node, str], where: str = SHARD) -> str:
    """Declares the operators for one module, and returns the name of what leaves.

    Args:
        outline: the unit.
        b: the builder of the unit.
        module: the traced module, or one of the same kind.
        start: the names of the values that enter.
        where: the form in which it leaves: this rank's shard, or WHOLE, of which logits are a share.
    """
    lowering = _Lowering(outline, b, module, start)
    lowering.run()
    return lowering.value(outline.target, where)


def declare_layer(
    outline: SegmentPlan, b: Builder, layer: Any, start: dict[Node, str], choices: int | None
) -> tuple[str, list[str]]:
    """Declares the operators of a layer.

    Args:
        outline: the unit.
        b: the builder of the unit.
        layer: the layer.
        start: the names of the values that enter.
        choices: see `RouterRecord`.

    Returns:
        The name of what leaves, and where the loss is balanced those of the sums that its routers bring.
    """
    lowering = _Lowering(outline, b, layer, start, choices)
    lowering.run()
    return lowering.value(outline.target, SHARD), lowering.parts


class _Lowering(Experts):
    """Declares the operators of one module."""

    def run(self) -> None:
        outline = self.outline
        for node in self.trace.nodes:
            is_mine = node in outline.values and node not in outline.start and node in outline.needed
            if is_mine and not self._is_there(node):
                self._declare(node)

    def _declare(self, node: Node) -> None:
        leaf = self.trace.leaf(node)
        if leaf is not None and self.outline.is_operator(node):
            self._OF_LEAVES[leaf.kind](self, node, leaf)
        elif self.outline.is_residual(node):
            self._residual(node)
        else:
            self._segment(node)

    def _linear(self, node: Node, leaf: OpaqueCall) -> None:
        outline, source = self.outline, args_of(node)[0]
        way = outline.inference.decisions.ways[node]
        if way == ROW:
            linear = self.module.get_submodule(leaf.path)
            name = self.b.row_parallel(self._name(node), linear, self.value(source, WHOLE))
            self._set(node, name)
            return
        alike = [user for user in source.users if user in outline.needed and self._is_beside(user, node)]
        linears = {self.trace.path_of(user): user for user in alike}
        modules = {path.rpartition(".")[2]: self.module.get_submodule(path) for path in linears}
        keys = list(modules)
        parent = leaf.path.rpartition(".")[0]
        name = self._free(f"{parent}.{'+'.join(keys)}" if parent else "+".join(keys))
        if way == COLUMN:
            blocks = outline.placed(node).blocks
            blocks = blocks if len(blocks) > 1 else ()
            outputs = self.b.column_parallel(name, modules, self.value(source, WHOLE), blocks=blocks)
        else:
            where = outline.placed(node).where
            outputs = self.b.replicated_linear(name, modules, self.value(source, where))
        for user, output in zip(linears.values(), outputs, strict=True):
            self._set(user, output)

    def _is_beside(self, other: Node, node: Node) -> bool:
        """Returns whether two linears read the same value, are of the same module, and are cut in the same way."""
        ways, placed = self.outline.inference.decisions.ways, self.outline.placed
        if other is node:
            return True
        leaf, mine = self.trace.leaf(other), self.trace.leaf(node)
        if leaf is None or mine is None or leaf.kind != LINEAR or args_of(other)[0] is not args_of(node)[0]:
            return False
        if len(placed(other).blocks) > 1 or len(placed(node).blocks) > 1:
            return False
        return ways[other] == ways[node] and leaf.path.rpartition(".")[0] == mine.path.rpartition(".")[0]

    def _norm(self, node: Node, leaf: OpaqueCall) -> None:
        where = self.outline.placed(node).where
        readers = [self.trace.leaf(user) for user in node.users if user in self.outline.needed]
        lowers = all(reader is not None and reader.kind == LINEAR for reader in readers)
        norm = self.module.get_submodule(leaf.path)
        self._set(node, self.b.norm(self._name(node), norm, self.value(args_of(node)[0], where), lowers))

    def _dropout(self, node: Node, leaf: OpaqueCall) -> None:
        where = self.outline.placed(node).where
        value = self.value(args_of(node)[0], where)
        module = self.module.get_submodule(leaf.path)
        dropout: Any = module if isinstance(module, nn.Dropout) else DropoutIn(module, leaf.details["p"])
        self._set(node, self.b.dropout(self._name(node), dropout, value))

    def _lookup(self, node: Node, leaf: OpaqueCall) -> None:
        table = self.module.get_submodule(leaf.path)
        self._set(node, self.b.lookup(self._name(node), table, plain=True))

    def _residual(self, node: Node) -> None:
        """Declares a sum: of what is partial first, which is then scattered, and added to what is not."""
        outline, b = self.outline, self.b
        if outline.placed(node).where == PARTIAL:
            left, right = (self.value(value, PARTIAL) for value in args_of(node))
            self._set(node, b.add(self._name(node), left, right))
            return
        parts = self._terms(node)
        partial = [part for part in parts if outline.placed(part).where == PARTIAL]
        names = [self.value(part, SHARD) for part in parts if part not in partial]
        if len(partial) > 1:
            total, *others = (self.value(part, PARTIAL) for part in partial)
            for value in others:
                total = b.add(self._name(node, "partial"), total, value)
            names.append(b.reduce_scatter(self._name(node, "scatter"), total))
        elif partial:
            names.append(self.value(partial[0], SHARD))
        total = names[0]
        for value in names[1:]:
            total = b.add(self._name(node), total, value)
        self._set(node, total)

    def _terms(self, node: Node) -> list[Node]:
        """Returns what a sum is made of. A sum that others read, too, is one term."""
        terms: list[Node] = []
        for value in args_of(node):
            terms += self._terms(value) if value in self.outline.folded else [value]
        return terms

    def _segment(self, node: Node) -> None:
        """Declares a piece of glue."""
        outline, b = self.outline, self.b
        if self._shows(node):
            return
        routed = {**outline.routed, **{weights: chosen for chosen, weights in outline.routed.items()}}
        if node in routed:
            self._router(*((routed[node], node) if node in outline.routed else (node, routed[node])))
            return
        glue, inputs = outline.glue([node])
        placed = outline.placed(node)
        names = [self.value(value, placed.where) for value in inputs]
        function, side = self._function(glue, [node], inputs)
        explicit = None
        if glue.gate is not None:
            act = self.module.get_submodule(glue.gate)
            explicit = GatedSilu(lambda: is_silu(act))
        name = b.segment(
            self._name(node),
            function,
            *names,
            side=side,
            **self._used_by(glue),
            on_shard=True,
            explicit=explicit,
        )
        if placed.is_summand:
            name = b.sum_over_ranks(self._name(node, "sum"), name)
        self._set(node, name)

    def _attention(self, node: Node, leaf: OpaqueCall) -> None:
        outline, b = self.outline, self.b
        q, k, v, more = args_of(node)[:4]
        if b.cp.size > 1:
            self._check_context(leaf, k, v)
        glue, inputs = outline.glue([q, k, v])
        of_keys = set(outline.inputs_of([q, k]))
        alone = [value not in of_keys for value in inputs]
        names = [self.value(value, WHOLE) for value in inputs]
        bound = glue.bind(self.module)

        def heads(*values: Tensor, **side: Any) -> tuple[Tensor, Tensor, Tensor]:
            # Attention keeps the values for backward; as a slice, they would keep queries and keys alive with them.
            values = tuple([v.contiguous() if own else v for v, own in zip(values, alone, strict=True)])
            rotated: tuple[Tensor, Tensor, Tensor] = bound(*[value.transpose(0, 1) for value in values], **side)
            return rotated

        options, mask = dict(leaf.details["options"]), leaf.details["mask"]
        if mask is not None and not isinstance(mask, MaskOf):
            raise Underivable("its attention masks are made in the layer")
        dropout = options.pop("dropout", 0.0) or 0.0
        named, value_dim = zip(leaf.details["tensors"], more, strict=True), self.trace.shape(v)[-1]
        tensors = {key: self.module.get_parameter(self.trace.attributes[value]) for key, value in named}
        attention = Attention(
            self.module.get_submodule(leaf.path) if leaf.path else self.module,
            heads,
            mask.sliding_window if mask is not None else None,
            eager=leaf.details["eager"],
            dropout=dropout,
            options=options,
            tensors=tensors,
            has_mask=mask is not None,
            value_dim=value_dim if value_dim < self.trace.shape(k)[-1] else None,
        )
        name = declare_attention(
            b,
            attention,
            *names,
            side=glue.side,
            **self._used_by(glue),
            name=self._name(node),
        )
        self._set_heads(node, name)

    def _check_context(self, leaf: OpaqueCall, k: Node, v: Node) -> None:
        """Refuses attention that is not built over a sequence that ranks share."""
        problem = None
        if self.trace.shape(k)[-1] < self.trace.shape(v)[-1]:
            problem = "has values that are longer than its keys"
        elif leaf.details["mask"] is None:
            problem = "takes no causal mask"
        if problem is not None:
            raise Underivable(
                f"cp_size={self.b.cp.size}: {leaf.path} {problem}, which is not built over a shared sequence; "
                "use cp_size=1 with tp_size or pp_size"
            )

    def _set_heads(self, node: Node, name: str) -> None:
        """Gives a name to the output of attention, whose heads lie side by side already."""
        batch, length, heads, size = self.trace.shape(node)
        result, views = node, ("reshape", "view", "clone", "contiguous", "to")
        while len(result.users) == 1 and self.trace.shape(result) != (batch, length, heads * size):
            (user,) = result.users
            if not any(f"aten.{view}." in str(user.target) for view in views):
                break
            result = user
        if self.trace.shape(result) == (batch, length, heads * size):
            self._set(result, name)
            self._set(node, name)
            return
        local = sum(self.outline.share.of(self.outline.placed(node).blocks))

        def by_heads(value: Tensor) -> Tensor:
            return value.unflatten(-1, (local, size))

        self._set(node, self.b.segment(self._name(node, "heads"), by_heads, name))

    def _layer(self, node: Node, leaf: OpaqueCall) -> None:
        raise Underivable("its layers do more than hand a value from one to the next")

    _OF_LEAVES: ClassVar[dict[str, Callable[[_Lowering, Node, OpaqueCall], None]]] = {
        LINEAR: _linear,
        NORM: _norm,
        DROPOUT: _dropout,
        LOOKUP: _lookup,
        ATTENTION: _attention,
        EXPERTS: Experts._experts,
        LAYER: _layer,
    }
