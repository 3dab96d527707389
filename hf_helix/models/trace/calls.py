"""The arguments of decoder layers after the hidden states, recorded from the decoder's own forward.

In:   a model whose layers are replaced by stubs while the decoder's `forward` runs.
Out:  once, the arguments of every layer; later, for every micro-batch, the tensors among them (a rope of any kind).
Must hold: the model's own code decides. The code runs over embeddings of one feature and ends at the last layer, so the
cost on a device is negligible. Masks are placeholders (`MaskOf`), since making masks would wait for the device.
"""

import contextlib
import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_helix.models.trace.opaque_calls import MaskOf, OtherMask, PaddingMask, replaced
from hf_helix.models.trace.trace import EXAMPLE_BATCH, EXAMPLE_LENGTH, Given, Underivable, refusal_of

logger = logging.getLogger(__name__)

_MASKS = {
    "create_causal_mask": lambda config: None,
    "create_sliding_window_causal_mask": lambda config: config.sliding_window,
}
"""The window of each mask function of Transformers."""

RECURRENT_MASK = "create_recurrent_attention_mask"
"""The function of Transformers that makes the mask of padding for recurrent layers, or None."""


LAYER_CLASS = GradientCheckpointingLayer
"""The base class of Transformers' decoder layers."""


def stock_forward(module: nn.Module) -> Callable[..., Any]:
    """Returns the `forward` of a module without the replacements of a cut model."""
    forward: Any = module.forward
    while getattr(forward, "is_refusal", False):
        forward = forward.__wrapped__
    return forward


class Enough(Exception):
    """Ends a run of a model's code."""


