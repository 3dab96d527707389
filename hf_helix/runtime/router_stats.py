"""What routers did since the last log, over all ranks.

In:   the meters of this rank's units.
Out:  figures for the logs; none where the model has no routers.
Must hold: every rank calls it; each token counts once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_helix.runtime.distributed.mesh import Mesh, world_size
from hf_helix.runtime.stage import Stage


def router_entries(stage: Stage, mesh: Mesh, capped: bool) -> dict[str, float]:
    """Means over the layers, and forget. Collective.

    Args:
        capped: whether experts drop what they have no room for.

    Returns:
        `helix/router_z`: mean of the squared log-sum-exp of a token's logits (the z-loss of ST-MoE without its factor),
        where the logits of every layer are known;
        `helix/expert_imbalance`: the load of the busiest expert in parts of the mean load, 1 where all are equal;
        `helix/dropped_tokens`: the part of all choices that found no room.
    """
    meters = {index: meter for index, unit in sorted(stage.model.items()) for meter in unit.meters}
    if not meters:
        return {}
    held = stage.units
    sums = torch.stack(
        [
            meter.read(mesh.device) if index in held else torch.zeros(meter.num_experts + 3, device=mesh.device)
            for index, meter in meters.items()
        ]
    )
    if world_size() > 1:
        dist.all_reduce(sums)
    load, (squares, tokens, dropped) = sums[:, :-3], sums[:, -3:].unbind(1)
    if not bool((tokens > 0).all()):
        return {}
    chosen = load.sum(1)
    entries = {}
    if not bool(squares.isnan().any()):
        entries["helix/router_z"] = (squares / tokens).mean()
    entries["helix/expert_imbalance"] = (load.amax(1) / load.mean(1)).mean()
    if capped:
        entries["helix/dropped_tokens"] = (dropped / chosen).mean()
    return {name: round(float(value), 4) for name, value in entries.items()}
