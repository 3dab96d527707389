"""What a decoder hands to its layers besides the value that goes through them: found by its own forward.

In:   a model, whose layers are replaced by stubs while its decoder's `forward` runs.
Out:  once, what every layer is called with; later, for every micro-batch, the tensors among it (a rope of any kind).
Must hold: the model's own code decides. It runs over embeddings of one feature, up to the last layer, so that it costs
a device nothing worth mentioning; masks are named instead of made, since making them would wait for the device.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_helix.models.trace.leaves import MaskOf
from hf_helix.models.trace.trace import EXAMPLE_BATCH, EXAMPLE_LENGTH, Given, Underivable, reason_of

_MASKS = {
    "create_causal_mask": lambda config: None,
    "create_sliding_window_causal_mask": lambda config: config.sliding_window,
}
"""The windows of the masks that functions of Transformers make."""


LAYER_CLASS = GradientCheckpointingLayer
"""What Transformers' decoder layers are made of."""


class _Enough(Exception):
    """The last layer was reached."""


@dataclass(frozen=True)
class LayerCall:
    """What a layer is called with.

    Attributes:
        args: behind the value that goes through the layers; tensors are `Given`.
        kwargs: the same by keyword.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def given(self) -> list[Given]:
        """The tensors, each once."""
        return list(dict.fromkeys(leaf for leaf in self._leaves if isinstance(leaf, Given)))

    @property
    def masks(self) -> list[MaskOf]:
        """What stands for its attention masks."""
        return [leaf for leaf in self._leaves if isinstance(leaf, MaskOf)]

    @property
    def _leaves(self) -> list[Any]:
        leaves: list[Any] = tree_leaves((self.args, self.kwargs))
        return leaves

    def fill(self, tensors: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments with tensors in the place of `Given`."""

        def put(leaf: Any) -> Any:
            return tensors[leaf.name] if isinstance(leaf, Given) else leaf

        args, kwargs = tree_map(put, (self.args, self.kwargs))
        return args, kwargs

    @property
    def key(self) -> str:
        """Tells calls apart that differ in more than the values of tensors."""
        return repr((self.args, sorted(self.kwargs.items())))


class Decoder:
    """The submodule of a model that runs its layers one after the other.

    Attributes:
        module: that submodule.
        layers: the layers.
        name: what it calls the list of them.
    """

    def __init__(self, base: Any) -> None:
        candidates = [
            (module, name, child)
            for module in base.modules()
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and child and all(isinstance(x, LAYER_CLASS) for x in child)
        ]
        if len(candidates) != 1:
            raise Underivable(f"it has {len(candidates) or 'no'} lists of decoder layers, and one is needed")
        ((self.module, self.name, self.layers),) = candidates
        self.path = next(path for path, module in base.named_modules() if module is self.module)
        self._stubs = nn.ModuleList(_Stub(layer, number) for number, layer in enumerate(self.layers))

    @contextlib.contextmanager
    def stubs(self, called: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
        """Returns the context in which layers are stubs, and masks are named.

        Args:
            called: is called in the place of a layer, with its number, and returns what the layer returns.
        """
        for stub in self._stubs:
            object.__setattr__(stub, "called", called)
        with named_masks(self.module):
            setattr(self.module, self.name, self._stubs)
            try:
                yield
            finally:
                setattr(self.module, self.name, self.layers)


class _Stub(nn.Module):
    """Stands in the place of a layer, whose attributes it shows.

    Attributes:
        called: see `Decoder.stubs`.
    """

    called: Callable[..., Any]

    def __init__(self, layer: nn.Module, number: int) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)
        self._number = number

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        result = self.called(self._number, args, kwargs)
        return hidden if result is None else (hidden, *result)


@contextlib.contextmanager
def named_masks(module: nn.Module) -> Iterator[None]:
    """Returns the context in which the code of a module gets `MaskOf` from the functions that make masks."""
    kind: Any = type(module)
    before = [(vars(sys.modules[home]), name) for home, name in _mask_functions(kind)]
    functions = [space[name] for space, name in before]
    for space, name in before:
        space[name] = _naming(name)
    try:
        yield
    finally:
        for (space, name), function in zip(before, functions, strict=True):
            space[name] = function


@functools.cache
def _mask_functions(kind: type) -> list[tuple[str, str]]:
    """Returns the functions that make masks, as module and name, which the code of a class may call."""
    homes = dict.fromkeys(base.__module__ for base in kind.__mro__ if base.__module__ in sys.modules)
    return [
        (home, name)
        for home in homes
        for name, value in vars(sys.modules[home]).items()
        if name.startswith("create_") and "mask" in name and callable(value)
    ]


def _naming(name: str) -> Callable[..., Any]:
    def make(config: Any = None, *args: Any, **kwargs: Any) -> Any:
        extra = [key for key in ("or_mask_function", "and_mask_function") if kwargs.get(key) is not None]
        if name not in _MASKS or extra:
            raise Underivable(f"its layers attend by {name}({', '.join(extra)}), which is not built")
        return MaskOf(_MASKS[name](config), kwargs.get("position_ids") is not None)

    return make


