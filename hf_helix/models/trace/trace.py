"""Rewrites of a trace that leave what it computes, and make it plain how values can be cut.

In:   the graph of `torch.export`, as the code of a model wrote it.
Out:  the same graph without slices and views that show everything, with linears before the views of what they read, and
      with tensors that are filled piece by piece as concatenations. What only changes how a value lies in memory is
      gone.
Must hold: every rewrite is exact.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.fx import Graph, Node

from hf_helix.models.trace.leaves import DTYPE, OPAQUE_OPS, OPS, OpaqueCall, Leaves, MaskOf
from hf_helix.models.trace.rope import ropes_as_operators

aten = torch.ops.aten
PARTS = ("slice", "select", "view", "reshape", "transpose", "permute", "unsqueeze", "split", "unbind", "expand")
"""Operations that may show the memory of their argument."""

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def rewrite(graph: Graph) -> None:
    """Rewrites a graph in place."""
    for node in list(graph.nodes):
        takes_all = node.target is aten.slice.Tensor and node.args[2:] == (0, sys.maxsize)
        if takes_all or node.target is aten.contiguous.default or _shows_the_same(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        _write_elsewhere(graph, node)
    for node in list(graph.nodes):
        if node.target is OPS.linear.default:
            _put_before_view(graph, node)
        elif node.target is aten.new_empty.default:
            _concatenate(graph, node)


def partial_writes(graph: Graph) -> Iterator[Node]:
    """Yields operations that write over a part of a tensor which is read later: a rewritten graph has lost them."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not _name_in_place(node):
            continue
        written: Any = node.args[0]
        shown = [written]
        while any(f"aten.{part}." in str(written.target) for part in PARTS):
            written = written.args[0]
            shown.append(written)
        readers = (user for value in shown for user in value.users if user not in (node, *shown))
        if written.op == "call_function" and any(order[reader] > order[node] for reader in readers):
            yield node


def _shows_the_same(node: Node) -> bool:
    """Returns whether a view has the shape of what it shows."""
    if node.target not in VIEWS:
        return False
    source: Any = node.args[0]
    before, after = ([getattr(size, "node", size) for size in value.meta["val"].shape] for value in (source, node))
    return [getattr(size, "expr", size) for size in before] == [getattr(size, "expr", size) for size in after]


def _name_in_place(node: Node) -> str:
    """Returns the name of an operation that writes over its first argument, such as `add_`; else an empty text."""
    name = str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))
    return name if name.endswith("_") and not name.startswith("_") else ""


def _write_elsewhere(graph: Graph, node: Node) -> None:
    """Replaces an operation that writes over its first argument by the one that gives a new tensor."""
    target: Any = node.target
    name = _name_in_place(node)
    plain = getattr(aten, name[:-1], None) if name else None
    if plain is None or node.target is aten.copy_.default:
        return
    if any(f"aten.{part}." in str(getattr(node.args[0], "target", "")) for part in PARTS):
        return  # the tensor that it shows a part of is written, too
    overload = target.name().partition(".")[2] or "default"
    if overload not in plain.overloads():
        return
    with graph.inserting_after(node):
        made = graph.call_function(getattr(plain, overload), node.args, dict(node.kwargs))
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    written: Any = node.args[0]
    order = {other: place for place, other in enumerate(graph.nodes)}
    for user in list(written.users):
        if order[user] > order[made]:
            user.replace_input_with(written, made)
    graph.erase_node(node)


def _put_before_view(graph: Graph, linear: Node) -> None:
    """Lets a linear read what a view shows in another shape, if its last dimension is the same; a view follows it."""
    view: Any = linear.args[0]
    if view.target not in VIEWS:
        return
    source = view.args[0]
    before, after = source.meta["val"].shape, view.meta["val"].shape
    if before[-1] != after[-1] or len(before) > 3:
        return
    features = linear.args[2]
    with graph.inserting_after(linear):
        shown = graph.call_function(aten.reshape.default, (linear, [*view.args[1][:-1], features]))
    shown.meta.update(linear.meta)
    linear.replace_all_uses_with(shown, delete_user_cb=lambda user: user is not shown)
    linear.args = (source, *linear.args[1:])
    linear.meta = {**linear.meta, "val": source.meta["val"].new_empty((*before[:-1], features))}
    if not view.users:
        graph.erase_node(view)


