"""Sums of gradients over ranks: which there are, what each takes, and how long they last after the backward beside
which they begin.

In:   the gradients that the units of every rank complete, and the axes over which they are summed.
Out:  the layout's sums as the runtime makes them, a profile that knows them, seconds.
Must hold: gradients are summed in the buckets that training fills, each once the last of them is complete; a link
carries in all what it can, so sums make way for what backward sends over the same link, or it for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.schedule.clock import part_of
from hf_helix.planning.timing.profile import Pair, Profile
from hf_helix.planning.window.layout import GradientReduction, Layout, Name, named_operators, named_reductions
from hf_helix.planning.window.passes import BUCKET_BYTES, fill_buckets
from hf_helix.simulation.amounts.amounts import Adders, Amounts, Gradient
from hf_helix.simulation.amounts.kernels import COPIES, EXPERT_COPIES, Transfer
from hf_helix.simulation.cluster import Cluster
from hf_helix.simulation.estimate import LEAST, Ring, transfer_seconds
from hf_helix.simulation.memory import GRADIENT

HELD_PARTS = 8
"""Numbers of units that hold weight gradients back which are looked at: so many parts of all units of a rank."""


def gradient_sums(
    amounts: Amounts, layout: Layout, spread: Collection[str] = ()
) -> list[tuple[GradientReduction, int]]:
    """Returns the sums of all ranks of a pipeline, each with the bytes of it that are of experts.

    Args:
        amounts: of a rank of this layout.
        layout: of all ranks of a pipeline.
        spread: the axes over which gradients are reduced to parts. Then those of a flat are one sum; of experts no
            other rank may have copies.
    """
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
    """Returns the profile with the sums of gradients in its layout; the same where no other rank sees other tokens.

    Args:
        profile: the times of the operators.
        amounts: of a rank of this layout.
        axes: where the ranks of every axis stand.
        cluster: what it runs on.
        spread: the axes over which gradients are reduced to parts.
    """
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


def exposed_sums(
    profile: Profile,
    amounts: Amounts,
    axes: Mapping[str, Ring],
    cluster: Cluster,
    spread: Collection[str] = (),
    holds: bool = False,
) -> float:
    """Returns the seconds in which gradients are still summed once the last backward has gone through all stages.

    Args:
        profile, amounts, axes, cluster, spread: as of `profile_with_sums`.
        holds: whether the plan holds weight gradients back, so many that most sums are hidden.
    """
    layout = profile.layout
    completed = _completed(amounts, layout, axes, cluster, spread)
    if not completed:
        return 0.0
    passes = [_pass_of(profile, name, amounts, axes) for name in layout.units]
    count = max(len(_computing(layout, rank)) for rank in range(layout.num_ranks)) if holds else 0
    found = [_last_backward(layout, passes, completed, held) for held in dict.fromkeys(_spread(count))]
    plain = found[0].computed
    return max(0.0, min(max(each.computed, each.summed) for each in found) - plain)


class _Pass(NamedTuple):
    """The backward of a unit: seconds of weight gradients, seconds of all else, and those of the latter in which the
    link of the sums carries nothing else."""

    weights: float
    chain: float
    free: float


class _Ends(NamedTuple):
    """When the last computation of a window ends, and when its last sum of gradients does."""

    computed: float
    summed: float


def _spread(count: int) -> list[int]:
    return [round(count * part / HELD_PARTS) for part in range(HELD_PARTS + 1)]


def _computing(layout: Layout, rank: int) -> list[int]:
    return [unit for unit in layout.units_of(rank) if not layout.transfers(unit)]


def _pass_of(profile: Profile, name: str, amounts: Amounts, axes: Mapping[str, Ring]) -> _Pass:
    seconds = {"W": 0.0, "I": 0.0}
    for op in profile.layout.graphs[name].backward.operators:
        if not op.receives and not op.ahead:
            seconds[part_of(op)] += profile.times[name, f"B.{op.name}"]
    weights, chain = seconds["W"], seconds["I"]
    free = free_seconds(profile, name, amounts, axes) - weights if name in amounts.weights else chain
    return _Pass(weights, chain, max(0.0, free))


def _last_backward(layout: Layout, passes: Sequence[_Pass], completed: Mapping[int, float], held: int) -> _Ends:
    """Returns how the backward of the last micro-batch ends, which goes through all stages of a pipeline.

    Args:
        layout: of all ranks of a pipeline.
        passes: of each unit.
        completed: of each unit that completes gradients, the seconds of their sums.
        held: so many units at the front of each rank compute their weight gradients behind everything else.
    """
    behind = {unit for rank in range(layout.num_ranks) for unit in _computing(layout, rank)[:held]}
    now, computed, summed = 0.0, [0.0] * layout.num_ranks, [0.0] * layout.num_ranks
    for unit in range(len(layout.units) - 1, -1, -1):
        rank, (weights, chain, free) = layout.rank_of(unit), passes[unit]
        if unit not in behind:
            chain, free = chain + weights, free + weights
        left, now = max(0.0, summed[rank] - now - free), now + chain
        computed[rank], summed[rank] = now, max(summed[rank], now + left) if left else summed[rank]
        if unit not in behind and unit in completed:
            summed[rank] = max(now, summed[rank]) + completed[unit]
    for unit in sorted(behind, reverse=True):
        rank = layout.rank_of(unit)
        computed[rank] += passes[unit].weights
        if unit in completed:
            summed[rank] = max(computed[rank], summed[rank]) + completed[unit]
    return _Ends(max(computed), max(summed))


def sums_behind(
    amounts: Amounts, layout: Layout, axes: Mapping[str, Ring], cluster: Cluster, spread: Collection[str] = ()
) -> float:
    """Returns the seconds of all sums of the rank that has most, where none begins before the last backward ends.

    Args:
        amounts: of a rank of this layout.
        layout: of all ranks of a pipeline.
        axes, cluster, spread: as of `profile_with_sums`.
    """
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


def free_seconds(
    profile: Profile, name: str, amounts: Amounts, axes: Mapping[str, Ring], forward: bool = False
) -> float:
    """Returns the seconds of a unit's backward in which the link of the sums carries nothing else.

    Args:
        profile: the times of the operators.
        name: of the unit.
        amounts: of a rank of this layout.
        axes: where the ranks of every axis stand.
        forward: whether its forward is meant instead.
    """
    crosses = axes[COPIES].crosses or axes[EXPERT_COPIES].crosses
    free = 0.0
    for entry, op in profile.layout.graphs[name].entries():
        if entry.startswith("F.") is not forward:
            continue
        sent = amounts.operators[name, entry].transfers
        if not any(axes[each.axis].size > 1 and axes[each.axis].crosses == crosses for each in sent):
            free += profile.times[name, entry]
        elif op.ahead:  # beside computation
            free -= profile.times[name, entry]
    return max(0.0, free)