@contextlib.contextmanager
def _narrow_lookups() -> Iterator[list[Tensor]]:
    """Returns the context in which tables of positions give one feature, as the embeddings that they are added to.

    Of the ranks of a pipeline, only the first has these tables. Yields what is looked up.
    """
    torch_functional: Any = functional
    before, looked_up = functional.embedding, list[Tensor]()

    def embedding(ids: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        looked_up.append(ids)
        return weight.new_zeros((*ids.shape, 1))

    torch_functional.embedding = embedding
    try:
        yield looked_up
    finally:
        torch_functional.embedding = before


def count_seen(mask: Tensor) -> Tensor:
    """Returns positions that count the tokens that a mask [batch, sequence] lets be seen; -1 for the others."""
    seen = mask.long()
    return seen.cumsum(1) * seen - 1


def _are_alike(tensors: list[Tensor], others: list[Tensor]) -> bool:
    """Returns whether tensors are equal, where one row may stand for all."""
    return len(tensors) == len(others) and all(
        one.shape[1:] == other.shape[1:] and bool((one == other).all())
        for one, other in zip(tensors, others, strict=True)
    )


class LayerCalls:
    """What the layers of a model are called with.

    Attributes:
        decoder: the submodule that calls them.
        calls: for each layer.
        is_tuple: whether layers return a tuple whose first part is the value that goes on.
        counts_what_is_seen: whether tokens that the mask hides are left out where the decoder counts positions.
    """

    def __init__(self, base: Any) -> None:
        self.decoder = Decoder(base)
        self._table = base.get_input_embeddings()
        self.is_tuple = False
        first = self._record(EXAMPLE_BATCH, EXAMPLE_LENGTH)
        second = self._record(EXAMPLE_BATCH + 1, EXAMPLE_LENGTH + 3)
        self._names: dict[int, str] = {}  # by the identity of tensors, which live until all are named
        self._wanted: dict[int, list[tuple[str, int]]] = {}
        self.calls = [self._call(number, first[number], second[number]) for number in range(len(self.decoder.layers))]
        self.counts_what_is_seen = self._counts_what_is_seen()

    @property
    def _device(self) -> torch.device:
        return next((b.device for b in self.decoder.module.buffers()), torch.device("cpu"))

    def _record(self, batch: int, length: int) -> dict[int, Any]:
        device = self._device
        positions = torch.arange(length, device=device).expand(1, -1)
        calls: dict[int, Any] = {}

        def called(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[number] = (args, kwargs)
            if len(calls) == len(self.decoder.layers):
                raise _Enough

        try:
            self._run(torch.zeros((batch, length), dtype=torch.long, device=device), positions, called)
        except Underivable:
            raise
        except Exception as error:
            raise Underivable(f"its forward cannot run without its layers: {reason_of(error)}") from error
        if len(calls) != len(self.decoder.layers):
            raise Underivable("its forward does not call every layer once")
        return calls

    def _run(
        self, ids: Tensor, positions: Tensor | None, called: Callable[..., Any], mask: Tensor | None = None
    ) -> list[Tensor]:
        """Runs the decoder, and returns what it looks up in tables of positions."""
        weight = self._table.weight
        embeddings = weight.new_empty((), device=ids.device).expand(*ids.shape, 1)
        with torch.no_grad(), self.decoder.stubs(called), _narrow_lookups() as looked_up:
            with contextlib.suppress(_Enough):
                self.decoder.module.forward(
                    inputs_embeds=embeddings, attention_mask=mask, position_ids=positions, use_cache=False
                )
            return list(looked_up)

    def _counts_what_is_seen(self) -> bool:
        """Finds out what positions the decoder gives tokens that come with a mask and without positions."""
        mask = torch.ones((EXAMPLE_BATCH, EXAMPLE_LENGTH), dtype=torch.long, device=self._device)
        mask[0, :2] = 0
        ids, plain = torch.zeros_like(mask), torch.arange(EXAMPLE_LENGTH, device=self._device).expand(1, -1)
        try:
            unnumbered, *others = (self._follow(ids, positions, mask) for positions in (None, plain, count_seen(mask)))
        except Underivable:
            raise
        except Exception:  # code that computes with the mask itself, of which the trace or the proof has more to say
            return False
        if mask.is_meta or _are_alike(unnumbered, others[0]):
            return False
        if _are_alike(unnumbered, others[1]):
            return True
        raise Underivable("its decoder counts positions by the attention mask, in a way that is not followed")

    def _follow(self, ids: Tensor, positions: Tensor | None, mask: Tensor) -> list[Tensor]:
        """Returns the tensors that layers are given, and what is looked up in tables of positions."""
        given: list[Tensor] = []

        def called(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given.extend(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            if number + 1 == len(self.decoder.layers):
                raise _Enough

        looked_up = self._run(ids, positions, called, mask)
        return [*looked_up, *given]

    def _call(self, number: int, first: Any, second: Any) -> LayerCall:
        leaves, spec = tree_flatten(first)
        others = tree_leaves(second)
        given = [
            self._given(number, place, leaf, other) if isinstance(leaf, Tensor) else leaf
            for place, (leaf, other) in enumerate(zip(leaves, others, strict=True))
        ]
        args, kwargs = tree_unflatten(given, spec)
        return LayerCall(tuple(args), kwargs)

    def _given(self, number: int, place: int, tensor: Tensor, other: Tensor) -> Given:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = f"given{len(self._names)}"
            self._wanted.setdefault(number, []).append((self._names[id(tensor)], place))
        name = self._names[id(tensor)]
        changing = tuple(dim for dim in range(tensor.dim()) if tensor.shape[dim] != other.shape[dim])
        return Given(name, tuple(tensor.shape), tensor.dtype, changing)

    def tensors(self, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """Returns what the layers are given for a micro-batch.

        Args:
            ids: the tokens [batch, sequence].
            positions: their positions [batch or 1, sequence].
        """
        wanted, tensors = self._wanted, {}
        last = max(wanted, default=-1)

        def called(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for name, place in wanted.get(number, ()):
                tensors[name] = tree_leaves((args, kwargs))[place]
            if number == last:
                raise _Enough

        if wanted:
            self._run(ids, positions, called)
        return tensors
