"""Communication once in a window: gradient reductions, and gathers of weights with `shard_optimizer`.

In:   the gradients and the weights of every unit, a case, and a cluster.
Out:  the gradient reductions and the gathers of a layout, and a profile with their seconds.
Must hold: buckets and order are as in training; `hf_helix.planning` places reductions and gathers in a window. Two
operators on one link each get half of its bandwidth.
"""

from collections.abc import Mapping
from dataclasses import replace

from hf_helix.doctor.amounts.records import Adders, Amounts, Gradient, KeptWeights, Transfer
from hf_helix.doctor.case import ELEMENT, GRADIENT, PARAMETER, Case
from hf_helix.doctor.estimate import LEAST, rings, transfer_seconds
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.profile import Pair, Profile
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES
from hf_helix.planning.window.layout import (
    GradientReduction,
    Layout,
    Name,
    WeightGather,
    named_operators,
)
from hf_helix.planning.window.passes import BUCKET_BYTES, fill_buckets

COPY = ELEMENT["bf16"]  # bytes of an element of cast weights


def with_reductions(profile: Profile, amounts: Amounts, case: Case, cluster: Cluster) -> Profile:
    """Returns a profile with the gradient reductions and the gathers of weights of a window; if the host has weights
    and states, with copies to and from the host.

    Args:
        profile: without them; of all layers, or of few.
        amounts: the amounts of a rank of the case.
        case: gives the ranks that share gradients and weights.
        cluster: the rates of links, devices and hosts.
    """
    return _with_gathers(_with_sums(profile, amounts, case, cluster), amounts, case, cluster)


def gradient_sums(amounts: Amounts, layout: Layout, case: Case) -> list[tuple[GradientReduction, int]]:
    """Returns the gradient reductions of all ranks of a pipeline, each with its bytes of experts' gradients."""
    spread, on_host = case.spread_gradients, bool(case.offload)
    found = []
    for rank in range(layout.num_ranks):
        completed = list(amounts.completed_gradients(layout, rank))
        numbers = fill_buckets([GRADIENT * made.elements for made, _ in completed], BUCKET_BYTES)
        buckets: dict[object, list[tuple[Gradient, Adders]]] = {}
        for number, (made, adders) in zip(numbers, completed, strict=True):
            key: object = number
            if spread or on_host:
                units = {unit for unit, _ in adders}
                key = min(units), len(units), made.flat
                if made.is_experts and EXPERT_COPIES not in spread and not on_host:
                    continue
            buckets[key] = [*buckets.pop(key, ()), (made, adders)]  # after the buckets that are complete earlier
        for bucket in buckets.values():
            adders = tuple(dict.fromkeys(adder for _, mine in bucket for adder in mine))
            experts = GRADIENT * sum(made.elements for made, _ in bucket if made.is_experts)
            is_sharded = (EXPERT_COPIES if experts else COPIES) in spread and len({unit for unit, _ in adders}) == 1
            size = GRADIENT * sum(made.elements for made, _ in bucket)
            found.append((GradientReduction(adders, size, case.reduces_often and is_sharded), experts))
    return found


def _with_sums(profile: Profile, amounts: Amounts, case: Case, cluster: Cluster) -> Profile:
    if case.sizes.copies == 1 and not case.offload:
        return profile
    found, ring = gradient_sums(amounts, profile.layout, case), rings(cluster, case.sizes)[COPIES]
    layout = replace(profile.layout, reductions=[made for made, _ in found], on_host=bool(case.offload))
    names = layout.reduction_names
    seconds = [max(LEAST, _seconds(*each, case, cluster)) for each in found]
    times = {**profile.times, **dict(zip(names, seconds, strict=True))}
    for name, (made, experts) in zip(layout.copy_names(Kind.DOWN), found, strict=False):
        times[name] = max(LEAST, case.stepped(made.bytes - experts, experts) / cluster.host.bandwidth)
    rounds = 1 if case.spread_gradients else 2
    sent = {name: ring.sent(rounds * made.bytes) for name, (made, _) in zip(names, found, strict=True)}
    pairs = dict(profile.pairs)
    if ring.size > 1:
        pairs |= _contended(layout, times, {**profile.bytes, **sent}, ring.crosses, cluster)
    return replace(profile, layout=layout, times=times, pairs=pairs)


