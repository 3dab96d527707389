"""Gathers of weights that ranks have each stepped a part of (`shard_optimizer`): what each takes, and how long the
first forward pass of a window waits for them.

In:   the weights that the units of every rank keep, and where the ranks with copies stand.
Out:  the layout's gathers as the runtime makes them, a profile that knows them, seconds.
Must hold: gathers are those of training, in its order; where they stand in a window says
`hf_helix.planning.window.passes`, for windows on paper as for those that run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.layout import Layout, WeightGather, named_gathers
from hf_helix.simulation.amounts.amounts import Amounts
from hf_helix.simulation.amounts.kept import KeptWeights
from hf_helix.simulation.amounts.kernels import COPIES, EXPERT_COPIES, Transfer
from hf_helix.simulation.cluster import Cluster
from hf_helix.simulation.estimate import LEAST, Ring, transfer_seconds
from hf_helix.simulation.memory import ELEMENT, PARAMETER
from hf_helix.simulation.step.sums import free_seconds

COPY = ELEMENT["bf16"]
"""Bytes of an element of a copy of weights, in a type of half the size."""


def weight_gathers(
    amounts: Amounts, layout: Layout, axes: Mapping[str, Ring]
) -> list[tuple[WeightGather, KeptWeights]]:
    """Returns the gathers of all ranks of a pipeline, each with the weights that it gathers.

    Args:
        amounts: of a rank of this layout.
        layout: of all ranks of a pipeline.
        axes: where the ranks of every axis stand; what no other rank has copies of is not gathered.
    """
    found = []
    units = list(layout.units)
    for unit, name in enumerate(units):
        for kept in amounts.kept:
            if kept.units[0] == name and axes[_axis(kept)].size > 1:
                others = (units.index(other) for other in kept.units[1:])  # there is one of each that shares weights
                found.append((WeightGather((unit, *others), kept.name, kept.bytes), kept))
    return found


def _axis(kept: KeptWeights) -> str:
    return EXPERT_COPIES if kept.is_experts else COPIES


def profile_with_gathers(profile: Profile, amounts: Amounts, axes: Mapping[str, Ring], cluster: Cluster) -> Profile:
    """Returns the profile with the gathers of weights in its layout; the same where no rank has copies.

    Args:
        profile: the times of the operators.
        amounts: of a rank of this layout.
        axes: where the ranks of every axis stand.
        cluster: what it runs on.
    """
    found = weight_gathers(amounts, profile.layout, axes)
    if not found:
        return profile
    layout = replace(profile.layout, gathers=[gather for gather, _ in found])
    seconds = (gather_seconds(kept, axes, cluster) for _, kept in found)
    times = dict(zip((name for name, _ in named_gathers(layout)), seconds, strict=True))
    return replace(profile, layout=layout, times={**profile.times, **times})


def gather_seconds(kept: KeptWeights, axes: Mapping[str, Ring], cluster: Cluster) -> float:
    """Returns the seconds in which a rank casts its part of some weights, if need be, and gathers all of them.

    Args:
        kept: the weights.
        axes: where the ranks of every axis stand.
        cluster: what it runs on.
    """
    ring, device = axes[_axis(kept)], cluster.device
    own = kept.elements / ring.size
    cast = own * (PARAMETER + kept.element_bytes) if kept.element_bytes != PARAMETER else 0.0
    sent = Transfer(_axis(kept), "all_gather", ring.sent(kept.bytes))
    return max(LEAST, device.moving_seconds(cast) + transfer_seconds(sent, ring, cluster))


def cast_seconds(amounts: Amounts, layout: Layout, cluster: Cluster, gathered: bool) -> float:
    """Returns the seconds in which the first forward pass of a window, on its way through all stages, casts weights to
    the type of matrix products; later ones find the copies.

    Args:
        amounts: of a rank of this layout.
        layout: of all ranks of a pipeline.
        cluster: what it runs on.
        gathered: whether weights are cast before they are gathered (`gather_seconds`), and only others here.
    """
    found = 0.0
    for name in layout.units:
        cast = sum(each.bytes for each in amounts.kept if each.units[0] == name and each.is_cast and not gathered)
        # What a later unit shares is kept as it is trained, for the first one, which looks rows up in it.
        if any(name in each.units[1:] for each in amounts.kept):
            cast += amounts.copies[name]
        found += cluster.device.moving_seconds(cast * (1 + PARAMETER / COPY))
    return found


def exposed_gathers(profile: Profile, amounts: Amounts, axes: Mapping[str, Ring], cluster: Cluster) -> float:
    """Returns the seconds that the first forward pass of a window waits for weights, on its way through all stages.

    Args:
        profile, amounts, axes, cluster: as of `profile_with_gathers`.
    """
    layout = profile.layout
    needed: dict[int, float] = {}  # of each unit, the seconds of the gathers that it has to wait for itself
    for gather, kept in weight_gathers(amounts, layout, axes):
        first = gather.units[0]
        needed[first] = needed.get(first, 0.0) + gather_seconds(kept, axes, cluster)
    now = waited = 0.0
    behind, taken = [0.0] * layout.num_ranks, [0.0] * layout.num_ranks  # gathers so far; what else the links carried
    for unit, name in enumerate(layout.units):
        rank = layout.rank_of(unit)
        behind[rank] += needed.get(unit, 0.0)
        waiting = max(0.0, behind[rank] + taken[rank] - now) if unit in needed else 0.0
        sending = (op for op in layout.graphs[name].forward.operators if not op.receives)
        seconds = sum(profile.times[name, f"F.{op.name}"] for op in sending)
        now, waited = now + waiting + seconds, waited + waiting
        if name in amounts.weights:
            taken[rank] += seconds - free_seconds(profile, name, amounts, axes, forward=True)
    return waited
