"""The builder: the steps of a layer, as methods that add operators to a unit.

In:   the submodules of one part of a Transformers model, and the axes that it is cut over.
Out:  a unit: the operators in order, and how every parameter is cut.
Must hold: a declaration says the forward pass once, in order; with one rank the collectives are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hf_helix.models.graph.context import GEMM, LIGHT, TRANSFER, LossTweaks, ParallelContext
from hf_helix.models.graph.norms import is_fused
from hf_helix.models.peft import Unwrapped, unwrap_peft
from hf_helix.operators.base import SplitComputation, TensorOperator, Tensors
from hf_helix.operators.communication.collectives import AllGather, AllGatherReplicated, ReduceScatter
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.explicit import Explicit, RmsNorm
from hf_helix.operators.linears.linear import Linear, Projection
from hf_helix.operators.moe.dispatch import RouterMeter
from hf_helix.operators.param_shard import COPIED, COPIED_ON_SHARDS, CUT_COLUMNS, CUT_ROWS, Placement, cut_bounds
from hf_helix.operators.segment import Add, Dropout, Segment, SumOfGradients, SumOfParts, cast_for_matmul, compiled
from hf_helix.operators.unit import Unit
from hf_helix.operators.vocab_parallel import TokenStatistics, cross_entropy, lookup, noisy
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Kind, Operator


class Draft:
    """Collects the operators of one unit. Values are names: every method returns the names of the values that it adds.

    Args:
        name: the name of the unit's graph; units of one name have equal graphs where they train the same.
        label: where the unit stands in the model, such as "layers.3"; for messages and traces.
        sharing: the axes that the model is cut over.
        repeats: whether units of this kind follow each other.
        loss_tweaks: what training arguments add to the mathematics of the model.

    Attributes:
        meters: what the routers of the unit count.
        called: the submodules that operators call as they are.
        logits: the value that the loss reads; None in units without a loss.
    """

    def __init__(
        self,
        name: str,
        label: str,
        sharing: ParallelContext,
        *,
        repeats: bool = False,
        loss_tweaks: LossTweaks | None = None,
    ) -> None:
        self.name = name
        self.label = label
        self.sharing = sharing
        self.loss_tweaks = loss_tweaks or LossTweaks()
        self.tp = sharing.tp
        self.cp = sharing.cp
        self.repeats = repeats
        self.meters: list[RouterMeter] = []
        self.called: list[nn.Module] = []
        self.logits: str | None = None
        self._declared: list[Operator] = []
        self._tensor_operators: dict[str, TensorOperator] = {}
        self._placements: dict[nn.Parameter, Placement] = {}
        self._inputs: list[str] = []

    def input(self, name: str) -> str:
        """Adds a value that enters the unit."""
        self._inputs.append(name)
        return name

    def all_gather(self, name: str, value: str) -> str:
        """Adds the all-gather of a sequence: from this rank's part to the whole. Selective recompute keeps the part."""
        return self._collective(name, AllGather(self.tp), value, recompute_when_selective=True)

    def reduce_scatter(self, name: str, value: str) -> str:
        """Adds the reduce-scatter of a sequence: from partial sums over the whole to this rank's part of their sum."""
        return self._collective(name, ReduceScatter(self.tp), value)

    def sum_over_ranks(self, name: str, value: str) -> str:
        """Adds the sum of a small value over the tensor-parallel ranks, which each uses in its own way.

        A norm over all heads needs it of the sums of squares over this rank's heads. It is an all-gather and a sum in
        rank order, so every rank gets the same bits; its backward sums the gradients of all ranks.

        Args:
            name: the name of the value that it gives; its operators are called after it.
            value: a part of the sum [tokens, ...].
        """
        if self.tp.size == 1:
            return value
        parts = self._collective(f"{name}.gather", AllGather(self.tp), value, relative_cost=LIGHT)
        return self._compute(name, SumOfParts(self.tp.size), (parts,), relative_cost=LIGHT / 2)

    def replicate(self, name: str, value: str, axis: Axis) -> str:
        """Adds the all-gather of [1, ...] to [ranks, ...], which all ranks use in the same way.

        Args:
            name: the name of the operator and of the value that it writes.
            value: the value of this rank.
            axis: the ranks.
        """
        if axis.size == 1:
            return value
        operator = Operator(
            name=name,
            kind=axis.kind,
            reads=(value,),
            writes=(name,),
            backward_kind=Kind.COMPUTE,
            relative_cost=LIGHT,
        )
        return self.declare(operator, AllGatherReplicated(axis))[0]

    def declare(self, operator: Operator, tensor_operator: TensorOperator) -> tuple[str, ...]:
        """Adds an operator, and how its parameters are trained and what it saves. All other methods end here.

        Args:
            operator: what plans see. `wgrad_fraction` and `has_saved_state` are filled in from the other argument.
            tensor_operator: what it does to tensors.

        Returns:
            The names of the values that it writes.
        """
        trained = tensor_operator.trained if isinstance(tensor_operator, SplitComputation) else 1.0
        self._declared.append(
            replace(operator, wgrad_fraction=trained, has_saved_state=tensor_operator.has_saved_state)
        )
        self._tensor_operators[operator.name] = tensor_operator
        return operator.writes

    def place(self, parameters: Iterable[Tensor | None], placement: Placement) -> None:
        """Records how parameters are cut.

        Raises:
            ValueError: the blocks of the placement are not as long as a parameter; or this unit places it otherwise.
        """
        for parameter in parameters:
            if isinstance(parameter, nn.Parameter):
                length = 0 if placement.dim is None else parameter.shape[placement.dim]
                if placement.blocks and sum(placement.blocks) != length:
                    raise ValueError(
                        f"{self.label}: blocks={placement.blocks} are {sum(placement.blocks)} together, and dimension "
                        f"{placement.dim} of the parameter has {length} (shape {list(parameter.shape)}); give the "
                        "lengths of the matrices that lie side by side there"
                    )
                placed = replace(placement, length=length)
                if self._placements.setdefault(parameter, placed) != placed:
                    raise ValueError(
                        f"{self.label}: a parameter of shape {list(parameter.shape)} is declared as "
                        f"{self._placements[parameter]} by one operator and as {placed} by another; all that read it "
                        "must see it in one way (column_parallel, row_parallel, replicated_linear, uses=, cut=, "
                        "on_shard=)"
                    )

    def build(self, *outputs: str) -> Unit:
        """Returns the unit, once everything is declared; the outputs are the values that leave it."""
        graphs = GraphPair.of(Graph(self.name, tuple(self._declared), tuple(self._inputs), outputs, self.repeats))
        sums = {
            op.forward_name: SumOfGradients()
            for op in graphs.backward.operators
            if op.forward_name not in self._tensor_operators
        }
        return Unit(
            label=self.label,
            graphs=graphs,
            operators=self._tensor_operators | sums,
            placements=self._placements,
            meters=tuple(self.meters),
            called=tuple(self.called),
            logits=self.logits,
            loss_shape=(3,) if self.loss_tweaks.figures else (),
        )

    def _compute(
        self,
        name: str,
        tensor_operator: TensorOperator,
        reads: tuple[str, ...],
        *,
        splits_dgrad_wgrad: bool = False,
        recompute_when_selective: bool = False,
        relative_cost: float,
    ) -> str:
        """Adds a computation of one value, which has the name of the operator."""
        operator = Operator(
            name=name,
            kind=Kind.COMPUTE,
            reads=reads,
            writes=(name,),
            splits_dgrad_wgrad=splits_dgrad_wgrad,
            recompute_when_selective=recompute_when_selective,
            relative_cost=relative_cost,
        )
        return self.declare(operator, tensor_operator)[0]

    def _collective(
        self,
        name: str,
        tensor_operator: AllGather | ReduceScatter,
        value: str,
        recompute_when_selective: bool = False,
        relative_cost: float = TRANSFER,
    ) -> str:
        if self.tp.size == 1:
            return value
        operator = Operator(
            name=name,
            kind=self.tp.kind,
            reads=(value,),
            writes=(name,),
            recompute_when_selective=recompute_when_selective,
            relative_cost=relative_cost,
        )
        return self.declare(operator, tensor_operator)[0]


