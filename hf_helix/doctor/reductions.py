"""Communication that happens once in a window: reductions of gradients, and gathers of weights with `shard_optimizer`.

In:   the gradients and the weights of every unit, and the ranks of every axis.
Out:  the gradient reductions and the gathers of a layout, and a profile with their seconds.
Must hold: both are those of training, in the same buckets and in the same order; `hf_helix.planning` says where they
stand in a window. Operators that share a link each get half of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from hf_helix.doctor.amounts.amounts import Adders, Amounts, Gradient
from hf_helix.doctor.amounts.kept import KeptWeights
from hf_helix.doctor.amounts.kernels import Transfer
from hf_helix.doctor.estimate import LEAST, Ring, transfer_seconds
from hf_helix.doctor.memory import ELEMENT, GRADIENT, PARAMETER
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.profile import Pair, Profile
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES
from hf_helix.planning.window.layout import (
    GradientReduction,
    Layout,
    Name,
    WeightGather,
    named_gathers,
    named_operators,
    named_reductions,
)
from hf_helix.planning.window.passes import BUCKET_BYTES, fill_buckets

COPY = ELEMENT["bf16"]
"""Bytes of an element of a copy of weights, in a type of half the size."""


def gradient_sums(
    amounts: Amounts, layout: Layout, spread: Collection[str] = ()
) -> list[tuple[GradientReduction, int]]:
    """Returns the sums of all ranks of a pipeline, each with the bytes of it that are of experts."""
    found = []
    for rank in range(layout.num_ranks):
        completed = list(amounts.completed_gradients(layout, rank))
        numbers = fill_buckets([GRADIENT * made.elements for made, _ in completed], BUCKET_BYTES)
        buckets: dict[object, list[tuple[Gradient, Adders]]] = {}
        for number, (made, adders) in zip(numbers, completed, strict=True):
            key: object = number
            if spread:
                units = {unit for unit, _ in adders}
                key = min(units), len(units), made.flat
                if made.is_experts and EXPERT_COPIES not in spread:
                    continue
            buckets[key] = [*buckets.pop(key, ()), (made, adders)]  # behind those that are complete before
        for bucket in buckets.values():
            adders = tuple(dict.fromkeys(adder for _, mine in bucket for adder in mine))
            experts = GRADIENT * sum(made.elements for made, _ in bucket if made.is_experts)
            found.append((GradientReduction(adders, GRADIENT * sum(made.elements for made, _ in bucket)), experts))
    return found


def profile_with_sums(
    profile: Profile, amounts: Amounts, axes: Mapping[str, Ring], cluster: Cluster, spread: Collection[str] = ()
) -> Profile:
    """Returns the profile with the sums of gradients in its layout; the same where no other rank sees other tokens."""
    if axes[COPIES].size == 1:
        return profile
    found = gradient_sums(amounts, profile.layout, spread)
    layout = replace(profile.layout, reductions=[made for made, _ in found])
    names = [name for name, _ in named_reductions(layout)]
    seconds = [max(LEAST, _seconds(*each, axes, cluster, spread)) for each in found]
    times = {**profile.times, **dict(zip(names, seconds, strict=True))}
    crosses = axes[COPIES].crosses
    sent = {
        name: axes[COPIES].sent((1 if spread else 2) * made.bytes) for name, (made, _) in zip(names, found, strict=True)
    }
    pairs = {**profile.pairs, **_contended(layout, times, {**profile.bytes, **sent}, crosses, cluster)}
    return replace(profile, layout=layout, times=times, pairs=pairs)


def _seconds(
    made: GradientReduction, experts: int, axes: Mapping[str, Ring], cluster: Cluster, spread: Collection[str]
) -> float:
    """Returns the seconds in which gradients are put in one piece and summed; a CPU also divides them.

    To parts, they are put into a piece full of zeros, and a CPU adds up what comes from the other ranks.
    """
    on_gpu, device, seconds = cluster.backend == "nccl", cluster.device, 0.0
    passes = (3 if on_gpu else 5) if spread else (2 if on_gpu else 4)
    for axis, held in ((COPIES, made.bytes - experts), (EXPERT_COPIES, experts)):
        if axes[axis].size > 1 and held:
            seconds += device.moving_seconds(passes * held, 2 * held)
            method, times = ("reduce_scatter", 1) if spread else ("all_reduce", 2)
            sent = Transfer(axis, method, axes[axis].sent(times * held))
            seconds += transfer_seconds(sent, axes[axis], cluster)
    return seconds


def _contended(
    layout: Layout, times: Mapping[Name, float], sent: Mapping[Name, float], crosses: bool, cluster: Cluster
) -> dict[tuple[Name, Name], Pair]:
    """Returns, for every kind of operator that sums slow down or are slowed down by, a pair of two. Over one link, each
    gets half of it."""
    link = Kind.INTER_NODE if crosses else Kind.INTRA_NODE
    summing = max((name for name, _ in named_reductions(layout)), key=lambda name: times[name])
    pairs = {}
    for kind in (Kind.COMPUTE, Kind.INTRA_NODE, Kind.INTER_NODE):
        others = [name for name, op in named_operators(layout) if op.kind is kind]
        if not others:
            continue
        other = max(others, key=lambda name: times[name])
        slow = 2.0, 2.0
        if kind is not link:
            slow = cluster.slowdowns(link, kind, (sent[summing], sent.get(other, 0)))
        if slow != (1.0, 1.0):
            pairs[summing, other] = Pair.of(times[summing], times[other], *slow)
    return pairs


def sums_behind(
    amounts: Amounts, layout: Layout, axes: Mapping[str, Ring], cluster: Cluster, spread: Collection[str] = ()
) -> float:
    """Returns the seconds of all sums of the rank that has most, where none begins before the last backward ends."""
    completed = _completed(amounts, layout, axes, cluster, spread)
    return max(
        sum(completed.get(unit, 0.0) for unit in layout.units_of(rank) if layout.units[unit] in amounts.weights)
        for rank in range(layout.num_ranks)
    )


def _completed(
    amounts: Amounts, layout: Layout, axes: Mapping[str, Ring], cluster: Cluster, spread: Collection[str]
) -> dict[int, float]:
    """Returns the seconds of the sums that each unit completes."""
    completed: dict[int, float] = {}
    for made, experts in gradient_sums(amounts, layout, spread) if axes[COPIES].size > 1 else ():
        last = min(unit for unit, _ in made.adders)
        completed[last] = completed.get(last, 0.0) + _seconds(made, experts, axes, cluster, spread)
    return completed


# -- gathers of weights ------------------------------------------------------------------------------------------------


def weight_gathers(
    amounts: Amounts, layout: Layout, axes: Mapping[str, Ring]
) -> list[tuple[WeightGather, KeptWeights]]:
    """Returns the gathers of all ranks of a pipeline, each with the weights that it gathers."""
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
    """Returns the profile with the gathers of weights in its layout; the same where no rank has copies."""
    found = weight_gathers(amounts, profile.layout, axes)
    if not found:
        return profile
    layout = replace(profile.layout, gathers=[gather for gather, _ in found])
    seconds = (gather_seconds(kept, axes, cluster) for _, kept in found)
    times = dict(zip((name for name, _ in named_gathers(layout)), seconds, strict=True))
    return replace(profile, layout=layout, times={**profile.times, **times})


def gather_seconds(kept: KeptWeights, axes: Mapping[str, Ring], cluster: Cluster) -> float:
    """Returns the seconds in which a rank casts its part of some weights, if need be, and gathers all of them."""
    ring, device = axes[_axis(kept)], cluster.device
    own = kept.elements / ring.size
    cast = own * (PARAMETER + kept.element_bytes) if kept.element_bytes != PARAMETER else 0.0
    sent = Transfer(_axis(kept), "all_gather", ring.sent(kept.bytes))
    return max(LEAST, device.moving_seconds(cast) + transfer_seconds(sent, ring, cluster))


def cast_seconds(amounts: Amounts, layout: Layout, cluster: Cluster, gathered: bool) -> float:
    """Returns the seconds in which the first forward pass of a window, on its way through all stages, casts weights to
    the type of matrix products; later ones find the copies.

    Args:
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
