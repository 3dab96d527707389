"""The segment plans of a model: of every kind of layer, and of the code before and after the layers.

In:   a causal language model of Transformers, or a model with the same structure.
Out:  for a rank of tensor parallelism, the plan of a layer and the plans of both ends; the blocks that run as they are.
Must hold: the traced code is the code in use: patched forwards, options and all. Layers with equal code, options and
arguments share a trace. A submodule whose code cannot be traced becomes a block, and its layer is traced anew.

    arguments of layers -> trace -> placements -> segment plan
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from hf_helix.models.derived.towers import Towers
from hf_helix.models.graph.balance import routers_of
from hf_helix.models.lowering.segment_function import Share
from hf_helix.models.lowering.segment_plan import SegmentPlan
from hf_helix.models.placement.inference import infer_placements
from hf_helix.models.placement.rules import Placements
from hf_helix.models.placement.value_placement import FREE, SHARD, NeedsInlining, ValuePlacement
from hf_helix.models.stock.alike import description
from hf_helix.models.trace.blocks import Block, Blocks
from hf_helix.models.trace.calls import LayerCalls
from hf_helix.models.trace.opaque_calls import DTYPE, OPS, CallKind, OpaqueCalls, skeleton_of
from hf_helix.models.trace.trace import (
    EXAMPLE_BATCH,
    EXAMPLE_LENGTH,
    HANDED,
    TOKEN_POSITIONS,
    ComputesWithMask,
    Given,
    HandsOn,
    ModuleTrace,
    Underivable,
    args_of,
    trace,
)
from hf_helix.operators.communication.transport import Axis

T = TypeVar("T")

POSITIONS = {
    False: Given(TOKEN_POSITIONS, (1, EXAMPLE_LENGTH), torch.int64, (1,)),
    True: Given(TOKEN_POSITIONS, (EXAMPLE_BATCH, EXAMPLE_LENGTH), torch.int64, (0, 1)),
}
"""The positions of tokens as an argument of the full model, alike for all rows and for each row."""


class SegmentPlans:
    """The segment plans of one model, once its code is followed.

    Args:
        base: the model, with all parameters.
        attempt: declares a layer by its number, for one rank; nothing is kept. An operator may refuse code that a trace
            follows.

    Attributes:
        calls: the arguments of the layers.
        towers: of images or sound; None without. Set by the family.
        ends_at_decoder: whether the code after the layers ends at the output of the decoder; else at the logits.
    """

    calls: LayerCalls

    def __init__(self, base: Any, attempt: Callable[[int], object]) -> None:
        text = base.config.get_text_config()
        self._width = getattr(text, "hidden_size", None) or base.get_input_embeddings().weight.shape[1]
        self._num_positions = getattr(text, "max_position_embeddings", None) or 0
        self._attempt = attempt
        self._routers = {id(router.module): router.index for router in routers_of(base)}
        self._traces: dict[tuple[str, frozenset[str]], ModuleTrace] = {}
        self._kinds: dict[tuple[str, int, int], SegmentPlan] = {}
        self._ends: dict[tuple[bool, int, int], tuple[SegmentPlan, SegmentPlan]] = {}
        self._blocks: dict[str, Blocks] = {}
        self._call_options: dict[str, Any] = {}
        self.ends_at_decoder = base.get_output_embeddings() is None
        self.towers: Towers | None = None

    # -- following the code ----------------------------------------------------------------------------------------

    def follow(self, base: Any) -> None:
        """Finds the arguments of layers: with masks as tensors if the code of a layer computes with a mask, and with a
        value that layers hand on. The code of each kind of layer is followed to its end, for one rank."""
        while True:
            try:
                self.calls = LayerCalls(base, **self._call_options)
                self._keys = [self.key(number) for number in range(len(self.calls.calls))]
                for number in self._firsts:
                    self.following(number, functools.partial(self._attempt, number))
                return
            except ComputesWithMask as error:
                self._make_masks(error)
            except HandsOn as hands_on:
                self._call_options["rest"] = (hands_on.given,)
            self._forget()

    def follow_cut(self, base: Any, tp: Axis) -> None:
        """Follows the code of each kind of layer for tensor-parallel ranks; blocks that are found there may ask for
        masks as tensors."""
        try:
            for number in self._firsts:
                self.following(number, functools.partial(self.of_layer, number, tp.size, tp.rank))
        except ComputesWithMask as error:
            self._make_masks(error)
            self._forget()
            self.follow(base)
            self.follow_cut(base, tp)

    def _make_masks(self, error: ComputesWithMask) -> None:
        """Makes masks tensors; raises the error that asks for them if they are."""
        if self._call_options:
            raise error
        self._call_options["makes_masks"] = True

    def _forget(self) -> None:
        for known in (self._traces, self._kinds, self._ends):
            known.clear()

    def following(self, number: int, make: Callable[[], T]) -> T:
        """Returns what `make` returns. As long as some code of a layer is not followed, its submodule becomes a
        block."""
        key, blocks = self.key(number), self._blocks_of(number)
        while True:
            try:
                return make()
            except Underivable as error:
                if not blocks.take(error):
                    raise
            self._traces = {each: graph for each, graph in self._traces.items() if each[0] != key}
            self._kinds = {each: plan for each, plan in self._kinds.items() if each[0] != key}

    def _blocks_of(self, number: int) -> Blocks:
        return self._blocks.setdefault(self.key(number), Blocks(self.layer(number)))

    @property
    def _firsts(self) -> list[int]:
        """The first layer of each kind."""
        return [self._keys.index(key) for key in dict.fromkeys(self._keys)]

    # -- the model -------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.calls.decoder.layers

    def layer(self, number: int) -> nn.Module:
        """Returns a decoder layer."""
        return self.layers[number]

    def key(self, number: int) -> str:
        """Returns a text for the code, options, sizes and arguments of a layer."""
        return f"{description(self.layer(number))}\n{self.calls.calls[number].key}"

    @property
    def token_shape(self) -> tuple[int, ...]:
        """The shape of a layer's output for each token. Projections may stand between the embedding and the layers, as
        in OPT-350M, or copies for several streams."""
        *streams, factor = self.calls.token_shape
        return (
            *streams,
            self._width if factor == self._width else factor * self._width,
        )  # a norm makes one feature all

    def blocks(self) -> list[tuple[int, Block]]:
        """Returns the blocks of all layers, each with the number of its layer."""
        return [(number, block) for number, key in enumerate(self._keys) for block in self._blocks[key].found.values()]

    def routers_in(self, layer: nn.Module) -> list[tuple[str, int]]:
        """Returns the path of each router in a layer, with the index of the logits among its outputs."""
        named = layer.named_modules()
        return [(path, self._routers[id(module)]) for path, module in named if id(module) in self._routers]

    def unread_parameters(self, base: Any) -> Collection[nn.Parameter]:
        """Returns the parameters that no trace reads."""
        plans = [self.of_layer(number, 1, 0) for number in range(len(self.layers))]
        inside = [
            (parameter, plan.trace.reads(name))
            for layer, plan in zip(self.layers, plans, strict=True)
            for name, parameter in layer.named_parameters()
        ]
        ends, own = self.of_ends(base, 1, 0), {parameter for parameter, _ in inside}
        outside = [
            (parameter, any(plan.trace.reads(name) for plan in ends))
            for name, parameter in base.named_parameters()
            if parameter not in own
        ]
        return {parameter for parameter, is_read in (*inside, *outside) if not is_read}

    def describe(self, base: Any) -> list[str]:
        """Returns the computation of the model as text: of each kind of layer, and of both ends."""
        text = []
        for number in {self.key(index): index for index in range(len(self.layers))}.values():
            plan = self.of_layer(number, 1, 0)
            text += [_described(plan.trace, plan.target), self.key(number)]
        return text + [_described(end.trace, end.target) for end in self.of_ends(base, 1, 0)]

    # -- plans -----------------------------------------------------------------------------------------------------

    def of_layer(self, number: int, size: int, rank: int) -> SegmentPlan:
        """Returns the segment plan of a layer for a rank of `size`, shared by all equal layers."""
        key = self.key(number)
        if (key, size, rank) not in self._kinds:
            make = functools.partial(self._trace_layer, number)
            placements = self._place(key, make, size, ValuePlacement(SHARD))
            graph = placements.trace
            start = [graph.hidden, *(node for node, name in graph.given.items() if name == HANDED)]
            self._kinds[key, size, rank] = SegmentPlan(placements, Share(size, rank), start, graph.result, graph.handed)
        return self._kinds[key, size, rank]

    def of_ends(self, base: Any, size: int, rank: int) -> tuple[SegmentPlan, SegmentPlan]:
        """Returns the segment plans of the code before and after the layers for a rank of `size`."""
        key = self.ends_at_decoder, size, rank
        if key not in self._ends:
            name = "decoder" if self.ends_at_decoder else ""
            placements = self._place(name, functools.partial(self._trace_model, base), size, ValuePlacement(FREE))
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

    def _trace_layer(self, number: int, inlined: frozenset[str]) -> ModuleTrace:
        layer, call = self.layer(number), self.calls.calls[number]
        opaque_calls, skeleton = OpaqueCalls(inlined), skeleton_of(layer).train()
        enter = self._blocks_of(number).replace(skeleton, opaque_calls)
        recorded, are_tuples = opaque_calls.record(skeleton, self.routers_in(layer)), list[bool]()

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

        hidden = torch.empty((EXAMPLE_BATCH, EXAMPLE_LENGTH, *self.token_shape), dtype=DTYPE, device="meta")
        graph = trace(skeleton, opaque_calls, hidden, call.given, run)
        if graph.longest is not None and graph.longest < self._num_positions:
            # Which submodule has the code is not known: one after another becomes a block.
            reason = f"its code does something else for rows of more than {graph.longest} tokens"
            raise Underivable(reason, self._blocks_of(number).next_child())
        return dataclasses.replace(graph, is_tuple=are_tuples[-1])

    def _trace_model(self, base: Any, inlined: frozenset[str]) -> ModuleTrace:
        """Traces a full model with opaque layers, up to its logits or to the output of its decoder."""
        is_tuple = self.of_layer(0, 1, 0).trace.is_tuple
        opaque_calls, skeleton, decoder = OpaqueCalls(inlined), skeleton_of(base).train(), self.calls.decoder
        skeleton.config.output_router_logits = False  # the loss of routers is not in the logits
        vars(skeleton).pop("forward", None)  # refused elsewhere, or code above the decoder, such as TRL's fused head
        layers: Any = skeleton.get_submodule(decoder.prefix)
        for number, layer in enumerate(layers):
            opaque = opaque_calls.add(CallKind.LAYER, str(number))
            layer.forward = _as_opaque(opaque, is_tuple, decoder.rest)
        inside = {id(module) for module in layers.modules()}
        table = base.get_input_embeddings()
        opaque_calls.set_table(next(name for name, module in base.named_modules() if module is table), table)
        opaque_calls.replace(skeleton, skip=lambda module: id(module) in inside)
        for module in skeleton.modules():
            if "Rotary" in type(module).__name__ and id(module) not in inside:
                module.forward = lambda x, *args, **kwargs: (x, x)  # only layers use the result

        def run(module: Any, ids: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, None]:
            inner, outer = (module.get_submodule(path) for path in (decoder.path, decoder.path.rpartition(".")[0]))
            with self.calls.decoder.masks(outer), self.calls.decoder.masks(inner):
                called = inner if self.ends_at_decoder else module
                if self.towers is not None and called is not inner:
                    self.towers.trace(opaque_calls, inner, module.get_input_embeddings())
                result = called(input_ids=ids, position_ids=given[0], use_cache=False)
                return (result[0] if self.ends_at_decoder else result.logits), None

        ids = torch.zeros((EXAMPLE_BATCH, EXAMPLE_LENGTH), dtype=torch.long, device="meta")
        return trace(skeleton, opaque_calls, ids, [POSITIONS[self.calls.has_rows]], run)


def _as_opaque(number: int, is_tuple: bool, rest: tuple[Any, ...]) -> Any:
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = OPS.unary(hidden_states, number)
        return (result, *rest) if is_tuple else result

    return forward


def _described(graph: ModuleTrace, target: Node) -> str:
    def text_of(detail: Any) -> str:
        return f"{detail.__module__}.{detail.__qualname__}" if callable(detail) else str(detail)

    opaque_calls = [
        (opaque.kind.value, opaque.path, sorted((key, text_of(value)) for key, value in opaque.details.items()))
        for opaque in graph.opaque_calls
    ]
    return "\n".join([*(node.format_node() or "" for node in graph.nodes), str(target), repr(opaque_calls)])
