"""The traffic of trained parameters: gradient reductions, and gathers of weights with `shard_optimizer`.

In:   the gradients and the weights of every unit, a case, and a cluster.
Out:  a profile with the traffic of a window, and its seconds.
Must hold: `hf_helix.planning.traffic` fills the buckets, as in training. Two operators on one link each get half of
its bandwidth.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace

from hf_helix.doctor.amounts.records import GRADIENT, PARAMETER, Amounts, Transfer, copies_axis
from hf_helix.doctor.case import ELEMENT, Case
from hf_helix.doctor.estimate import LEAST, Ring, rings, transfer_seconds
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.parameters import EXPERTS, Parameter
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.profile import Pair, Profile
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES
from hf_helix.planning.traffic import Bucket, FlatWeights, flat_weights, gradient_buckets
from hf_helix.planning.window.layout import Layout, Name, named_operators, with_traffic

CAST = ELEMENT["bf16"]  # bytes of an element of cast weights

Kept = tuple[FlatWeights, Parameter]
"""Weights that every replica keeps, and one of their parameters."""


def timed_traffic(profile: Profile, amounts: Amounts, case: Case, cluster: Cluster) -> Profile:
    """Returns a profile with the traffic of a window: gradient reductions, gathers of weights, and if the host has
    weights and states, copies to and from the host.

    Args:
        profile: without traffic; of all layers, or of few.
        amounts: the amounts of a rank of the case.
        case: gives the ranks that share gradients and weights.
        cluster: the rates of links, devices and hosts.
    """
    sums, gathers = planned_reductions(amounts, profile.layout, case), weight_gathers(amounts, profile.layout, case)
    if not sums and not gathers:
        return profile
    layout = _with(profile.layout, sums, gathers, case)
    times, axes = dict(profile.times), rings(cluster, case.sizes)
    reducing = functools.cache(lambda count, experts: _reduction_seconds(count, experts, axes, case, cluster))
    for traffic, (bucket, experts) in zip(layout.reductions, sums, strict=True):
        seconds = reducing(bucket.bytes - experts, experts)
        copied = case.stepped(bucket.bytes - experts, experts) / cluster.host.bandwidth
        for name, op in traffic.named_operators:
            times[name] = max(LEAST, copied if op.kind.copies else seconds)
    for traffic, kept in zip(layout.gathers, gathers, strict=True):
        copied = kept[0].bytes / _ranks(kept[1], case) / cluster.host.bandwidth
        for name, op in traffic.named_operators:
            times[name] = max(LEAST, copied) if op.kind.copies else gather_seconds(kept, axes, case, cluster)
    pairs = {**profile.pairs, **(_contended(layout, times, profile, axes[COPIES], case, cluster) if sums else {})}
    return replace(profile, layout=layout, times=times, pairs=pairs)


def layout_with_traffic(layout: Layout, amounts: Amounts, case: Case) -> Layout:
    """Returns a layout with the traffic of a window, as in training."""
    return _with(layout, planned_reductions(amounts, layout, case), weight_gathers(amounts, layout, case), case)


def _with(layout: Layout, sums: list[tuple[Bucket, int]], gathers: list[Kept], case: Case) -> Layout:
    buckets, weights = [bucket for bucket, _ in sums], [flat for flat, _ in gathers]
    return with_traffic(layout, buckets, weights, bool(case.config.offload), case.reduces_often)


def planned_reductions(amounts: Amounts, layout: Layout, case: Case) -> list[tuple[Bucket, int]]:
    """Returns the buckets that a plan orders, of all ranks of a pipeline, each with its bytes of experts' gradients."""
    found = list[tuple[Bucket, int]]()
    if case.sizes.copies == 1 and not case.config.offload:  # asked for most layouts of a search
        return found
    for rank in range(layout.num_ranks):
        gradients = amounts.completed_gradients(layout, rank, case.place, bool(case.config.offload))
        for bucket in gradient_buckets([member for _, member in gradients]):
            members = [gradients[number] for number in bucket.members]
            experts = sum(member.bytes for row, member in members if row.cut.mesh_axis == EXPERTS)
            if bucket.is_planned:
                found.append((bucket, experts))
    return found


def exchanged_seconds(trained: int, experts: int, case: Case, cluster: Cluster) -> tuple[float, float]:
    """Returns the least seconds in which weights are gathered before a window, and gradients reduced after it.

    Args:
        trained: elements with replicas on all data-parallel ranks.
        experts: elements of experts, with fewer replicas.
        case: gives the ranks that share gradients and weights.
        cluster: the rates of links and devices.
    """
    gathered, reduced, axes = 0.0, 0.0, rings(cluster, case.sizes)
    if not case.reduces_often and case.sizes.copies > 1:
        reduced = _reduction_seconds(trained * GRADIENT, experts * GRADIENT, axes, case, cluster)
    if case.config.shard_optimizer and not case.config.offload:
        for axis, count in ((COPIES, trained), (EXPERT_COPIES, experts)):
            sent = Transfer(axis, "all_gather", axes[axis].sent(count * ELEMENT[case.dtype]))
            gathered += transfer_seconds(sent, axes[axis], cluster)
    return gathered, reduced


