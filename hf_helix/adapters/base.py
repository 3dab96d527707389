"""How a Transformers model becomes units: the builder that declarations write to, and what a family declares.

In:   an ordinary Transformers causal language model and the tensor-parallel axis.
Out:  the units of the embedding, of every decoder layer and of the head, and the side inputs of a batch.
Must hold: a declaration says the forward pass once, in order; with one rank the collectives are simply absent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_helix.adapters.sequence import PADDING, SequenceCut, documents_of
from hf_helix.operators.attention import Kernel
from hf_helix.operators.base import Tensors
from hf_helix.operators.collectives import Axis, Gather, GatherReplicated, Scatter
from hf_helix.operators.linear import Linear
from hf_helix.operators.local import Add, Segment, SumOfGradients
from hf_helix.operators.ring import DOCUMENTS, Block, Blocks, Join, Step
from hf_helix.operators.unit import (
    COPIED,
    COPIED_ON_SHARDS,
    CUT_COLUMNS,
    CUT_ROWS,
    Placement,
    TensorOperator,
    Unit,
    cut_bounds,
)
from hf_helix.operators.vocabulary import IGNORED, cross_entropy, lookup, token_statistics
from hf_helix.planning.graph import Graph, GraphPair, Kind, Operator

GEMM = 4.0
ATTENTION = 4.0
TRANSFER = 4.0
LIGHT = 1.0

RING, ALL_GATHER = "ring", "all_gather"


class Builder:
    """Collects the operators of one unit. Values are names; every method returns the names it writes."""

    def __init__(
        self,
        name: str,
        label: str,
        tp: Axis,
        *,
        repeats: bool = False,
        cp: Axis | None = None,
        cp_method: str = RING,
    ) -> None:
        self.name = name
        self.label = label
        self.tp = tp
        self.cp = cp or Axis.single()
        self.cp_method = cp_method
        self.repeats = repeats
        self._declared: list[Operator] = []
        self._operators: dict[str, TensorOperator] = {}
        self._placements: dict[nn.Parameter, Placement] = {}
        self._inputs: list[str] = []

    def input(self, name: str) -> str:
        """A value that enters the unit."""
        self._inputs.append(name)
        return name

    def local(
        self,
        name: str,
        function: Callable[..., Tensor | Tensors],
        *inputs: str,
        side: Sequence[str] = (),
        on_shard: bool = False,
        draws: Callable[[], bool] | None = None,
        effort: float = LIGHT,
    ) -> str:
        """A function of one output under autograd: a submodule, or any function without parameters.

        Args:
            on_shard: its inputs are this rank's part of the sequence, so its parameters' gradients are summed.
            draws: see `Segment`.
        """
        parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
        self._place(parameters, COPIED_ON_SHARDS if on_shard else COPIED)
        segment = Segment(function, parameters, side, draws)
        return self._declare(name, segment, inputs, (name,), effort=effort)[0]

    def local_outputs(
        self,
        name: str,
        function: Callable[..., Tensors],
        outputs: Sequence[str],
        *inputs: str,
        side: Sequence[str] = (),
    ) -> tuple[str, ...]:
        """A function of several outputs under autograd, without parameters."""
        return self._declare(name, Segment(function, (), side), inputs, tuple(outputs), effort=LIGHT)

    def add(self, name: str, left: str, right: str) -> str:
        """Residual addition."""
        return self._declare(name, Add(), (left, right), (name,), effort=LIGHT / 2)[0]

    def column_parallel(self, name: str, linears: Mapping[str, nn.Linear], value: str) -> tuple[str, ...]:
        """Linears over the whole sequence, each cut by its output features; one output per linear."""
        for linear in linears.values():
            _require_plain(linear, self.label)
            self._place([linear.weight], CUT_ROWS)
            self._place([linear.bias], CUT_ROWS)
        outputs = tuple(f"{name}.{key}" for key in linears)
        operator = Linear(list(linears.values()))
        return self._declare(name, operator, (value,), outputs, split=True, effort=GEMM * max(1, len(linears) / 2))

    def row_parallel(self, name: str, linear: nn.Linear, value: str) -> str:
        """A linear cut by its input features; its outputs are partial sums for `scatter`."""
        _require_plain(linear, self.label)
        self._place([linear.weight], CUT_COLUMNS)
        self._place([linear.bias], COPIED)
        operator = Linear([linear], adds_bias=self.tp.rank == 0)
        return self._declare(name, operator, (value,), (name,), split=True, effort=GEMM)[0]

    def gather(self, name: str, value: str) -> str:
        """This rank's part of the sequence to the whole sequence."""
        return self._collective(name, Gather(self.tp), value)

    def scatter(self, name: str, value: str) -> str:
        """Partial sums over the whole sequence to this rank's part of their sum."""
        return self._collective(name, Scatter(self.tp), value)

    def shared_attention(self, name: str, q: str, kv: str, kernel: Kernel, scale: float) -> str:
        """Causal attention over a sequence that context-parallel ranks share, see `hf_helix.operators.ring`.

        Args:
            q: [batch, heads, tokens of this rank, head_dim].
            kv: keys and values, [2, batch, kv heads, tokens of this rank, head_dim].

        Returns:
            [tokens of this rank, batch, heads * head_dim].
        """
        kept = (f"{name}.out", f"{name}.lse")
        size = self.cp.size
        so_far: tuple[str, ...] = ()
        if self.cp_method == RING:
            for distance in range(size):
                here = kv
                if distance + 1 < size:
                    kv = self._repeated(f"{name}.ring{distance + 1}", Step(self.cp), kv, TRANSFER)
                so_far = self._declare(
                    f"{name}.block{distance}",
                    Block(kernel, self.cp, distance, scale),
                    (q, here, *so_far),
                    (f"{name}.part{distance}",),
                    keeps=(q, here, *kept),
                    effort=ATTENTION / size,
                )
        else:
            kv = self._repeated(f"{name}.gather", Gather(self.cp), kv, TRANSFER * (size - 1))
            so_far = self._declare(
                f"{name}.blocks",
                Blocks(kernel, self.cp, scale),
                (q, kv),
                (f"{name}.whole",),
                keeps=(q, kv, *kept),
                effort=ATTENTION,
            )
        return self._declare(f"{name}.join", Join(), so_far, kept, effort=LIGHT)[0]

    def lookup(self, name: str, embedding: nn.Embedding) -> str:
        """Token embeddings, the table cut by rows; outputs are partial sums for `scatter`. Reads side input `ids`."""
        num_rows = embedding.weight.shape[0]
        first, _ = cut_bounds(num_rows, self.tp.size, self.tp.rank)
        weight: Any = embedding.weight
        padding = embedding.padding_idx

        def find(ids: Tensor) -> Tensor:
            return lookup(ids, weight, first, num_rows, padding)

        self._place([weight], CUT_ROWS)
        return self._declare(name, Segment(find, [weight], ("ids",)), (), (name,), effort=LIGHT)[0]

    def loss(self, name: str, logits: str, vocab_size: int) -> str:
        """Cross-entropy over logits cut by vocabulary. Reads side inputs `targets` and `loss_scale`."""
        first, _ = cut_bounds(vocab_size, self.tp.size, self.tp.rank)

        def statistics(value: Tensor, targets: Tensor) -> Tensor:
            return token_statistics(value, targets, first)

        value = self.local(f"{name}.statistics", statistics, logits, side=("targets",), effort=GEMM)
        if self.tp.size > 1:
            operator = GatherReplicated(self.tp)
            value = self._declare(
                f"{name}.gather",
                operator,
                (value,),
                (f"{name}.gather",),
                kind=self.tp.kind,
                backward_kind=Kind.COMPUTE,
                effort=LIGHT,
            )[0]
        return self.local(name, cross_entropy, value, side=("targets", "loss_scale"))

    def build(self, *outputs: str) -> Unit:
        """The unit, once everything is declared."""
        graphs = GraphPair.of(Graph(self.name, tuple(self._declared), tuple(self._inputs), outputs, self.repeats))
        sums = {op.of: SumOfGradients() for op in graphs.backward.operators if op.of not in self._operators}
        return Unit(
            label=self.label,
            graphs=graphs,
            operators=self._operators | sums,
            placements=self._placements,
        )

    def _collective(self, name: str, operator: Gather | Scatter, value: str) -> str:
        if self.tp.size == 1:
            return value
        return self._declare(name, operator, (value,), (name,), kind=self.tp.kind, effort=TRANSFER)[0]

    def _repeated(self, name: str, operator: Step | Gather, value: str, effort: float) -> str:
        """Communication over the context-parallel ranks that backward runs again, to keep nothing."""
        return self._declare(name, operator, (value,), (f"{name}.kv",), kind=self.cp.kind, again=True, effort=effort)[0]

    def _declare(
        self,
        name: str,
        operator: TensorOperator,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        *,
        kind: Kind = Kind.COMPUTE,
        split: bool = False,
        backward_kind: Kind | None = None,
        keeps: tuple[str, ...] = (),
        again: bool = False,
        effort: float,
    ) -> tuple[str, ...]:
        self._declared.append(
            Operator(
                name=name,
                kind=kind,
                reads=reads,
                writes=writes,
                split=split,
                backward_kind=backward_kind,
                keeps=keeps,
                again=again,
                effort=effort,
            )
        )
        self._operators[name] = operator
        return writes

    def _place(self, parameters: Iterable[Tensor | None], placement: Placement) -> None:
        for parameter in parameters:
            if isinstance(parameter, nn.Parameter):
                length = 0 if placement.dim is None else parameter.shape[placement.dim]
                self._placements[parameter] = replace(placement, length=length)


