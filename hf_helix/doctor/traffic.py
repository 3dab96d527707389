"""The traffic of trained parameters: gradient reductions, and gathers of weights with `shard_optimizer`.

In:   the gradients and the weights of every unit, a case, and a cluster.
Out:  a profile with the traffic of a window, and its seconds.
Must hold: `hf_helix.planning.traffic` fills the buckets, as in training. Two operators on one link each get half of
its bandwidth.
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
from hf_helix.planning.traffic import Bucket, BucketMember, FlatWeights, gradient_buckets
from hf_helix.planning.window.layout import Layout, Name, named_operators, with_traffic

COPY = ELEMENT["bf16"]  # bytes of an element of cast weights


def timed_traffic(profile: Profile, amounts: Amounts, case: Case, cluster: Cluster) -> Profile:
    """Returns a profile with the traffic of a window: gradient reductions, gathers of weights, and if the host has
    weights and states, copies to and from the host.

    Args:
        profile: without traffic; of all layers, or of few.
        amounts: the amounts of a rank of the case.
        case: gives the ranks that share gradients and weights.
        cluster: the rates of links, devices and hosts.
    """
    sums, gathers = gradient_sums(amounts, profile.layout, case), weight_gathers(amounts, profile.layout, case)
    if not sums and not gathers:
        return profile
    layout = _with(profile.layout, sums, gathers, case)
    times = dict(profile.times)
    for traffic, (bucket, experts) in zip(layout.reductions, sums, strict=True):
        seconds = _seconds(bucket, experts, case, cluster)
        copied = case.stepped(bucket.bytes - experts, experts) / cluster.host.bandwidth
        for name, op in traffic.named_operators:
            times[name] = max(LEAST, copied if op.kind.copies else seconds)
    for traffic, (_, kept) in zip(layout.gathers, gathers, strict=True):
        copied = kept.bytes / _ranks(kept, case) / cluster.host.bandwidth
        for name, op in traffic.named_operators:
            times[name] = max(LEAST, copied) if op.kind.copies else gather_seconds(kept, case, cluster)
    pairs = {**profile.pairs, **(_contended(layout, times, profile, case, cluster) if sums else {})}
    return replace(profile, layout=layout, times=times, pairs=pairs)


def layout_with_traffic(layout: Layout, amounts: Amounts, case: Case) -> Layout:
    """Returns a layout with the traffic of a window, as in training."""
    return _with(layout, gradient_sums(amounts, layout, case), weight_gathers(amounts, layout, case), case)


def _with(
    layout: Layout, sums: list[tuple[Bucket, int]], gathers: list[tuple[FlatWeights, KeptWeights]], case: Case
) -> Layout:
    buckets, weights = [bucket for bucket, _ in sums], [flat for flat, _ in gathers]
    return with_traffic(layout, buckets, weights, bool(case.config.offload), case.reduces_often)


def gradient_sums(amounts: Amounts, layout: Layout, case: Case) -> list[tuple[Bucket, int]]:
    """Returns the buckets of all ranks of a pipeline, each with its bytes of experts' gradients; none if neither other
    ranks nor the host have a part in them."""
    found = list[tuple[Bucket, int]]()
    if case.sizes.copies == 1 and not case.config.offload:
        return found
    for rank in range(layout.num_ranks):
        completed = list(amounts.completed_gradients(layout, rank))
        rows = [_row(made, adders, case) for made, adders in completed]
        for bucket in gradient_buckets(rows):
            members = (completed[number][0] for number in bucket.members)
            experts = GRADIENT * sum(made.elements for made in members if made.is_experts)
            if bucket.is_planned:
                found.append((bucket, experts))
    return found


def _row(made: Gradient, adders: Adders, case: Case) -> BucketMember:
    spread, axis = case.spread_gradients, EXPERT_COPIES if made.is_experts else COPIES
    units = {unit for unit, _ in adders}
    is_flat = axis in spread or bool(case.config.offload)
    flat = f"{min(units)}.{len(units)}.{made.flat}" if is_flat else ""
    return BucketMember(GRADIENT * made.elements, adders, is_flat or not spread, flat, axis in spread)


def _seconds(made: Bucket, experts: int, case: Case, cluster: Cluster) -> float:
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
    layout: Layout, times: Mapping[Name, float], profile: Profile, case: Case, cluster: Cluster
) -> dict[tuple[Name, Name], Pair]:
    """Returns a pair of the longest gradient reduction with an operator of each kind under mutual slowdown; none if no
    other rank adds to gradients."""
    ring = rings(cluster, case.sizes)[COPIES]
    if ring.size == 1:
        return {}
    link = Kind.INTER_NODE if ring.crosses else Kind.INTRA_NODE
    longest = max(layout.reductions, key=lambda each: times[each.named_operators[0][0]])
    (summing, _), sent = longest.named_operators[0], ring.sent((1 if case.spread_gradients else 2) * longest.bytes)
    pairs = {}
    for kind in (Kind.COMPUTE, Kind.INTRA_NODE, Kind.INTER_NODE):
        others = [name for name, op in named_operators(layout) if op.kind is kind]
        if not others:
            continue
        other = max(others, key=lambda name: times[name])
        slow = 2.0, 2.0
        if kind is not link:
            slow = cluster.slowdowns(link, kind, (sent, profile.bytes.get(other, 0)))
        if slow != (1.0, 1.0):
            pairs[summing, other] = Pair.of(times[summing], times[other], *slow)
    return pairs


# -- gathers of weights ------------------------------------------------------------------------------------------------


def weight_gathers(amounts: Amounts, layout: Layout, case: Case) -> list[tuple[FlatWeights, KeptWeights]]:
    """Returns the gathers of all ranks of a pipeline, each with its weights; of weights that the host has, also with a
    single replica."""
    found = []
    units = list(layout.units)
    for unit, name in enumerate(units):
        for kept in amounts.kept:
            if kept.units[0] == name and (case.config.offload or _ranks(kept, case) > 1):
                # Names of units with shared weights occur once on a rank.
                own = layout.units_of(layout.rank_of(unit))
                others = (next(each for each in own if units[each] == other) for other in kept.units[1:])
                found.append((FlatWeights((unit, *others), kept.name, kept.bytes), kept))
    return found


def _ranks(kept: KeptWeights, case: Case) -> int:
    """Returns the number of ranks that step some weights, each its shard."""
    return case.spread_gradients.get(kept.axis, 1)


def gather_seconds(kept: KeptWeights, case: Case, cluster: Cluster) -> float:
    """Returns the seconds in which a rank casts its shard of some weights, if need be and unless the host has done so,
    and gathers the full weights."""
    ring, ranks = rings(cluster, case.sizes)[kept.axis], _ranks(kept, case)
    is_cast = kept.element_bytes != PARAMETER and not case.config.offload
    moved = kept.elements / ranks * (PARAMETER + kept.element_bytes)
    seconds = cluster.device.moving_seconds(moved) if is_cast else 0.0
    if ranks > 1:
        seconds += transfer_seconds(Transfer(kept.axis, "all_gather", ring.sent(kept.bytes)), ring, cluster)
    return max(LEAST, seconds)


def cast_seconds(amounts: Amounts, layout: Layout, case: Case, cluster: Cluster) -> float:
    """Returns the seconds in which the first forward pass of a window, through all stages, casts weights to the type of
    matrix products; later passes reuse the copies. Gathered weights are cast before their gather (`gather_seconds`),
    and do not count here, like weights that the host has cast."""
    found, gathered = 0.0, bool(case.config.offload or weight_gathers(amounts, layout, case))
    for name in layout.units:
        cast = sum(each.bytes for each in amounts.kept if each.units[0] == name and each.is_cast and not gathered)
        # Weights shared with a later unit stay in the trained type: the first unit looks rows up in them.
        if any(name in each.units[1:] for each in amounts.kept):
            cast += amounts.copies[name]
        found += cluster.device.moving_seconds(cast * (1 + PARAMETER / COPY))
    return found