def _reduction_seconds(count: int, experts: int, axes: Mapping[str, Ring], case: Case, cluster: Cluster) -> float:
    """Returns the seconds in which gradients are copied into a bucket and reduced; `count` and `experts` are bytes, and
    `axes` those of `rings`."""
    on_gpu, device, seconds = cluster.backend == "nccl", cluster.device, 0.0
    is_spread = bool(case.spread_gradients)
    for axis, held in ((COPIES, count), (EXPERT_COPIES, experts)):
        if axes[axis].size > 1 and held:
            seconds += device.moving_seconds(passes(axes[axis].size, is_spread, on_gpu) * held, 2 * held)
            method, times = ("reduce_scatter", 1) if is_spread else ("all_reduce", 2)
            summed = held * ELEMENT.get(case.software.sums, GRADIENT) // GRADIENT
            sent = Transfer(axis, method, axes[axis].sent(times * summed))
            seconds += transfer_seconds(sent, axes[axis], cluster)
    return seconds


def passes(ranks: int, is_spread: bool, on_gpu: bool) -> float:
    """Returns how often a reduction reads or writes the bytes of its bucket, without the collective's own work.

                                                full gradients     shards
        zeros in a flat buffer                                     1
        copy into the bucket                    2                  2
        sum of exchanged parts, on a CPU                           1 + 2 / ranks
        division by the number of batches       2; 0 by NCCL       2 / ranks

    Args:
        ranks: with equal parameters.
        is_spread: whether each rank keeps the sums of a shard.
        on_gpu: whether NCCL reduces.
    """
    if not is_spread:
        return 2 if on_gpu else 4
    return 3 + 2 / ranks + (0 if on_gpu else 1 + 2 / ranks)


def _contended(
    layout: Layout, times: Mapping[Name, float], profile: Profile, ring: Ring, case: Case, cluster: Cluster
) -> dict[tuple[Name, Name], Pair]:
    """Returns a pair of the longest gradient reduction with an operator of each kind under mutual slowdown; none if no
    other rank adds to gradients."""
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


def kept_weights(amounts: Amounts, case: Case) -> list[Kept]:
    """Returns the weights that every replica keeps under `shard_optimizer`, with counted units."""
    found: dict[tuple[tuple[int, ...], str], Parameter] = {}
    for row in amounts.parameters:
        if row.flat is not None:
            found.setdefault((row.units, row.flat.name), row)
    return [(flat, found[flat.readers, flat.name]) for flat in flat_weights(amounts.parameters, case.place)]


def weight_gathers(amounts: Amounts, layout: Layout, case: Case) -> list[Kept]:
    """Returns the gathers of all ranks of a pipeline; of weights that the host has, also with a single replica."""
    gathers, counted = list[Kept](), kept_weights(amounts, case)
    for unit, name in enumerate(layout.units):
        at = amounts.units_in(layout, unit)
        for flat, row in counted:
            is_first = amounts.layout.units[flat.readers[0]] == name
            if is_first and (case.config.offload or _ranks(row, case) > 1):
                gathers.append((replace(flat, readers=tuple(map(at, flat.readers))), row))
    return gathers


def _ranks(row: Parameter, case: Case) -> int:
    """Returns the number of ranks that step a parameter, each its shard."""
    return case.place.sharers(row.cut.mesh_axis).shards.size


def is_cast(row: Parameter) -> bool:
    """Returns whether a parameter is gathered in another type than it is trained in."""
    return row.flat is not None and row.flat.itemsize != row.itemsize


def gather_seconds(kept: Kept, axes: Mapping[str, Ring], case: Case, cluster: Cluster) -> float:
    """Returns the seconds in which a rank casts its shard of some weights, if need be and unless the host has done so,
    and gathers the full weights; `axes` are those of `rings`."""
    flat, row = kept
    assert row.flat is not None
    axis, ranks, itemsize = copies_axis(row.cut.mesh_axis), _ranks(row, case), row.flat.itemsize
    ring = axes[axis]
    moved = flat.bytes / itemsize / ranks * (PARAMETER + itemsize)
    seconds = cluster.device.moving_seconds(moved) if itemsize != PARAMETER and not case.config.offload else 0.0
    if ranks > 1:
        seconds += transfer_seconds(Transfer(axis, "all_gather", ring.sent(flat.bytes)), ring, cluster)
    return max(LEAST, seconds)


def cast_seconds(amounts: Amounts, layout: Layout, case: Case, cluster: Cluster) -> float:
    """Returns the seconds in which the first forward pass of a window, through all stages, casts weights to the type of
    matrix products; later passes reuse the copies. Gathered weights are cast before their gather (`gather_seconds`),
    and do not count here, like weights that the host has cast."""
    kept = kept_weights(amounts, case)
    gathered = bool(case.config.offload or any(_ranks(row, case) > 1 for _, row in kept))
    # Weights shared with a later unit stay in the trained type: the first unit looks rows up in them.
    later = {amounts.layout.units[unit] for flat, _ in kept for unit in flat.readers[1:]}
    cast = {name: amounts.copies[name] if name in later else 0 for name in amounts.layout.units}
    for flat, row in kept:
        cast[amounts.layout.units[flat.readers[0]]] += flat.bytes if is_cast(row) and not gathered else 0
    return sum(cluster.device.moving_seconds(cast.get(name, 0) * (1 + PARAMETER / CAST)) for name in layout.units)
