"""Segments of a trace as functions over this rank's share of the values.

In:   the nodes of a segment, between opaque calls, and the placements of their values.
Out:  a function over tensors, made once for all equal layers; parameters and submodules are bound layer by layer.
Must hold: sizes of batch and sequence come from the tensor arguments; lengths of cut dimensions are this rank's. A cast
to the dtype of the trace becomes a cast to the dtype of the first value.
"""

import functools
import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_helix.models.placement.rules import Placements
from hf_helix.models.placement.value_placement import FREE, ValuePlacement, argument, bounds_of_slice, edges_of, name_of
from hf_helix.models.stock.peft import AdaptedOwner, adapters_of_parameters
from hf_helix.models.stock.stock_modules import normed, rotate
from hf_helix.models.trace.opaque_calls import DTYPE, CallKind
from hf_helix.models.trace.trace import BATCH, SEQUENCE, ModuleTrace, Underivable, args_of, reached
from hf_helix.operators.torch_functions import is_tagged_elementwise
from hf_helix.planning.parameters import Cut, cut_bounds

META = torch.device("meta")
LEAST = torch.finfo(DTYPE).min

_OF_SIZES: dict[str, Callable[..., Any]] = {"Mul": operator.mul, "Add": operator.add, "Max": max, "Min": min}
"""What sizes are computed by, under the names of their expressions."""


@dataclass(frozen=True)
class Share:
    """A rank's position on the tensor-parallel axis."""

    size: int
    rank: int

    def of(self, blocks: Sequence[int]) -> list[int]:
        """Returns the lengths of this rank's parts of blocks."""
        bounds = (cut_bounds(block, self.size, self.rank) for block in blocks)
        return [last - first for first, last in bounds]


