"""Towers: models of images next to a language model, run by the model's own code between the lookup and the layers.

In:   a model whose code looks tokens up, puts features of images in the places of some, and calls the decoder; batches
      with images, and the embeddings of this rank's tokens.
Out:  an operator of the embedding unit that returns the embeddings with the features; the arguments of layers for a
      batch with images.
Must hold: the model's own code runs the tower, chooses the places of features, and makes positions and masks; the code
runs from the lookup, whose result is given, to the call of the decoder, which ends the run. A rank gives the embeddings
of its own tokens, and zeros elsewhere, so gradients of a tower are sums over the ranks of a sequence. A tower that is
not trained keeps nothing for backward, since nothing before its features has a gradient.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from hf_helix.models.graph.attention import like_embeddings
from hf_helix.models.graph.builder import Builder
from hf_helix.models.stock.batch_inputs import SequenceCut
from hf_helix.models.trace.calls import Enough, LayerCalls, stock_forward
from hf_helix.models.trace.opaque_calls import OPS, CallKind, OpaqueCalls
from hf_helix.planning.parameters import COPIED

logger = logging.getLogger(__name__)

FEATURES = "features"
"""The value [layers * tokens of this rank, batch, hidden] that is added to the hidden states after the next layers, a
part for each layer (deepstack); empty for text only."""

IMAGES = "images"
"""The side input with the images of a micro-batch; None for text only."""

REFUSED = dict.fromkeys(
    ("pixel_values_videos", "input_features", "input_values", "audio_values"),
    "for a tower of videos or sound, which is not built; text and images are: leave it out, or use the stock Trainer",
)
"""The entries of a batch for other towers."""

_CACHE = ("past_key_values", "cache", "cache_params", "cache_position", "use_cache")  # renamed by Transformers 5.24
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep")
DECODER_INPUTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "inputs_embeds",
    "labels",
    *_CACHE,
    *_OUTPUTS,
    "kwargs",
)
"""The arguments of a model of only text: its inputs, and switches."""


@dataclass(frozen=True, eq=False)
class Images:
    """The images of a micro-batch.

    Attributes:
        given: arguments of the code around the decoder.
        places: the positions in the sequence of the tokens of this rank and of its tensor-parallel ranks.
        padded: the length of the sequence with padding.
    """

    given: Mapping[str, Any]
    places: Tensor
    padded: int


IMAGE_SIDE = 448
"""Pixels of the side of a sample image, if the tower takes any size."""


class Towers:
    """The towers of a model.

    Args:
        base: the Transformers model.
        calls: the arguments of its layers.

    Attributes:
        parameters: of the towers, and of the code between towers and decoder.
        modules: the modules that hold them.
        names: of the entries of a batch for images and their places.
        problem: why images cannot be read; "" if they can.
        are_deep: whether features are also added after the first layers.
        deep_layers: the number of these layers, if the configuration has it; otherwise 0.
    """

    def __init__(self, base: Any, calls: LayerCalls) -> None:
        decoder, self._calls = calls.decoder, calls
        self._base = base
        self._table = base.get_input_embeddings()
        self._outer = base.get_submodule(decoder.path.rpartition(".")[0])
        apart = [decoder.module, self._table, base.get_output_embeddings()]
        inside = {id(module) for part in apart if part is not None for module in part.modules()}
        used = {parameter for part in apart if part is not None for parameter in part.parameters()}
        self.parameters = [parameter for parameter in base.parameters() if parameter not in used]
        around = {id(module) for module in base.modules() if any(each is decoder.module for each in module.modules())}
        self.modules = [module for module in base.modules() if id(module) not in inside | around]
        self.names = [name for name in _parameters_of(self._outer) if name not in (*DECODER_INPUTS, *REFUSED)]
        further = [name for name in _parameters_of(decoder.module) if name not in DECODER_INPUTS]
        self.are_deep, self._adds = any("deepstack" in name for name in further), False
        vision = getattr(base.config, "vision_config", None)
        self.deep_layers = len(getattr(vision, "deepstack_visual_indexes", None) or ()) if self.are_deep else 0
        refused = further and not self.are_deep
        self.problem = f"its decoder takes {' and '.join(further)} of them beside its embeddings" if refused else ""

    # -- batches ---------------------------------------------------------------------------------------------------

    def given(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries of a batch for images and their places."""
        return {name: batch[name] for name in self.names if batch.get(name) is not None}

    @property
    def are_trained(self) -> bool:
        """Whether any parameter of the towers is trained."""
        return any(parameter.requires_grad for parameter in self.parameters)

    def have_images(self, batch: Mapping[str, Any]) -> bool:
        """Returns whether towers run for a batch."""
        return any(map(_is_read_by_towers, self.given(batch).values()))

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Raises ValueError for a batch with images that cannot be read."""
        name, given = type(self._base).__name__, self.given(batch)
        if self.problem and self.have_images(batch):
            raise ValueError(
                f"the batch has {', '.join(given)}, and images are not built for {name}, on text alone it trains: "
                f"{self.problem}; leave them out, or use the stock Trainer"
            )
        positions = batch.get("position_ids")
        if positions is not None and positions.dim() > 2:
            raise ValueError(
                f"position_ids has {positions.dim()} dimensions, and 2 are built; leave it out: {name} computes "
                "positions of images itself, from the other entries of the batch"
            )

    def side_inputs(self, batch: Mapping[str, Any], cut: SequenceCut) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the tensors of layers by name, of the full sequence, if they differ from a text's; and the images of
        a micro-batch, with the masks of layers if the model's code makes masks of its own."""
        given, ids = self.given(batch), batch["input_ids"]
        side: dict[str, Any] = {IMAGES: None}
        if not given and (batch.get("attention_mask") is None or not self._counts_by_mask):
            return {}, side
        padded = cut.padded(ids.shape[1])
        places = cut.take(torch.arange(padded, device=ids.device), 0)
        whole = {name: batch.get(name) for name in ("input_ids", "attention_mask", "position_ids")} | given
        if self.have_images(batch):
            side[IMAGES] = Images(whole, places, padded)
        known = {name: value for name, value in whole.items() if not _is_read_by_towers(value)}
        embeddings = like_embeddings(self._base, ids)
        with torch.no_grad():
            found = self._run(known, lambda *args, **kwargs: embeddings)
        mask, positions = found.get("attention_mask"), found.get("position_ids")
        if mask is not None and mask is not batch.get("attention_mask"):
            if cut.cp_size > 1:
                raise ValueError(
                    f"cp_size={cut.cp_size}: {type(self._base).__name__} makes attention masks of {', '.join(given)}, "
                    "which is not built over a shared sequence; use cp_size=1 with tp_size or pp_size, or leave them "
                    "out of batches of text alone"
                )
            side["masks"] = self._calls.masks(ids, positions, mask)
        if positions is None or positions is batch.get("position_ids"):
            return {}, side
        found = self._calls.tensors(ids, positions)  # some layers get no positions then
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}, side

    @functools.cached_property
    def _counts_by_mask(self) -> bool:
        """Whether the code around the decoder also counts positions by the mask for text without images."""
        if self._table.weight.is_meta:
            return False
        mask = torch.tensor([[0, 1, 1]], device=self._table.weight.device)
        embeddings, positions = like_embeddings(self._base, mask), None
        known = {"input_ids": torch.zeros_like(mask), "attention_mask": mask}
        try:
            with torch.no_grad():
                positions = self._run(known, lambda *args, **kwargs: embeddings).get("position_ids")
        except Exception as error:  # code that does not run without images
            logger.debug("positions by the mask of text: the code around the decoder cannot run", exc_info=error)
        plain = torch.arange(3, device=mask.device)  # from another start they count the same
        return positions is not None and bool((positions - positions[..., :1] != plain).any())

    # -- cost ------------------------------------------------------------------------------------------------------

    @property
    def work(self) -> float:
        """The elements of matrices that patches of images meet for each of their tokens in the text; a third for towers
        that are not trained, which run only forward."""
        tables = {module.weight for module in self.modules if isinstance(module, nn.Embedding)}
        matrices = (p for module in self.modules for p in module.parameters(recurse=False) if p.dim() > 1)
        size = sum(p.numel() for p in matrices if p not in tables)
        return size * _patches_per_token(self._base.config) / (1 if self.are_trained else 3)

    def sample(self, count: int) -> Images:
        """Returns square images, without places: pixels on the device of the model, sizes on the host. They have the
        side that the tower takes, or `IMAGE_SIDE`.

        Raises:
            ValueError: the model reads images in another form.
        """
        named = inspect.signature(getattr(self._outer, "get_image_features", lambda: None)).parameters
        vision = getattr(self._base.config, "vision_config", None)
        needed = [
            name for name, each in named.items() if each.default is each.empty and each.kind is not each.VAR_KEYWORD
        ]
        side: Any = getattr(vision, "image_size", IMAGE_SIDE)
        patch: Any = getattr(vision, "patch_size", None)
        side, patch = (each[0] if isinstance(each, (list, tuple)) else each for each in (side, patch))
        is_known = {*needed} <= {"pixel_values", "image_sizes", "image_grid_thw"} and patch is not None
        if self.problem or not is_known or "pixel_values" not in named or "pixel_attention_mask" in named:
            why = self.problem or f"its code reads {', '.join(needed) or 'none'} for images, or their values"
            raise ValueError(f"the tower of {type(self._base).__name__} is not counted: {why}")
        device = self.parameters[0].device
        if "image_grid_thw" in named:
            high = max(1, IMAGE_SIDE // (patch * (merge := getattr(vision, "spatial_merge_size", 2)))) * merge
            channels: Any = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
            width = channels * getattr(vision, "temporal_patch_size", 1) * patch**2
            pixels = torch.empty(count * high * high, width, device=device)
            return Images(
                {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, high, high]] * count)}, pixels, 0
            )
        pixels = torch.empty(count, 3, side, side, device=device)
        sizes = {"image_sizes": torch.tensor([[side, side]] * count)} if "image_sizes" in needed else {}
        return Images({"pixel_values": pixels, **sizes}, pixels, 0)

    def share_of(self, batch: Mapping[str, Any]) -> float:
        """Returns the part of the tokens of a batch that are of images. Waits for the device."""
        config = self._base.config
        return float((batch["input_ids"] == getattr(config, "image_token_id", None)).float().mean())

    def features(self, images: Images) -> list[Tensor]:
        """Returns the features of images [tokens of images, hidden]: the ones among the embeddings, and the ones added
        after each layer."""
        found = self._outer.get_image_features(**images.given)
        each = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return [torch.cat([leaf.flatten(0, -2) for leaf in tree_leaves(value)]) for value in each]

    # -- the operator ----------------------------------------------------------------------------------------------

    def trace(self, opaque_calls: OpaqueCalls, decoder: Any, table: Any) -> None:
        """Makes a skeleton of the model call its decoder with embeddings that have passed through an opaque call; finds
        a problem if the embeddings are not the looked-up ones.

        Args:
            opaque_calls: of the trace.
            decoder: of the skeleton.
            table: of the skeleton.
        """
        looked_up: list[Any] = []
        look_up, decode = table.forward, decoder.forward

        def recording(*args: Any, **kwargs: Any) -> Any:
            looked_up.append(look_up(*args, **kwargs))
            return looked_up[-1]

        def merging(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("inputs_embeds")
            if len(looked_up) != 1 or given is not looked_up[0]:
                self.problem = self.problem or "its code computes with embeddings before its decoder is called"
            elif not self.problem:
                kwargs["inputs_embeds"] = OPS.unary(given, opaque_calls.add(CallKind.TOWERS, "", declare=self.declare))
            return decode(*args, **kwargs)

        table.forward, decoder.forward = recording, merging

    def declare(self, b: Builder, name: str, x: str) -> str:
        """Adds the operator that puts features of images in their places among the embeddings.

        Args:
            b: of the embedding unit.
            name: of the operator.
            x: the name of the embeddings [tokens of this rank, batch, hidden].
        """
        drops = any(_drops(module) for module in self.modules)

        def merge(x: Tensor, images: Images | None) -> tuple[Tensor, ...]:
            merged = [x.view_as(x)] if images is None else self._merge(x, images, b.tp.rank)
            features = [torch.cat([x[:0], *merged[1:]])] if self.are_deep else []
            return (merged[0], *features)

        b.modules_run_as_is += self.modules
        return b.autograd_outputs(
            name,
            merge,
            (name, FEATURES) if self.are_deep else (name,),
            x,
            side=(IMAGES,),
            uses=self.parameters,
            on_shard=True,
            draws=(lambda: self._outer.training) if drops else None,
            compiles=False,
        )[0]

    def leave_idle(self, b: Builder) -> None:
        """Places the towers that no operator reads, frozen as in Transformers, which gives them no gradient."""
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        b.record_cut(self.parameters, COPIED)

    def _merge(self, x: Tensor, images: Images, rank: int) -> list[Tensor]:
        """Returns the embeddings, and the features that are added after the first layers, one after the other. On the
        meta device, whose ids have no values, features take the first places."""
        if x.is_meta:
            first, *deep = (each[: x[..., 0].numel()].to(x.dtype) for each in self.features(images))
            rest = x.flatten(0, 1)[len(first) :]
            return [
                torch.cat([each, others]).view_as(x) for each, others in [(first, rest), *((d, 0 * rest) for d in deep)]
            ]
        mine = images.places[rank * len(x) :][: len(x)]
        length = images.given["input_ids"].shape[1]
        whole = x.new_zeros(images.padded, *x.shape[1:]).index_copy(0, mine, x)
        embeddings = whole[:length].transpose(0, 1)
        found = self._run(images.given, lambda *args, **kwargs: embeddings)
        padding = (0, 0, 0, 0, 0, images.padded - length)
        values = [found["inputs_embeds"], *found.get(FEATURES, ())]
        return [functional.pad(value.transpose(0, 1), padding)[mine] for value in values]

    def _run(self, given: Mapping[str, Any], look_up: Callable[..., Tensor]) -> dict[str, Any]:
        """Runs the code around the decoder up to the decoder's call; returns the arguments of the call."""
        found: dict[str, Any] = {}

        def decode(*args: Any, **kwargs: Any) -> Any:
            found.update(kwargs)
            raise Enough

        decoder = self._calls.decoder.module
        with _forward(self._table, look_up), _forward(decoder, decode), contextlib.suppress(Enough):
            stock_forward(self._outer)(**given)
        further = [
            name
            for name, value in found.items()
            if name not in DECODER_INPUTS and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        ]
        if further and self.are_deep:
            found[FEATURES] = self._features(found, further)
        elif further or "inputs_embeds" not in found:
            raise ValueError(
                f"images are not built for {type(self._base).__name__}: its decoder takes "
                f"{' and '.join(further) or 'no embeddings'}; leave them out, or use the stock Trainer"
            )
        return found

    def _features(self, found: Mapping[str, Any], further: Sequence[str]) -> list[Tensor]:
        """Returns the values that the decoder's code adds to the hidden states after the first layers [batch, sequence,
        hidden], layer by layer. `further` names the decoder's arguments that only images bring. Refuses code that does
        more."""
        embeddings = found["inputs_embeds"]
        zeros, ones = torch.zeros_like(embeddings), torch.ones_like(embeddings)
        entered = self._entered(found, zeros)
        features = [hidden for hidden, _ in entered[1:]]
        while features and features[-1] is zeros:
            features.pop()
        if not self._adds:  # looked at once, since a look waits for the device
            with torch.no_grad():
                plain = self._entered({name: value for name, value in found.items() if name not in further}, ones)
                moved = self._entered(found, ones)
                sums = [embeddings, *(ones if value is zeros else ones + value for value, _ in entered[1:])]
                self._adds = all(
                    torch.equal(hidden, total) and all(map(torch.equal, given, usual))
                    for (hidden, given), (_, usual), total in zip(moved, plain, sums, strict=True)
                )
            if not self._adds or any(hidden is not ones for hidden, _ in plain[1:]):
                raise ValueError(
                    f"images are not built for {type(self._base).__name__}: its decoder does more with "
                    f"{' and '.join(further)} than add them behind layers; leave them out, or use the stock Trainer"
                )
        return features

    def _entered(self, given: Mapping[str, Any], left: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        """Runs the decoder's code with stubs for layers, which return `left`; returns for each layer the hidden states
        that enter, and the layer's further tensors."""
        entered: list[tuple[Tensor, list[Tensor]]] = []
        decoder = self._calls.decoder

        def called(number: int, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> Tensor:
            leaves = tree_leaves((args, kwargs))
            entered.append((hidden, [leaf for leaf in leaves if isinstance(leaf, Tensor)]))
            if number + 1 == len(decoder.layers):
                raise Enough
            return left

        decoder.run(called, given)
        return entered


@contextlib.contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Returns the context in which a module has another forward."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _parameters_of(module: nn.Module) -> list[str]:
    return list(inspect.signature(stock_forward(module)).parameters)


def _is_read_by_towers(value: Any) -> bool:
    """Returns whether an entry of a batch is only for towers, as pixels are; sizes and kinds of tokens are not."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_read_by_towers, value))
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def _patches_per_token(config: Any) -> float:
    """Returns the patches of an image for each of its tokens in the text, by the names that configurations have."""
    vision = config.vision_config

    def value(name: str) -> Any:
        return getattr(config, name, None) or getattr(vision, name, None)

    for name, power in (("spatial_merge_size", 2), ("scale_factor", 2), ("downsample_ratio", -2)):
        if value(name):
            return float(value(name)) ** power
    tokens = getattr(config, "mm_tokens_per_image", None)
    return float((vision.image_size // vision.patch_size) ** 2 / tokens) if tokens else 1.0


def _drops(module: Any) -> bool:
    """Returns whether a module of a tower draws random numbers in training."""
    rates = [getattr(module, name, 0.0) for name in ("p", "dropout", "attention_dropout", "dropout_p", "drop_prob")]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