def lookup_segment(table: Unwrapped, embedding: nn.Module, tp: Axis, neftune_alpha: float | None) -> Segment:
    """Returns the segment of a lookup.

    Args:
        table: the plain embedding and the adapters beside it.
        embedding: the submodule of the model, which says whether it is in training.
        tp: the tensor-parallel ranks that the rows are cut over.
        neftune_alpha: `TrainingArguments.neftune_noise_alpha`; None for no noise.
    """
    num_rows = table.weight.shape[0]
    first, _ = cut_bounds(num_rows, tp.size, tp.rank)
    padding = table.module.padding_idx

    def find(ids: Tensor) -> Tensor:
        value = total = lookup(ids, table.weight, first, num_rows, padding)
        for adapter in table.adapters():
            low = lookup(ids, adapter.down.t(), first, num_rows, padding)
            total = total + low @ adapter.up.t() * adapter.scaling
        return total.to(value.dtype)

    def find_noisy(ids: Tensor, length: int) -> Tensor:
        assert neftune_alpha is not None
        return noisy(find(ids), neftune_alpha, length) if embedding.training else find(ids)

    parameters: list[Any] = [copy.weight for copy in table.copies]
    for adapter in table.all_adapters():
        parameters += adapter.parameters
    reads = table.lora is not None  # the gradient of a table does not depend on what is in it
    if neftune_alpha is not None and tp.rank == 0:  # one of the partial sums brings the noise
        draws, side = (lambda: embedding.training), ("ids", "length")
        return Segment(find_noisy, parameters, side, draws=draws, backward_reads=reads)
    return Segment(find, parameters, ("ids",), backward_reads=reads)


