"""From a segment plan to a unit: every opaque call and every segment becomes an operator.

In:   the segment plan of a unit, one of the unit's modules, and the builder of the unit.
Out:  the declared operators, and the name of the unit's result.
Must hold: partial residual sums are added before the reduce-scatter.
"""

from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from hf_helix.models.graph.attention import Attention, WithGroups, declare_attention
from hf_helix.models.graph.context import ATTENTION, LIGHT
from hf_helix.models.lowering.blocks import BlockCalls
from hf_helix.models.lowering.experts import Experts
from hf_helix.models.lowering.mixers import Mixers
from hf_helix.models.lowering.segment_plan import DropoutIn
from hf_helix.models.placement.rules import SAME
from hf_helix.models.placement.value_placement import COLUMN, FULL, PARTIAL, ROW, SHARD, dim_of, name_of
from hf_helix.models.stock.stock_modules import is_silu
from hf_helix.models.trace.opaque_calls import MASK, CallKind, MaskOf, OpaqueCall, OtherMask
from hf_helix.models.trace.trace import Underivable, args_of
from hf_helix.operators.explicit import GatedSilu


class Lowering(Experts, Mixers, BlockCalls):
    """Declares the operators of one module. Opaque calls are declared by the methods with the names of their kinds."""

    def run(self, where: str = SHARD) -> str:
        """Declares all operators, and returns the name of the module's result in the form `where`."""
        plan = self.plan
        for node in self.trace.nodes:
            is_mine = node in plan.values and node not in plan.start and node in plan.needed
            if is_mine and not self._is_there(node):
                with self.trace.following(node):
                    self._declare(node)
        return self.value(plan.target, where)

    def _declare(self, node: Node) -> None:
        if self.plan.is_operator(node):
            opaque = self.trace.call_of(node)
            getattr(self, f"_{opaque.kind.value}")(node, opaque)
        elif self.plan.is_residual(node):
            self._residual(node)
        else:
            self._segment(node)

    def _linear(self, node: Node, opaque: OpaqueCall) -> None:
        plan, source = self.plan, args_of(node)[0]
        style = plan.placements.decisions.styles[node]
        if style == ROW:
            linear = self.module.get_submodule(opaque.path)
            name = self.b.row_parallel(self._name(node), linear, self.value(source, FULL))
            self._set(node, name)
            return
        fused = [user for user in source.users if user in plan.needed and self._fuses(user, node)]
        linears = {self.trace.path_of(user): user for user in fused}
        modules = {path.rpartition(".")[2]: self.module.get_submodule(path) for path in linears}
        keys = list(modules)
        parent = opaque.path.rpartition(".")[0]
        name = self._free(f"{parent}.{'+'.join(keys)}" if parent else "+".join(keys))
        if style == COLUMN:
            blocks = plan.placement(node).blocks
            blocks = blocks if len(blocks) > 1 else ()
            outputs = self.b.column_parallel(name, modules, self.value(source, FULL), blocks=blocks)
        else:
            where = plan.placement(node).where
            outputs = self.b.replicated_linear(name, modules, self.value(source, where))
        for user, output in zip(linears.values(), outputs, strict=True):
            self._set(user, output)

    def _fuses(self, other: Node, node: Node) -> bool:
        """Returns whether two linears run as an operator together: same input, parent module and parallel style."""
        styles, placement = self.plan.placements.decisions.styles, self.plan.placement
        if other is node:
            return True
        if self.trace.kind_of(other) is not CallKind.LINEAR or args_of(other)[0] is not args_of(node)[0]:
            return False
        path, mine = self.trace.path_of(other), self.trace.path_of(node)
        if path == mine:  # a second call
            return False
        if len(placement(other).blocks) > 1 or len(placement(node).blocks) > 1:
            return False
        return styles[other] == styles[node] and path.rpartition(".")[0] == mine.rpartition(".")[0]

    def _norm(self, node: Node, opaque: OpaqueCall) -> None:
        where = self.plan.placement(node).where
        readers = [user for user in node.users if user in self.plan.needed]
        lowers = all(self.trace.kind_of(reader) is CallKind.LINEAR for reader in readers)
        norm = self.module.get_submodule(opaque.path)
        self._set(node, self.b.norm(self._name(node), norm, self.value(args_of(node)[0], where), lowers))

    def _dropout(self, node: Node, opaque: OpaqueCall) -> None:
        where = self.plan.placement(node).where
        value = self.value(args_of(node)[0], where)
        module = self.module.get_submodule(opaque.path)
        dropout: Any = module if isinstance(module, nn.Dropout) else DropoutIn(module, opaque.details["p"])
        self._set(node, self.b.dropout(self._name(node), dropout, value))

    def _lookup(self, node: Node, opaque: OpaqueCall) -> None:
        table, given = self.module.get_submodule(opaque.path), args_of(node)[0]
        ids = given
        while ids.op == "call_function" and name_of(ids) in (*SAME, "view", "reshape"):
            ids = args_of(ids)[0]
        change = None
        if ids is not self.trace.hidden:  # such as padding in the places of images
            segment, _ = self.plan.segment([given], [self.trace.hidden])
            if segment.side or self.trace.shape(given) != self.trace.shape(self.trace.hidden):
                raise Underivable("its code changes the ids of tokens before it looks them up")
            change = segment.bind(self.module)
        self._set(node, self.b.lookup(self._name(node), table, plain=True, change=change))

    def _residual(self, node: Node) -> None:
        """Declares a sum: partial terms are added first, scattered, and added to the other terms."""
        plan, b = self.plan, self.b
        if plan.placement(node).where == PARTIAL:
            left, right = (self.value(value, PARTIAL) for value in args_of(node))
            self._set(node, b.add(self._name(node), left, right))
            return
        parts = self._terms(node)
        partial = [part for part in parts if plan.placement(part).where == PARTIAL]
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
        """Returns the terms of a sum. A sum with other readers is a single term."""
        terms: list[Node] = []
        for value in args_of(node):
            terms += self._terms(value) if value in self.plan.folded else [value]
        return terms

    def _segment(self, node: Node) -> None:
        """Declares a segment."""
        plan, b = self.plan, self.b
        if self._shows(node):
            return
        routed = {**plan.routed, **{weights: chosen for chosen, weights in plan.routed.items()}}
        if node in routed:
            self._router(*((routed[node], node) if node in plan.routed else (node, routed[node])))
            return
        segment, inputs = plan.segment([node])
        placement = plan.placement(node)
        names = [self.value(value, placement.where) for value in inputs]
        function, side = self._function(segment, [node], inputs, mixes=segment.mixes)
        explicit, dropping = None, [self.module.get_submodule(path) for path in segment.drops]
        if segment.mixes and b.cp.size > 1:
            raise self._not_shared(node)
        if segment.gate is not None:
            act = self.module.get_submodule(segment.gate)
            explicit = GatedSilu(lambda: is_silu(act))
        cost = ATTENTION if segment.mixes else LIGHT
        if node is plan.handed:
            self._set(node, b.indices(self._name(node), function, *names, side=side, **self._used_by(segment)))
            return
        name = b.autograd(
            self._name(node),
            function,
            *names,
            side=side,
            **self._used_by(segment),
            on_shard=True,
            explicit=explicit,
            draws=(lambda: any(module.training for module in dropping)) if dropping else None,
            relative_cost=cost,
            elementwise=segment.elementwise,
        )
        if placement.is_summand:
            name = b.sum_over_ranks(self._name(node, "sum"), name)
        if node in plan.placements.shares:
            share = plan.placements.shares[node]
            name = b.gather_features(self._name(node, "features"), name, dim_of(share))
        self._set(node, name)

    def _attention(self, node: Node, opaque: OpaqueCall) -> None:
        plan, b = self.plan, self.b
        q, k, v, more = args_of(node)[:4]
        named = dict(zip(opaque.details["tensors"], more, strict=True))
        made = [named.pop(MASK)] if MASK in named else []
        segment, inputs = plan.segment([q, k, v, *made])
        if b.cp.size > 1 and (segment.mixes or made):
            raise self._not_shared(node)
        if b.cp.size > 1:
            self._check_context(opaque, k, v)
        of_keys = set(plan.inputs_of([q, k]))
        alone = [value not in of_keys for value in inputs]
        names = [self.value(value, FULL) for value in inputs]
        bound = segment.bind(self.module)
        module = self.module.get_submodule(opaque.path) if opaque.path else self.module
        is_one = plan.placement(k).dim is None and plan.placement(q).dim is not None and b.tp.size > 1
        if is_one:
            module = WithGroups(module, sum(plan.share.of(plan.placement(q).blocks)))
        first = b.tp.rank * self.trace.shape(k)[1] // b.tp.size

        def heads(*values: Tensor, **side: Any) -> tuple[Tensor, Tensor, Tensor]:
            # Attention keeps the values for backward; as a slice, they would keep queries and keys alive with them.
            values = tuple([v.contiguous() if own else v for v, own in zip(values, alone, strict=True)])
            q, k, v, *masks = bound(*[value.transpose(0, 1) for value in values], **side)
            k, v = (value[:, first : first + 1] if is_one else value for value in (k, v))
            return (q, k, v, *masks)

        options, mask = dict(opaque.details["options"]), opaque.details["mask"]
        if isinstance(mask, OtherMask):
            raise Underivable(f"its layers attend by {mask.call}, which is not built")
        if mask is not None and not isinstance(mask, MaskOf):
            raise Underivable("its attention masks are made in the layer")
        dropout = options.pop("dropout", 0.0) or 0.0
        value_dim = self.trace.shape(v)[-1]
        tensors = {key: self.module.get_parameter(self.trace.attributes[value]) for key, value in named.items()}
        attention = Attention(
            module,
            heads,
            mask.sliding_window if mask is not None else None,
            eager=opaque.details["eager"],
            dropout=dropout,
            options=options,
            tensors=tensors,
            has_mask=mask is not None,
            value_dim=value_dim if value_dim < self.trace.shape(k)[-1] else None,
        )
        used, name = self._used_by(segment), self._name(node)
        name = declare_attention(b, attention, *names, side=segment.side, **used, name=name)
        self._set_heads(node, name)

    def _not_shared(self, node: Node) -> Underivable:
        return Underivable(
            f"cp_size={self.b.cp.size}: the code of {self.trace.path(node) or 'the model'} mixes tokens, or counts or "
            "masks them, outside of Transformers' attention interface, which is not built over a shared sequence; use "
            "cp_size=1 with tp_size or pp_size"
        )

    def _check_context(self, opaque: OpaqueCall, k: Node, v: Node) -> None:
        """Refuses attention without an implementation for context parallelism."""
        problem = None
        if self.trace.shape(k)[-1] < self.trace.shape(v)[-1]:
            problem = "has values that are longer than its keys"
        elif opaque.details["mask"] is None or not getattr(self.module.get_submodule(opaque.path), "is_causal", True):
            problem = "takes no causal mask, or is not causal in batches without padding"
        if problem is not None:
            raise Underivable(
                f"cp_size={self.b.cp.size}: {opaque.path} {problem}, which is not built over a shared sequence; "
                "use cp_size=1 with tp_size or pp_size"
            )

    def _set_heads(self, node: Node, name: str) -> None:
        """Names the output of attention, whose heads lie side by side already."""
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
        local = sum(self.plan.share.of(self.plan.placement(node).blocks))

        def by_heads(value: Tensor) -> Tensor:
            return value.unflatten(-1, (local, size))

        self._set(node, self.b.autograd(self._name(node, "heads"), by_heads, name))

    def _layer(self, node: Node, opaque: OpaqueCall) -> None:
        raise Underivable("its layers do more than hand a value from one to the next")

    def _towers(self, node: Node, opaque: OpaqueCall) -> None:
        x = self.value(args_of(node)[0], SHARD)
        self._set(node, opaque.details["declare"](self.b, self._name(node), x))
