"""What a module computes, as a graph: `torch.export` of a skeleton whose submodules are leaves.

In:   a module, and examples of what it is called with.
Out:  a `ModuleTrace`: the nodes in order, what they stand for, and numbers in the place of symbolic sizes.
Must hold: batch and sequence stay open; head counts may be written down, and are rewritten where values are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.fx import Node

from hf_helix.models.trace.leaves import DTYPE, LEAF_OPS, Leaf, Leaves, MaskOf
from hf_helix.models.trace.rewrite import partial_writes, rewrite
from hf_helix.models.trace.rope import ropes_as_operators

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
    leaves: Sequence[Leaf]
    attributes: dict[Node, str]
    constants: dict[Node, torch.Tensor]
    given: dict[Node, str]
    batch: Any
    sequence: Any

    def leaf(self, node: Node) -> Leaf | None:
        """Returns what a call stands for; None for any other operation."""
        place = LEAF_OPS.get(node.target)
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
