"""Opaque calls: submodules and functions that appear in a trace as one operation each.

In:   a skeleton: a copy of a module on the meta device, see `skeleton_of`.
Out:  the same skeleton, with calls of custom operators in place of linears, norms, activations, dropouts, experts,
      attention and ropes; an `OpaqueCall` describes each call but a rope's.
Must hold: the model itself is never touched. A module becomes opaque only if its effect on the dimensions of its input
is known; all other code is traced through.
"""

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.pytorch_utils import Conv1D

from hf_helix.models.graph.experts import forward_arguments, is_experts
from hf_helix.models.stock.alike import same_code
from hf_helix.models.stock.copies import copy_module
from hf_helix.models.stock.peft import is_parameter_wrapper, is_plain_linear, unwrapped
from hf_helix.operators.attention.rope import Pair

DTYPE = torch.bfloat16
"""The dtype of traces, which stands for the compute dtype of the model; a cast to fp32 means fp32."""


class CallKind(Enum):
    """What an opaque call stands for."""

    LINEAR = "linear"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    DROPOUT = "dropout"
    ATTENTION = "attention"
    EXPERTS = "experts"
    LAYER = "layer"
    LOOKUP = "lookup"
    MIXER = "mixer"
    GATED_NORM = "gated_norm"
    HIDE = "hide"
    TOWERS = "towers"
    BLOCK = "block"