Used = nn.Module | nn.Parameter
"""What a function reads: a submodule with all of its parameters, or one parameter."""


class Builder(Draft):
    """The steps of a layer. Values are names: every method returns the names of the values that it adds."""

    def segment(
        self,
        name: str,
        function: Callable[..., Tensor | Tensors],
        *inputs: str,
        side: Sequence[str] = (),
        uses: Sequence[Used] = (),
        cut: Sequence[Used] = (),
        on_shard: bool = False,
        draws: Callable[[], bool] | None = None,
        compiles: bool = True,
        explicit: Explicit | None = None,
        relative_cost: float = LIGHT,
    ) -> str:
        """Adds a submodule, or any function of one output, that runs under autograd. Selective recompute runs it again.

        Args:
            name: the name of the operator and of the value that it writes.
            function: returns a tensor, or a tuple of one.
            inputs: the values that it takes.
            side: the side inputs of the micro-batch that it takes as keywords.
            uses: the submodules that a function calls, or whose parameters it reads, and single parameters.
            cut: the same, of which this rank holds the part that belongs to its share of the heads or features: they
                are cut along dimension 0 (the weight of a norm over all heads, an attention sink for each head). They
                may be among the parameters of `uses`.
            on_shard: whether its inputs are this rank's part of the sequence or of the heads, so that the gradients of
                its other parameters are summed over the ranks.
            draws: returns whether the function draws random numbers, see `Segment`.
            compiles: whether `HelixConfig(compile=True)` compiles it. A function that draws is never compiled.
            explicit: takes the place of the function, unless that is compiled.
            relative_cost: a rough time relative to other operators.
        """
        parameters = self._parameters(function, uses, cut, on_shard)
        runs = self.compiled(function) if compiles and not draws else function
        segment = Segment(runs, parameters, side, draws, explicit=explicit if runs is function else None)
        return self._compute(name, segment, inputs, recompute_when_selective=True, relative_cost=relative_cost)

    def segment_outputs(
        self,
        name: str,
        function: Callable[..., Tensors],
        outputs: Sequence[str],
        *inputs: str,
        side: Sequence[str] = (),
        uses: Sequence[Used] = (),
        cut: Sequence[Used] = (),
        on_shard: bool = False,
        draws: Callable[[], bool] | None = None,
        non_differentiable: Sequence[str] = (),
    ) -> tuple[str, ...]:
        """Adds a function of several outputs that runs under autograd; see `segment` for what is not said here.

        Args:
            outputs: the names of the outputs that have gradients.
            non_differentiable: the names of further outputs, which have no gradient (indices).
        """
        parameters = self._parameters(function, uses, cut, on_shard)
        segment = Segment(
            function if draws else self.compiled(function), parameters, side, draws, len(non_differentiable)
        )
        return self.declare(
            Operator(
                name=name,
                kind=Kind.COMPUTE,
                reads=inputs,
                writes=(*outputs, *non_differentiable),
                non_differentiable=tuple(non_differentiable),
                recompute_when_selective=True,
                relative_cost=LIGHT,
            ),
            segment,
        )

    def norm(self, name: str, module: nn.Module, value: str, lowers: bool = True) -> str:
        """Adds a norm over this rank's part of the sequence.

        Args:
            name: the name of the operator and of the value that it writes.
            module: the norm.
            value: the value that it takes.
            lowers: whether only linears read what it gives, so that autocast may cast it before it is communicated.
        """

        def norm(value: Tensor) -> Tensor:
            return cast_for_matmul(module(value)) if lowers else module(value)

        explicit = RmsNorm(module, is_fused, lowers)
        return self.segment(name, norm, value, uses=(module,), on_shard=True, explicit=explicit)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function as it runs under autograd: compiled where `HelixConfig(compile=True)` asks for it."""
        return compiled(function) if self.sharing.compile else function

    def add(self, name: str, left: str, right: str) -> str:
        """Adds a residual addition.

        Args:
            name: the name of the operator and of the value that it writes.
            left: a value.
            right: the value that is added to it, of the same shape.
        """
        return self._compute(name, Add(), (left, right), relative_cost=LIGHT / 2)

    def dropout(self, name: str, module: nn.Dropout, value: str) -> str:
        """Adds dropout, where the model has any.

        Args:
            name: the name of the operator and of the value that it writes.
            module: says with which probability.
            value: the value that it takes.
        """
        if module.p == 0:
            return value
        return self._compute(name, Dropout(module), (value,), relative_cost=LIGHT)

    def column_parallel(
        self, name: str, linears: Mapping[str, Projection], value: str, blocks: Sequence[int] = ()
    ) -> tuple[str, ...]:
        """Adds linears over the whole sequence, each cut by its output features.

        Args:
            name: the name of the operator.
            linears: the linears by what their outputs are called: the value of `key` is `name.key`.
            value: the value that all of them take.
            blocks: the whole lengths of parts of the output features that are cut each by itself, such as queries, keys
                and values in one linear; the same for each linear, see `Placement`.

        Returns:
            One value for each linear [tokens, batch, output features of this rank].
        """
        rows = replace(CUT_ROWS, blocks=tuple(blocks))
        columns = replace(CUT_COLUMNS, blocks=tuple(blocks))
        plain_linears = [unwrap_peft(linear, self.label) for linear in linears.values()]
        for linear in plain_linears:
            self._place_linear(linear, columns if linear.is_transposed else rows, rows, down=COPIED_ON_SHARDS, up=rows)
        return self._linears(name, plain_linears, value, tuple(f"{name}.{key}" for key in linears))

    def replicated_linear(self, name: str, linears: Mapping[str, Projection], value: str) -> tuple[str, ...]:
        """Adds linears of which every rank has a whole copy.

        Their value is this rank's part of the sequence; or the whole of it, of whose outputs every rank uses a part.
        Either way a rank finds a part of the gradients of weights and biases, which are summed over the ranks.

        Args:
            name: the name of the operator.
            linears: the linears by what their outputs are called: the value of `key` is `name.key`.
            value: the value that all of them take.

        Returns:
            One value for each linear [tokens, batch, output features].
        """
        copied = COPIED_ON_SHARDS
        plain_linears = [unwrap_peft(linear, self.label) for linear in linears.values()]
        for linear in plain_linears:
            self._place_linear(linear, copied, copied, down=copied, up=copied)
        return self._linears(name, plain_linears, value, tuple(f"{name}.{key}" for key in linears))

    def row_parallel(self, name: str, linear: Projection, value: str) -> str:
        """Adds a linear that is cut by its input features; its outputs are partial sums for `reduce_scatter`.

        Args:
            name: the name of the operator and of the value that it writes.
            linear: the linear, with a low-rank adapter of PEFT if it has one.
            value: the value that it takes, [sequence, batch, features / tp_size].
        """
        plain_linear = unwrap_peft(linear, self.label)
        matrix = CUT_ROWS if plain_linear.is_transposed else CUT_COLUMNS
        self._place_linear(plain_linear, matrix, COPIED, down=CUT_COLUMNS, up=COPIED_ON_SHARDS)
        operator = _linear([plain_linear], adds_bias=self.tp.rank == 0)
        return self._compute(name, operator, (value,), splits_dgrad_wgrad=True, relative_cost=GEMM)

    def lookup(self, name: str, embedding: nn.Module, *, plain: bool = False) -> str:
        """Adds the lookup of token embeddings in a table that is cut by rows; gives partial sums for `reduce_scatter`.

        Reads the side input `ids` and, where noise is added, `length`.

        Args:
            name: the name of the operator and of the value that it writes.
            embedding: the embedding.
            plain: whether the caller declares what a subclass of `nn.Embedding` does beyond a lookup (a scale), as
                operators behind this one. Without it, subclasses are refused.

        Raises:
            ValueError: the embedding is of another class; or noise would be added before what stands behind the lookup.
        """
        table = unwrap_peft(embedding, self.label, embeddings_of_subclasses=plain)
        if self.loss_tweaks.neftune_alpha is not None and type(table.module) is not nn.Embedding:
            raise ValueError(
                f"neftune_noise_alpha={self.loss_tweaks.neftune_alpha} with an embedding of class "
                f"{type(table.module).__name__}: the noise comes behind all that the embedding does, and is built for "
                "plain torch.nn.Embedding; use neftune_noise_alpha=None"
            )
        self.place([copy.weight for copy in table.copies], CUT_ROWS)
        for adapter in table.all_adapters():
            self.place([adapter.down], CUT_COLUMNS)
            self.place([adapter.up], COPIED_ON_SHARDS)
        segment = lookup_segment(table, embedding, self.tp, self.loss_tweaks.neftune_alpha)
        return self._compute(name, segment, (), relative_cost=LIGHT)

    def loss(self, name: str, logits: str, vocab_size: int) -> str:
        """Adds the cross-entropy of logits that are cut by vocabulary. Reads side inputs `targets` and `loss_scale`.

        Args:
            name: the name of the value that it gives; its operators are called after it.
            logits: the logits as the model's own forward returns them; `predict()` gives them.
            vocab_size: the rows of the whole head.
        """
        self.logits = logits
        first, _ = cut_bounds(vocab_size, self.tp.size, self.tp.rank)
        written_by = next((op.name for op in self._declared if logits in op.writes), "")
        statistics = TokenStatistics(
            first,
            vocab_size,
            self.loss_tweaks.label_smoothing,
            # A linear keeps nothing of what it gives.
            overwrites=isinstance(self._tensor_operators.get(written_by), Linear),
            figures=self.loss_tweaks.figures,
            wrap=self.compiled,
        )
        value = self._compute(f"{name}.statistics", statistics, (logits,), relative_cost=GEMM)
        value = self.replicate(f"{name}.gather", value, self.tp)
        return self.segment(name, cross_entropy, value, side=("targets", "loss_scale"))

    def _linears(
        self, name: str, linears: Sequence[Unwrapped], value: str, outputs: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Adds linears that read one value, and of which each gives one."""
        return self.declare(
            Operator(
                name=name,
                kind=Kind.COMPUTE,
                reads=(value,),
                writes=outputs,
                splits_dgrad_wgrad=True,
                relative_cost=GEMM * max(1, len(linears) / 2),
            ),
            _linear(linears),
        )

    def _place_linear(
        self, linear: Unwrapped, matrix: Placement, bias: Placement, *, down: Placement, up: Placement
    ) -> None:
        """Records how a linear is cut, and how the adapters beside it are."""
        self.place([copy.weight for copy in linear.copies], matrix)
        self.place([copy.bias for copy in linear.copies], bias)
        for adapter in linear.all_adapters():
            self.place([adapter.down], down)
            self.place([adapter.up], up)
            self.place([adapter.bias], bias)

    def _parameters(
        self, function: object, uses: Sequence[Used], cut: Sequence[Used], on_shard: bool
    ) -> list[nn.Parameter]:
        """Returns the parameters that a function under autograd differentiates: copies, and those that are cut."""
        if isinstance(function, nn.Module):
            uses = () if any(function is each for each in cut) else (function,)
        self.called += [used for used in (*uses, *cut) if isinstance(used, nn.Module)]
        copied, shares = _parameters_of(uses), _parameters_of(cut)
        copies = [parameter for parameter in copied if parameter not in shares]
        self.place(copies, COPIED_ON_SHARDS if on_shard else COPIED)
        self.place(shares, CUT_ROWS)
        return list(copied | shares)


def _parameters_of(used: Sequence[Used]) -> dict[nn.Parameter, None]:
    """Returns the parameters of modules, and those that are given as they are, each once and in order."""
    groups = (each.parameters() if isinstance(each, nn.Module) else (each,) for each in used)
    return dict.fromkeys(parameter for parameters in groups for parameter in parameters)


def _linear(linears: Sequence[Unwrapped], adds_bias: bool = True) -> Linear:
    """Returns the operator of linears that read one value."""
    return Linear(
        [linear.projection for linear in linears],
        adds_bias,
        transposed=any(linear.is_transposed for linear in linears),
        # None where no linear has any: a step then looks none up.
        adapters=linears if any(linear.lora is not None for linear in linears) else (),
        copies=[copy for linear in linears for copy in linear.copies],
    )