def _concatenate(graph: Graph, whole: Node) -> None:
    """Replaces a new tensor, whose parts along one dimension are copied from other tensors, by their concatenation."""
    writes: list[tuple[int, Node, Node, Node]] = []
    others: list[Node] = []
    dims = set()
    for user in whole.users:
        copies = list(user.users)
        if user.target is aten.slice.Tensor and len(copies) == 1 and copies[0].target is aten.copy_.default:
            dims.add(user.args[1])
            writes.append((int(user.args[2]), user, copies[0], copies[0].args[1]))  # type: ignore[arg-type]
        else:
            others.append(user)
    if len(dims) != 1 or any(copy.users for _, _, copy, _ in writes):
        return
    writes.sort(key=lambda write: write[0])
    dim: Any = dims.pop()
    lengths = [source.meta["val"].shape[dim] for *_, source in writes]
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    if [start for start, *_ in writes] != starts or sum(lengths) != whole.meta["val"].shape[dim]:
        return
    last = max((copy for _, _, copy, _ in writes), key=list(graph.nodes).index)
    with graph.inserting_after(last):
        joined = graph.call_function(aten.cat.default, ([source for *_, source in writes], dim))
    joined.meta.update(whole.meta)
    for user in others:
        user.replace_input_with(whole, joined)
    for _, part, copy, _ in writes:
        graph.erase_node(copy)
        graph.erase_node(part)
    graph.erase_node(whole)


# -- trace ---------------------------------------------------------------------------------------------------------
# What a module computes, as a graph: `torch.export` of a skeleton whose submodules are leaves.
#
# In:   a module, and examples of what it is called with.
# Out:  a `ModuleTrace`: the nodes in order, what they stand for, and numbers in the place of symbolic sizes.
# Must hold: batch and sequence stay open; head counts may be written down, and are rewritten where values are cut.


PLACES = "places"
"""The side input with the positions of tokens, as the embedding and the head are given them."""

BATCH, SEQUENCE = 1_000_003, 2_000_003
"""What the sizes of a trace are where a computation needs numbers: primes, so that no size of a model equals them."""

EXAMPLE_BATCH, EXAMPLE_LENGTH = 2, 6
"""The sizes of the examples that a module is traced with."""


class Underivable(ValueError):
    """A model that a family cannot be derived for. Its text says why."""


@dataclass(frozen=True)
class Given:
    """A tensor that a layer is called with besides what the layer before it gives, such as a rope.

    Attributes:
        name: the name of the side input of a micro-batch.
        shape: its shape at `EXAMPLE_BATCH` and `EXAMPLE_LENGTH`.
        dtype: its type.
        open: its dimensions that change with batch or sequence.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    open: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ModuleTrace:
    """The graph of a module.

    Attributes:
        nodes: the calls in order.
        hidden: the node of the value that enters.
        result: the node of the value that leaves.
        logits: the nodes of what routers say of every token and expert.
        leaves: what the calls of custom operators stand for.
        attributes: the nodes of parameters and buffers, with their names in the module.
        constants: the nodes of tensors that the code makes, with their values.
        given: the nodes of further inputs, with their names.
        batch: the symbol of the number of sequences.
        sequence: the symbol of their length.
    """

    nodes: Sequence[Node]
    hidden: Node
    result: Node
    logits: tuple[Node, ...]
    leaves: Sequence[OpaqueCall]
    attributes: dict[Node, str]
    constants: dict[Node, torch.Tensor]
    given: dict[Node, str]
    batch: Any
    sequence: Any

    def leaf(self, node: Node) -> OpaqueCall | None:
        """Returns what a call stands for; None for any other operation."""
        place = OPAQUE_OPS.get(node.target)
        return None if place is None else self.leaves[args_of(node)[place]]

    def path_of(self, node: Node) -> str:
        """Returns the path of the module that a leaf stands for."""
        leaf = self.leaf(node)
        assert leaf is not None
        return leaf.path

    def number(self, size: Any) -> int:
        """Returns a size as a number, see `BATCH`."""
        if isinstance(size, int):
            return size
        expression = size.node.expr if hasattr(size, "node") else size
        others = expression.free_symbols - {self.batch, self.sequence}
        if not others:
            return int(expression.subs({self.batch: BATCH, self.sequence: SEQUENCE}))
        # The size of another input, which the code does not compare with that of the tokens.
        known = {EXAMPLE_BATCH: BATCH, EXAMPLE_LENGTH: SEQUENCE}
        hint = getattr(size.node, "hint", None)
        if expression not in others or hint not in known:
            raise Underivable(f"its code computes with sizes in a way that is not followed: {expression}")
        return known[hint]

    def shape(self, node: Node) -> tuple[int, ...]:
        """Returns the shape of a value, in numbers."""
        return tuple(self.number(size) for size in node.meta["val"].shape)

    def path(self, node: Node) -> str:
        """Returns the path of the module whose code makes a call."""
        return _path_of(node)


def _path_of(node: Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("module").removeprefix(".")


def args_of(node: Node) -> Any:
    """Returns the arguments of a call, which torch types as all that a graph can hold."""
    return node.args


def is_tensor(node: Any) -> bool:
    """Returns whether a node gives a tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def has_value(node: Node) -> bool:
    """Returns whether a node gives a tensor, or several."""
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


