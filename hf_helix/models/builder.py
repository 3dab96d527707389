"""The builder that a declaration writes to.

In:   the submodules of one part of a Transformers model, and the axes that it is cut over.
Out:  a unit: the operators in order, and how every parameter is cut.
Must hold: a declaration says the forward pass once, in order; with one rank the collectives are simply absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_helix.models.norms import is_fused
from hf_helix.models.peft import Opened, opened
from hf_helix.operators.attention.partial import Kernel
from hf_helix.operators.attention.ring_attention import GatheredBlocks, JoinBlocks, RingBlock, RingStep
from hf_helix.operators.base import SplitComputation, TensorOperator, Tensors
from hf_helix.operators.communication.collectives import AllGather, AllGatherReplicated, ReduceScatter
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.explicit import Explicit, RmsNorm
from hf_helix.operators.linears.linear import Linear, Projection
from hf_helix.operators.linears.low_rank import Adapters
from hf_helix.operators.moe.dispatch import RouterMeter
from hf_helix.operators.segment import Add, Dropout, Segment, SumOfGradients, cast_for_matmul, compiled
from hf_helix.operators.unit import (
    COPIED,
    COPIED_ON_SHARDS,
    CUT_COLUMNS,
    CUT_ROWS,
    Placement,
    Unit,
    cut_bounds,
)
from hf_helix.operators.vocab_parallel import TokenStatistics, cross_entropy, lookup, noisy
from hf_helix.planning.graph.operator import Graph, Kind, Operator
from hf_helix.planning.graph.pair import GraphPair

GEMM = 4.0
ATTENTION = 4.0
TRANSFER = 4.0
LIGHT = 1.0

RING, ALL_GATHER = "ring", "all_gather"


@dataclass(frozen=True)
class Sharing:
    """The axes that a model is cut over, and how.

    Attributes:
        tp: of tensor and sequence parallelism.
        cp: of context parallelism.
        experts: that tokens go to their experts over: the ranks of expert parallelism and of tp together.
        cp_method: see `HelixConfig`.
        capacity_factor: `HelixConfig.expert_capacity_factor`.
        device: that operators run on; the model may lie elsewhere still.
        compile: `HelixConfig.compile`.
    """

    tp: Axis = field(default_factory=Axis.single)
    cp: Axis = field(default_factory=Axis.single)
    experts: Axis = field(default_factory=Axis.single)
    cp_method: str = RING
    capacity_factor: float | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compile: bool = False

    @property
    def ep_size(self) -> int:
        return self.experts.size // self.tp.size


@dataclass(frozen=True)
class Additions:
    """What training arguments add to the mathematics of any model, as the stock Trainer does from outside.

    Attributes:
        label_smoothing: `TrainingArguments.label_smoothing_factor`; in evaluation, too.
        neftune_alpha: `TrainingArguments.neftune_noise_alpha`; in training only.
    """

    label_smoothing: float = 0.0
    neftune_alpha: float | None = None


class Builder:
    """Collects the operators of one unit. Values are names; every method returns the names it writes."""

    def __init__(
        self, name: str, label: str, sharing: Sharing, *, repeats: bool = False, additions: Additions | None = None
    ) -> None:
        self.name = name
        self.label = label
        self.sharing = sharing
        self.additions = additions or Additions()
        self.tp = sharing.tp
        self.cp = sharing.cp
        self.repeats = repeats
        self.meters: list[RouterMeter] = []
        self.called: list[nn.Module] = []
        self.logits: str | None = None
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
        uses: Sequence[nn.Module] = (),
        on_shard: bool = False,
        draws: Callable[[], bool] | None = None,
        compiles: bool = True,
        explicit: Explicit | None = None,
        effort: float = LIGHT,
    ) -> str:
        """A function of one output under autograd: a submodule, or any function. Selective recompute runs it again.

        Args:
            uses: the submodules that a function calls, or whose parameters it reads.
            on_shard: its inputs are this rank's part of the sequence or of the heads, so its parameters' gradients are
                summed.
            draws: see `Segment`.
            compiles: whether `HelixConfig(compile=True)` compiles it; no function is compiled that draws.
            explicit: takes the place of the function, unless that is compiled.
        """
        parameters = self._parameters(function, uses, on_shard)
        made = self.compiled(function) if compiles and not draws else function
        segment = Segment(made, parameters, side, draws, explicit=explicit if made is function else None)
        return self.declare(name, segment, inputs, (name,), cheap=True, effort=effort)[0]

    def local_outputs(
        self,
        name: str,
        function: Callable[..., Tensors],
        outputs: Sequence[str],
        *inputs: str,
        side: Sequence[str] = (),
        uses: Sequence[nn.Module] = (),
        on_shard: bool = False,
        draws: Callable[[], bool] | None = None,
        plain: Sequence[str] = (),
    ) -> tuple[str, ...]:
        """A function of several outputs under autograd; see `local`.

        Args:
            plain: further outputs, which have no gradient (indices).
        """
        parameters = self._parameters(function, uses, on_shard)
        segment = Segment(function if draws else self.compiled(function), parameters, side, draws, len(plain))
        return self.declare(name, segment, inputs, (*outputs, *plain), plain=tuple(plain), cheap=True, effort=LIGHT)

    def norm(self, name: str, module: nn.Module, value: str, lowers: bool = True) -> str:
        """A norm over this rank's part of the sequence.

        Args:
            lowers: only linears read what it gives, so it is handed on as matrix products take it.
        """

        def norm(value: Tensor) -> Tensor:
            return cast_for_matmul(module(value)) if lowers else module(value)

        explicit = RmsNorm(module, is_fused, lowers)
        return self.local(name, norm, value, uses=(module,), on_shard=True, explicit=explicit)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function under autograd as it runs: compiled where `HelixConfig(compile=True)` asks for it."""
        return compiled(function) if self.sharing.compile else function

    def add(self, name: str, left: str, right: str) -> str:
        """Residual addition."""
        return self.declare(name, Add(), (left, right), (name,), effort=LIGHT / 2)[0]

    def dropout(self, name: str, module: nn.Dropout, value: str) -> str:
        """Dropout, where the model has any."""
        if module.p == 0:
            return value
        return self.declare(name, Dropout(module), (value,), (name,), effort=LIGHT)[0]

    def column_parallel(
        self, name: str, linears: Mapping[str, Projection], value: str, blocks: int = 1
    ) -> tuple[str, ...]:
        """Linears over the whole sequence, each cut by its output features; one output per linear.

        Args:
            blocks: equal parts of the output features that are cut each by itself, see `Placement`.
        """
        found = [opened(linear, self.label) for linear in linears.values()]
        rows = replace(CUT_ROWS, num_fused=blocks)
        for linear in found:
            matrix = replace(CUT_COLUMNS, num_fused=blocks) if linear.is_transposed else rows
            self._place_linear(linear, matrix, rows, down=COPIED_ON_SHARDS, up=rows)
        outputs = tuple(f"{name}.{key}" for key in linears)
        transposed = any(linear.is_transposed for linear in found)
        projections = [linear.projection for linear in found]
        operator = Linear(projections, transposed=transposed, adapters=_adapters(found))
        return self.declare(name, operator, (value,), outputs, split=True, effort=GEMM * max(1, len(linears) / 2))

    def row_parallel(self, name: str, linear: Projection, value: str) -> str:
        """A linear cut by its input features; its outputs are partial sums for `scatter`."""
        found = opened(linear, self.label)
        matrix = CUT_ROWS if found.is_transposed else CUT_COLUMNS
        self._place_linear(found, matrix, COPIED, down=CUT_COLUMNS, up=COPIED_ON_SHARDS)
        operator = Linear([found.projection], self.tp.rank == 0, found.is_transposed, _adapters([found]))
        return self.declare(name, operator, (value,), (name,), split=True, effort=GEMM)[0]

    def gather(self, name: str, value: str) -> str:
        """This rank's part of the sequence to the whole sequence. Selective recompute keeps the part only."""
        return self._collective(name, AllGather(self.tp), value, cheap=True)

    def scatter(self, name: str, value: str) -> str:
        """Partial sums over the whole sequence to this rank's part of their sum."""
        return self._collective(name, ReduceScatter(self.tp), value)

    def shared_attention(
        self,
        name: str,
        q: str,
        kv: str,
        kernel: Kernel,
        scale: float,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> str:
        """Causal attention over a sequence that context-parallel ranks share, see `operators.attention.ring_attention`.

        Args:
            q: [batch, heads, tokens of this rank, head_dim].
            kv: keys and values, [2, batch, kv heads, tokens of this rank, head_dim].
            window: how many tokens a token looks back on, itself included; None for all.
            dtype: of the model.

        Returns:
            [tokens of this rank, batch, heads * head_dim].
        """
        kept = (f"{name}.out", f"{name}.lse")
        size = self.cp.size
        so_far: tuple[str, ...] = ()
        if self.sharing.cp_method == RING:
            for distance in range(size):
                here = kv
                if distance + 1 < size:
                    kv = self._repeated(f"{name}.ring{distance + 1}", RingStep(self.cp), kv, TRANSFER)
                so_far = self.declare(
                    f"{name}.block{distance}",
                    RingBlock(kernel, self.cp, distance, scale, window),
                    (q, here, *so_far),
                    (f"{name}.part{distance}",),
                    keeps=(q, here, *kept),
                    effort=ATTENTION / size,
                )
        else:
            kv = self._repeated(f"{name}.gather", AllGather(self.cp), kv, TRANSFER * (size - 1))
            so_far = self.declare(
                f"{name}.blocks",
                GatheredBlocks(kernel, self.cp, scale, window),
                (q, kv),
                (f"{name}.whole",),
                keeps=(q, kv, *kept),
                effort=ATTENTION,
            )
        return self.declare(f"{name}.join", JoinBlocks(dtype), so_far, kept, effort=LIGHT)[0]

    def lookup(self, name: str, embedding: nn.Module) -> str:
        """Token embeddings, the table cut by rows; outputs are partial sums for `scatter`.

        Reads side inputs `ids` and, where there is noise to add, `length`.
        """
        table = opened(embedding, self.label)
        num_rows = table.weight.shape[0]
        first, _ = cut_bounds(num_rows, self.tp.size, self.tp.rank)
        padding = table.module.padding_idx

        def find(ids: Tensor) -> Tensor:
            found = total = lookup(ids, table.weight, first, num_rows, padding)
            for adapter in table.adapters():
                low = lookup(ids, adapter.down.t(), first, num_rows, padding)
                total = total + low @ adapter.up.t() * adapter.scaling
            return total.to(found.dtype)

        alpha = self.additions.neftune_alpha

        def find_noisy(ids: Tensor, length: int) -> Tensor:
            assert alpha is not None
            return noisy(find(ids), alpha, length) if embedding.training else find(ids)

        weights: list[Any] = [copy.weight for copy in table.copies]
        self.place(weights, CUT_ROWS)
        for adapter in table.all_adapters():
            self.place([adapter.down], CUT_COLUMNS)
            self.place([adapter.up], COPIED_ON_SHARDS)
            weights += adapter.parameters
        segment = Segment(find, weights, ("ids",))
        if alpha is not None and self.tp.rank == 0:  # one of the partial sums brings the noise
            segment = Segment(find_noisy, weights, ("ids", "length"), draws=lambda: embedding.training)
        return self.declare(name, segment, (), (name,), effort=LIGHT)[0]

    def loss(self, name: str, logits: str, vocab_size: int) -> str:
        """Cross-entropy over logits cut by vocabulary. Reads side inputs `targets` and `loss_scale`.

        Args:
            logits: the model's, with everything that it does to them behind its head; `predict()` gives them.
        """
        self.logits = logits
        first, _ = cut_bounds(vocab_size, self.tp.size, self.tp.rank)
        written_by = next((op.name for op in self._declared if logits in op.writes), "")
        operator = TokenStatistics(
            first,
            vocab_size,
            self.additions.label_smoothing,
            overwrites=isinstance(self._operators.get(written_by), Linear),  # which keeps nothing of what it gives
            wrap=self.compiled,
        )
        (value,) = self.declare(f"{name}.statistics", operator, (logits,), (f"{name}.statistics",), effort=GEMM)
        value = self.replicate(f"{name}.gather", value, self.tp)
        return self.local(name, cross_entropy, value, side=("targets", "loss_scale"))

    def replicate(self, name: str, value: str, axis: Axis) -> str:
        """Every rank's [1, ...] to [ranks, ...], which all use in the same way."""
        if axis.size == 1:
            return value
        return self.declare(
            name,
            AllGatherReplicated(axis),
            (value,),
            (name,),
            kind=axis.kind,
            backward_kind=Kind.COMPUTE,
            effort=LIGHT,
        )[0]

    def build(self, *outputs: str) -> Unit:
        """The unit, once everything is declared."""
        graphs = GraphPair.of(Graph(self.name, tuple(self._declared), tuple(self._inputs), outputs, self.repeats))
        sums = {op.of: SumOfGradients() for op in graphs.backward.operators if op.of not in self._operators}
        return Unit(
            label=self.label,
            graphs=graphs,
            operators=self._operators | sums,
            placements=self._placements,
            meters=tuple(self.meters),
            called=tuple(self.called),
            logits=self.logits,
        )

    def _collective(self, name: str, operator: AllGather | ReduceScatter, value: str, cheap: bool = False) -> str:
        if self.tp.size == 1:
            return value
        return self.declare(name, operator, (value,), (name,), kind=self.tp.kind, cheap=cheap, effort=TRANSFER)[0]

    def _repeated(self, name: str, operator: RingStep | AllGather, value: str, effort: float) -> str:
        """Communication over the context-parallel ranks that backward runs again, to keep nothing."""
        return self.declare(name, operator, (value,), (f"{name}.kv",), kind=self.cp.kind, again=True, effort=effort)[0]

    def declare(
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
        cheap: bool = False,
        plain: tuple[str, ...] = (),
        sizes: tuple[str, ...] = (),
        effort: float,
    ) -> tuple[str, ...]:
        """An operator, as in `Operator`; the names it writes."""
        self._declared.append(
            Operator(
                name=name,
                kind=kind,
                reads=reads,
                writes=writes,
                split=split,
                trained=operator.trained if isinstance(operator, SplitComputation) else 1.0,
                backward_kind=backward_kind,
                keeps=keeps,
                saves=operator.saves,
                again=again,
                cheap=cheap,
                plain=plain,
                sizes=sizes,
                effort=effort,
            )
        )
        self._operators[name] = operator
        return writes

    def _place_linear(
        self, linear: Opened, matrix: Placement, bias: Placement, *, down: Placement, up: Placement
    ) -> None:
        """Say how a linear is cut, and how the adapters beside it."""
        self.place([copy.weight for copy in linear.copies], matrix)
        self.place([copy.bias for copy in linear.copies], bias)
        for adapter in linear.all_adapters():
            self.place([adapter.down], down)
            self.place([adapter.up], up)
            self.place([adapter.bias], bias)

    def _parameters(self, function: object, uses: Sequence[nn.Module], on_shard: bool) -> list[nn.Parameter]:
        """What a function under autograd differentiates, every rank with a copy."""
        modules = [function] if isinstance(function, nn.Module) else uses
        self.called += modules
        parameters = [parameter for module in modules for parameter in module.parameters()]
        self.place(parameters, COPIED_ON_SHARDS if on_shard else COPIED)
        return parameters

    def place(self, parameters: Iterable[Tensor | None], placement: Placement) -> None:
        """Say how parameters are cut."""
        for parameter in parameters:
            if isinstance(parameter, nn.Parameter):
                length = 0 if placement.dim is None else parameter.shape[placement.dim]
                self._placements[parameter] = replace(placement, length=length)


def _adapters(linears: Sequence[Opened]) -> list[Adapters]:
    """Beside each linear; none where no linear ever has any, which saves looking."""
    return [linear.adapters for linear in linears] if any(linear.lora is not None for linear in linears) else []
