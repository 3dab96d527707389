"""The builder: the steps of a layer, as methods that add operators to a unit.

In:   the submodules of one part of a Transformers model, and the axes to cut the part over.
Out:  a unit: the operators in order, and the cut of every parameter.
Must hold: a declaration states the forward pass once, in order; with one rank the collectives are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from hf_helix.operators.linears.four_bit import FourBit
from hf_helix.operators.linears.linear import Linear, Projection
from hf_helix.operators.moe.dispatch import RouterMeter
from hf_helix.operators.param_shard import COPIED, COPIED_ON_SHARDS, CUT_COLUMNS, CUT_ROWS, Placement, cut_bounds
from hf_helix.operators.segment import Add, Dropout, Segment, SumOfGradients, SumOfParts, cast_for_matmul, compiled
from hf_helix.operators.unit import Unit
from hf_helix.operators.vocab_parallel import TokenStatistics, cross_entropy, lookup, noisy
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Kind, Operator


class Draft:
    """Collects the operators of one unit. Values are names: every method returns the names of the added values.

    Args:
        name: the name of the unit's graph; units of one name have equal graphs where equal parameters train.
        label: the place of the unit in the model, for example "layers.3"; for messages and traces.
        sharing: the axes to cut the model over.
        repeats: whether units of this kind follow each other.
        loss_tweaks: changes of the loss by training arguments.

    Attributes:
        meters: counters of the unit's routers.
        called: the submodules called by operators as they are.
        logits: the value read by the loss; None in units without a loss.
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
        self._above: set[nn.Parameter] = set()

    def input(self, name: str) -> str:
        """Adds an input of the unit."""
        self._inputs.append(name)
        return name

    def all_gather(self, name: str, value: str) -> str:
        """Adds the all-gather of a sequence: from this rank's part to the whole. Selective recompute keeps the part."""
        return self._collective(name, AllGather(self.tp), value, recompute_when_selective=True)

    def reduce_scatter(self, name: str, value: str) -> str:
        """Adds the reduce-scatter of a sequence: from partial sums over the whole to this rank's part of their sum."""
        return self._collective(name, ReduceScatter(self.tp), value)

    def sum_over_ranks(self, name: str, value: str) -> str:
        """Adds the sum of a small value over the tensor-parallel ranks; each rank uses the sum in its own way.

        For example, a norm over all heads needs the sum of squares over the heads of all ranks. An all-gather and a
        sum in rank order give equal bits on every rank; backward sums the gradients of all ranks.

        Args:
            name: the name of the sum; begins the names of the operators.
            value: a part of the sum [tokens, ...].
        """
        if self.tp.size == 1:
            return value
        parts = self._collective(f"{name}.gather", AllGather(self.tp), value, relative_cost=LIGHT)
        return self._compute(name, SumOfParts(self.tp.size), (parts,), relative_cost=LIGHT / 2)

    def replicate(self, name: str, value: str, axis: Axis) -> str:
        """Adds the all-gather of [1, ...] over an axis to [ranks, ...]; all ranks use the result in the same way.

        Args:
            name: the name of the operator and of its output.
            value: this rank's value.
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
        """Adds an operator, the training of its parameters, and its saved values. All other methods end here.

        Args:
            operator: the operator as seen by plans. `wgrad_fraction` and `has_saved_state` are filled in from the
                other argument.
            tensor_operator: the computation on tensors.

        Returns:
            The names of the operator's outputs.
        """
        trained = tensor_operator.trained if isinstance(tensor_operator, SplitComputation) else 1.0
        self._declared.append(
            replace(operator, wgrad_fraction=trained, has_saved_state=tensor_operator.has_saved_state)
        )
        self._tensor_operators[operator.name] = tensor_operator
        return operator.writes

    def place(self, parameters: Iterable[Tensor | None], placement: Placement) -> None:
        """Records the placement of parameters.

        Raises:
            ValueError: the blocks of the placement do not fit a parameter; or the unit has another placement for it.
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
        """Returns the declared unit with these outputs."""
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
            above=self._above,
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
        """Adds a computation of one value, named after the operator."""
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
        table: the plain embedding and its adapters.
        embedding: the submodule of the model, with the training mode.
        tp: the tensor-parallel ranks that share the rows.
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
    reads = table.lora is not None  # the gradient of a table does not depend on the table's contents
    if neftune_alpha is not None and tp.rank == 0:  # one of the partial sums brings the noise
        draws, side = (lambda: embedding.training), ("ids", "length")
        return Segment(find_noisy, parameters, side, draws=draws, backward_reads=reads)
    return Segment(find, parameters, ("ids",), backward_reads=reads)


Used = nn.Module | nn.Parameter
"""What a function reads: a submodule with all of its parameters, or one parameter."""