class _Called(nn.Module):
    """A skeleton, called with the value that enters and the tensors that it is given."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, x: torch.Tensor, *given: torch.Tensor) -> Any:
        return self.call(self.module, x, given)


def trace(
    skeleton: nn.Module, leaves: Leaves, hidden: torch.Tensor, given: Sequence[Given], call: Callable[..., Any]
) -> ModuleTrace:
    """Traces a skeleton.

    Args:
        skeleton: the module, whose submodules are leaves already.
        leaves: these leaves.
        hidden: an example of the value that enters [batch, sequence, ...].
        given: further inputs.
        call: calls the skeleton: `call(skeleton, x, given)` returns the tensor that leaves, and what routers say.

    Raises:
        Underivable: the code cannot be traced.
    """
    auto = Dim.AUTO
    examples = [
        torch.empty(g.shape, dtype=DTYPE if g.dtype.is_floating_point else g.dtype, device="meta") for g in given
    ]
    open_dims: tuple[Any, ...] = ({0: auto, 1: auto},)
    if given:
        open_dims += (tuple(dict.fromkeys(g.open, auto) for g in given),)
    try:
        with torch.no_grad(), leaves.capturing(), ropes_as_operators(skeleton):
            program = torch.export.export(
                _Called(skeleton, call), (hidden, *examples), strict=False, dynamic_shapes=open_dims
            )
    except Underivable:
        raise
    except Exception as error:
        raise Underivable(f"torch.export cannot trace it: {reason_of(error)}") from error
    return _trace_of(program, leaves, given)


def reason_of(error: Exception) -> str:
    """Returns what an error of a model's code says about the model."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    what = f"{type(error).__name__}: {lines[0]}"
    if MaskOf.__name__ not in what:
        return what
    return "its code computes with the attention mask itself, and does not hand it to Transformers' attention interface"


def _trace_of(program: Any, leaves: Leaves, given: Sequence[Given]) -> ModuleTrace:
    rewrite(program.graph)
    nodes = list(program.graph.nodes)
    for node in partial_writes(program.graph):
        where = _path_of(node) or "the layer"
        raise Underivable(f"{node.target} in {where} writes over a part of a tensor, which is not built")
    signature = program.graph_signature
    owned = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    attributes, constants, inputs = {}, {}, []
    for node in nodes:
        if node.op != "placeholder":
            continue
        if node.name in owned:
            attributes[node] = owned[node.name].removeprefix("module.")
        elif node.name in signature.inputs_to_lifted_tensor_constants:
            constants[node] = program.constants[signature.inputs_to_lifted_tensor_constants[node.name]]
        else:
            inputs.append(node)
    hidden, *rest = inputs
    batch, sequence = (size.node.expr if hasattr(size, "node") else size for size in hidden.meta["val"].shape[:2])
    if isinstance(batch, int) or isinstance(sequence, int):
        raise Underivable("its code is only right for one batch size or one length")
    result, *logits = next(node for node in nodes if node.op == "output").args[0]
    return ModuleTrace(
        nodes=[node for node in nodes if node.op == "call_function"],
        hidden=hidden,
        result=result,
        logits=tuple(logits),
        leaves=leaves.leaves,
        attributes=attributes,
        constants=constants,
        given={node: g.name for node, g in zip(rest, given, strict=True)},
        batch=batch,
        sequence=sequence,
    )