def _seconds(made: GradientReduction, experts: int, case: Case, cluster: Cluster) -> float:
    """Returns the seconds in which gradients are copied into a bucket and reduced; a CPU also adds up and divides."""
    on_gpu, device, seconds = cluster.backend == "nccl", cluster.device, 0.0
    axes, spread = rings(cluster, case.sizes), case.spread_gradients
    passes = (3 if on_gpu else 5) if spread else (2 if on_gpu else 4)
    for axis, held in ((COPIES, made.bytes - experts), (EXPERT_COPIES, experts)):
        if axes[axis].size > 1 and held:
            seconds += device.moving_seconds(passes * held, 2 * held)
            method, times = ("reduce_scatter", 1) if spread else ("all_reduce", 2)
            summed = held * ELEMENT.get(case.software.sums, GRADIENT) // GRADIENT
            sent = Transfer(axis, method, axes[axis].sent(times * summed))
            seconds += transfer_seconds(sent, axes[axis], cluster)
    return seconds


def _contended(
    layout: Layout, times: Mapping[Name, float], sent: Mapping[Name, float], crosses: bool, cluster: Cluster
) -> dict[tuple[Name, Name], Pair]:
    """Returns a pair of the longest gradient reduction with an operator of each kind under mutual slowdown."""
    link = Kind.INTER_NODE if crosses else Kind.INTRA_NODE
    summing = max(layout.reduction_names, key=lambda name: times[name])
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


# -- gathers of weights ------------------------------------------------------------------------------------------------


def weight_gathers(amounts: Amounts, layout: Layout, case: Case) -> list[tuple[WeightGather, KeptWeights]]:
    """Returns the gathers of all ranks of a pipeline, each with its weights; of weights that the host has, also with a
    single replica."""
    found = []
    units = list(layout.units)
    for unit, name in enumerate(units):
        for kept in amounts.kept:
            if kept.units[0] == name and (case.offload or _ranks(kept, case) > 1):
                # Names of units with shared weights occur once on a rank.
                own = layout.units_of(layout.rank_of(unit))
                others = (next(each for each in own if units[each] == other) for other in kept.units[1:])
                found.append((WeightGather((unit, *others), kept.name, kept.bytes), kept))
    return found


def _ranks(kept: KeptWeights, case: Case) -> int:
    """Returns the number of ranks that step some weights, each its shard."""
    return case.spread_gradients.get(kept.axis, 1)


def _with_gathers(profile: Profile, amounts: Amounts, case: Case, cluster: Cluster) -> Profile:
    found = weight_gathers(amounts, profile.layout, case)
    if not found:
        return profile
    layout = replace(profile.layout, gathers=[gather for gather, _ in found])
    seconds = (gather_seconds(kept, case, cluster) for _, kept in found)
    times = {**profile.times, **dict(zip(layout.gather_names, seconds, strict=True))}
    for name, (_, kept) in zip(layout.copy_names(Kind.UP), found, strict=False):
        times[name] = max(LEAST, kept.bytes / _ranks(kept, case) / cluster.host.bandwidth)
    return replace(profile, layout=layout, times=times)


def gather_seconds(kept: KeptWeights, case: Case, cluster: Cluster) -> float:
    """Returns the seconds in which a rank casts its shard of some weights, if need be and unless the host has done so,
    and gathers the full weights."""
    ring, ranks = rings(cluster, case.sizes)[kept.axis], _ranks(kept, case)
    is_cast = kept.element_bytes != PARAMETER and not case.offload
    moved = kept.elements / ranks * (PARAMETER + kept.element_bytes)
    seconds = cluster.device.moving_seconds(moved) if is_cast else 0.0
    if ranks > 1:
        seconds += transfer_seconds(Transfer(kept.axis, "all_gather", ring.sent(kept.bytes)), ring, cluster)
    return max(LEAST, seconds)


def cast_seconds(amounts: Amounts, layout: Layout, case: Case, cluster: Cluster) -> float:
    """Returns the seconds in which the first forward pass of a window, through all stages, casts weights to the type of
    matrix products; later passes reuse the copies. Gathered weights are cast before their gather (`gather_seconds`),
    and do not count here, like weights that the host has cast."""
    found, gathered = 0.0, bool(case.offload or weight_gathers(amounts, layout, case))
    for name in layout.units:
        cast = sum(each.bytes for each in amounts.kept if each.units[0] == name and each.is_cast and not gathered)
        # Weights shared with a later unit stay in the trained type: the first unit looks rows up in them.
        if any(name in each.units[1:] for each in amounts.kept):
            cast += amounts.copies[name]
        found += cluster.device.moving_seconds(cast * (1 + PARAMETER / COPY))
    return found
