"""A family derived from a model: units like a declared family's, without a declaration.

In:   a causal language model of Transformers, or a model with the same structure.
Out:  the units of the model, and the side inputs of its batches.
Must hold: the traced code is the code in use: patched forwards, options and all. A model that cannot be derived is
refused with the reason. Layers with equal code, options and arguments share a trace.

    arguments of layers -> trace -> placements -> segment plan -> operators
"""

import contextlib
import hashlib
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_helix.models.derived.family import Family, check_cuts
from hf_helix.models.derived.model_code import forward_of, has_stock_loss, other_code
from hf_helix.models.derived.segment_plans import SegmentPlans
from hf_helix.models.derived.towers import DECODER_INPUTS, FEATURES, REFUSED, Towers
from hf_helix.models.graph.attention import causal_masks
from hf_helix.models.graph.balance import BALANCE, Balance, add_part, balance_of, balance_side_inputs
from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import LossTweaks, ParallelContext
from hf_helix.models.graph.experts import check_expert_count, expert_side_inputs, is_experts
from hf_helix.models.lowering.lower import Lowering
from hf_helix.models.placement.value_placement import FULL
from hf_helix.models.stock.batch_inputs import SequenceCut, form_of
from hf_helix.models.stock.causal_lm import has_towers, layer_configs, text_part
from hf_helix.models.trace.blocks import Block
from hf_helix.models.trace.calls import LayerCalls
from hf_helix.models.trace.opaque_calls import CallKind
from hf_helix.models.trace.trace import (
    HANDED,
    SEEN,
    TOKEN_POSITIONS,
    Underivable,
)
from hf_helix.operators.base import Tensors
from hf_helix.operators.units.unit import Unit

T = TypeVar("T")

logger = logging.getLogger(__name__)

DOCUMENTS_OF_KERNELS = ("seq_idx", "cu_seq_lens_q")
OF_DOCUMENTS = (
    "by which Transformers keeps packed documents apart in recurrent layers, which is not built: use a row for each "
    "document, or a collator that gives position_ids alone, with which states run over the ends of documents, as in "
    "Transformers"
)

DECLARE = (
    "use a class that `hf-helix models` calls proven, or the stock Trainer for this class; or pp_size, if only tp_size "
    "or cp_size is refused; or describe its decoder layer in a subclass of hf_helix.models.derived.family.Family, and "
    "call hf_helix.register_model(YourFamily()), as docs/adding_a_model.md shows"
)


def check_heads(config: Any, tp_size: int) -> None:
    """Raises ValueError, with a value that works, unless ranks have equal numbers of heads in every layer; several
    ranks may share a key-value head."""
    config = config.get_text_config()
    names = {"attention heads": "num_attention_heads", "key-value heads": "num_key_value_heads"}
    for layer in layer_configs(config):
        counts = {words: getattr(layer, name, None) for words, name in names.items()}
        heads = {words: count for words, count in counts.items() if isinstance(count, int)}
        if heads:
            check_cuts(tp_size, heads, {"vocab_size": config.vocab_size}, shared=("key-value heads",))


