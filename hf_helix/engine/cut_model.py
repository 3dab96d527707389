"""The cut model, as all parts of the engine read it.

In:   the cut model, its units on this rank, and the snapshot of what the operators read.
Out:  a `CutModel`, which does not change in a run.
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_helix.checkpoint.cut_parameters import align_buffers
from hf_helix.config import HelixConfig
from hf_helix.engine.cut.snapshot import Snapshot
from hf_helix.engine.optimizer_shards import unsharded
from hf_helix.models.derived.family import Family
from hf_helix.runtime.distributed.agreement import agree_on_action
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.divided import running_model_code
from hf_helix.runtime.rank_units import RankUnits


@dataclass(frozen=True, eq=False)
class CutModel:
    """A model cut in place.

    Attributes:
        model: the Transformers model, perhaps a `PeftModel`.
        base: the Transformers model inside.
        family: the family of the base.
        config, mesh: of the run.
        rank_units: the units of this rank.
        modules_run_as_is: the modules that are not cut.
        ends_at_decoder: whether a caller computes the loss.
        trains: whether any parameter was trained before the cut.
        snapshot: the model right after the cut.
    """

    model: Any
    base: Any
    family: Family
    config: HelixConfig
    mesh: Mesh
    rank_units: RankUnits
    modules_run_as_is: Collection[nn.Module]
    ends_at_decoder: bool
    trains: bool
    snapshot: Snapshot

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Returns the context in which the model's own code runs over this rank's slices: linears and lookups run over
        slices; other cut weights, such as experts, are gathered once. Collective."""
        with unsharded(self.rank_units), running_model_code():
            yield

    def align_buffers(self, action: str) -> None:
        """Gives buffers that a script has changed, on any rank, rank 0's values, as DDP does before every window.
        Collective on a model with buffers; `action` is the clause for the ranks' next action."""
        if self.snapshot.has_buffers:
            (have_changed,) = agree_on_action(action, [self.snapshot.have_buffers_changed()])
            if have_changed:
                align_buffers(self.model, self.mesh.device)
                self.snapshot.have_buffers_changed()  # by the alignment itself