class _TakesFirst(Underivable):
    """Raised if the decoder indexes a layer's output (`out[0]`), which takes the first row of a stub's tensor; a run
    with stubs that return tuples may follow."""


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a layer after the hidden states; tensors are `Given`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def given(self) -> list[Given]:
        """The tensors, each once."""
        return list(dict.fromkeys(leaf for leaf in self._leaves if isinstance(leaf, Given)))

    @property
    def masks(self) -> list[MaskOf]:
        """The attention masks, as placeholders."""
        return [leaf for leaf in self._leaves if isinstance(leaf, MaskOf)]

    @property
    def hides_padding(self) -> bool:
        """Whether the layer hides padding from a recurrence."""
        return any(isinstance(leaf, PaddingMask) for leaf in self._leaves)

    @property
    def _leaves(self) -> list[Any]:
        leaves: list[Any] = tree_leaves((self.args, self.kwargs))
        return leaves

    def fill(self, tensors: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with tensors in place of `Given`. Mappings that layers may write to, such as keys and
        values for later layers, are copies."""

        def put(leaf: Any) -> Any:
            if isinstance(leaf, MutableMapping):
                return copy.copy(leaf)
            return tensors[leaf.name] if isinstance(leaf, Given) else leaf

        args, kwargs = tree_map(put, (self.args, self.kwargs))
        return args, kwargs

    @property
    def key(self) -> str:
        """A text, equal for calls with different values of tensors, and different for all other calls."""
        return repr((self.args, sorted(self.kwargs.items())))


class Decoder:
    """The submodule of a model that runs the layers in order, from embeddings.

    Attributes:
        module: the submodule.
        path: its name in the model.
        holder: the submodule with the list of layers: `module`, or an encoder inside that takes hidden states.
        layers: the layers.
        prefix: the name of the list of layers in the model.
        takes_first: whether the submodule takes the first of a layer's outputs.
        rest: a layer's outputs after the hidden states, if the submodule takes a pair of every layer: None, or
            the description of a value that the next layer takes.
        masks: the context in which mask functions return what layers are handed: placeholders, or tensors.

    With `makes_masks`, masks are tensors, for layers that compute with them, instead of placeholders.
    """

    takes_first = False
    rest: tuple[Given | None, ...] = ()

    def __init__(self, base: Any, makes_masks: bool = False) -> None:
        self.masks = functools.partial(changed_masks, _making if makes_masks else _naming)
        candidates = [
            (module, name, child)
            for module in base.modules()
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and child and all(isinstance(x, LAYER_CLASS) for x in child)
        ]
        if len(candidates) > 1 and hasattr(base, "get_decoder"):  # towers of images and sound also have layers
            text = {id(module) for module in base.get_decoder().modules()}
            candidates = [each for each in candidates if id(each[0]) in text]
        if len(candidates) > 1 and hasattr(base, "get_decoder"):  # or lie between embeddings and decoder layers
            candidates = [each for each in candidates if each[0] is base.get_decoder()] or candidates
        if len(candidates) != 1:
            raise Underivable(f"it has {len(candidates) or 'no'} lists of decoder layers, and one is needed")
        ((self.holder, self._name, self.layers),) = candidates
        inside = next(path for path, module in base.named_modules() if module is self.holder)
        self.prefix = f"{inside}.{self._name}".removeprefix(".")
        self.path = _runner(base, inside)
        self.module = base.get_submodule(self.path)
        self._stubs = nn.ModuleList(_Stub(layer, number, self) for number, layer in enumerate(self.layers))

    def run(
        self,
        called: Callable[[int, tuple[Any, ...], dict[str, Any], Tensor], Tensor | None],
        given: Mapping[str, Any],
        with_masks: bool = False,
    ) -> None:
        """Runs the code with stubs for layers, until `called` raises `Enough`.

        Args:
            called: takes the number of a layer, its arguments and the hidden states that enter, and returns those that
                leave, or None for the same.
            given: the arguments.
            with_masks: whether Transformers makes masks; otherwise they are placeholders, or tensors.
        """
        for stub in self._stubs:
            object.__setattr__(stub, "called", called)
        with contextlib.nullcontext() if with_masks else self.masks(self.module), contextlib.suppress(Enough):
            setattr(self.holder, self._name, self._stubs)
            try:
                stock_forward(self.module)(**given)
            finally:
                setattr(self.holder, self._name, self.layers)


def _runner(base: nn.Module, path: str) -> str:
    """Returns the name of the innermost submodule that takes embeddings, of those at a path or around it."""
    parts = path.split(".") if path else []
    paths = [".".join(parts[:count]) for count in range(len(parts), -1, -1)]
    takers = (p for p in paths if "inputs_embeds" in inspect.signature(stock_forward(base.get_submodule(p))).parameters)
    return next(takers, path)


class _Stub(nn.Module):
    """A stub with the attributes of a layer; for `called` see `Decoder.run`."""

    called: Callable[..., Any]

    def __init__(self, layer: nn.Module, number: int, decoder: Decoder) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)
        self._decoder = decoder
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
        left = self.called(self._number, args, kwargs, hidden)
        hidden = hidden if left is None else left
        return (hidden, *self._decoder.rest) if self._decoder.rest or self._decoder.takes_first else hidden


@contextlib.contextmanager
def changed_masks(change: Callable[[str, Callable[..., Any]], Callable[..., Any]], module: nn.Module) -> Iterator[None]:
    """Returns the context in which the mask functions of a module's code are changed, given name and function."""
    kind: Any = type(module)
    functions = [(vars(sys.modules[home]), name) for home, name in _mask_functions(kind)]
    with replaced((space, {name: change(name, space[name])}) for space, name in functions):
        yield


def _making(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a mask function that makes a tensor, never None. On the meta device, on which Transformers cannot look
    for documents in positions, the tensor is for a single document: only its shape is read."""
    skips = {"allow_is_causal_skip", "allow_is_bidirectional_skip"} & {*inspect.signature(function).parameters}

    def make(*args: Any, **kwargs: Any) -> Any:
        if getattr(kwargs.get("position_ids"), "is_meta", False):
            kwargs["position_ids"] = None
        made = function(*args, **{**kwargs, **dict.fromkeys(skips, False)})
        if made is None and name == RECURRENT_MASK:  # as for rows without padding
            embeddings = inspect.signature(function).bind(*args, **kwargs).arguments["inputs_embeds"]
            return embeddings.new_ones(embeddings.shape[:2], dtype=torch.long)
        return made

    return make


@functools.cache
def _mask_functions(kind: type) -> list[tuple[str, str]]:
    """Returns the possible mask functions of the code of a class, as module and name."""
    homes = dict.fromkeys(base.__module__ for base in kind.__mro__ if base.__module__ in sys.modules)
    return [
        (home, name)
        for home in homes
        for name, value in vars(sys.modules[home]).items()
        if name.startswith("create_") and "mask" in name and callable(value)
    ]


def _naming(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a mask function that makes a placeholder."""

    def make(config: Any = None, *args: Any, **kwargs: Any) -> Any:
        extra = [key for key in ("or_mask_function", "and_mask_function") if kwargs.get(key) is not None]
        by_positions = kwargs.get("position_ids") is not None
        if name == RECURRENT_MASK and not extra:
            return PaddingMask()
        if name == "create_masks_for_generate" and not extra:  # text has no blocks of images in it
            return _masks_by_kind(config.get_text_config(), by_positions)
        if name not in _MASKS or extra:
            return OtherMask(f"{name}({', '.join(extra)})")
        return MaskOf(_MASKS[name](config), by_positions)

    return make


def _masks_by_kind(config: Any, by_positions: bool) -> Any:
    """Returns the masks of all kinds of layers, as the larger model of a decoder hands them to the decoder."""
    window = getattr(config, "sliding_window", None)
    if not hasattr(config, "layer_types"):
        return MaskOf(window, by_positions)
    known = {
        "full_attention": MaskOf(None, by_positions),
        "sliding_attention": MaskOf(window, by_positions),
        "linear_attention": PaddingMask(),
        "conv": PaddingMask(),
    }
    if unknown := {*config.layer_types} - known.keys():
        raise Underivable(f"its layers attend by create_masks_for_generate() of {sorted(unknown)}, which is not built")
    return {kind: known[kind] for kind in config.layer_types}


class Lookup(NamedTuple):
    """The ids that were looked up in a table, and the number of its rows."""

    ids: Tensor
    rows: int


def _count_positions(looked_up: Sequence[Lookup]) -> int | None:
    """Returns how many positions, from 0, have a row in every table of positions; None without such a table. On the
    meta device, whose ids have no values, a table of positions has a row for each token of the example."""
    counts = []
    for ids, rows in looked_up:
        if ids.is_meta:
            counts += [rows] if rows >= EXAMPLE_LENGTH else []
        elif ids.shape[-1] == EXAMPLE_LENGTH:
            first, last = (ids - torch.arange(EXAMPLE_LENGTH, device=ids.device)).aminmax()
            counts += [rows - int(first)] if first == last else []
    return min(counts, default=None)


@contextlib.contextmanager
def _narrow_lookups() -> Iterator[list[Lookup]]:
    """Returns the context in which lookups in tables of positions give one feature, as the embeddings have one feature,
    norms return their value, and projections one feature of it, also of several embeddings side by side.

    Only the first pipeline rank has these tables. Yields the list of lookups.
    """
    looked_up: list[Lookup] = []

    def embedding(ids: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        looked_up.append(Lookup(ids, weight.shape[0]))
        return weight.new_zeros((*ids.shape, 1), device=ids.device)  # a table may lie on the meta device

    def unchanged(value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return value

    def projected(value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return value[..., :1]

    changed = {"embedding": embedding, "layer_norm": unchanged, "linear": projected}
    with replaced([(vars(functional), changed)]):
        yield looked_up


def count_seen(ids: Tensor, mask: Tensor | None) -> Tensor | None:
    """Returns positions that count the visible tokens of a mask [batch, sequence]; -1 for hidden tokens. None for plain
    positions."""
    if mask is None:
        return None
    seen = mask.long()
    return seen.cumsum(1) * seen - 1


def count_kept(ids: Tensor, mask: Tensor | None, pad: Any) -> Tensor:
    """Returns positions after `pad` that count the tokens other than `pad` [batch, sequence]; `pad` for these."""
    kept = (ids != pad).long()
    return kept.cumsum(1) * kept + pad


def _are_equal(tensors: list[Tensor], others: list[Tensor]) -> bool:
    """Returns whether tensors are equal; a single row may stand for all rows."""
    return len(tensors) == len(others) and all(
        one.shape[1:] == other.shape[1:] and bool((one == other).all())
        for one, other in zip(tensors, others, strict=True)
    )


class LayerCalls:
    """The arguments of all layers of a model; for `makes_masks` and `rest` see `Decoder`.

    Attributes:
        decoder: the submodule that calls the layers.
        calls: the arguments of each layer.
        num_positions: how many positions have a row in the tables of positions; None without tables.
        has_rows: whether the embedding needs the positions of every row of a batch: the code reads other tables
            besides, or computes with positions.
        token_shape: of the layers' input for each token, from embeddings of one feature.
        count: from the ids and the mask of a batch to the positions that the decoder counts by them; None for plain
            positions. Read once the model has weights.
    """

    def __init__(self, base: Any, makes_masks: bool = False, rest: tuple[Given | None, ...] = ()) -> None:
        self.decoder = Decoder(base, makes_masks)
        self.decoder.rest = rest
        drop = max(getattr(each, "layerdrop", None) or 0.0 for each in (self.decoder.module, self.decoder.holder))
        if drop:
            raise Underivable(
                f"layerdrop={drop} leaves out layers at random, which is not built; load the model with layerdrop=0.0"
            )
        if width := getattr(base.config.get_text_config(), "hidden_size_per_layer_input", None):
            raise Underivable(
                f"hidden_size_per_layer_input={width} gives every layer embeddings of its own, which is not built"
            )
        if any("input_ids" in inspect.signature(stock_forward(each)).parameters for each in self.decoder.layers):
            raise Underivable(
                "its decoder hands the ids of tokens to every layer, which is not built: units of layers would take "
                "them as a side input"
            )
        self._makes_masks = makes_masks  # then code also computes with positions, and each row has its own
        self._table = base.get_input_embeddings()
        self._pad = getattr(base.config.get_text_config(), "pad_token_id", None)
        second, _ = self._record_either(EXAMPLE_BATCH + 1, EXAMPLE_LENGTH + 3)
        first, looked_up = self._record(EXAMPLE_BATCH, EXAMPLE_LENGTH)
        self.has_rows = makes_masks or any(len(each.ids) > 1 for each in looked_up)
        self.num_positions = _count_positions(looked_up)
        self._names: dict[int, str] = {}  # by `id`; the tensors live until all are named
        self._wanted: dict[int, list[tuple[str, int]]] = {}
        masked = self._places_of_mask()
        self.calls = [
            self._call(number, first[number], second[number], masked.get(number, ()))
            for number in range(len(self.decoder.layers))
        ]
        if not self._is_empty:
            _ = self.count  # refused here if it is not followed

    @functools.cached_property
    def count(self) -> Callable[[Tensor, Tensor | None], Tensor | None] | None:
        return self._way_of_counting()

    @property
    def _is_empty(self) -> bool:
        """Whether the model is on the meta device, without weights."""
        return self._table.weight.is_meta or self._device.type == "meta"

    @property
    def _device(self) -> torch.device:
        return next((b.device for b in self.decoder.module.buffers()), torch.device("cpu"))

    def _record_either(self, batch: int, length: int) -> tuple[dict[int, Any], list[Lookup]]:
        """Records with stubs that return hidden states or, where the code takes the first of these, a tuple, or, where
        the code unpacks them, a pair; see `Decoder`.

        The rows of a batch would be unpacked as well, if there were two.
        """
        try:
            return self._record(batch, length)
        except _TakesFirst:
            self.decoder.takes_first = True
            return self._record(batch, length)
        except Underivable as error:
            if "values to unpack (expected 2" not in str(error):
                raise
            self.decoder.rest = (None,)
            return self._record(batch, length)

    def _record(self, batch: int, length: int) -> tuple[dict[int, Any], list[Lookup]]:
        device = self._device
        positions = torch.arange(length, device=device).expand(batch if self._makes_masks else 1, -1)
        try:
            calls, looked_up = self._run(torch.zeros((batch, length), dtype=torch.long, device=device), positions)
        except Underivable:
            raise
        except Exception as error:
            raise refusal_of("its forward cannot run without its layers", error) from error
        if len(calls) != len(self.decoder.layers):
            raise Underivable("its forward does not call every layer once")
        return calls, looked_up

    def _run(
        self,
        ids: Tensor,
        positions: Tensor | None,
        mask: Any = None,
        layers: Collection[int] | None = None,
        by_ids: bool = False,
        with_masks: bool = False,
    ) -> tuple[dict[int, Any], list[Lookup]]:
        """Runs the decoder until some layers are called; None for all layers.

        Returns:
            The arguments of every layer that was called, and the lookups in tables of positions.
        """
        wanted = set(range(len(self.decoder.layers)) if layers is None else layers)
        calls: dict[int, Any] = {}
        shapes: list[torch.Size] = []

        def called(number: int, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> None:
            if shapes and hidden.shape == shapes[-1][1:]:
                raise _TakesFirst("its decoder takes the first row of what a layer returns")
            shapes.append(hidden.shape)
            self.token_shape = tuple(hidden.shape[2:])
            calls[number] = args, kwargs
            if wanted <= calls.keys():
                raise Enough

        embeddings = self._table.weight.new_zeros((), device=ids.device).expand(*ids.shape, 1)
        entering = {"input_ids": ids} if by_ids else {"inputs_embeds": embeddings}
        with torch.no_grad(), _narrow_lookups() as looked_up:
            given = {**entering, "attention_mask": mask, "position_ids": positions, "use_cache": False}
            self.decoder.run(called, given, with_masks)
            return calls, looked_up

    def _way_of_counting(self) -> Callable[[Tensor, Tensor | None], Tensor | None] | None:
        """Compares the positions that the decoder computes itself with plain positions, and with other ways."""
        pad = self._pad
        ids = torch.full((EXAMPLE_BATCH, EXAMPLE_LENGTH), (pad or 0) + 1, device=self._device)
        ids[0, 1] = ids[1, 3:] = (pad or 0) + (pad is None)
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        plain = torch.arange(EXAMPLE_LENGTH, device=self._device).expand(1, -1)
        try:
            unnumbered, numbered = self._follow(ids, mask, (None, plain))
            if _are_equal(unnumbered, numbered):
                return None
            for way in (count_seen, functools.partial(count_kept, pad=pad)):
                with contextlib.suppress(TypeError, RuntimeError):  # without padding, or with positions out of range
                    if _are_equal(*self._follow(ids, mask, (None, way(ids, mask)))):
                        return way
        except Underivable:
            raise
        except Exception as error:  # code that computes with the mask itself: the trace or the proof refuses it
            logger.debug("positions by the mask of a batch: the decoder cannot run", exc_info=error)
            return None
        raise Underivable("its decoder counts positions by the attention mask, in a way that is not followed")

    def _follow(self, ids: Tensor, mask: Tensor, ways: Sequence[Tensor | None]) -> list[list[Tensor]]:
        """Returns for each way to give positions the ids looked up in tables, and the tensors among the arguments of
        layers. Arguments that appear only with explicit positions are ignored."""
        runs = [self._run(ids, positions, mask, by_ids=True) for positions in ways]
        leaves = [tree_leaves(list(calls.values())) for calls, _ in runs]
        known = [place for place, leaf in enumerate(leaves[0]) if isinstance(leaf, Tensor)]
        return [
            [*(each.ids for each in looked_up), *(of_run[place] for place in known)]
            for of_run, (_, looked_up) in zip(leaves, runs, strict=True)
        ]

    def _places_of_mask(self) -> dict[int, list[int]]:
        """Returns for each layer the places among its arguments that take the mask of a batch itself."""
        ids = torch.zeros((EXAMPLE_BATCH, EXAMPLE_LENGTH), dtype=torch.long, device=self._device)
        mask, calls = torch.ones_like(ids), dict[int, Any]()
        try:
            calls, _ = self._run(ids, torch.arange(EXAMPLE_LENGTH, device=self._device).expand(1, -1), mask)
        except Exception as error:  # code that computes with the mask: the trace or the proof refuses it
            logger.debug("layers that take the mask of a batch: the decoder cannot run", exc_info=error)
        return {
            number: [index for index, leaf in enumerate(tree_leaves(call)) if leaf is mask]
            for number, call in calls.items()
        }

    def _call(self, number: int, first: Any, second: Any, masked: Collection[int]) -> LayerCall:
        leaves, spec = tree_flatten(first)
        others = tree_leaves(second)
        given = [
            self._given(number, index, leaf, other) if isinstance(leaf, Tensor) else leaf
            for index, (leaf, other) in enumerate(zip(leaves, others, strict=True))
        ]
        given = [PaddingMask() if leaf is None and index in masked else leaf for index, leaf in enumerate(given)]
        args, kwargs = tree_unflatten(given, spec)
        return LayerCall(tuple(args), kwargs)

    def _given(self, number: int, index: int, tensor: Tensor, other: Tensor) -> Given:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = f"given{len(self._names)}"
            self._wanted.setdefault(number, []).append((self._names[id(tensor)], index))
        if tensor.is_floating_point() and tensor.shape == (EXAMPLE_BATCH, EXAMPLE_LENGTH, 1):
            raise Underivable("its decoder hands the embedding to every layer, which is not built")
        name = self._names[id(tensor)]
        changing = tuple(dim for dim in range(tensor.dim()) if tensor.shape[dim] != other.shape[dim])
        return Given(name, tuple(tensor.shape), tensor.dtype, changing)

    def tensors(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the tensor arguments of layers for a micro-batch.

        Args:
            ids: the tokens [batch, sequence].
            positions: of the tokens [batch or 1, sequence].
            mask: of hidden tokens, if masks are among these arguments.
        """
        if not self._wanted:
            return {}
        positions = positions.expand_as(ids) if self._makes_masks else positions
        calls, _ = self._run(ids, positions, mask, layers=self._wanted)
        return {
            name: tree_leaves(calls[number])[index] for number, named in self._wanted.items() for name, index in named
        }

    def masks(self, ids: Tensor, positions: Tensor | None, mask: Any) -> dict[int | None, Any]:
        """Returns the attention masks of layers by their windows, as the decoder's code makes them.

        Args:
            ids: the tokens [batch, sequence].
            positions: the positions of the tokens; None for the decoder's own.
            mask: given to the decoder: masks of layers by kind, or a mask of more than tokens.
        """
        calls, _ = self._run(ids, positions, mask, with_masks=True)
        leaves = {number: tree_leaves(call) for number, call in calls.items()}
        places = (
            (number, index, place)
            for number, call in enumerate(self.calls)
            for index, place in enumerate(tree_leaves((call.args, call.kwargs)))
        )
        return {
            place.sliding_window: leaves[number][index] for number, index, place in places if isinstance(place, MaskOf)
        }