DOCUMENTS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments of attention with the boundaries of documents; hf_helix passes boundaries of its own."""


MASK = "attention_mask"
"""The argument of attention for a mask that the code of a layer has made."""


@dataclass(frozen=True)
class MaskOf:
    """A placeholder for an attention mask between a decoder and its layers.

    Attributes:
        sliding_window: the number of tokens that a token attends to; None for all earlier tokens.
        by_positions: whether positions were given for the mask; positions separate packed documents.
    """

    sliding_window: int | None = None
    by_positions: bool = True


@dataclass(frozen=True)
class PaddingMask:
    """A placeholder for the mask of padding [batch, sequence] between a decoder and its recurrent layers."""


@dataclass(frozen=True)
class OtherMask:
    """A placeholder for a mask that is not built; layers may be handed the mask, and may not attend by the mask.

    Attributes:
        call: the call that makes the mask in the decoder's code.
    """

    call: str


@dataclass(frozen=True)
class OpaqueCall:
    """The description of a call of a custom operator.

    Attributes:
        path: the name of the module in the traced module.
        details: for attention, the arguments of the attention interface; for dropout, the probability; for a mixer, the
            `MixerCall`; for a block, the `BlockCall`.
    """

    kind: CallKind
    path: str
    details: Mapping[str, Any] = field(default_factory=dict)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "linear(Tensor x, int number, int features) -> Tensor": lambda x, _, features: x.new_empty(
        (*x.shape[:-1], features)
    ),
    "unary(Tensor x, int number) -> Tensor": lambda x, _: torch.empty_like(x),
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] more, int number) -> Tensor": lambda q, k, v, *_: q.new_empty(
        (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    ),
    "lookup(Tensor ids, int number, int features) -> Tensor": lambda ids, _, features: ids.new_empty(
        (*ids.shape, features), dtype=DTYPE
    ),
    "experts(Tensor x, Tensor index, Tensor weights, int number) -> Tensor": lambda x, *_: torch.empty_like(x),
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)": lambda q, k, cos, _: tuple(
        torch.empty_like(value, dtype=torch.promote_types(q.dtype, cos.dtype)) for value in (q, k)
    ),
    "mixer(Tensor[] tensors, int like, int number) -> Tensor": lambda tensors, like, _: tensors[like].new_empty(
        tensors[like].shape
    ),
    "gated_norm(Tensor x, Tensor gate, int number) -> Tensor": lambda x, *_: torch.empty_like(x),
    "block(Tensor[] tensors, SymInt[] sizes, ScalarType dtype, int number) -> Tensor": (
        lambda tensors, sizes, dtype, _: tensors[0].new_empty(sizes, dtype=dtype)
    ),
}
"""The schemas of the custom operators, each with a function that gives the shapes of its result."""

_library = torch.library.Library("hf_helix", "DEF")
for _schema, _shapes in _OPERATORS.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _shapes, "Meta")  # `register_fake` would look for its caller's source

OPS = torch.ops.hf_helix
OPAQUE_OPS: dict[Any, int] = {
    OPS.linear.default: 1,
    OPS.unary.default: 1,
    OPS.attention.default: 4,
    OPS.experts.default: 3,
    OPS.lookup.default: 1,
    OPS.mixer.default: 2,
    OPS.gated_norm.default: 2,
    OPS.block.default: 3,
}
"""The custom operators, each with the index of the argument for the number of the call; tensors stand before it."""


def _on_meta(tensor: Tensor, is_buffer: bool) -> Tensor:
    """Returns a tensor without memory in place of a parameter or buffer."""
    dtype = tensor.dtype if is_buffer and not tensor.is_floating_point() else DTYPE
    return torch.empty(tensor.shape, device="meta", dtype=dtype)


def skeleton_of(module: nn.Module, make: Callable[[Tensor, bool], Tensor] = _on_meta) -> Any:
    """Returns a copy of a module: code and options, without memory for weights.

    Args:
        module: the module.
        make: returns the value of a parameter, or of a buffer (True); by default on the meta device.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(make(parameter, False), requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = make(buffer, True)
    skeleton = copy_module(module, memo)
    part: Any
    for part in skeleton.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            hooks.clear()  # hooks without effect on the cut model are refused elsewhere, by name
        if hasattr(part, "gradient_checkpointing"):
            part.gradient_checkpointing = False
    return skeleton


class OpaqueCalls:
    """Replaces submodules by custom operators, and records the description of each call.

    Args:
        inlined: the paths of norms that are traced through, see `hf_helix.models.placement`.
    """

    def __init__(self, inlined: frozenset[str] = frozenset()) -> None:
        self.opaque_calls: list[OpaqueCall] = []
        self._inlined = inlined
        self._paths: dict[int, str] = {}
        self.table = ""
        self.tables: set[str] = set()

    def add(self, kind: CallKind, path: str, **details: Any) -> int:
        """Adds a call and returns its number."""
        self.opaque_calls.append(OpaqueCall(kind, path, details))
        return len(self.opaque_calls) - 1

    def replace(self, skeleton: nn.Module, skip: Callable[[nn.Module], bool] = lambda module: False) -> None:
        """Makes the submodules of a skeleton opaque, in place; submodules for which `skip` is True stay as they are,
        with everything inside."""

        def visit(path: str, module: Any) -> None:
            self._paths[id(module)] = path
            if skip(module) or self._replace_one(path, module):
                return
            children = module.named_children()
            if is_parameter_wrapper(module):  # adapters of a parameter are added where a segment reads the parameter
                module.forward = _calling(module.base_layer)
                children = iter([("base_layer", module.base_layer)])
            for name, child in children:
                visit(f"{path}.{name}" if path else name, child)

        visit("", skeleton)

    def record(self, skeleton: nn.Module, routers: Iterable[tuple[str, int]]) -> list[Any]:
        """Returns a list into which routers of the skeleton record their logits; `routers` are their paths, each with
        the index of the logits among its outputs."""
        recorded: list[Any] = []
        for path, index in routers:
            router: Any = skeleton.get_submodule(path)
            router.forward = _recording(router.forward, index, recorded)
        return recorded

    def _replace_one(self, path: str, module: Any) -> bool:
        """Makes a module opaque and returns True; returns False for a module that must be traced through."""
        if is_projection(module):
            plain = unwrapped(module).copies[0]
            features = int(plain.nf if isinstance(plain, Conv1D) else plain.out_features)
            number = self.add(CallKind.LINEAR, path)
            module.forward = lambda x: OPS.linear(x, number, features)
        elif is_experts(unwrapped(module).copies[0]):
            number = self.add(CallKind.EXPERTS, path)
            names = forward_arguments(unwrapped(module).copies[0])

            def run(*values: Any, **named: Any) -> Tensor:
                hidden, index, weights = (*values, *(named[name] for name in names[len(values) :]))
                result: Tensor = OPS.experts(hidden, index, weights, number)
                return result

            module.forward = run
        elif is_gated_norm(module):
            if path not in self._inlined:
                module.forward = self._gating(module.forward, path)
        elif is_norm(module) and path not in self._inlined and _keeps_shape(module):
            number = self.add(CallKind.NORM, path)
            module.forward = lambda x: OPS.unary(x, number)
        elif isinstance(module, nn.Dropout):
            number = self.add(CallKind.DROPOUT, path, p=module.p)
            dropout: Any = module
            dropout.forward = lambda x: OPS.unary(x, number) if dropout.p else x
        elif is_activation(module):
            number = self.add(CallKind.ELEMENTWISE, path)
            module.forward = lambda x: OPS.unary(x, number)
        else:
            return False
        return True

    def _gating(self, forward: Callable[..., Any], path: str) -> Callable[..., Any]:
        """Returns the forward of a gated norm: opaque for a value with a gate of its shape."""
        number = self.add(CallKind.GATED_NORM, path)

        def run(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            if len(values) != 2 or not all(isinstance(value, Tensor) for value in values):
                return forward(*args, **kwargs)
            is_alike = [str(size) for size in values[0].shape] == [str(size) for size in values[1].shape]
            return OPS.gated_norm(*values, number) if is_alike else forward(*args, **kwargs)

        return run

    def set_table(self, path: str, table: Any) -> None:
        """Makes the lookups of an embedding opaque: its own, and the lookups of all copies of `modules_to_save`."""
        inside = unwrapped(table)
        copies = inside.copies if inside.wrapper is not None else ()
        self.table = path
        self.tables = {path, *(f"{path}.{name}" for name, module in table.named_modules() if module in copies)}

    @contextlib.contextmanager
    def capturing(self, skeleton: nn.Module) -> Iterator[None]:
        """Returns the context of a trace, in which attention, dropout, lookups and Llama's rope are opaque."""
        plain_embedding = functional.embedding

        def embedding(ids: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.path_of_frame() not in self.tables:
                return plain_embedding(ids, weight, *args, **kwargs)
            value: Tensor = OPS.lookup(ids, self.add(CallKind.LOOKUP, self.table), weight.shape[1])
            return value

        def get_interface(functions: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            def attend(
                module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **given: Any
            ) -> Any:
                options = {name: value for name, value in given.items() if name not in DOCUMENTS}
                if isinstance(attention_mask, Tensor):
                    options[MASK], attention_mask = attention_mask, None
                tensors = {name: value for name, value in options.items() if isinstance(value, Tensor)}
                rest = {name: value for name, value in options.items() if name not in tensors}
                number = self.add(
                    CallKind.ATTENTION,
                    self._paths[id(module)],
                    mask=attention_mask,
                    eager=default,
                    options=rest,
                    tensors=tuple(tensors),
                )
                return OPS.attention(query, key, value, list(tensors.values()), number), None

            return attend

        def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            if not training or p == 0:
                return input
            value: Tensor = OPS.unary(input, self.add(CallKind.DROPOUT, self.path_of_frame(), p=p))
            return value

        interface: Any = type(ALL_ATTENTION_FUNCTIONS)
        plain_interface, interface.get_interface = interface.get_interface, get_interface
        changed: list[tuple[dict[str, Any], Mapping[str, Any]]] = [(vars(torch), {"tensor": _number})]
        changed += [(vars(functional), {"dropout": dropout, "embedding": embedding})]
        changed += [(space, {name: _rope_as_operator(space[name])}) for space, name in ropes_of(skeleton)]
        try:
            with replaced(changed):
                yield
        finally:
            interface.get_interface = plain_interface

    def path_of_error(self, error: BaseException | None) -> str | None:
        """Returns the path of the innermost module whose code raised an error; None for an error of other code."""
        path = None
        while error is not None:
            for frame, _ in traceback.walk_tb(error.__traceback__):
                here = self._path_of_owner(frame)
                path = path if here is None else here
            if path is not None:
                break
            error = error.__cause__ or error.__context__
        return path

    def path_of_frame(self) -> str:
        """Returns the path of the module whose code is running; the module decides whether dropout is active."""
        frame = inspect.currentframe()
        while frame is not None:
            path = self._path_of_owner(frame)
            if path is not None:
                return path
            frame = frame.f_back
        return ""

    def _path_of_owner(self, frame: FrameType) -> str | None:
        """Returns the path of the module whose method a frame runs; None for other code. If a model has a module in two
        places, torch traces through stand-ins of its modules."""
        owner: Any = frame.f_locals.get("self")
        owner = owner.get_base() if hasattr(type(owner), "get_base") else owner
        return self._paths.get(id(owner)) if isinstance(owner, nn.Module) else None


def _calling(module: nn.Module) -> Callable[..., Any]:
    """Returns a forward that calls a module."""
    return lambda *args, **kwargs: module(*args, **kwargs)


def _number(data: Any, *args: Any, plain: Callable[..., Tensor] = torch.tensor, **options: Any) -> Tensor:
    """Returns a tensor; of a number, by an operation that also keeps the number on the meta device."""
    is_on_device = isinstance(data, float | int) and options.keys() == {"dtype", "device"}
    return torch.full((), data, **options) if is_on_device else plain(data, *args, **options)


def _recording(forward: Callable[..., Any], index: int, recorded: list[Any]) -> Callable[..., Any]:
    """Returns a forward that records one of its outputs."""

    def record(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        recorded.append(output[index] if isinstance(output, (tuple, list)) else output)
        return output

    return record


@contextlib.contextmanager
def replaced(changes: Iterable[tuple[dict[str, Any], Mapping[str, Any]]]) -> Iterator[None]:
    """Returns the context in which namespaces have other values under some of their names."""
    with contextlib.ExitStack() as stack:
        for space, values in changes:
            stack.callback(space.update, {name: space[name] for name in values})
            space.update(values)
        yield


def names_of_code(skeleton: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yields every name in the modules of a skeleton's classes: the module, the name and the value."""
    homes = {base.__module__ for module in skeleton.modules() for base in type(module).__mro__}
    for home in sorted(homes & sys.modules.keys()):
        yield from [(home, name, value) for name, value in vars(sys.modules[home]).items()]


def ropes_of(skeleton: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the copies of `apply_rotary_pos_emb` in the modules of a skeleton's classes, as namespace and name."""
    for home, name, value in names_of_code(skeleton):
        if same_code(value, apply_rotary_pos_emb):
            yield vars(sys.modules[home]), name


def _rope_as_operator(function: Callable[..., Pair]) -> Callable[..., Pair]:
    """Returns a rope that is one operation of the trace, with half the number of kernels of the model's code. Other
    forms of the call (heads after the tokens, parts of heads with full cosines) are traced as the code."""

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Pair:
        has_heads_first = not args and not kwargs and q.dim() == k.dim() == 4 and cos.dim() == sin.dim() == 3
        if not has_heads_first or {value.shape[-1] for value in (q, k, cos, sin)} != {q.shape[-1]}:
            return function(q, k, cos, sin, *args, **kwargs)
        pair: Pair = OPS.rope(q, k, cos, sin)
        return pair

    return run


def is_projection(module: Any) -> bool:
    """Returns whether a module is a plain linear, with or without PEFT's wrappers."""
    return is_plain_linear(unwrapped(module).copies[0])


def is_norm(module: Any) -> bool:
    """Returns whether a module normalises the last dimension of its single argument, with or without PEFT's wrapper."""
    module = unwrapped(module).copies[0]
    if "Norm" not in type(module).__name__ or next(module.children(), None) is not None:
        return False
    if type(module).__module__.startswith("torch.") and len(getattr(module, "normalized_shape", ())) != 1:
        return False  # torch's norms of several dimensions, of channels, or of a batch
    required = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    return len(required) == 1 and all(p.dim() == 1 for p in module.parameters())


def _keeps_shape(norm: Any) -> bool:
    """Returns whether a norm of a skeleton returns the normalised values, and not only their scale."""
    width = next((parameter.shape[0] for parameter in norm.parameters()), 8)
    value = torch.empty(1, 1, width, dtype=DTYPE, device="meta")
    try:
        with torch.no_grad():
            return bool(norm(value).shape == value.shape)
    except (RuntimeError, NotImplementedError):  # of code that does not run on the meta device
        return True


def is_gated_norm(module: Any) -> bool:
    """Returns whether a module normalises the last dimension of its first argument, and gates it by the second."""
    if "Norm" not in type(module).__name__ or next(module.children(), None) is not None:
        return False
    names = list(inspect.signature(module.forward).parameters)
    return names[1:] in (["gate"], ["z"], ["g"]) and all(p.dim() == 1 for p in module.parameters())


def is_activation(module: Any) -> bool:
    """Returns whether a module is an element-wise function."""
    home = type(module).__module__
    known = home in ("transformers.activations", "torch.nn.modules.activation")
    plain = next(module.parameters(), None) is None and next(module.children(), None) is None
    return known and plain and not isinstance(module, _NOT_ELEMENTWISE)


_NOT_ELEMENTWISE = (nn.Softmax, nn.Softmax2d, nn.Softmin, nn.LogSoftmax, nn.GLU, nn.RReLU, nn.MultiheadAttention)
"""The activations of torch over several elements, or with random numbers."""