class Builder(Draft):
    """The steps of a layer. Values are names: every method returns the names of the added values."""

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
        """Adds a submodule, or any function of one output, under autograd. Selective recompute runs it again.

        Args:
            name: the name of the operator and of its output.
            function: returns a tensor, or a tuple of one.
            inputs: the function's input values.
            side: the side inputs of the micro-batch passed as keywords.
            uses: the submodules called or read by the function, and single parameters.
            cut: submodules and parameters of which this rank holds the part for its share of the heads or features, cut
                along dimension 0 (the weight of a norm over all heads, an attention sink for each head). Parameters of
                `uses` may be among them.
            on_shard: whether the inputs are this rank's part of the sequence or of the heads; then gradients of the
                parameters that are not cut are summed over the ranks.
            draws: returns whether the function draws random numbers, see `Segment`.
            compiles: whether `HelixConfig(compile=True)` compiles the function; never if the function draws.
            explicit: runs in place of the function, unless the function is compiled.
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
        """Adds a function of several outputs under autograd; see `segment` for the other arguments.

        Args:
            outputs: the names of the outputs with gradients.
            non_differentiable: the names of further outputs without gradient (indices).
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
            name: the name of the operator and of its output.
            module: the norm.
            value: the input.
            lowers: whether only linears read the output, so that autocast may cast the output before communication.
        """

        def norm(value: Tensor) -> Tensor:
            return cast_for_matmul(module(value)) if lowers else module(value)

        explicit = RmsNorm(module, is_fused, lowers)
        return self.segment(name, norm, value, uses=(module,), on_shard=True, explicit=explicit)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function as run under autograd: compiled with `HelixConfig(compile=True)`."""
        return compiled(function) if self.sharing.compile else function

    def add(self, name: str, left: str, right: str) -> str:
        """Adds a residual addition.

        Args:
            name: the name of the operator and of its output.
            left: the first summand.
            right: the second summand, of the same shape.
        """
        return self._compute(name, Add(), (left, right), relative_cost=LIGHT / 2)

    def dropout(self, name: str, module: nn.Dropout, value: str) -> str:
        """Adds dropout, unless its probability is 0.

        Args:
            name: the name of the operator and of its output.
            module: the dropout with the probability.
            value: the input.
        """
        if module.p == 0:
            return value
        return self._compute(name, Dropout(module), (value,), relative_cost=LIGHT)

    def column_parallel(
        self, name: str, linears: Mapping[str, Projection], value: str, blocks: Sequence[int] = ()
    ) -> tuple[str, ...]:
        """Adds linears over the full sequence, each cut by its output features.

        Args:
            name: the name of the operator.
            linears: the linears by output: the value of `key` is `name.key`.
            value: the common input.
            blocks: the full lengths of parts of the output features to be cut separately, such as queries, keys and
                values in one linear; equal for all linears, see `Placement`.

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
        """Adds linears with full copies on every rank.

        The input is this rank's part of the sequence; or the full sequence, if every rank uses a part of the outputs.
        In either case a rank computes a part of the gradients of weights and biases, to be summed over the ranks.

        Args:
            name: the name of the operator.
            linears: the linears by output: the value of `key` is `name.key`.
            value: the common input.

        Returns:
            One value for each linear [tokens, batch, output features].
        """
        copied = COPIED_ON_SHARDS
        plain_linears = [unwrap_peft(linear, self.label) for linear in linears.values()]
        for linear in plain_linears:
            self._place_linear(linear, copied, copied, down=copied, up=copied)
        return self._linears(name, plain_linears, value, tuple(f"{name}.{key}" for key in linears))

    def row_parallel(self, name: str, linear: Projection, value: str) -> str:
        """Adds a linear cut by its input features; the outputs are partial sums for `reduce_scatter`.

        Args:
            name: the name of the operator and of its output.
            linear: the linear, perhaps with a low-rank adapter of PEFT.
            value: the input [sequence, batch, features / tp_size].
        """
        plain_linear = unwrap_peft(linear, self.label)
        matrix = CUT_ROWS if plain_linear.is_transposed else CUT_COLUMNS
        self._place_linear(plain_linear, matrix, COPIED, down=CUT_COLUMNS, up=COPIED_ON_SHARDS)
        operator = _linear([plain_linear], adds_bias=self.tp.rank == 0)
        return self._compute(name, operator, (value,), splits_dgrad_wgrad=True, relative_cost=GEMM)

    def lookup(self, name: str, embedding: nn.Module, *, plain: bool = False) -> str:
        """Adds the lookup of token embeddings in a table cut by rows; returns partial sums for `reduce_scatter`.

        Reads the side input `ids` and, for noise, `length`.

        Args:
            name: the name of the operator and of its output.
            embedding: the embedding.
            plain: whether the caller declares the extra computation of a subclass of `nn.Embedding` (a scale) by
                operators after the lookup. Otherwise subclasses are refused.

        Raises:
            ValueError: the embedding is of another class; or noise would be added before an operator after the lookup.
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
        """Adds the cross-entropy of logits cut by vocabulary. Reads side inputs `targets` and `loss_scale`.

        Args:
            name: the name of the output; begins the names of the operators.
            logits: the logits as returned by the model's own forward and by `predict()`.
            vocab_size: the rows of the full head.
        """
        self.logits = logits
        first, _ = cut_bounds(vocab_size, self.tp.size, self.tp.rank)
        written_by = next((op.name for op in self._declared if logits in op.writes), "")
        statistics = TokenStatistics(
            first,
            vocab_size,
            self.loss_tweaks.label_smoothing,
            # A linear keeps nothing of its output.
            overwrites=isinstance(self._tensor_operators.get(written_by), Linear),
            figures=self.loss_tweaks.figures,
            wrap=self.compiled,
        )
        value = self._compute(f"{name}.statistics", statistics, (logits,), relative_cost=GEMM)
        value = self.replicate(f"{name}.gather", value, self.tp)
        return self.segment(name, cross_entropy, value, side=("targets", "loss_scale"))

    def place_above(self, model: Any, below: Collection[nn.Parameter] | None) -> None:
        """Records the placements of the parameters above the decoder, which code of the caller's reads: the head cut by
        vocabulary, everything else in full.

        Args:
            model: the full model.
            below: the parameters of the other units; None for the head alone.
        """
        read = set(self._placements)
        head = model.get_output_embeddings()
        if head is not None:
            self._place_linear(unwrap_peft(head, self.label), CUT_ROWS, CUT_ROWS, down=COPIED, up=CUT_ROWS)
        if below is not None:
            known = {*below, *self._placements}
            self.place([parameter for parameter in model.parameters() if parameter not in known], COPIED)
        self._above = self._placements.keys() - read

    def _linears(
        self, name: str, linears: Sequence[Unwrapped], value: str, outputs: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Adds linears with one common input and one output each."""
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
        """Records the cut of a linear and of its adapters."""
        weights = [copy.weight for copy in linear.copies]
        if linear.four_bit is not None:
            self._check_blocks(linear.four_bit, matrix)
            weights.append(linear.four_bit.absmax)
        self.place(weights, matrix)
        self.place([copy.bias for copy in linear.copies], bias)
        for adapter in linear.all_adapters():
            self.place([adapter.down], down)
            self.place([adapter.up], up)
            self.place([adapter.bias], bias)

    def _check_blocks(self, weight: FourBit, matrix: Placement) -> None:
        """Refuses a cut of a weight in 4 bits through its blocks."""
        blocks = weight.absmax.shape[1]
        if matrix.dim == 1 and blocks % self.tp.size:
            works = [str(size) for size in range(1, self.tp.size) if blocks % size == 0]
            raise ValueError(
                f"{self.label}: tp_size={self.tp.size} would cut a weight in 4 bits through its blocks: a row of "
                f"{blocks * weight.block_size} elements has {blocks} blocks of {weight.block_size} with one scale "
                f"each; use tp_size={' or '.join(works)}, and pp_size or shard_parameters=True for the other ranks; or "
                "leave such linears in 16 bits, BitsAndBytesConfig(..., llm_int8_skip_modules=['down_proj'])"
            )

    def _parameters(
        self, function: object, uses: Sequence[Used], cut: Sequence[Used], on_shard: bool
    ) -> list[nn.Parameter]:
        """Returns the parameters differentiated by a function under autograd: full copies, and cut parameters."""
        if isinstance(function, nn.Module):
            uses = () if any(function is each for each in cut) else (function,)
        self.called += [used for used in (*uses, *cut) if isinstance(used, nn.Module)]
        copied, shares = _parameters_of(uses), _parameters_of(cut)
        copies = [parameter for parameter in copied if parameter not in shares]
        self.place(copies, COPIED_ON_SHARDS if on_shard else COPIED)
        self.place(shares, CUT_ROWS)
        return list(copied | shares)


def _parameters_of(used: Sequence[Used]) -> dict[nn.Parameter, None]:
    """Returns the parameters of modules and the given parameters, each once and in order."""
    groups = (each.parameters() if isinstance(each, nn.Module) else (each,) for each in used)
    return dict.fromkeys(parameter for parameters in groups for parameter in parameters)


def _linear(linears: Sequence[Unwrapped], adds_bias: bool = True) -> Linear:
    """Returns the operator of linears with one common input."""
    return Linear(
        [linear.projection for linear in linears],
        adds_bias,
        transposed=any(linear.is_transposed for linear in linears),
        # None where no linear has any: a step then looks none up.
        adapters=linears if any(linear.lora is not None for linear in linears) else (),
        copies=[copy for linear in linears for copy in linear.copies],
        four_bit=[linear.four_bit for linear in linears],
    )
