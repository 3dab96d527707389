"""Units: a rank's part of the model, as operators for a plan to order.

In:   the declaration of a decoder layer, of the embedding or of the head (see `hf_helix.models.registry`).
Out:  its forward graph, the backward graph derived from it, the operators that the graphs name, and the cuts of its
      parameters.
Must hold: units of the same name have equal graphs, so one order serves them all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from hf_helix.operators.autograd_operator import Add, SumOfGradients
from hf_helix.operators.base import Communication, TensorOperator
from hf_helix.operators.experts.moe import RouterMeter
from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Operator
from hf_helix.planning.parameters import Cut
from hf_helix.planning.schedule.placement import FRONT, REAR, half_name
from hf_helix.planning.timing.recompute import NONE, recomputed, with_copies_down


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A decoder layer, the embedding or the head, bound to its modules.

    Attributes:
        label: its position in the model (`layers.3`), for messages and traces.
        graphs: forward and backward.
        operators: by their declared names.
        placements: each parameter with its cut.
        meters: the counts of its routers.
        modules_run_as_is: the submodules that operators call, hooks included; of other submodules operators read the
            weights.
        logits: of the head, the input of the loss: the logits of the model's own forward.
        loss_shape: of the head's output: a scalar, or a loss followed by figures.
        token_figures: how many further figures each token has, between the loss and these figures.
        ends_at_decoder: of the last unit, whether its output is the decoder's, and a caller computes losses.
        above: the parameters above the decoder, which only the caller's code reads.
        unread: the parameters that the model's code never reads: kept and saved, without a gradient.
        flat_parameters: by the values of gathered weights, also of backward; empty if every rank keeps all weights.
    """

    label: str
    graphs: GraphPair
    operators: Mapping[str, TensorOperator]
    placements: Mapping[torch.nn.Parameter, Cut]
    meters: Sequence[RouterMeter] = ()
    modules_run_as_is: Sequence[torch.nn.Module] = ()
    logits: str | None = None
    loss_shape: tuple[int, ...] = ()
    token_figures: int = 0
    ends_at_decoder: bool = False
    above: Collection[torch.nn.Parameter] = ()
    unread: Collection[torch.nn.Parameter] = ()
    flat_parameters: Mapping[str, FlatParameter] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.graphs.forward.name

    @property
    def by_data(self) -> bool:
        """Whether the values of a batch decide the code that runs, see `TensorOperator`."""
        return any(operator.by_data for operator in self.operators.values())

    def recomputed(self, mode: str, suffix: str = "", on_host: Communication | None = None) -> Unit:
        """Returns the unit that keeps less for backward, and recomputes the rest, see
        `hf_helix.planning.timing.recompute`.

        Args:
            mode: the option.
            suffix: of the unit's name.
            on_host: copies the unit's kept values to the host and back; None if the device keeps them.
        """
        if mode == NONE:
            return self
        forward = recomputed(self.graphs.forward, mode)
        forward = replace(forward if on_host is None else with_copies_down(forward), name=f"{forward.name}{suffix}")
        graphs = GraphPair.of(forward)
        copies = [op.name for _, op in graphs.entries() if op.kind.copies]
        kept = {} if on_host is None else dict.fromkeys(copies, on_host)
        return replace(self, graphs=graphs, operators={**self.operators, **kept})

    @classmethod
    def of(cls, graph: Graph, operators: Mapping[str, TensorOperator], **fields: Any) -> Unit:
        """Returns the unit of a forward graph, with the sums of gradients that its backward graph has."""
        graphs = GraphPair.of(graph)
        made = {op.forward_name for op in graphs.backward.operators} - operators.keys()
        return cls(graphs=graphs, operators={**operators, **{name: SumOfGradients() for name in made}}, **fields)

    def halves(self) -> tuple[Unit, Unit] | None:
        """Returns a layer as two units, cut at the residual stream in its middle, usually between attention and MLP;
        None unless some sum of the residual stream is the only value that later operators read."""
        graph = self.graphs.forward
        for end, operator in enumerate(graph.operators[:-1], 1):
            read = {value for op in graph.operators[end:] for value in op.depends_on}
            known = {value for op in graph.operators[:end] for value in op.writes}
            is_residual = isinstance(self.operators[operator.name], Add) and len(graph.inputs) == 1
            if is_residual and not self.meters and read & {*known, *graph.inputs} == set(operator.writes):
                front = self.part(half_name(FRONT, graph.name), graph.operators[:end], graph.inputs, operator.writes)
                rear = self.part(half_name(REAR, graph.name), graph.operators[end:], operator.writes, graph.outputs)
                front, rear = (
                    replace(half, label=f"{self.label}.{name}") for half, name in ((front, FRONT), (rear, REAR))
                )
                placed = [*front.placements, *rear.placements]  # none twice, none without a reader
                if len({*placed}) < len(placed) or {*placed, *self.unread} != self.placements.keys():
                    return None
                unread = {parameter: self.placements[parameter] for parameter in self.unread}
                return front, replace(rear, placements={**rear.placements, **unread}, unread=self.unread)
        return None

    def part(
        self,
        name: str,
        operators: Sequence[Operator],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        added: Mapping[str, TensorOperator] = MappingProxyType({}),
    ) -> Unit:
        """Returns some operators of the unit as a unit, without the order of other operators.

        Args:
            name: of the unit.
            operators: in canonical order.
            inputs, outputs: the values that enter and leave the unit.
            added: the operators that this unit lacks.
        """
        names = [op.name for op in operators]
        within = [
            replace(op, ordered_after=tuple(each for each in op.ordered_after if each in names)) for op in operators
        ]
        graph = self.graphs.forward
        shown = tuple(value for op in within for value in op.writes if value in graph.shown)
        part = Graph(name, tuple(within), inputs, outputs, graph.repeats, shown=shown)
        own = {each: added[each] if each in added else self.operators[each] for each in names}
        read = {parameter for operator in own.values() for parameter in operator.parameters}
        placements = {parameter: placed for parameter, placed in self.placements.items() if parameter in read}
        kept = {
            "modules_run_as_is": self.modules_run_as_is,
            "logits": self.logits,
            "loss_shape": self.loss_shape,
            "token_figures": self.token_figures,
            "ends_at_decoder": self.ends_at_decoder,
        }
        return Unit.of(part, own, label=self.label, placements=placements, **kept)
