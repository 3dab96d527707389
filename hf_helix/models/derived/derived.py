"""A family derived from a model: units like a declared family's, without a declaration.

In:   a causal language model of Transformers, or a model with the same structure.
Out:  the units of the model, and the side inputs of its batches.
Must hold: the traced code is the code in use: patched forwards, options and all. A model that cannot be derived is
refused with the reason. Layers with equal code, options and arguments share a trace.

    arguments of layers -> trace -> placements -> segment plan -> operators
"""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from hf_helix.models.derived.family import Family, check_cuts
from hf_helix.models.derived.model_code import forward_of, has_stock_loss, other_code
from hf_helix.models.derived.towers import DECODER_INPUTS, FEATURES, REFUSED, Towers
from hf_helix.models.graph.attention import causal_masks
from hf_helix.models.graph.balance import BALANCE, Balance, add_part, balance_of, balance_side_inputs, routers_of
from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import LossTweaks, ParallelContext
from hf_helix.models.graph.experts import check_expert_count, expert_side_inputs, is_experts
from hf_helix.models.lowering.lower import Lowering
from hf_helix.models.lowering.segment_function import Share
from hf_helix.models.lowering.segment_plan import SegmentPlan
from hf_helix.models.placement.inference import infer_placements
from hf_helix.models.placement.rules import Placements
from hf_helix.models.placement.value_placement import FREE, FULL, SHARD, NeedsInlining, ValuePlacement
from hf_helix.models.stock.alike import description
from hf_helix.models.stock.batch_inputs import SequenceCut, form_of
from hf_helix.models.stock.causal_lm import has_towers, layer_configs, text_part
from hf_helix.models.trace.blocks import Block, Blocks
from hf_helix.models.trace.calls import LayerCalls
from hf_helix.models.trace.opaque_calls import DTYPE, OPS, CallKind, OpaqueCalls, skeleton_of
from hf_helix.models.trace.trace import (
    EXAMPLE_BATCH,
    EXAMPLE_LENGTH,
    HANDED,
    SEEN,
    TOKEN_POSITIONS,
    ComputesWithMask,
    Given,
    HandsOn,
    ModuleTrace,
    Underivable,
    args_of,
    trace,
)
from hf_helix.operators.base import Tensors
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.units.unit import Unit

T = TypeVar("T")

logger = logging.getLogger(__name__)

