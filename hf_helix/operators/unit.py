"""Units: what a rank holds of the model, in pieces that a plan can order.

In:   the declaration of a decoder layer, of the embedding or of the head (see `hf_helix.models.registry`).
Out:  its forward graph, the backward graph derived from it, the operators that the graphs name, and how its
      parameters are cut.
Must hold: units of the same name have equal graphs, so one order serves them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from hf_helix.operators.base import TensorOperator
from hf_helix.operators.moe.dispatch import RouterMeter
from hf_helix.operators.param_shard import Placement
from hf_helix.operators.zero.flat_parameter import FlatParameter
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.recompute import NONE, recomputed


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A decoder layer, the embedding or the head, bound to its modules.

    Attributes:
        label: where it stands in the model, such as "layers.3"; for messages and traces.
        graphs: forward and backward.
        operators: by their declared names.
        placements: each parameter with the way it is cut.
        meters: what its routers count.
        called: the submodules that operators call as they are, hooks included; of others they read the weights.
        logits: of the head, the value that the loss reads: what the model's own forward returns as logits.
        loss_shape: of what the head gives: a scalar, or a loss with figures behind it.
        flat_parameters: the values that hold gathered weights, those of backward included, with the parameters in them; empty
            where every rank keeps all weights.
    """

    label: str
    graphs: GraphPair
    operators: Mapping[str, TensorOperator]
    placements: Mapping[torch.nn.Parameter, Placement]
    meters: Sequence[RouterMeter] = ()
    called: Sequence[torch.nn.Module] = ()
    logits: str | None = None
    loss_shape: tuple[int, ...] = ()
    flat_parameters: Mapping[str, FlatParameter] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.graphs.forward.name

    def recomputed(self, mode: str, suffix: str = "") -> Unit:
        """The unit that keeps less for backward, and runs that again, see `hf_helix.planning.graph.recompute`.

        Args:
            suffix: of the name of a unit that does.
        """
        if mode == NONE:
            return self
        forward = recomputed(self.graphs.forward, mode)
        return replace(self, graphs=GraphPair.of(replace(forward, name=f"{forward.name}{suffix}")))
