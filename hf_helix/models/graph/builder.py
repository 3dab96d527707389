"""The builder: the steps of a layer, as methods that add operators to a unit.

In:   the submodules of one part of a Transformers model, and the axes to cut the part over.
Out:  a unit: the operators in order, and the cut of every parameter.
Must hold: a declaration states the forward pass once, in order; with one rank the collectives are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any

from torch import Tensor, nn

from hf_helix.models.graph.context import GEMM, LIGHT, TRANSFER, LossTweaks, ParallelContext, TokenLoss
from hf_helix.models.graph.token_loss import BATCH, NUM_FIGURES, SCALE, joined_statistics, token_loss
from hf_helix.models.stock.batch_inputs import SequenceCut
from hf_helix.models.stock.peft import Unwrapped, unwrap_peft
from hf_helix.models.stock.stock_modules import is_rms_norm
from hf_helix.operators.autograd_operator import Add, AutogradOperator, Dropout, SumOfParts, cast_for_matmul, compiled
from hf_helix.operators.base import SplitComputation, TensorOperator, Tensors
from hf_helix.operators.communication.collectives import AllGather, AllGatherReplicated, ReduceScatter
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.experts.moe import RouterMeter
from hf_helix.operators.explicit import Explicit, RmsNorm
from hf_helix.operators.linears.dora import RowNorms, ShareNorms, row_norms
from hf_helix.operators.linears.four_bit import FourBit
from hf_helix.operators.linears.linear import Linear, Projection
from hf_helix.operators.units.unit import Unit
from hf_helix.operators.vocabulary.head import Deferred, HeadInTiles
from hf_helix.operators.vocabulary.lookup import lookup, noisy
from hf_helix.operators.vocabulary.loss import TokenStatistics, cross_entropy
from hf_helix.planning.graph.operator import Graph, Kind, Operator
from hf_helix.planning.parameters import COPIED, COPIED_SUMMED, CUT_DIM_0, CUT_DIM_1, Cut, cut_bounds

Used = nn.Module | nn.Parameter
"""What a function reads: a submodule with all of its parameters, or one parameter."""

UsedCut = Used | tuple[nn.Parameter, Cut]
"""What a function reads a part of: cut along dimension 0, or a parameter with its cut."""


class Builder:
    """The steps of a layer, as operators of one unit. Values are names: methods return the names of the added values,
    and take the name of an operator, `name`, and the names of its inputs. A single output has the operator's name.

    Args:
        name: the name of the unit's graph; units of one name have equal graphs if equal parameters train.
        label: the place of the unit in the model, for example "layers.3"; for messages and traces.
        sharing: the axes to cut the model over.
        repeats: whether units of this kind follow each other.
        loss_tweaks: changes of the loss by training arguments.

    Attributes:
        meters: counters of the unit's routers.
        modules_run_as_is: the submodules called by operators as they are.
        logits: the value read by the loss; None in units without a loss.
        shown: the values that a caller of the decoder may read, see `Graph`.
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
        self.vocabulary = sharing.vocabulary or sharing.tp
        self.repeats = repeats
        self.meters: list[RouterMeter] = []
        self.modules_run_as_is: list[nn.Module] = []
        self.logits: str | None = None
        self.num_figures = 2 if self.loss_tweaks.figures else 0  # after the loss and the figures of tokens
        self.shown: list[str] = []
        self._declared: list[Operator] = []
        self._tensor_operators: dict[str, TensorOperator] = {}
        self._placements: dict[nn.Parameter, Cut] = {}
        self._inputs: list[str] = []
        self._plain_inputs: list[str] = []
        self._above: set[nn.Parameter] = set()
        self._unread: set[nn.Parameter] = set()

    def anew(self) -> Builder:
        """Returns a builder of the same unit, without operators."""
        return Builder(self.name, self.label, self.sharing, repeats=self.repeats, loss_tweaks=self.loss_tweaks)

    def unused(self, name: str, last: str) -> str:
        """Returns a first part of the names of operators, of which `last` is one: `name`, or `name.2` and so on."""
        numbered = (f"{name}.{number}" for number in count(2))
        return next(each for each in chain([name], numbered) if f"{each}.{last}" not in self._tensor_operators)

    def input(self, name: str, is_plain: bool = False) -> str:
        """Adds an input of the unit; a plain one has no gradient."""
        self._inputs.append(name)
        self._plain_inputs += [name] * is_plain
        return name

    def all_gather(self, name: str, value: str) -> str:
        """Adds the all-gather of a sequence: from this rank's part to the whole. Selective recompute keeps the part."""
        return self._collective(name, AllGather(self.tp), value, recompute_when_selective=True)

    def reduce_scatter(self, name: str, value: str) -> str:
        """Adds the reduce-scatter of a sequence: from partial sums over the whole to this rank's part of their sum."""
        return self._collective(name, ReduceScatter(self.tp), value)

    def gather_features(self, name: str, value: str, dim: int) -> str:
        """Adds the all-gather of features: from this rank's share of a dimension to the whole dimension.

        Args:
            name: the name of the result; begins the names of the operators.
            value: the share [tokens, batch, ...].
            dim: the dimension.
        """
        if self.tp.size == 1:
            return value
        parts = self._collective(f"{name}.gather", AllGather(self.tp), value, relative_cost=LIGHT)
        return self.join_features(name, parts, self.tp, dim)

    def join_features(self, name: str, value: str, axis: Axis, dim: int) -> str:
        """Adds the join of the shares of a dimension [ranks * tokens, batch, ...] to the whole [tokens, batch, ...].

        Args:
            axis: the ranks that the shares come from.
            dim: the dimension.
        """

        def join(parts: Tensor) -> Tensor:
            return parts.unflatten(0, (axis.size, -1)).movedim(0, dim).flatten(dim, dim + 1)

        return self.declare(name, AutogradOperator(join), (value,), relative_cost=LIGHT / 2)[0]

    def take_part(self, name: str, value: str) -> str:
        """Adds the cut of a full sequence that every rank has: this rank's part. The gradient is a partial sum."""
        if self.tp.size == 1:
            return value

        def take(whole: Tensor) -> Tensor:
            return whole.chunk(self.tp.size)[self.tp.rank].contiguous()

        return self.declare(name, AutogradOperator(take), (value,), relative_cost=LIGHT / 2)[0]

    def sum_over_ranks(self, name: str, value: str) -> str:
        """Adds the sum of a small value [tokens, ...] over the tensor-parallel ranks; each rank uses the sum in its own
        way.

        For example, a norm over all heads needs the sum of squares over the heads of all ranks. An all-gather and a
        sum in rank order give equal bits on every rank; backward sums the gradients of all ranks.
        """
        if self.tp.size == 1:
            return value
        parts = self._collective(f"{name}.gather", AllGather(self.tp), value, relative_cost=LIGHT)
        return self.declare(name, SumOfParts(self.tp.size), (parts,), relative_cost=LIGHT / 2)[0]

    def replicate(self, name: str, value: str, axis: Axis) -> str:
        """Adds the all-gather of [1, ...] over an axis to [ranks, ...]; all ranks use the result in the same way.

        Args:
            axis: the ranks.
        """
        if axis.size == 1:
            return value
        return self.declare(name, AllGatherReplicated(axis), (value,), kind=axis.kind, backward_kind=Kind.COMPUTE)[0]

    def declare(
        self,
        name: str,
        tensor_operator: TensorOperator,
        reads: Sequence[str],
        writes: Sequence[str] | None = None,
        *,
        kind: Kind = Kind.COMPUTE,
        **fields: Any,
    ) -> tuple[str, ...]:
        """Adds an operator, and returns the names of its outputs. All other methods end here.

        Args:
            name: the name of the operator.
            tensor_operator: the computation on tensors, with its trained weights and saved state.
            reads: the names of the inputs.
            writes: the names of the outputs; None for one output with the operator's name.
            kind: the stream.
            fields: further fields of `Operator`.
        """
        operator = Operator(
            name=name,
            kind=kind,
            reads=tuple(reads),
            writes=(name,) if writes is None else tuple(writes),
            wgrad_fraction=tensor_operator.trained if isinstance(tensor_operator, SplitComputation) else 1.0,
            has_saved_state=tensor_operator.has_saved_state,
            **fields,
        )
        self._declared.append(operator)
        self._tensor_operators[name] = tensor_operator
        return operator.writes

    def record_cut(self, parameters: Iterable[Tensor | None], placement: Cut) -> None:
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

    def keep_unread(self, parameters: Sequence[nn.Parameter]) -> None:
        """Records parameters that the model's code never reads."""
        self.record_cut(parameters, COPIED)
        self._unread.update(parameters)

    def build(self, *outputs: str) -> Unit:
        """Returns the declared unit with these outputs."""
        declared, inputs = tuple(self._declared), tuple(self._inputs)
        graph = Graph(
            self.name,
            declared,
            inputs,
            outputs,
            self.repeats,
            shown=tuple(self.shown),
            plain_inputs=tuple(self._plain_inputs),
        )
        return Unit.of(
            graph,
            self._tensor_operators,
            label=self.label,
            placements=self._placements,
            meters=tuple(self.meters),
            modules_run_as_is=tuple(self.modules_run_as_is),
            logits=self.logits,
            loss_shape=(1 + self.num_figures,) if self.loss_tweaks.lists_figures else (),
            token_figures=NUM_FIGURES if self.loss_tweaks.token_loss is not None else 0,
            ends_at_decoder=self.loss_tweaks.ends_at_decoder,
            above=self._above,
            unread=self._unread,
        )

    def autograd_outputs(
        self,
        name: str,
        function: Callable[..., Tensor | Tensors],
        outputs: Sequence[str],
        *inputs: str,
        side: Sequence[str] = (),
        uses: Sequence[Used] = (),
        cut: Sequence[UsedCut] = (),
        on_shard: bool = False,
        draws: Callable[[], bool] | None = None,
        non_differentiable: Sequence[str] = (),
        compiles: bool = True,
        explicit: Explicit | None = None,
        relative_cost: float = LIGHT,
        frees_inputs: bool = False,
        elementwise: bool = False,
        by_data: bool = False,
    ) -> tuple[str, ...]:
        """Adds a submodule, or any function, under autograd. Selective recompute runs it again.

        Args:
            function: returns a tensor, or a tuple of tensors.
            outputs: the names of the outputs with gradients.
            inputs: the function's input values.
            side: the side inputs of the micro-batch passed as keywords.
            uses: the submodules called or read by the function, and single parameters.
            cut: submodules and parameters of which this rank holds the part for its share of the heads or features, cut
                along dimension 0 (the weight of a norm over all heads, an attention sink for each head), or a parameter
                with its cut. Parameters of `uses` may be among them.
            on_shard: whether the inputs are this rank's part of the sequence or of the heads; then gradients of the
                parameters that are not cut are summed over the ranks.
            draws: returns whether the function draws random numbers, see `AutogradOperator`.
            non_differentiable: the names of further outputs without gradient (indices).
            compiles: whether `HelixConfig(compile=True)` compiles the function; never if the function draws.
            explicit: runs in place of the function, unless the function is compiled.
            relative_cost: a rough time relative to other operators.
            frees_inputs: see `AutogradOperator`.
            elementwise, by_data: see `AutogradOperator`.
        """
        parameters = self._parameters(function, uses, cut, on_shard)
        runs = self.compiled(function) if compiles and not draws else function
        plain, kept = tuple(non_differentiable), explicit if runs is function else None
        traits = {"frees_inputs": frees_inputs, "elementwise": elementwise, "by_data": by_data}
        operator = AutogradOperator(runs, parameters, side, draws, len(plain), kept, **traits)
        fields: dict[str, Any] = {"non_differentiable": plain, "recompute_when_selective": True}
        return self.declare(name, operator, inputs, (*outputs, *plain), relative_cost=relative_cost, **fields)

    def autograd(self, name: str, function: Callable[..., Tensor | Tensors], *inputs: str, **options: Any) -> str:
        """Adds a function of one output; see `autograd_outputs` for the options."""
        return self.autograd_outputs(name, function, (name,), *inputs, **options)[0]

    def indices(self, name: str, function: Callable[..., Any], *inputs: str, **options: Any) -> str:
        """Adds a function of one output without gradient; see `autograd_outputs` for the options."""
        options |= {"on_shard": True, "non_differentiable": (name,)}
        return self.autograd_outputs(name, function, (), *inputs, **options)[0]

    def norm(self, name: str, module: nn.Module, value: str, lowers: bool = True) -> str:
        """Adds a norm over this rank's part of the sequence.

        Args:
            module: the norm.
            lowers: whether only linears read the output, so that autocast may cast the output before communication.
        """

        def norm(value: Tensor) -> Tensor:
            return cast_for_matmul(module(value)) if lowers else module(value)

        explicit = RmsNorm(module, is_rms_norm, lowers)
        return self.autograd(name, norm, value, uses=(module,), on_shard=True, explicit=explicit)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function as run under autograd: compiled with `HelixConfig(compile=True)`."""
        return compiled(function) if self.sharing.compile else function

    def add(self, name: str, left: str, right: str) -> str:
        """Adds a residual addition.

        Args:
            left: a summand.
            right: the other summand, of the same shape.
        """
        return self.declare(name, Add(), (left, right), relative_cost=LIGHT / 2)[0]

    def dropout(self, name: str, module: nn.Dropout, value: str) -> str:
        """Adds dropout, unless its probability is 0.

        Args:
            module: the dropout with the probability.
        """
        return value if module.p == 0 else self.declare(name, Dropout(module), (value,))[0]

    def column_parallel(
        self, name: str, linears: Mapping[str, Projection], value: str, blocks: Sequence[int] = ()
    ) -> tuple[str, ...]:
        """Adds linears over the full sequence, each cut by its output features.

        Args:
            linears: the linears by output: the value of `key` is `name.key`.
            value: the common input.
            blocks: the full lengths of parts of the output features to be cut separately, such as queries, keys and
                values in one linear; equal for all linears, see `Cut`.

        Returns:
            One value for each linear [tokens, batch, output features of this rank].
        """
        rows, columns = (replace(cut, blocks=tuple(blocks)) for cut in (CUT_DIM_0, CUT_DIM_1))
        return self._linears(name, linears, value, rows, columns)

    def replicated_linear(self, name: str, linears: Mapping[str, Projection], value: str) -> tuple[str, ...]:
        """Adds linears with full copies on every rank.

        The input is this rank's part of the sequence; or the full sequence, if every rank uses a part of the outputs.
        In either case a rank computes a part of the gradients of weights and biases, to be summed over the ranks.

        Args:
            linears: the linears by output: the value of `key` is `name.key`.
            value: the common input.

        Returns:
            One value for each linear [tokens, batch, output features].
        """
        return self._linears(name, linears, value, COPIED_SUMMED, COPIED_SUMMED)

    def row_parallel(self, name: str, linear: Projection, value: str) -> str:
        """Adds a linear cut by its input features; the outputs are partial sums for `reduce_scatter`.

        Args:
            linear: the linear, perhaps with a low-rank adapter of PEFT.
            value: the input [sequence, batch, features / tp_size].
        """
        plain_linear = unwrap_peft(linear, self.label)
        matrix = CUT_DIM_0 if plain_linear.is_transposed else CUT_DIM_1
        self._place_linear(plain_linear, matrix, COPIED, down=CUT_DIM_1, up=COPIED_SUMMED)
        return self._linear(name, [plain_linear], value, (name,), GEMM, is_partial=True)[0]

    def lookup(
        self, name: str, embedding: nn.Module, *, plain: bool = False, change: Callable[[Tensor], Tensor] | None = None
    ) -> str:
        """Adds the lookup of token embeddings in a table cut by rows; returns partial sums for `reduce_scatter`.

        Reads the side input `ids` and, for noise, `length`.

        Args:
            embedding: the embedding.
            plain: whether the caller declares the extra computation of a subclass of `nn.Embedding` (a scale) by
                operators after the lookup. Otherwise subclasses are refused.
            change: returns the looked-up ids, from the ids of the batch.

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
        self.record_cut([copy.weight for copy in table.copies], CUT_DIM_0)
        for adapter in table.all_adapters():
            self.record_cut([adapter.down], CUT_DIM_1)
            self.record_cut([adapter.up, adapter.magnitude], COPIED_SUMMED)
        norms = self._norms(name, [table], RowNorms([table], transposed=True, is_cast=False), self.vocabulary)
        operator = _lookup_operator(table, embedding, self.vocabulary, self.loss_tweaks.neftune_alpha, change)
        return self.declare(name, operator, norms)[0]

    def loss(self, name: str, logits: str, vocab_size: int) -> str:
        """Adds the cross-entropy of logits cut by vocabulary. Reads side inputs `targets` and `loss_scale`.

        Args:
            name: the name of the output; begins the names of the operators.
            logits: the logits as returned by the model's own forward and by `predict()`.
            vocab_size: the rows of the full head.
        """
        self.logits = logits
        first, _ = cut_bounds(vocab_size, self.vocabulary.size, self.vocabulary.rank)
        written_by = next((op.name for op in self._declared if logits in op.writes), "")
        overwrites = isinstance(self._tensor_operators.get(written_by), Linear)  # a linear keeps nothing of its output
        head = self._defer_head(logits)
        statistics = TokenStatistics(
            first,
            vocab_size,
            self.loss_tweaks.label_smoothing,
            overwrites,
            self.loss_tweaks.wanted,
            wrap=self.compiled,
            head=head,
        )
        (value,) = self.declare(f"{name}.statistics", statistics, (logits,), relative_cost=GEMM)
        value = self.replicate(f"{name}.gather", value, self.tp)
        if self.loss_tweaks.token_loss is not None:
            return self._token_loss(name, value, self.loss_tweaks.token_loss, vocab_size)
        return self.autograd(name, cross_entropy, value, side=("targets", "loss_scale"))

    def _token_loss(self, name: str, statistics: str, loss: TokenLoss, vocab_size: int) -> str:
        """Adds a loss of log-probabilities from the statistics of every rank's logits."""
        if self.cp.size > 1:
            statistics = self.autograd(f"{name}.joined", joined_statistics, statistics)
            statistics = self.replicate(f"{name}.gather.cp", statistics, self.cp)
        function = partial(token_loss, loss=loss, length=vocab_size, cut=SequenceCut.of(self.tp, self.cp))
        return self.autograd(name, function, statistics, side=(BATCH, SCALE), compiles=False)

    def _defer_head(self, logits: str) -> HeadInTiles | None:
        """Defers the linear of the head and a function after it to a loss in tiles, and returns both; None if
        logits are made in another way."""
        written_by = {value: op for op in self._declared for value in op.writes}
        chain: list[str] = []
        value, change = logits, None
        while value in written_by:
            op = written_by[value]
            operator = self._tensor_operators[op.name]
            chain.append(op.name)
            if isinstance(operator, Linear):
                if not operator.is_plain:
                    return None
                few = self.loss_tweaks.token_loss is not None  # as TRL's heads keep
                head = HeadInTiles(operator.linears[0], operator.parameters, change, self.sharing.recomputes, few)
                for name in chain:
                    self._tensor_operators[name] = Deferred(self._tensor_operators[name], head)
                return head
            if change is not None or not (isinstance(operator, AutogradOperator) and operator.elementwise):
                return None
            change, (value,) = operator.function, op.reads
        return None

    def place_above(self, model: Any, below: Collection[nn.Parameter] | None) -> None:
        """Records the placements of the parameters above the decoder, which code of the caller's reads: the head cut by
        vocabulary, everything else in full.

        Args:
            model: the full model.
            below: the parameters of the other units; None for only the head.
        """
        read = set(self._placements)
        head = model.get_output_embeddings()
        if head is not None:
            self._place_linear(unwrap_peft(head, self.label), CUT_DIM_0, CUT_DIM_0, down=COPIED, up=CUT_DIM_0)
        if below is not None:
            known = {*below, *self._placements}
            self.record_cut([parameter for parameter in model.parameters() if parameter not in known], COPIED)
        self._above = self._placements.keys() - read

    def _collective(
        self,
        name: str,
        tensor_operator: AllGather | ReduceScatter,
        value: str,
        *,
        relative_cost: float = TRANSFER,
        **fields: Any,
    ) -> str:
        """Adds communication over the tensor-parallel ranks; with one rank nothing."""
        if self.tp.size == 1:
            return value
        fields |= {"kind": self.tp.kind, "relative_cost": relative_cost}
        return self.declare(name, tensor_operator, (value,), **fields)[0]

    def _linears(
        self, name: str, linears: Mapping[str, Projection], value: str, rows: Cut, columns: Cut
    ) -> tuple[str, ...]:
        """Adds linears with one common input and one output each: weights [features out, features in] with the
        placement `rows`, transposed weights with `columns`."""
        plain_linears = [unwrap_peft(linear, self.label) for linear in linears.values()]
        for linear in plain_linears:
            self._place_linear(linear, columns if linear.is_transposed else rows, rows, down=COPIED_SUMMED, up=rows)
        outputs = tuple(f"{name}.{key}" for key in linears)
        cost = GEMM * max(1, len(linears) / 2)
        return self._linear(name, plain_linears, value, outputs, cost)

    def _linear(
        self,
        name: str,
        linears: Sequence[Unwrapped],
        value: str,
        outputs: Sequence[str],
        cost: float,
        is_partial: bool = False,
    ) -> tuple[str, ...]:
        """Adds the operator of linears with one common input; the outputs are partial sums over the ranks, or not."""
        norms = RowNorms(linears, transposed=any(linear.is_transposed for linear in linears))
        reads = self._norms(name, linears, norms, self.tp if is_partial else None)
        operator = Linear(
            [linear.projection for linear in linears],
            adds_bias=not is_partial or self.tp.rank == 0,
            transposed=any(linear.is_transposed for linear in linears),
            # None if no linear has any: a step then looks none up.
            adapters=linears if any(linear.lora is not None for linear in linears) else (),
            copies=[copy for linear in linears for copy in linear.copies],
            four_bit=[linear.four_bit for linear in linears],
            takes_norms=bool(reads),
        )
        fields: dict[str, Any] = {"saved_for_backward": reads, "splits_dgrad_wgrad": True, "relative_cost": cost}
        return self.declare(name, operator, (value, *reads), outputs, **fields)

    def _norms(
        self, name: str, linears: Sequence[Unwrapped], norms: RowNorms, parts_on: Axis | None
    ) -> tuple[str, ...]:
        """Adds the squared norms of rows for the magnitudes of adapters; nothing without magnitudes.

        Args:
            name: of the operator that reads the norms.
            linears: with their adapters.
            norms: the operator that computes the norms on a rank.
            parts_on: the ranks that hold parts of a row; None if each rank holds whole rows.
        """
        if all(adapter.magnitude is None for linear in linears for adapter in linear.all_adapters()):
            return ()
        value = f"{name}.norms"
        values = self.declare(value, norms, (), non_differentiable=(value,), relative_cost=LIGHT)
        if parts_on is None or parts_on.size == 1:
            return values
        gathered = f"{value}.gather"
        fields: dict[str, Any] = {"kind": parts_on.kind, "non_differentiable": (gathered,), "relative_cost": LIGHT}
        return self.declare(gathered, ShareNorms(parts_on), values, **fields)

    def _place_linear(self, linear: Unwrapped, matrix: Cut, bias: Cut, *, down: Cut, up: Cut) -> None:
        """Records the cut of a linear and of its adapters."""
        weights = [copy.weight for copy in linear.copies]
        if linear.four_bit is not None:
            self._check_blocks(linear.four_bit, matrix)
            weights.append(linear.four_bit.absmax)
        self.record_cut(weights, matrix)
        self.record_cut([copy.bias for copy in linear.copies], bias)
        for adapter in linear.all_adapters():
            self.record_cut([adapter.down], down)
            self.record_cut([adapter.up, adapter.magnitude], up)
            self.record_cut([adapter.bias], bias)

    def _check_blocks(self, weight: FourBit, matrix: Cut) -> None:
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
        self, function: object, uses: Sequence[Used], cut: Sequence[UsedCut], on_shard: bool
    ) -> list[nn.Parameter]:
        """Returns the parameters differentiated by a function under autograd: full copies, and cut parameters."""
        if isinstance(function, nn.Module):
            uses = () if any(function is each for each in cut) else (function,)
        self.modules_run_as_is += [used for used in (*uses, *cut) if isinstance(used, nn.Module)]
        placed = dict(each for each in cut if isinstance(each, tuple))
        rows = _parameters_of([each for each in cut if not isinstance(each, tuple)])
        copied, shares = _parameters_of(uses), dict.fromkeys([*rows, *placed])
        copies = [parameter for parameter in copied if parameter not in shares]
        self.record_cut(copies, COPIED_SUMMED if on_shard else COPIED)
        for parameter in shares:
            self.record_cut([parameter], placed.get(parameter, CUT_DIM_0))
        return list(copied | shares)