POSITIONS = {
    False: Given(TOKEN_POSITIONS, (1, EXAMPLE_LENGTH), torch.int64, (1,)),
    True: Given(TOKEN_POSITIONS, (EXAMPLE_BATCH, EXAMPLE_LENGTH), torch.int64, (0, 1)),
}
"""The positions of tokens as an argument of the full model, alike for all rows and for each row."""

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
        self._width = getattr(base.config.get_text_config(), "hidden_size", None)
        self._num_positions = getattr(base.config.get_text_config(), "max_position_embeddings", None) or 0
        with refusing(base):
            if has_towers(base) and not has_stock_loss(base):
                raise Underivable("it has a loss of its own above embeddings that its towers may change")
            self._traces: dict[tuple[str, frozenset[str]], ModuleTrace] = {}
            self._kinds: dict[tuple[str, int, int], SegmentPlan] = {}
            self._blocks: dict[str, Blocks] = {}
            self._routers = {id(router.module): router.index for router in routers_of(base)}
            self._balance: Balance | None = None
            self._call_options: dict[str, Any] = {}
            self._has_head = base.get_output_embeddings() is not None
            self._ends_at_decoder = not self._has_head
            self._follow_layers(base)
            self._has_blocks = bool(self.blocks())
            self._has_experts = bool(self._expert_counts())
            self._ends: dict[tuple[bool, int, int], tuple[SegmentPlan, SegmentPlan]] = {}
            documents = dict.fromkeys(DOCUMENTS_OF_KERNELS, OF_DOCUMENTS) if self.is_recurrent else {}
            self.towers = Towers(base, self.calls) if has_towers(base) else None
            further = _further_inputs(base, [] if self.towers is None else self.towers.names)
            self.unread = {**further, **documents, **({} if self.towers is None else REFUSED)}

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Returns None: a copy of the model, which refers to this family, has a family of its own."""

    def __reduce__(self) -> Any:
        return type(None), ()

    def _follow_layers(self, base: Any) -> None:
        """Finds the arguments of layers: with masks as tensors if the code of a layer computes with a mask, and with a
        value that layers hand on. The code of each kind of layer is followed to its end, for one rank."""
        while True:
            try:
                self.calls = LayerCalls(base, **self._call_options)
                self._token_shape = self.token_shape(base)
                self._keys = [self._key(number) for number in range(len(self.calls.calls))]
                for number in self._firsts:
                    self._following(number, functools.partial(self._try, number))
                break
            except ComputesWithMask:
                if self._call_options:
                    raise
                self._call_options["makes_masks"] = True
            except HandsOn as hands_on:
                self._call_options["rest"] = (hands_on.given,)
            self._traces.clear()
            self._kinds.clear()
        masks = [mask for call in self.calls.calls for mask in call.masks]
        by_positions = {mask.by_positions for mask in masks}
        if len(by_positions) > 1:
            raise Underivable("only some of its layers tell packed documents apart")
        self.packs_by_positions = by_positions != {False}
        self._windows = {mask.sliding_window for mask in masks}
        self.is_recurrent = any(call.hides_padding for call in self.calls.calls)

    def _try(self, number: int) -> None:
        """Declares a layer for one rank, of which nothing is kept."""
        try:
            self._declared(Builder("layer", f"layers.{number}", ParallelContext()), number, self._layer(number))
        except Underivable:
            raise
        except Exception as error:  # of weights in 4 bits before they are opened, or refused when the model is declared
            logger.debug("layer %s is not declared", number, exc_info=error)

    def _follow_cut(self, model: Any, tp: Axis) -> None:
        """Follows the code of each kind of layer for tensor-parallel ranks; blocks that are found there may ask for
        masks as tensors."""
        try:
            for number in self._firsts:
                self._following(number, functools.partial(self._kind, number, tp.size, tp.rank))
        except ComputesWithMask:
            if self._call_options:
                raise
            self._call_options["makes_masks"] = True
            for known in (self._traces, self._kinds, self._ends):
                known.clear()
            self._follow_layers(model)
            self._follow_cut(model, tp)
        self._has_blocks = bool(self.blocks())

    def _following(self, number: int, make: Callable[[], T]) -> T:
        """Returns what `make` returns. As long as some code of a layer is not followed, its submodule becomes a
        block."""
        key, blocks = self._key(number), self._blocks_of(number)
        while True:
            try:
                return make()
            except Underivable as error:
                if not blocks.take(error):
                    raise
            self._traces = {each: graph for each, graph in self._traces.items() if each[0] != key}
            self._kinds = {each: plan for each, plan in self._kinds.items() if each[0] != key}

    def _blocks_of(self, number: int) -> Blocks:
        return self._blocks.setdefault(self._key(number), Blocks(self._layer(number)))

    def _layer(self, number: int) -> nn.Module:
        return self.calls.decoder.layers[number]

    @property
    def _firsts(self) -> list[int]:
        """The first layer of each kind."""
        return [self._keys.index(key) for key in dict.fromkeys(self._keys)]

    def blocks(self) -> list[tuple[int, Block]]:
        """Returns the blocks of all layers, each with the number of its layer."""
        return [(number, block) for number, key in enumerate(self._keys) for block in self._blocks[key].found.values()]

    def notices(self, model: Any, tp_size: int) -> list[str]:
        """Returns a line for each block: its layers, the reason, and the cost. `model` is full."""
        layers: dict[Block, list[int]] = {}
        for number, block in self.blocks():
            layers.setdefault(block, []).append(number)
        total = sum(parameter.numel() for parameter in model.parameters())
        lines = []
        for block, numbers in layers.items():
            own = [p for number in numbers for p in self._layer(number).get_submodule(block.path).parameters()]
            share = f"{sum(parameter.numel() for parameter in own) / total:.0%} of the parameters"
            lines.append(block.line(f"{len(numbers)} of {len(self.calls.calls)} layers, {share}", tp_size))
        return lines

    # -- units -----------------------------------------------------------------------------------------------------

    def layers(self, model: Any) -> Sequence[nn.Module]:
        return list(self.calls.decoder.layers)

    def decoder(self, model: Any) -> nn.Module:
        return self.calls.decoder.module

    def final_norm(self, model: Any) -> nn.Module:
        raise NotImplementedError

    def layer(self, b: Builder, layer: Any) -> Unit:
        number = next(index for index, other in enumerate(self.calls.decoder.layers) if other is layer)

        def declare() -> Unit:
            graph = self._kind(number, b.tp.size, b.tp.rank).trace
            for name, parameter in layer.named_parameters():
                if not graph.trains(name):
                    parameter.requires_grad_(False)  # as in Transformers: without gradient and without a step
            return self._declared(b.anew(), number, layer)

        return declare() if b.cp.size > 1 else self._following(number, declare)

    def _declared(self, b: Builder, number: int, layer: nn.Module) -> Unit:
        plan, balance = self._kind(number, b.tp.size, b.tp.rank), self._balance
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
        routers = self._routers_in(layer)
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
            self._follow_cut(model, sharing.tp)
            ends = loss_tweaks is not None and loss_tweaks.ends_at_decoder
            self._balance = None if ends else balance_of(model)
            self._ends_at_decoder = not self._has_head or ends
            return super().units(model, sharing, loss_tweaks, layer_indices)

    def layer_key(self, model: Any, index: int) -> str:
        return self._key(index)

    def unread_parameters(self, model: Any) -> Collection[nn.Parameter]:
        """Returns the parameters that no trace reads."""
        layers = self.calls.decoder.layers
        plans = [self._kind(index, 1, 0) for index in range(len(layers))]
        inside = [
            (parameter, plan.trace.reads(name))
            for layer, plan in zip(layers, plans, strict=True)
            for name, parameter in layer.named_parameters()
        ]
        ends, own = self._plans_of_ends(model, 1, 0), {parameter for parameter, _ in inside}
        outside = [
            (parameter, any(plan.trace.reads(name) for plan in ends))
            for name, parameter in model.named_parameters()
            if parameter not in own
        ]
        return {parameter for parameter, is_read in (*inside, *outside) if not is_read}

    def embedding(self, b: Builder, model: Any) -> Unit:
        plan, _ = self._plans_of_ends(model, b.tp.size, b.tp.rank)
        x = Lowering(plan, b, model, {}).run()
        if self.towers is not None and all(opaque.kind is not CallKind.TOWERS for opaque in plan.trace.opaque_calls):
            self.towers.leave_idle(b)
        has_handed = self._kind(0, 1, 0).handed is not None
        handed = (b.indices(HANDED, lambda ids: ids.new_empty(0), side=("ids",)),) if has_handed else ()
        features = (FEATURES,) if self._has_features else ()
        return b.build(x, *self.balance_start(b, model), *features, *handed)

    def token_shape(self, model: Any) -> tuple[int, ...]:
        # Projections may stand between the embedding and the layers, as in OPT-350M, or copies for several streams.
        (width,) = (self._width,) if isinstance(self._width, int) else super().token_shape(model)
        *streams, factor = self.calls.token_shape
        return (*streams, width if factor == width else factor * width)  # a norm's weight makes one feature all

    def empty(
        self, model: Any, tp_size: int, ends_at_decoder: bool = False, dtype: torch.dtype | None = None
    ) -> Callable[[Mapping[str, Any]], Tensors]:
        make, trace = super().empty(model, tp_size, ends_at_decoder, dtype), self._kind(0, 1, 0).trace
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
        towers = None if self._ends_at_decoder else self.towers
        return towers is not None and towers.are_deep and not towers.problem

    @property
    def first_least(self) -> int:
        return self.towers.deep_layers if self.towers is not None and self._has_features else 0

    def _last(self, b: Builder, x: str) -> str:
        """Returns the output of the last layer, after which no features are left."""
        return b.autograd(f"{FEATURES}.end", _same, x, b.input(FEATURES)) if self._has_features else x

    def loss(self, b: Builder, model: Any, x: str) -> str:
        x = self._last(b, x)
        _, plan = self._plans_of_ends(model, b.tp.size, b.tp.rank)
        logits = Lowering(plan, b, model, {plan.start[0]: x}).run(FULL)
        return b.loss("loss", logits, model.get_output_embeddings().weight.shape[0])

    def decoder_output(self, b: Builder, model: Any, x: str) -> str:
        x = self._last(b, x)
        _, plan = self._plans_of_ends(model, b.tp.size, b.tp.rank)
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
            text = [type(model).__qualname__, repr(balance_of(model))]
            for number in {self._key(index): index for index in range(len(self.calls.decoder.layers))}.values():
                plan = self._kind(number, 1, 0)
                text += [_described(plan.trace, plan.target), self._key(number)]
            pre, post = self._plans_of_ends(model, 1, 0)
            text += [_described(pre.trace, pre.target), _described(post.trace, post.target)]
            return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    # -- traces ----------------------------------------------------------------------------------------------------

    def _key(self, number: int) -> str:
        """Returns a text for the code, options, sizes and arguments of a layer."""
        return f"{description(self.calls.decoder.layers[number])}\n{self.calls.calls[number].key}"

    def _kind(self, number: int, size: int, rank: int) -> SegmentPlan:
        """Returns the segment plan of a layer, shared by all equal layers."""
        key = self._key(number)
        if (key, size, rank) not in self._kinds:
            placements = self._place(key, self._tracing(number), size, ValuePlacement(SHARD))
            graph = placements.trace
            start = [graph.hidden, *(node for node, name in graph.given.items() if name == HANDED)]
            self._kinds[key, size, rank] = SegmentPlan(placements, Share(size, rank), start, graph.result, graph.handed)
        return self._kinds[key, size, rank]

    def _place(
        self, key: str, make: Callable[[frozenset[str]], ModuleTrace], tp_size: int, hidden: ValuePlacement
    ) -> Placements:
        """Returns the placements of a trace, after tracing through the norms named by `NeedsInlining`."""
        inlined: frozenset[str] = frozenset()
        while True:
            try:
                return infer_placements(self._traced(key, make, inlined), tp_size, hidden)
            except NeedsInlining as needed:
                inlined |= {needed.path}

    def _traced(
        self, key: str, make: Callable[[frozenset[str]], ModuleTrace], inlined: frozenset[str] = frozenset()
    ) -> ModuleTrace:
        if (key, inlined) not in self._traces:
            self._traces[key, inlined] = make(inlined)
        return self._traces[key, inlined]

    def _tracing(self, number: int) -> Callable[[frozenset[str]], ModuleTrace]:
        return functools.partial(self._trace_layer, number)

    def _trace_layer(self, number: int, inlined: frozenset[str]) -> ModuleTrace:
        layer, call = self._layer(number), self.calls.calls[number]
        opaque_calls, skeleton = OpaqueCalls(inlined), skeleton_of(layer).train()
        enter = self._blocks_of(number).replace(skeleton, opaque_calls)
        recorded, are_tuples = opaque_calls.record(skeleton, self._routers_in(layer)), list[bool]()

        def run(module: Any, x: Tensor, given: Sequence[Tensor]) -> Any:
            args, kwargs = call.fill(dict(zip((g.name for g in call.given), given, strict=True)))
            recorded.clear()
            enter(x)
            result = module(x, *args, **kwargs)
            are_tuples.append(isinstance(result, tuple))
            rest, logits = self.calls.decoder.rest, [x for x in recorded if isinstance(x, Tensor)]
            (handed,) = result[1:] if rest else (None,)
            if isinstance(handed, Tensor) and not handed.is_floating_point() and rest == (None,):
                raise HandsOn(handed)
            if (handed is None) != (rest in ((), (None,))) or (handed is not None and handed.is_floating_point()):
                raise Underivable("its layers hand a second value from one to the next, which is not built")
            return (result[0] if isinstance(result, tuple) else result, handed, *logits)

        hidden = torch.empty((EXAMPLE_BATCH, EXAMPLE_LENGTH, *self._token_shape), dtype=DTYPE, device="meta")
        graph = trace(skeleton, opaque_calls, hidden, call.given, run)
        if graph.longest is not None and graph.longest < self._num_positions:
            # Which submodule has the code is not known: one after another becomes a block.
            reason = f"its code does something else for rows of more than {graph.longest} tokens"
            raise Underivable(reason, self._blocks_of(number).next_child())
        return dataclasses.replace(graph, is_tuple=are_tuples[-1])

    def _trace_model(self, model: Any, inlined: frozenset[str]) -> ModuleTrace:
        """Traces a full model with opaque layers, up to its logits or to the output of its decoder."""
        is_tuple = self._kind(0, 1, 0).trace.is_tuple
        opaque_calls, skeleton, decoder = OpaqueCalls(inlined), skeleton_of(model).train(), self.calls.decoder
        skeleton.config.output_router_logits = False  # the loss of routers is not in the logits
        vars(skeleton).pop("forward", None)  # refused elsewhere, or code above the decoder, such as TRL's fused head
        layers: Any = skeleton.get_submodule(decoder.prefix)
        for number, layer in enumerate(layers):
            opaque = opaque_calls.add(CallKind.LAYER, str(number))
            layer.forward = _as_opaque(opaque, is_tuple, decoder.rest)
        inside = {id(module) for module in layers.modules()}
        table = model.get_input_embeddings()
        opaque_calls.set_table(next(name for name, module in model.named_modules() if module is table), table)
        opaque_calls.replace(skeleton, skip=lambda module: id(module) in inside)
        for module in skeleton.modules():
            if "Rotary" in type(module).__name__ and id(module) not in inside:
                module.forward = lambda x, *args, **kwargs: (x, x)  # only layers use the result

        def run(module: Any, ids: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, None]:
            inner, outer = (module.get_submodule(path) for path in (decoder.path, decoder.path.rpartition(".")[0]))
            with self.calls.decoder.masks(outer), self.calls.decoder.masks(inner):
                called = inner if self._ends_at_decoder else module
                if self.towers is not None and called is not inner:
                    self.towers.trace(opaque_calls, inner, module.get_input_embeddings())
                result = called(input_ids=ids, position_ids=given[0], use_cache=False)
                return (result[0] if self._ends_at_decoder else result.logits), None

        ids = torch.zeros((EXAMPLE_BATCH, EXAMPLE_LENGTH), dtype=torch.long, device="meta")
        return trace(skeleton, opaque_calls, ids, [POSITIONS[self.calls.has_rows]], run)

    def _plans_of_ends(self, model: Any, size: int, rank: int) -> tuple[SegmentPlan, SegmentPlan]:
        key = self._ends_at_decoder, size, rank
        if key not in self._ends:
            name = "decoder" if self._ends_at_decoder else ""
            placements = self._place(name, functools.partial(self._trace_model, model), size, ValuePlacement(FREE))
            graph = placements.trace
            layers = [node for node in graph.nodes if graph.kind_of(node) is CallKind.LAYER]
            layers.sort(key=lambda node: int(graph.path_of(node)))
            for before, after in itertools.pairwise(layers):
                if args_of(after)[0] is not before:
                    raise Underivable("its forward computes something between two layers")
            share = Share(size, rank)
            first = args_of(layers[0])[0]
            self._ends[key] = (
                SegmentPlan(placements, share, [], first),
                SegmentPlan(placements, share, [layers[-1]], graph.result),
            )
        return self._ends[key]

    # -- checks ----------------------------------------------------------------------------------------------------

    def check(self, config: Any, tp_size: int) -> None:
        check_heads(config, tp_size)

    def check_experts(self, model: Any, sharing: ParallelContext) -> None:
        counts = self._expert_counts()
        if not counts and self._has_blocks and (sharing.ep_size > 1 or sharing.capacity_factor):
            raise ValueError(
                f"ep_size={sharing.ep_size} with expert_capacity_factor={sharing.capacity_factor} is for fused "
                f"experts, and those of {type(model).__name__} run as they are, in a block that every rank has whole; "
                "use ep_size=1 and expert_capacity_factor=None"
            )
        if not counts:
            super().check_experts(model, sharing)
        for count in counts:
            check_expert_count(count, sharing)

    def _routers_in(self, layer: nn.Module) -> list[tuple[str, int]]:
        """Returns the path of each router in a layer, with the index of the logits among its outputs."""
        named = layer.named_modules()
        return [(path, self._routers[id(module)]) for path, module in named if id(module) in self._routers]

    def _expert_counts(self) -> set[int]:
        as_is = [self._layer(number).get_submodule(block.path) for number, block in self.blocks()]
        inside = {id(module) for block in as_is for module in block.modules()}
        modules = [m for layer in self.calls.decoder.layers for m in layer.modules() if is_experts(m)]
        modules = [module for module in modules if id(module) not in inside]
        return {len(m.get_parameter("down_proj")) for m in modules}

    # -- side inputs -----------------------------------------------------------------------------------------------

    def side_modules(self, model: Any) -> Sequence[nn.Module]:
        layers = set(map(id, self.calls.decoder.layers))
        own = {id(m) for layer in self.calls.decoder.layers for m in layer.modules()}
        tables = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
        return [
            m
            for m in self.calls.decoder.module.modules()
            if id(m) not in own | layers | tables and not list(m.children())
        ]

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
        modules = (module for layer in self.calls.decoder.layers for module in layer.modules())
        is_causal = all(getattr(module, "is_causal", True) for module in modules)
        return super().loss_adds_up(model) and is_causal and not self._has_blocks

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


def _as_opaque(number: int, is_tuple: bool, rest: tuple[Any, ...]) -> Any:
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = OPS.unary(hidden_states, number)
        return (result, *rest) if is_tuple else result

    return forward


def _add_features(x: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    count = min(len(x), len(features))
    return (x + features[:count] if count else x.view_as(x)), features[count:]


def _same(value: Tensor, *others: Tensor) -> Tensor:
    return value.view_as(value)


def _described(graph: ModuleTrace, target: Node) -> str:
    def text_of(detail: Any) -> str:
        return f"{detail.__module__}.{detail.__qualname__}" if callable(detail) else str(detail)

    opaque_calls = [
        (opaque.kind.value, opaque.path, sorted((key, text_of(value)) for key, value in opaque.details.items()))
        for opaque in graph.opaque_calls
    ]
    return "\n".join([*(node.format_node() or "" for node in graph.nodes), str(target), repr(opaque_calls)])


@contextlib.contextmanager
def refusing(model: Any) -> Iterator[None]:
    """Returns the context in which a refusal names the class and an alternative."""
    try:
        yield
    except Underivable as error:
        own = not type(model).__module__.startswith("transformers.")
        instead = other_code(model, own) or text_part(model) or DECLARE
        raise ValueError(f"{type(model).__name__} cannot be derived: {error}; {instead}") from error