class Family(ABC):
    """What a model family declares. A family needs `layer` and, where it differs from Llama, the rest.

    Attributes:
        model_class: name of the Transformers class, such as "LlamaForCausalLM".
    """

    model_class: str

    @abstractmethod
    def layer(self, b: Builder, layer: Any) -> Unit:
        """Declare one decoder layer: value `x` [sequence shard, batch, hidden] in, the same out."""

    def layers(self, model: Any) -> Sequence[nn.Module]:
        """The decoder layers in order."""
        return model.model.layers

    def embedding(self, b: Builder, model: Any) -> Unit:
        """Declare the way from side input `ids` to the first layer."""
        x = b.lookup("lookup", model.model.embed_tokens)
        return b.build(b.scatter("scatter", x))

    def head(self, b: Builder, model: Any) -> Unit:
        """Declare the way from the last layer to the loss. The value `head.logits` is kept where it is asked for."""
        x = b.input("x")
        h = b.local("norm", model.model.norm, x, on_shard=True)
        h = b.gather("gather", h)
        (logits,) = b.column_parallel("head", {"logits": model.lm_head}, h)
        return b.build(b.loss("loss", logits, model.lm_head.weight.shape[0]))

    def check(self, config: Any, tp_size: int) -> None:
        """Raise ValueError, naming the option and a value that works, if the model cannot be cut so."""
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if heads % tp_size or kv_heads % tp_size:
            works = [size for size in range(1, kv_heads + 1) if heads % size == 0 and kv_heads % size == 0]
            raise ValueError(
                f"tp_size={tp_size} must divide the model's {heads} attention heads and {kv_heads} key-value heads; "
                f"values that work: {', '.join(map(str, works))}"
            )
        shortest = min(config.vocab_size, config.intermediate_size)
        if shortest < tp_size:
            raise ValueError(
                f"tp_size={tp_size} leaves ranks without a row of a dimension of {shortest} "
                f"(vocab_size={config.vocab_size}, intermediate_size={config.intermediate_size}); "
                f"use tp_size={shortest} or less"
            )

    def check_context(self, model: Any) -> None:
        """Raise ValueError if the attention of the model cannot be cut over context-parallel ranks."""
        raise ValueError(
            f"cp_size above 1 is not built for {type(model).__name__}: its declaration has no attention over a shared "
            "sequence (Builder.shared_attention); use cp_size=1 and tp_size or pp_size instead"
        )

    def units(self, model: Any, tp: Axis, cp: Axis | None = None, cp_method: str = RING) -> list[Unit]:
        """Every unit of the model in forward order: the embedding, the layers, the head."""
        self.check(model.config, tp.size)
        if cp is not None and cp.size > 1:
            self.check_context(model)
        found = [self.embedding(Builder("embedding", "embedding", tp), model)]
        for index, layer in enumerate(self.layers(model)):
            b = Builder("layer", f"layers.{index}", tp, repeats=True, cp=cp, cp_method=cp_method)
            found.append(self.layer(b, layer))
        found.append(self.head(Builder("head", "head", tp), model))
        return found

    def empty(self, model: Any, tp_size: int) -> Callable[[Mapping[str, Any]], Tensor]:
        """From the side inputs of a micro-batch, room for what a layer hands on: [sequence shard, batch, hidden].

        Called before the model is cut.
        """
        weight = model.get_input_embeddings().weight
        hidden, dtype = weight.shape[1], weight.dtype

        def make(side: Mapping[str, Any]) -> Tensor:
            ids = side["ids"]
            return torch.empty(ids.shape[0] // tp_size, ids.shape[1], hidden, dtype=dtype, device=ids.device)

        return make

    def head_cost(self, model: Any) -> float:
        """The work of head and loss in layers, by the sizes of their matrices."""
        layer = next(iter(self.layers(model)))
        matrices = sum(weight.numel() for weight in layer.parameters() if weight.dim() > 1)
        return float(model.get_output_embeddings().weight.numel() / matrices)

    def side_inputs(self, model: Any, batch: Mapping[str, Any], cut: SequenceCut, loss_scale: Tensor) -> dict[str, Any]:
        """The tensors of a micro-batch that carry no gradient: of this rank's tokens, sequence first.

        Args:
            batch: what the data collator made: `input_ids` [batch, sequence] and, where given, `attention_mask`,
                `position_ids`, `labels` or `shift_labels`.
            cut: which tokens are this rank's; a sequence that does not divide is padded.
            loss_scale: what the summed loss is multiplied with.
        """
        ids, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
        targets = batch.get("shift_labels")
        if targets is None:
            labels = batch.get("labels")
            targets = torch.full_like(ids, IGNORED) if labels is None else labels
            targets = functional.pad(targets[:, 1:], (0, 1), value=IGNORED)
        counted = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0) if positions is None else positions
        found = {
            "ids": cut.take(ids, 1).t().contiguous(),
            "targets": cut.take(targets, 1, IGNORED).t().contiguous(),
            "loss_scale": loss_scale,
        }
        if cut.cp_size == 1:
            return {**found, **self.attention_inputs(model, ids, mask, counted)}
        documents = documents_of(ids, mask, positions)
        if documents is not None:
            extra = cut.padded(ids.shape[1]) - ids.shape[1]
            documents = functional.pad(documents, (0, extra), value=PADDING)
        return {**found, DOCUMENTS: documents, **self.context_inputs(model, ids, counted, cut)}

    @abstractmethod
    def attention_inputs(self, model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor) -> dict[str, Any]:
        """Masks and positions in the form that the layers' attention takes them, of the length without padding."""

    def context_inputs(self, model: Any, ids: Tensor, positions: Tensor, cut: SequenceCut) -> dict[str, Any]:
        """What layers need of the positions of this rank's tokens. Computed for the whole sequence, then cut."""
        return {}


def _require_plain(linear: nn.Module, label: str) -> None:
    if type(linear) is not nn.Linear:
        raise ValueError(
            f"{label}: a projection is a {type(linear).__module__}.{type(linear).__name__}, and this version cuts "
            "plain torch.nn.Linear only (no PEFT adapters, no quantised weights); merge the adapters or load the "
            "model without quantisation"
        )