def _parameters_of(used: Sequence[Used]) -> dict[nn.Parameter, None]:
    """Returns the parameters of modules and the given parameters, each once and in order."""
    groups = (each.parameters() if isinstance(each, nn.Module) else (each,) for each in used)
    return dict.fromkeys(parameter for parameters in groups for parameter in parameters)


def _lookup_operator(
    table: Unwrapped,
    embedding: nn.Module,
    axis: Axis,
    neftune_alpha: float | None,
    change: Callable[[Tensor], Tensor] | None,
) -> AutogradOperator:
    """Returns the operator of a lookup in a table with adapters; `embedding` has the training mode."""
    num_rows = table.weight.shape[0]
    first, _ = cut_bounds(num_rows, axis.size, axis.rank)
    padding = table.module.padding_idx

    def find(*norms: Tensor, ids: Tensor) -> Tensor:
        ids = ids if change is None else change(ids)
        value = total = lookup(ids, table.weight, first, num_rows, padding)
        for adapter in table.adapters():
            low = lookup(ids, adapter.down.t(), first, num_rows, padding)
            total = total + low @ adapter.up.t() * adapter.scaling
            if adapter.magnitude is not None:
                total = total * (adapter.magnitude / row_norms(norms[0]))
        return total.to(value.dtype)

    def find_noisy(*norms: Tensor, ids: Tensor, length: int) -> Tensor:
        assert neftune_alpha is not None
        found = find(*norms, ids=ids)
        return noisy(found, neftune_alpha, length) if embedding.training else found

    parameters: list[Any] = [copy.weight for copy in table.copies]
    for adapter in table.all_adapters():
        parameters += adapter.parameters
    plain = int(any(adapter.magnitude is not None for adapter in table.all_adapters()))
    reads = table.lora is not None  # the gradient of a table does not depend on the table's contents
    if neftune_alpha is not None and axis.rank == 0:  # one of the partial sums brings the noise
        draws, side = (lambda: embedding.training), ("ids", "length")
        return AutogradOperator(find_noisy, parameters, side, draws=draws, backward_reads=reads, plain_inputs=plain)
    return AutogradOperator(find, parameters, ("ids",), backward_reads=reads, plain_inputs=plain)