@dataclass(frozen=True)
class SegmentFunction:
    """A segment as a function.

    Attributes:
        function: called with owners of attributes, submodules, values, and side inputs by keyword.
        attributes: the parameters and buffers that the function reads, by name in the traced module.
        modules: the paths of the submodules that the function calls.
        side: the names of the side inputs.
        gate: the path of the submodule, if the function is `submodule(x) * y`; else None.
        mixes: whether the function mixes tokens.
        drops: the paths of the submodules that decide whether the function drops out values.
        elementwise: see `AutogradOperator`.
    """

    function: Callable[..., Any]
    attributes: tuple[str, ...]
    modules: tuple[str, ...]
    side: tuple[str, ...]
    gate: str | None = None
    mixes: bool = False
    drops: tuple[str, ...] = ()
    elementwise: bool = False

    def bind(self, module: nn.Module) -> Callable[..., Any]:
        """Returns the function for one layer."""
        owners = [_adapted(module, name) or _owner(module, name) for name in self.attributes]
        return functools.partial(self.function, *owners, *self.called(module))

    def adapters(self, module: nn.Module, name: str) -> list[Tensor]:
        """Returns the weights of all adapters of a parameter that the function reads."""
        adapted = _adapted(module, name)
        return [] if adapted is None else [p for a in adapted.adapters.all_adapters() for p in a.parameters]

    def parameters(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters that the function reads itself, by name."""
        attributes = [(name, getattr(_owner(module, name), name.rpartition(".")[2])) for name in self.attributes]
        return [(name, value) for name, value in attributes if isinstance(value, nn.Parameter)]

    def called(self, module: nn.Module) -> list[nn.Module]:
        """Returns the submodules that the function calls."""
        return [module.get_submodule(path) for path in self.modules]

    def read(self, module: nn.Module) -> list[nn.Module]:
        """Returns the submodules whose parameters the function reads; others only say whether values are dropped."""
        return [module.get_submodule(path) for path in self.modules if path not in self.drops]


class SegmentWriter:
    """Writes nodes of a trace into a new graph."""

    def __init__(self, placements: Placements, share: Share, flat: Container[Node] = ()) -> None:
        self.placements = placements
        self.flat = flat
        self.trace: ModuleTrace = placements.trace
        self.share = share
        self.graph = Graph()
        self.made: dict[Node, Any] = {}
        self.sizes: dict[Any, tuple[Node, int]] = {}
        self.first: Node | None = None
        self.entered: Node | None = None

    def write(self, inputs: Sequence[Node], outputs: Sequence[Node]) -> SegmentFunction:
        """Returns the function that computes nodes from others."""
        nodes = [node for node in self._needed(inputs, outputs) if node not in inputs]
        attributes = [node for node in nodes if node in self.trace.attributes]
        given = [node for node in nodes if node in self.trace.given]
        opaque_calls = [node for node in nodes if self.trace.kind_of(node) is not None]
        mixers = [node for node in opaque_calls if self.trace.kind_of(node) is CallKind.MIXER]
        modules = list(dict.fromkeys(self.trace.path_of(node) for node in opaque_calls if node not in mixers))
        names = [self.trace.attributes[node] for node in attributes]
        owners = {node: self.graph.placeholder(f"owner{i}") for i, node in enumerate(attributes)}
        called = {path: self.graph.placeholder(f"module{i}") for i, path in enumerate(modules)}
        for i, node in enumerate(inputs):
            self._enter(node, self.graph.placeholder(f"value{i}"))
        for node in given:
            self._enter(node, self.graph.placeholder(self.trace.given[node]))
            if node in self.placements.decisions.cut:
                self.made[node] = self._share_of(node)
        for node, name in zip(attributes, names, strict=True):
            self.made[node] = self.graph.call_function(getattr, (owners[node], name.rpartition(".")[2]))
            if node in self.trace.buffers and node in self.placements.decisions.cut:
                self.made[node] = self._share_of(node)
            if self.first is None and node.meta["val"].is_floating_point():
                self.first = self.made[node]
        for node in nodes:
            with self.trace.following(node):
                self._write(node, called)
        results = [self._leave(node) for node in outputs]
        self.graph.output(results[0] if len(results) == 1 else tuple(results))
        module = GraphModule(nn.Module(), self.graph)
        gate = None
        if len(modules) == 1 and len(nodes) == 2 and len(inputs) == 2:
            product = outputs[0]
            if product.target is torch.ops.aten.mul.Tensor and args_of(product) == (opaque_calls[0], inputs[1]):
                gate = modules[0] if args_of(opaque_calls[0])[0] is inputs[0] else None
        side = tuple(self.trace.given[node] for node in given)
        mixes = any(node in self.placements.mixing for node in nodes)
        dropouts = [node for node in opaque_calls if self.trace.kind_of(node) is CallKind.DROPOUT]
        drops = tuple(map(self.trace.path_of, dropouts))
        elementwise = len(inputs) == 1 and all(
            node.op == "call_function" and is_tagged_elementwise(name_of(node)) for node in nodes
        )
        return SegmentFunction(module.forward, tuple(names), tuple(modules), side, gate, mixes, drops, elementwise)

    def _write(self, node: Node, modules: Mapping[str, Node]) -> None:
        if node in self.trace.constants:
            self.made[node] = self._constant(self.trace.constants[node])
        elif self.trace.kind_of(node) is not None:
            self.made[node] = self._call(node, modules)
        elif node not in self.made:
            self.made[node] = self._copy(node)

    def _call(self, node: Node, modules: Mapping[str, Node]) -> Node:
        """Writes an opaque call, of one of the submodules by their paths or of a function."""
        kind, args = self.trace.kind_of(node), args_of(node)
        if kind is CallKind.MIXER:
            function = self.trace.call_of(node).details["call"].function()
            return self.graph.call_function(function, tuple(self._value(value) for value in args[0]))
        if kind is CallKind.BLOCK:
            run = self.trace.call_of(node).details["call"].run
            tensors = (self._value(value) for value in args[0])
            return self.graph.call_function(run, (modules[self.trace.path_of(node)], *tensors))
        module, x = modules[self.trace.path_of(node)], self._value(args[0])
        if kind is CallKind.GATED_NORM:
            return self.graph.call_function(_gated, (module, x, self._value(args[1])))
        if kind is CallKind.DROPOUT:
            return self.graph.call_function(_drop, (module, x, self.trace.call_of(node).details["p"]))
        return self.graph.call_function(normed, (module, x))

    def _share_of(self, node: Node) -> Node:
        """Writes this rank's share of a buffer or an input, which every rank has in full."""
        dim, blocks = self.placements.decisions.cut[node]
        if blocks[0] % BATCH == 0:  # rows and their heads, cut within every row
            rows = self.graph.call_function(
                torch.ops.aten.unflatten.int, (self.made[node], dim, (-1, blocks[0] // BATCH))
            )
            first, last = cut_bounds(blocks[0] // BATCH, self.share.size, self.share.rank)
            part = self.graph.call_function(torch.ops.aten.slice.Tensor, (rows, dim + 1, first, last))
            return self.graph.call_function(torch.ops.aten.flatten.using_ints, (part, dim, dim + 1))
        bounds = Cut(dim=dim, blocks=blocks).bounds(self.share.size, self.share.rank)
        slices = [self.graph.call_function(torch.ops.aten.slice.Tensor, (self.made[node], dim, *b)) for b in bounds]
        return self.graph.call_function(torch.ops.aten.cat.default, (slices, dim))

    def _needed(self, inputs: Sequence[Node], outputs: Sequence[Node]) -> list[Node]:
        """Returns the nodes that the outputs need, in the order of the trace."""
        known = set(inputs)
        needed = reached(
            outputs, lambda node: () if node in known else [v for v in node.all_input_nodes if not _is_size(v)]
        )
        order = [*inputs, *self.trace.attributes, *self.trace.constants, *self.trace.given, *self.trace.nodes]
        return [node for node in dict.fromkeys(order) if node in needed or node in known]

    def _enter(self, node: Node, here: Node) -> None:
        self.made[node] = here
        self.entered = self.entered or here
        if self.first is None and node.meta["val"].is_floating_point():
            self.first = here
        if self._is_flattened(node):
            for dim, symbol in enumerate((self.trace.batch, self.trace.sequence)):
                self.sizes.setdefault(symbol, (here, dim))
            self.made[node] = self.graph.call_function(torch.ops.aten.flatten.using_ints, (here, 0, 1))
            return
        for dim, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int):
                self.sizes.setdefault(size.node.expr, (here, dim))

    def _leave(self, node: Node) -> Node:
        made: Node = self.made[node]
        of_rope = any(value.op == "call_function" and name_of(value) == "rope" for value in node.all_input_nodes)
        if not of_rope and any(view in str(node.target) for view in ("getitem", "slice", "split")):
            # A slice would keep a larger tensor alive; a rope keeps queries and keys alive anyway.
            made = self.graph.call_function(torch.ops.aten.contiguous.default, (made,))
        if not self._is_flattened(node):
            return made
        sizes = [self._size(symbol) for symbol in (self.trace.batch, self.trace.sequence)]
        return self.graph.call_function(torch.ops.aten.unflatten.int, (made, 0, sizes))

    def _is_flattened(self, node: Node) -> bool:
        """Returns whether tokens lie in one dimension in the code of the model, and in two between operators."""
        return self.trace.shape(node)[:1] == (BATCH * SEQUENCE,) and node not in self.flat

    def _constant(self, value: Tensor) -> Any:
        """Returns a constant of the code: a single number."""
        if value.numel() != 1 or value.is_meta:
            raise Underivable("its code makes a tensor of constants")
        return value.item()

    def _value(self, value: Any) -> Any:
        """Returns an argument of the trace as an argument of the new graph."""
        if isinstance(value, Node):
            return self._size(value.meta["val"]) if _is_size(value) else self.made[value]
        if isinstance(value, (list, tuple)):
            return type(value)(self._value(part) for part in value)
        if isinstance(value, slice):
            return slice(*(self._value(part) for part in (value.start, value.stop, value.step)))
        return value

    def _size(self, size: Any) -> Any:
        """Returns a size as a number, or as a computation on the sizes of the inputs."""
        if isinstance(size, int):
            return size
        expression = size.node.expr if hasattr(size, "node") else size
        if expression.is_Integer:
            return int(expression)
        if expression in self.sizes:
            here, dim = self.sizes[expression]
            return self.graph.call_function(torch.ops.aten.sym_size.int, (here, dim))
        if type(expression).__name__ in _OF_SIZES:
            parts, compute = [self._size(part) for part in expression.args], _OF_SIZES[type(expression).__name__]
            return functools.reduce(lambda total, part: self.graph.call_function(compute, (total, part)), parts)
        raise Underivable(f"its code computes with sizes in a way that is not followed: {expression}")

    def _copy(self, node: Node) -> Any:
        """Writes one operation, with the lengths of this rank's share."""
        target: Any = node.target
        args = list(args_of(node))
        kwargs = {name: self._type(self._value(value)) for name, value in node.kwargs.items()}
        name = name_of(node)
        known = self.placements.shares.get(node) or self.placements.values.get(node)
        placement = known or ValuePlacement(FREE)
        if name in ("view", "reshape", "_unsafe_view"):
            target = torch.ops.aten.reshape.default
            args[1] = self._lengths(args[1], placement)
        elif name == "view_as":
            target = torch.ops.aten.reshape_as.default
        elif name == "rope":
            # Only tensors of a micro-batch surely need no gradient, and `rotate` gives cosines and sines none.
            target = rotate if all(value in self.trace.given for value in args[2:]) else apply_rotary_pos_emb
        elif name == "expand":
            args[1] = self._lengths(args[1], placement)
        elif name == "unflatten":
            args[2] = self._lengths(args[2], placement, args[1] % len(self.trace.shape(args[0])))
        elif name == "slice" and self._cuts(node):
            first, last = self._local_bounds(node)
            args = [args[0], args[1], first, last]
        elif name in ("split", "split_with_sizes", "chunk") and self._cuts(node):
            target = torch.ops.aten.split_with_sizes.default
            dim = argument(node, "dim")
            whole = [self.trace.number(value.shape[dim]) for value in node.meta["val"]]
            args = [args[0], self._local_lengths(node, whole), dim]
        args = [self._type(self._value(value)) for value in args]
        made = self.graph.call_function(target, tuple(args), kwargs)
        if placement.is_summand:
            (length,) = self._of(args_of(node)[0]).blocks
            return self.graph.call_function(torch.ops.aten.mul.Tensor, (made, self.share.of([length])[0] / length))
        return made

    def _type(self, value: Any) -> Any:
        """Returns a dtype, its least number, or a device of the trace from the first value with fractions; a
        device, of any value."""
        is_least = isinstance(value, float) and value == LEAST
        if value is not DTYPE and value != META and not is_least:
            return value
        source = self.first if value != META or self.first is not None else self.entered
        if source is None:
            raise Underivable("its code makes tensors of nothing")
        if is_least:
            return self.graph.call_function(_least, (source,))
        return self.graph.call_function(getattr, (source, "dtype" if value is DTYPE else "device"))

    def _of(self, value: Any) -> ValuePlacement:
        return self.placements.values[value]

    def _lengths(self, lengths: Any, placement: ValuePlacement, first: int = 0) -> list[Any]:
        """Returns a rank's lengths of dimensions, from dimension `first` on."""
        result = list(lengths)
        index = -1 if placement.dim is None else placement.dim - first
        if not 0 <= index < len(result) or result[index] == -1:
            return result
        here = sum(self.share.of(placement.blocks))
        if isinstance(result[index], int):
            result[index] = here
        else:  # rows and their heads in one dimension
            parts = [self._value(result[index]), here // math.gcd(here, placement.size)]
            times = self.graph.call_function(operator.mul, tuple(parts))
            result[index] = self.graph.call_function(operator.floordiv, (times, placement.size * parts[1] // here))
            self.made[result[index]] = result[index]
        return result

    def _cuts(self, node: Node) -> bool:
        """Returns whether an operation splits the cut dimension."""
        given, dims = self._of(args_of(node)[0]), len(self.trace.shape(args_of(node)[0]))
        return given.dim is not None and argument(node, "dim") % dims == given.dim

    def _local_bounds(self, node: Node) -> tuple[int, int]:
        given = self._of(args_of(node)[0])
        edges, local = edges_of(given.blocks), edges_of(self.share.of(given.blocks))
        first, last = bounds_of_slice(node, given.size)
        return local[edges.index(first)], local[edges.index(last)]

    def _local_lengths(self, node: Node, whole: Sequence[int]) -> list[int]:
        given, lengths, index = self._of(args_of(node)[0]), [], 0
        for length in whole:
            blocks: list[int] = []
            while sum(blocks) < length:
                blocks.append(given.blocks[index])
                index += 1
            lengths.append(sum(self.share.of(blocks)))
        return lengths


def _gated(module: nn.Module, value: Tensor, gate: Tensor) -> Any:
    return module(value, gate)


def _least(value: Tensor) -> float:
    return torch.finfo(value.dtype).min


def _drop(module: nn.Module, value: Tensor, p: float) -> Tensor:
    return nn.functional.dropout(value, p, module.training)


def _is_size(node: Node) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), (torch.SymInt, int))


def _adapted(module: nn.Module, name: str) -> AdaptedOwner | None:
    """Returns the owner of a parameter with adapters; None for other parameters."""
    path, _, own = name.rpartition(".")
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
    adapters = adapters_of_parameters(module.get_submodule(path)).get(own)
    return None if adapters is None else AdaptedOwner(_owner(module, name), adapters)


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])
