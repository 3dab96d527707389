"""The draft of a unit: operators in the order in which they are declared, with what crosses ranks.

In:   operators, what they do to tensors, and how parameters are cut.
Out:  a unit.
Must hold: a declaration says the forward pass once, in order; with one rank the collectives are absent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from hf_helix.models.graph.context import LIGHT, TRANSFER, LossTweaks, ParallelContext
from hf_helix.operators.base import SplitComputation, TensorOperator
from hf_helix.operators.communication.collectives import AllGather, AllGatherReplicated, ReduceScatter
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.moe.dispatch import RouterMeter
from hf_helix.operators.param_shard import Placement
from hf_helix.operators.segment import SumOfGradients, SumOfParts
from hf_helix.operators.unit import Unit
from hf_helix.planning.graph.operator import Graph, Kind, Operator
from hf_helix.planning.graph.pair import GraphPair


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