class DerivedFamily(Family):
    """The family of one model, which has all parameters.

    Raises:
        ValueError: the model cannot be derived; the text has the reason and the way to declare a family.
    """

    needs_proof = True

    def __init__(self, base: Any) -> None:
        self.model_class = type(base).__name__
        self.traced = {id(module): forward_of(module) for module in base.modules()}
        with refusing(base):
            if getattr(base.config, "is_encoder_decoder", False):
                raise Underivable("it has an encoder in front of its decoder, and only decoders are built")
            if has_towers(base) and not has_stock_loss(base):
                raise Underivable("it has a loss of its own above embeddings that its towers may change")
            self._balance: Balance | None = None
            self._has_head = base.get_output_embeddings() is not None
            self.plans = SegmentPlans(base, self._attempt)
            self.plans.follow(base)
            self._read_masks()
            self.towers = self.plans.towers = Towers(base, self.calls) if has_towers(base) else None
            self._has_experts = bool(self._expert_counts())
            documents = dict.fromkeys(DOCUMENTS_OF_KERNELS, OF_DOCUMENTS) if self.is_recurrent else {}
            further = _further_inputs(base, [] if self.towers is None else self.towers.names)
            self.unread = {**further, **documents, **({} if self.towers is None else REFUSED)}

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Returns None: a copy of the model, which refers to this family, has a family of its own."""

    def __reduce__(self) -> Any:
        return type(None), ()

    def _attempt(self, number: int) -> None:
        """Declares a layer for one rank, of which nothing is kept."""
        try:
            self._declared(Builder("layer", f"layers.{number}", ParallelContext()), number, self.plans.layer(number))
        except Underivable:
            raise
        except Exception as error:  # of weights in 4 bits before they are opened, or refused when the model is declared
            logger.debug("layer %s is not declared", number, exc_info=error)

    @property
    def calls(self) -> LayerCalls:
        """The arguments of the layers."""
        return self.plans.calls

    def _read_masks(self) -> None:
        """Reads how layers are masked, after their code is followed."""
        masks = [mask for call in self.calls.calls for mask in call.masks]
        by_positions = {mask.by_positions for mask in masks}
        if len(by_positions) > 1:
            raise Underivable("only some of its layers tell packed documents apart")
        self.packs_by_positions = by_positions != {False}
        self._windows = {mask.sliding_window for mask in masks}
        self.is_recurrent = any(call.hides_padding for call in self.calls.calls)

    def notices(self, model: Any, tp_size: int) -> list[str]:
        """Returns a line for each block: its layers, the reason, and the cost. `model` is full."""
        layers: dict[Block, list[int]] = {}
        for number, block in self.plans.blocks():
            layers.setdefault(block, []).append(number)
        total = sum(parameter.numel() for parameter in model.parameters())
        lines = []
        for block, numbers in layers.items():
            own = [p for number in numbers for p in self.plans.layer(number).get_submodule(block.path).parameters()]
            share = f"{sum(parameter.numel() for parameter in own) / total:.0%} of the parameters"
            lines.append(block.line(f"{len(numbers)} of {len(self.plans.layers)} layers, {share}", tp_size))
        return lines

    # -- units -----------------------------------------------------------------------------------------------------

    def layers(self, model: Any) -> Sequence[nn.Module]:
        return list(self.plans.layers)

    def decoder(self, model: Any) -> nn.Module:
        return self.calls.decoder.module

    def final_norm(self, model: Any) -> nn.Module:
        raise NotImplementedError

    def layer(self, b: Builder, layer: Any) -> Unit:
        number = next(index for index, other in enumerate(self.plans.layers) if other is layer)

        def declare() -> Unit:
            graph = self.plans.of_layer(number, b.tp.size, b.tp.rank).trace
            for name, parameter in layer.named_parameters():
                if not graph.trains(name):
                    parameter.requires_grad_(False)  # as in Transformers: without gradient and without a step
            return self._declared(b.anew(), number, layer)

        return declare() if b.cp.size > 1 else self.plans.following(number, declare)

    def _declared(self, b: Builder, number: int, layer: nn.Module) -> Unit:
        plan, balance = self.plans.of_layer(number, b.tp.size, b.tp.rank), self._balance
        named = list(layer.named_parameters())
        start = {plan.trace.hidden: b.input("x")}
        sums = None if balance is None else b.input(BALANCE)
        features = b.input(f"{FEATURES}.before") if self._has_features else None
        if plan.trace.handed is not None:
            given = b.input(f"{HANDED}.before", is_plain=True)
            start |= {node: given for node, name in plan.trace.given.items() if name == HANDED}
        lowering = Lowering(plan, b, layer, start, None if balance is None else balance.choices)
        x, parts = lowering.run(), lowering.parts
        if features is not None:
            x, features = b.autograd_outputs("deepstack", _add_features, ("deepstack", FEATURES), x, features)
        more = () if features is None else (features,)
        handed = () if plan.handed is None else (b.indices(HANDED, _same, lowering.value(plan.handed, FULL)),)
        b.keep_unread([p for name, p in named if not plan.trace.reads(name)])
        if sums is None:
            return b.build(x, *more, *handed)
        routers = self.plans.routers_in(layer)
        if len(parts) != len(routers) or len(routers) > 1:
            raise Underivable(
                f"output_router_logits=True adds a loss for the balance of its experts, which reads {len(routers)} "
                f"routers of {b.label}, of which {len(parts)} are followed"
            )
        return b.build(x, add_part(b, sums, parts[0] if parts else None), *more, *handed)

    def units(
        self,
        model: Any,
        sharing: ParallelContext,
        loss_tweaks: LossTweaks | None = None,
        layer_indices: Collection[int] | None = None,
    ) -> list[Unit]:
        with refusing(model):
            self.plans.follow_cut(model, sharing.tp)
            self._read_masks()
            ends = loss_tweaks is not None and loss_tweaks.ends_at_decoder
            self._balance = None if ends else balance_of(model)
            self.plans.ends_at_decoder = not self._has_head or ends
            return super().units(model, sharing, loss_tweaks, layer_indices)

    def layer_key(self, model: Any, index: int) -> str:
        return self.plans.key(index)

    def unread_parameters(self, model: Any) -> Collection[nn.Parameter]:
        return self.plans.unread_parameters(model)

    def embedding(self, b: Builder, model: Any) -> Unit:
        plan, _ = self.plans.of_ends(model, b.tp.size, b.tp.rank)
        x = Lowering(plan, b, model, {}).run()
        if self.towers is not None and all(opaque.kind is not CallKind.TOWERS for opaque in plan.trace.opaque_calls):
            self.towers.leave_idle(b)
        has_handed = self.plans.of_layer(0, 1, 0).handed is not None
        handed = (b.indices(HANDED, lambda ids: ids.new_empty(0), side=("ids",)),) if has_handed else ()
        features = (FEATURES,) if self._has_features else ()
        return b.build(x, *self.balance_start(b, model), *features, *handed)

    def token_shape(self, model: Any) -> tuple[int, ...]:
        return self.plans.token_shape

    def empty(
        self, model: Any, tp_size: int, ends_at_decoder: bool = False, dtype: torch.dtype | None = None
    ) -> Callable[[Mapping[str, Any]], Tensors]:
        make, trace = super().empty(model, tp_size, ends_at_decoder, dtype), self.plans.of_layer(0, 1, 0).trace
        handed = trace.handed
        if self._has_features:  # after the first pipeline stage none are left
            return lambda side: (*(made := make(side)), made[0].new_empty(0, *made[0].shape[1:]))
        if handed is None:
            return make

        def make_more(side: Mapping[str, Any]) -> Tensors:
            sizes = [*side["ids"].shape, *(trace.size(size, side["length"]) for size in handed.meta["val"].shape[2:])]
            return (*make(side), side["ids"].new_empty(sizes, dtype=handed.meta["val"].dtype))

        return make_more

    @property
    def _has_features(self) -> bool:
        """Whether layers pass on features of images that are added after the first layers."""
        towers = None if self.plans.ends_at_decoder else self.towers
        return towers is not None and towers.are_deep and not towers.problem

    @property
    def first_least(self) -> int:
        return self.towers.deep_layers if self.towers is not None and self._has_features else 0

    def _last(self, b: Builder, x: str) -> str:
        """Returns the output of the last layer, after which no features are left."""
        return b.autograd(f"{FEATURES}.end", _same, x, b.input(FEATURES)) if self._has_features else x

    def loss(self, b: Builder, model: Any, x: str) -> str:
        x = self._last(b, x)
        _, plan = self.plans.of_ends(model, b.tp.size, b.tp.rank)
        logits = Lowering(plan, b, model, {plan.start[0]: x}).run(FULL)
        return b.loss("loss", logits, model.get_output_embeddings().weight.shape[0])

    def decoder_output(self, b: Builder, model: Any, x: str) -> str:
        x = self._last(b, x)
        _, plan = self.plans.of_ends(model, b.tp.size, b.tp.rank)
        output = Lowering(plan, b, model, {plan.start[0]: x}).run()
        return b.autograd("output", _same, x, compiles=False) if output == x else output

    def balance(self, model: Any) -> Balance | None:
        """Returns the load-balancing loss of the latest units."""
        return self._balance

    def check_context(self, model: Any) -> None:
        """Does nothing: the declaration of attention refuses a model that cannot be cut over context-parallel ranks."""

    def digest(self, model: Any) -> str:
        """Returns a fingerprint of the model's computation."""
        with refusing(model):
            text = [type(model).__qualname__, repr(balance_of(model)), *self.plans.describe(model)]
            return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    # -- checks ----------------------------------------------------------------------------------------------------

    def check(self, config: Any, tp_size: int) -> None:
        check_heads(config, tp_size)

    def check_experts(self, model: Any, sharing: ParallelContext) -> None:
        counts = self._expert_counts()
        if not counts and self.plans.blocks() and (sharing.ep_size > 1 or sharing.capacity_factor):
            raise ValueError(
                f"ep_size={sharing.ep_size} with expert_capacity_factor={sharing.capacity_factor} is for fused "
                f"experts, and those of {type(model).__name__} run as they are, in a block that every rank has whole; "
                "use ep_size=1 and expert_capacity_factor=None"
            )
        if not counts:
            super().check_experts(model, sharing)
        for count in counts:
            check_expert_count(count, sharing)

    def _expert_counts(self) -> set[int]:
        as_is = [self.plans.layer(number).get_submodule(block.path) for number, block in self.plans.blocks()]
        inside = {id(module) for block in as_is for module in block.modules()}
        modules = [m for layer in self.plans.layers for m in layer.modules() if is_experts(m)]
        modules = [module for module in modules if id(module) not in inside]
        return {len(m.get_parameter("down_proj")) for m in modules}

    # -- side inputs -----------------------------------------------------------------------------------------------

    def side_modules(self, model: Any) -> Sequence[nn.Module]:
        tables = {model.get_input_embeddings(), model.get_output_embeddings()}
        others = _modules_besides(self.calls.decoder.module, {*self.plans.layers, *tables})
        return [module for module in others if not list(module.children())]

    def side_inputs(
        self, model: Any, batch: Mapping[str, Any], cut: SequenceCut, loss_scale: Tensor, batch_scale: float = 1.0
    ) -> dict[str, Any]:
        side = super().side_inputs(model, batch, cut, loss_scale, batch_scale)
        if self.calls.has_rows:
            side[TOKEN_POSITIONS] = side[TOKEN_POSITIONS].expand_as(side["ids"])
        if self.is_recurrent:
            mask = batch.get("attention_mask")
            is_hiding = mask is not None and mask.dim() == 2 and form_of(batch).is_masked
            side[SEEN] = cut.take(batch["attention_mask"], 1).t() if is_hiding else None
        if self.towers is not None:
            tensors, of_images = self.towers.side_inputs(batch, cut)
            side |= of_images | (tensors if cut.cp_size == 1 else self._taken(tensors, batch["input_ids"], cut))
        if not self._has_experts:
            return side
        balance = {} if self._balance is None else balance_side_inputs(batch, batch_scale)
        return {**side, **expert_side_inputs(batch, cut), **balance}

    def loss_adds_up(self, model: Any) -> bool:
        # Attention that is not causal sees later tokens in batches without padding, so a row may depend on the others;
        # a block may do so in any way.
        modules = (module for layer in self.plans.layers for module in layer.modules())
        is_causal = all(getattr(module, "is_causal", True) for module in modules)
        return super().loss_adds_up(model) and is_causal and not self.plans.blocks()

    def count_positions(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        counted = None if ids.is_meta or self.calls.count is None else self.calls.count(ids, mask)
        return super().count_positions(ids, mask) if counted is None else counted

    def attention_inputs(
        self, model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor, documents: Tensor | None
    ) -> dict[str, Any]:
        masks = causal_masks(model, self._windows, ids, mask, documents)
        return {**self.calls.tensors(ids, positions, mask), "masks": masks, "positions": positions}

    def context_inputs(self, model: Any, ids: Tensor, positions: Tensor, cut: SequenceCut) -> dict[str, Any]:
        return self._taken(self.calls.tensors(ids, positions), ids, cut)

    def num_positions(self, model: Any) -> int | None:
        return self.calls.num_positions

    def _taken(self, tensors: Mapping[str, Tensor], ids: Tensor, cut: SequenceCut) -> dict[str, Any]:
        """Returns this rank's part of the tensor arguments of layers."""
        inputs = {}
        dims = {given.name: given.along_tokens for call in self.calls.calls for given in call.given}
        for name, tensor in tensors.items():
            along = [dim for dim in dims[name] if tensor.shape[dim] == ids.shape[1]]
            inputs[name] = cut.take(tensor, along[0]) if along else tensor
        return inputs


def _further_inputs(base: Any, read: Collection[str]) -> dict[str, str]:
    """Returns the tensors that a model takes beside ids, masks and positions, with what to do instead; `read` are those
    that towers read."""
    names = inspect.signature(base.forward).parameters.keys() - {*DECODER_INPUTS, *read}
    named = f"which {type(base).__name__} would read and the cut model would not"
    instead = f"{named}: leave it out, or use the stock Trainer"
    types = f"{named}: leave it out, tokenizer(..., return_token_type_ids=False), or use the stock Trainer"
    return {name: types if name == "token_type_ids" else instead for name in sorted(names)}


def _modules_besides(module: nn.Module, others: Collection[nn.Module | None]) -> list[nn.Module]:
    """Returns a module and all modules inside, without some others and what is inside of these."""
    found, left = dict[nn.Module, None](), [module]
    while left:
        each = left.pop()
        if each not in others and each not in found:
            found[each] = None
            left += reversed(list(each.children()))
    return list(found)


def _add_features(x: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    count = min(len(x), len(features))
    return (x + features[:count] if count else x.view_as(x)), features[count:]


def _same(value: Tensor, *others: Tensor) -> Tensor:
    return value.view_as(value)


@contextlib.contextmanager
def refusing(model: Any) -> Iterator[None]:
    """Returns the context in which a refusal names the class and an alternative."""
    try:
        yield
    except Underivable as error:
        own = not type(model).__module__.startswith("transformers.")
        instead = other_code(model, own) or text_part(model) or DECLARE
        raise ValueError(f"{type(model).__name__} cannot be derived: {error}; {instead}") from error
