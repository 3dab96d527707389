"""The trace of a module: the graph of `torch.export`, rewritten so that placement can follow every value.

In:   a skeleton with opaque calls, and examples of its arguments.
Out:  a `ModuleTrace`: the nodes in order, the descriptions of opaque calls, and numbers in place of symbolic sizes.
Must hold: batch and sequence stay symbolic; head counts may be constants, and are rewritten if values are cut. Every
rewrite is exact:

    slices and views without effect             -> removed
    contiguous                                  -> removed
    an in-place operation                       -> the operation with a new result
    linear(view(x)), norm(view(x), view(gate))  -> view(linear(x)), view(norm(x, gate))
    transpose(transpose(x))                     -> x
    new_empty, filled by copies into its slices -> cat
"""

import contextlib
import functools
import io
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.fx import Graph, Node

from hf_helix.models.stock.peft import adapted_names
from hf_helix.models.trace.mixers import mixers_as_operators
from hf_helix.models.trace.opaque_calls import (
    DTYPE,
    OPAQUE_OPS,
    OPS,
    CallKind,
    MaskOf,
    OpaqueCall,
    OpaqueCalls,
    OtherMask,
    PaddingMask,
)

aten = torch.ops.aten
PARTS = ("slice", "select", "view", "reshape", "transpose", "permute", "unsqueeze", "split", "unbind", "expand")
"""Operations whose result may share memory with their argument."""

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def rewrite(graph: Graph) -> None:
    """Rewrites a graph in place."""
    for node in list(graph.nodes):
        takes_all = node.target is aten.slice.Tensor and node.args[2:] == (0, sys.maxsize)
        if takes_all or node.target is aten.contiguous.default or _shows_the_same(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is aten.transpose.int and _is_undone_by(node.args[0], node):
            node.replace_all_uses_with(node.args[0].args[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        _write_elsewhere(graph, node)
    for node in list(graph.nodes):
        if node.target is OPS.linear.default:
            _put_before_view(graph, node)
        elif node.target is OPS.gated_norm.default:
            _put_before_views(graph, node)
        elif node.target is aten.new_empty.default:
            _concatenate(graph, node)


def partial_writes(graph: Graph) -> Iterator[Node]:
    """Yields in-place operations on a part of a tensor that is read later. A rewritten graph does not contain their
    effect."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not _name_in_place(node):
            continue
        written: Any = node.args[0]
        shown = [written]
        while _is_part(written):
            written = written.args[0]
            shown.append(written)
        readers = (user for value in shown for user in value.users if user not in (node, *shown))
        if written.op == "call_function" and any(order[reader] > order[node] for reader in readers):
            yield node


def _is_part(value: Any) -> bool:
    """Returns whether a value shares memory with the first argument of its operation."""
    return any(f"aten.{part}." in str(getattr(value, "target", "")) for part in PARTS)


def _shows_the_same(node: Node) -> bool:
    """Returns whether a view has the shape of its argument."""
    if node.target not in VIEWS:
        return False
    source: Any = node.args[0]
    before, after = ([getattr(size, "node", size) for size in value.meta["val"].shape] for value in (source, node))
    return [getattr(size, "expr", size) for size in before] == [getattr(size, "expr", size) for size in after]


def _is_undone_by(before: Any, node: Any) -> bool:
    """Returns whether two transpositions, one after the other, cancel."""
    dims = len(node.meta["val"].shape)
    both = [{dim % dims for dim in each.args[1:]} for each in (before, node) if each.target is aten.transpose.int]
    return len(both) == 2 and both[0] == both[1]


def _name_in_place(node: Node) -> str:
    """Returns the name of an in-place operation, such as `add_`; an empty text for any other operation."""
    name = str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))
    return name if name.endswith("_") and not name.startswith("_") else ""


def _write_elsewhere(graph: Graph, node: Node) -> None:
    """Replaces an in-place operation by the operation with a new result."""
    target: Any = node.target
    name = _name_in_place(node)
    plain = getattr(aten, name[:-1], None) if name else None
    if plain is None or node.target is aten.copy_.default:
        return
    if _is_part(node.args[0]):
        return  # the argument shares memory with another tensor, which is also written
    overload = target.name().partition(".")[2] or "default"
    if overload not in plain.overloads():
        return
    with graph.inserting_after(node):
        made = graph.call_function(getattr(plain, overload), node.args, dict(node.kwargs))
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    written: Any = node.args[0]
    order = {other: index for index, other in enumerate(graph.nodes)}
    for user in list(written.users):
        if order[user] > order[made]:
            user.replace_input_with(written, made)
    graph.erase_node(node)


def _put_before_view(graph: Graph, linear: Node) -> None:
    """Moves a view from before a linear to after the linear, if the view keeps the last dimension."""
    view: Any = linear.args[0]
    if view.target not in VIEWS:
        return
    source = view.args[0]
    before, after = source.meta["val"].shape, view.meta["val"].shape
    if before[-1] != after[-1] or len(before) > 3:
        return
    features: Any = linear.args[2]
    _show_behind(graph, linear, [source], [*view.args[1][:-1], features], (*before[:-1], features))
    if not view.users:
        graph.erase_node(view)


def _show_behind(graph: Graph, node: Node, sources: Sequence[Node], view: Any, shape: Sequence[Any]) -> Node:
    """Gives a node other first arguments and a result of their shape, and returns a view of it for its readers."""
    with graph.inserting_after(node):
        shown = graph.call_function(aten.reshape.default, (node, view))
    shown.meta.update(node.meta)
    node.replace_all_uses_with(shown, delete_user_cb=lambda user: user is not shown)
    node.args = (*sources, *node.args[len(sources) :])
    node.meta = {**node.meta, "val": sources[0].meta["val"].new_empty(shape)}
    return shown


def _put_before_views(graph: Graph, norm: Node) -> None:
    """Moves views from before a gated norm to after the norm, if they keep the last dimension and their arguments have
    one shape, or one has heads side by side; views after the norm then show the norm itself."""
    views: Any = norm.args[:2]
    if any(view.target not in VIEWS for view in views):
        return
    sources = [view.args[0] for view in views]
    for place, (source, like) in enumerate(zip(sources, reversed(sources), strict=True)):
        heads = like.meta["val"].shape[2:]
        if (
            len(heads) == 2
            and len(source.meta["val"].shape) == 3
            and source.meta["val"].shape[2] == heads[0] * heads[1]
        ):
            with graph.inserting_before(norm):
                sources[place] = graph.call_function(aten.unflatten.int, (source, 2, [int(size) for size in heads]))
            sources[place].meta.update(norm.meta)
            sources[place].meta["val"] = source.meta["val"].unflatten(2, heads)
    shape, other = (source.meta["val"].shape for source in sources)
    if [str(size) for size in shape] != [str(size) for size in other] or shape[-1] != norm.meta["val"].shape[-1]:
        return
    shown = _show_behind(graph, norm, sources, views[0].args[1], shape)
    for user in list(shown.users):
        if user.target in VIEWS:
            user.args = (norm, user.args[1])
            if _shows_the_same(user):
                user.replace_all_uses_with(norm)
                graph.erase_node(user)
    for view in (*views, shown):
        if not view.users:
            graph.erase_node(view)


def _concatenate(graph: Graph, whole: Node) -> None:
    """Replaces a new tensor whose slices are all filled by copies, along one dimension, by a concatenation."""
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
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
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


TOKEN_POSITIONS = "token_positions"
"""The side input with the positions of tokens, for the embedding and the head."""

SEEN = "seen"
"""The side input with 1 for visible and 0 for hidden tokens, for recurrent layers; None if none is hidden."""

HANDED = "handed"
"""The value without gradient that a layer takes from the layer before, such as the indices of an indexer."""

BATCH, SEQUENCE = 1_000_003, 2_000_003
"""The sizes of a trace as numbers: primes, different from every size of a model."""

EXAMPLE_BATCH, EXAMPLE_LENGTH = 2, 6
"""The sizes of the examples for a trace."""


class Underivable(ValueError):
    """Refuses to derive a model; the text is the reason.

    Attributes:
        path: the submodule of a layer whose code is not followed, and which may run as it is (`trace.blocks`); None if
            that is no remedy.
    """

    def __init__(self, reason: str, path: str | None = None) -> None:
        super().__init__(reason)
        self.path = path


class HandsOn(Underivable):
    """Refuses layers that hand a value to the next layer; a trace with this value may follow."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__("its layers hand a second value from one to the next, which is not built")
        is_open = [not isinstance(size, int) for size in value.shape]
        shape = tuple(map(int, value.shape))
        self.given = Given(HANDED, shape, value.dtype, tuple(dim for dim, opens in enumerate(is_open) if opens))


class ComputesWithMask(Underivable):
    """Refuses a placeholder for a mask; a trace over masks as tensors may follow."""


@dataclass(frozen=True)
class Given:
    """An argument of a layer after the hidden states, such as a rope.

    Attributes:
        name: the name of the side input of a micro-batch.
        shape: the shape at `EXAMPLE_BATCH` and `EXAMPLE_LENGTH`.
        open: the dimensions that change with batch or sequence.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    open: tuple[int, ...]

    @property
    def along_tokens(self) -> list[int]:
        """The dimensions that change with the sequence."""
        return [dim for dim in self.open if self.shape[dim] == EXAMPLE_LENGTH]


@functools.lru_cache(maxsize=1024)
def _with_numbers(expression: Any, batch: Any, sequence: Any) -> int:
    """Returns a size of some sequences and tokens as a number, see `BATCH`; few sizes occur, each often."""
    return int(expression.subs({batch: BATCH, sequence: SEQUENCE}))


@dataclass(frozen=True, eq=False)
class ModuleTrace:
    """The graph of a module.

    Attributes:
        nodes: the calls in order.
        hidden: the node of the value that enters.
        result: the node of the value that leaves.
        handed: the node of the value without gradient that the next layer takes; None for none.
        logits: the nodes of router logits, for every token and expert.
        opaque_calls: the descriptions of calls of custom operators.
        attributes: the nodes of parameters and buffers, with their names in the module.
        buffers: the nodes of buffers.
        constants: the nodes of tensors that the code makes, with their values.
        given: the nodes of further inputs, with their names.
        batch: the symbol of the number of sequences.
        sequence: the symbol of the sequence length.
        longest: the largest length for which the code runs as traced; None for any length.
        adapted: the names of weights of adapters of single parameters, each with the name of the parameter.
        is_tuple: whether the module returns a tuple that begins with the value that leaves.
    """

    nodes: Sequence[Node]
    hidden: Node
    result: Node
    handed: Node | None
    logits: tuple[Node, ...]
    opaque_calls: Sequence[OpaqueCall]
    attributes: dict[Node, str]
    buffers: frozenset[Node]
    constants: dict[Node, torch.Tensor]
    given: dict[Node, str]
    batch: Any
    sequence: Any
    longest: int | None
    adapted: Mapping[str, str]
    is_tuple: bool = False

    def call_of(self, node: Node) -> OpaqueCall:
        """Returns the description of an opaque call."""
        return self.opaque_calls[args_of(node)[OPAQUE_OPS[node.target]]]

    def kind_of(self, node: Node) -> CallKind | None:
        """Returns what an opaque call stands for; None for any other operation."""
        return self.call_of(node).kind if node.target in OPAQUE_OPS else None

    def path_of(self, node: Node) -> str:
        """Returns the path of the module of an opaque call."""
        return self.call_of(node).path

    def reads(self, name: str) -> bool:
        """Returns whether the code reads a parameter, itself or in a submodule that is called."""
        return self._is_read(name, {*self.nodes, *(node for node in self.attributes if node.users)})

    def trains(self, name: str) -> bool:
        """Returns whether a parameter gets a gradient: one that only indices depend on gets none."""
        return self._is_read(name, self._differentiable)

    def _is_read(self, name: str, nodes: Collection[Node]) -> bool:
        name = self.adapted.get(name, name)
        # A call of attention has the path of the calling module.
        called = [self.path_of(node) for node in nodes if self.kind_of(node) not in (None, CallKind.ATTENTION)]
        own = (self.attributes[node] for node in nodes if node in self.attributes)
        is_block = any(self.kind_of(node) is CallKind.BLOCK and not self.path_of(node) for node in nodes)  # the layer
        return is_block or name in own or any(name.startswith(f"{path}.") for path in called if path)

    @functools.cached_property
    def _differentiable(self) -> Collection[Node]:
        """The nodes with a gradient."""

        def is_real(node: Node) -> bool:
            value = node.meta.get("val")
            values = value if isinstance(value, (tuple, list)) else [value]
            return any(isinstance(x, torch.Tensor) and x.dtype not in INTEGERS for x in values)

        return reached((self.result, *self.logits), lambda node: filter(is_real, node.all_input_nodes))

    def number(self, size: Any) -> int:
        """Returns a size as a number, see `BATCH`."""
        if isinstance(size, int):
            return size
        expression = size.node.expr if hasattr(size, "node") else size
        others = expression.free_symbols - {self.batch, self.sequence}
        if not others:
            return _with_numbers(expression, self.batch, self.sequence)
        # The size of an input whose code never compares the size with the size of the tokens.
        known = {EXAMPLE_BATCH: BATCH, EXAMPLE_LENGTH: SEQUENCE}
        hint = getattr(size.node, "hint", None)
        if expression not in others or hint not in known:
            raise Underivable(f"its code computes with sizes in a way that is not followed: {expression}")
        return known[hint]

    def shape(self, node: Node) -> tuple[int, ...]:
        """Returns the shape of a value, in numbers."""
        return tuple(self.number(size) for size in node.meta["val"].shape)

    def size(self, size: Any, length: int) -> int:
        """Returns a size that depends only on the length of the sequence, as a number."""
        return size if isinstance(size, int) else int(size.node.expr.subs({self.sequence: length}))

    def path(self, node: Node) -> str:
        """Returns the path of the module whose code makes a call."""
        return _path_of(node)

    @contextlib.contextmanager
    def following(self, node: Node) -> Iterator[None]:
        """Returns the context in which refusals name the module whose code makes a call, or reads a constant, unless
        they name another."""
        try:
            yield
        except Underivable as refusal:
            called = next(iter(node.users), node) if node.op == "placeholder" else node
            refusal.path = self.path(called) if refusal.path is None else refusal.path
            raise


def _path_of(node: Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("module").removeprefix(".")


def reached(starts: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> dict[Node, None]:
    """Returns nodes and all nodes after them, as the keys of a dictionary: each once, depth first; `onward` gives the
    next nodes of a node."""
    found: dict[Node, None] = {}
    waiting = [*starts][::-1]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += [*onward(node)][::-1]
    return found


def args_of(node: Node) -> Any:
    """Returns the arguments of a call without torch's union type."""
    return node.args


def _draws(node: Node) -> bool:
    """Returns whether an operation of torch draws random numbers; attention may, with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if node.target is not aten.scaled_dot_product_attention.default:
        return True
    return bool(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0))


def is_tensor(node: Any) -> bool:
    """Returns whether the value of a node is a tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def has_value(node: Node) -> bool:
    """Returns whether the value of a node is a tensor or a sequence of tensors."""
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


class _Called(nn.Module):
    """A skeleton as a module with positional tensors as arguments."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, x: torch.Tensor, *given: torch.Tensor) -> Any:
        return self.call(self.module, x, given)


def trace(
    skeleton: nn.Module,
    opaque_calls: OpaqueCalls,
    hidden: torch.Tensor,
    given: Sequence[Given],
    call: Callable[..., Any],
) -> ModuleTrace:
    """Traces a skeleton; `hidden` is an example of the value that enters [batch, sequence, ...].

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
        mixers = mixers_as_operators(skeleton, opaque_calls)
        with torch.no_grad(), opaque_calls.capturing(skeleton), mixers, _without_logs():
            program = torch.export.export(
                _Called(skeleton, call), (hidden, *examples), strict=False, dynamic_shapes=open_dims
            )
    except Underivable:
        raise
    except Exception as error:
        refusal = refusal_of("torch.export cannot trace it", error)
        refusal.path = opaque_calls.path_of_error(error)
        raise refusal from error
    return _trace_of(program, opaque_calls, given, adapted_names(skeleton))


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Returns the context in which torch says nothing of code that it cannot trace: the error has the reason."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def refusal_of(what: str, error: Exception) -> Underivable:
    """Returns the refusal for an error of a model's code: `what` failed, and the first line of the error."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = f"{type(error).__name__}: {lines[0]}"
    if any(kind.__name__ in reason for kind in (MaskOf, PaddingMask, OtherMask)):
        return ComputesWithMask(
            f"{what}: its code computes with the attention mask itself, and does not hand it to Transformers' "
            "attention interface"
        )
    return Underivable(f"{what}: {reason}")


def _trace_of(
    program: Any, opaque_calls: OpaqueCalls, given: Sequence[Given], adapted: Mapping[str, str]
) -> ModuleTrace:
    _check_buffers(program)
    rewrite(program.graph)
    nodes = list(program.graph.nodes)
    for node in partial_writes(program.graph):
        where = _path_of(node) or "the layer"
        reason = f"{node.target} in {where} writes over a part of a tensor, which is not built"
        raise Underivable(reason, _path_of(node))
    for node in nodes:
        if _draws(node) and node.users:  # evaluation would draw as well, and recomputation anew
            raise Underivable(
                f"{node.target.overloadpacket.__name__} in {_path_of(node) or 'the layer'} draws random numbers in "
                "training, which is not built but for dropout; load the model with the option for it at 0, such as "
                "router_jitter_noise=0.0"
            )
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
    result, handed, *logits = next(node for node in nodes if node.op == "output").args[0]
    return ModuleTrace(
        nodes=[node for node in nodes if node.op == "call_function"],
        hidden=hidden,
        result=result,
        handed=handed,
        logits=tuple(logits),
        opaque_calls=opaque_calls.opaque_calls,
        attributes=attributes,
        buffers=frozenset(node for node in attributes if node.name in signature.inputs_to_buffers),
        constants=constants,
        given={node: g.name for node, g in zip(rest, given, strict=True)},
        batch=batch,
        sequence=sequence,
        longest=_longest(program.range_constraints.get(sequence)),
        adapted=adapted,
    )


def _check_buffers(program: Any) -> None:
    """Refuses code that writes to a buffer: a graph would not contain the effect."""
    names = program.graph_signature.inputs_to_buffers
    for node in program.graph.nodes:
        if not _name_in_place(node):
            continue
        written: Any = node.args[0]
        while _is_part(written):
            written = written.args[0]
        if written.name in names:
            raise Underivable(
                f"its forward pass writes to the buffer {names[written.name].removeprefix('module.')}, which is not "
                "built; change the buffer between steps, in a callback"
            )


def _longest(constraint: Any) -> int | None:
    """Returns the upper bound of a length; None without a bound."""
    upper: Any = None if constraint is None else constraint.upper
    return int(upper) if getattr(upper, "is_Integer", False) else None
