"""The counts of routers, for readers that look at different times.

In:   the meters of this rank's routers, which micro-batches in training add to.
Out:  for every reader the counts since it last looked, over all ranks; each token counts once.
Must hold: a look of one reader takes nothing from another; ranks read alike.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.runtime.distributed.mesh import Mesh, world_size
from hf_helix.runtime.rank_units import RankUnits

LOGS, LOADS = "logs", "loads"
"""The readers."""


class RouterCounts:
    """The counts of the routers of a cut model.

    Args:
        rank_units: the units of this rank, and of others.
        mesh: the mesh of ranks.
    """

    def __init__(self, rank_units: RankUnits, mesh: Mesh) -> None:
        units = sorted(rank_units.all_units.items())
        self._meters = [(meter, index in rank_units.units) for index, unit in units for meter in unit.meters]
        self._sizes = [meter.num_experts + 3 for meter, _ in self._meters]
        self._device = mesh.device
        self._unread: dict[str, Tensor] = {LOGS: torch.zeros(sum(self._sizes), device=mesh.device)}

    def read(self, reader: str = LOGS) -> list[Tensor]:
        """Returns for every router of the model, in the order of layers, the sums of `RouterMeter.read` since the
        reader's last look; at its first look since the last of the logs. Collective."""
        if not self._meters:
            return []
        new = torch.cat(
            [
                meter.read(self._device) if is_here else torch.zeros(size, device=self._device)
                for (meter, is_here), size in zip(self._meters, self._sizes, strict=True)
            ]
        )
        self._unread.setdefault(reader, self._unread[LOGS])
        sums = self._unread[reader] + new
        self._unread = {
            name: torch.zeros_like(new) if name == reader else self._unread[name] + new for name in self._unread
        }
        if world_size() > 1:
            dist.all_reduce(sums)
        return list(sums.split(self._sizes))


def router_entries(sums: list[Tensor], capped: bool) -> dict[str, float]:
    """Returns the figures of routers, as means over layers.

    Args:
        sums: see `RouterCounts.read`.
        capped: whether experts drop tokens beyond their capacity.

    Returns:
        Nothing if the model has no routers; otherwise
        `helix/router_z`: mean of the squared log-sum-exp of a token's logits (the z-loss of ST-MoE without its factor),
        if the logits of every layer are known;
        `helix/expert_imbalance`: the load of the busiest expert in parts of the mean load, 1 if all are equal;
        `helix/dropped_tokens`: the share of dropped choices.
    """
    if not sums:
        return {}
    loads, others = zip(*[(each[:-3], each[-3:]) for each in sums], strict=True)
    squares, tokens, dropped = torch.stack(others).unbind(1)
    if not bool((tokens > 0).all()):
        return {}
    chosen = torch.stack([load.sum() for load in loads])
    entries = {}
    if not bool(squares.isnan().any()):
        entries["helix/router_z"] = (squares / tokens).mean()
    entries["helix/expert_imbalance"] = torch.stack([load.max() / load.mean() for load in loads]).mean()
    if capped:
        entries["helix/dropped_tokens"] = (dropped / chosen).mean()
    return {name: round(float(value), 4) for name, value in entries.items()}
