"""Sums of gradients over ranks: how long they last after the backward beside which they begin.

In:   what the units of every rank hold and send, their times, and the axes over which gradients are summed.
Out:  seconds.
Must hold: gradients are summed in the buckets that training fills, each once the last of them is complete; a link
carries in all what it can, so sums make way for what backward sends over the same link, or it for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_helix.planning.layout import Layout
from hf_helix.planning.profile import Profile
from hf_helix.runtime.gradient_buckets import BUCKET_BYTES
from hf_helix.simulation.amounts import Amounts
from hf_helix.simulation.cluster import Cluster
from hf_helix.simulation.estimate import Ring, transfer_seconds
from hf_helix.simulation.kernels import Transfer
from hf_helix.simulation.memory import GRADIENT

COPIES, EXPERT_COPIES = "copies", "expert_copies"


def exposed_sums(
    amounts: Amounts, layout: Layout, axes: Mapping[str, Ring], cluster: Cluster, profile: Profile
) -> float:
    """Returns the seconds after the last backward in which gradients are still summed, of the rank that takes longest.

    Args:
        amounts: of a rank of this layout.
        layout: of all ranks of a pipeline.
        axes: where the ranks of every axis stand.
        cluster: what it runs on.
        profile: the times of the operators.
    """
    worst = 0.0
    for rank in range(layout.num_ranks):
        waiting = 0.0
        buckets = [_Buckets(axis, axes[axis], cluster) for axis in (COPIES, EXPERT_COPIES)]
        for name in reversed([layout.units[unit] for unit in layout.units_of(rank)]):
            if name not in amounts.weights:
                continue
            waiting = max(0.0, waiting - _free_seconds(amounts, layout, name, profile, axes))
            held = amounts.weights[name]
            waiting += sum(
                bucket.add(count) for bucket, count in zip(buckets, (held.trained, held.experts), strict=True)
            )
        waiting += sum(bucket.rest() for bucket in buckets)
        worst = max(worst, waiting)
    return worst


class _Buckets:
    """Gradients that are summed over an axis, bucket by bucket.

    Args:
        axis: the name of the axis.
        ring: its ranks.
        cluster: what carries them.
    """

    def __init__(self, axis: str, ring: Ring, cluster: Cluster) -> None:
        self._axis, self._ring, self._cluster = axis, ring, cluster
        self._filled = 0

    def add(self, count: int) -> float:
        """Returns the seconds for which the buckets are summed that so many more elements fill."""
        full, self._filled = divmod(self._filled + count * GRADIENT, BUCKET_BYTES)
        return full * self._seconds(BUCKET_BYTES)

    def rest(self) -> float:
        """Returns the seconds for which the last bucket is summed."""
        return self._seconds(self._filled)

    def _seconds(self, held: int) -> float:
        """Returns the seconds in which gradients are put in one piece and summed; a CPU also divides them."""
        size = self._ring.size
        if size == 1 or not held:
            return 0.0
        passes = 2 if self._cluster.backend == "nccl" else 4
        device = self._cluster.device
        moving = passes * held / (device.bandwidth * device.memory_efficiency.at(2 * held))
        sent = Transfer(self._axis, "all_reduce", 2 * held * (size - 1) // size)
        return moving + transfer_seconds(sent, self._ring, self._cluster)


def _free_seconds(amounts: Amounts, layout: Layout, name: str, profile: Profile, axes: Mapping[str, Ring]) -> float:
    """Returns the seconds of a unit's backward in which the link of the sums carries nothing else."""
    crosses = axes[COPIES].crosses or axes[EXPERT_COPIES].crosses
    free = 0.0
    for op in layout.graphs[name].backward.operators:
        entry = name, f"B.{op.name}"
        sent = amounts.operators[entry].transfers
        if not any(axes[each.axis].size > 1 and axes[each.axis].crosses == crosses for each in sent):
            free += profile.times[entry]
    return free
