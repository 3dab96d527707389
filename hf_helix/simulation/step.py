"""A whole optimizer step of a whole cluster: how long it takes, and what for.

In:   the amounts of a rank, a case (layout, micro-batches, plan), and a cluster.
Out:  a `Step`.
Must hold: data-parallel replicas are equal, so one pipeline is simulated for all; the window's time is that of the cost
function, whose rules are those of the executor.

Long windows repeat themselves. So windows are simulated with few layers on a stage and few micro-batches, and what one
more of each takes is added as often as there are more; a layout that is looked at in depth is simulated whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hf_helix.planning.cost import COMPUTE, STREAMS, Timeline
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.graph.pair import transfer_graphs
from hf_helix.planning.layout import Layout, place_names
from hf_helix.planning.pipeline.actions import Action, Slot
from hf_helix.planning.pipeline.costs import Costs, stage_costs
from hf_helix.planning.pipeline.placement import split_layers, stage_ranks
from hf_helix.planning.pipeline.scheduler import Scheduler
from hf_helix.planning.pipeline.simulate import simulate_schedule
from hf_helix.planning.plans.plan import Plan
from hf_helix.planning.plans.registry import make_plan, predict_plan, runs_one_strand
from hf_helix.planning.profile import Profile
from hf_helix.simulation.amounts import Amounts
from hf_helix.simulation.cluster import Cluster
from hf_helix.simulation.estimate import Sizes, estimate_profile, rings, transfer_seconds
from hf_helix.simulation.kernels import Transfer
from hf_helix.simulation.memory import GRADIENT, PARAMETER, Memory, held_weights, memory_of

OPTIMIZER_BYTES = 32
"""Bytes that an optimizer's step moves for an element: gradient, weight and two states read, the latter written, the
gradient read once more for its norm."""

CHAIN = (6, 10)
"""Layers of the two chains whose difference is what a layer takes in the steady state."""

WHOLE = 60_000
"""Operators of a window up to which it is simulated whole, if asked for."""


@dataclass(frozen=True)
class Case:
    """What is trained how.

    Attributes:
        sizes: the parallel sizes.
        batch: sequences in a micro-batch.
        length: tokens in a sequence.
        microbatches: of a window, on each data-parallel rank.
        plan: the name of a rule.
        schedule: as in `HelixConfig`.
        recompute: as in `HelixConfig`.
        shard_optimizer: as in `HelixConfig`.
        dtype: the type of matrix products.
    """

    sizes: Sizes
    batch: int
    length: int
    microbatches: int
    plan: str = "greedy"
    schedule: str = "auto"
    recompute: str = "none"
    shard_optimizer: bool = False
    dtype: str = "bf16"

    @property
    def tokens(self) -> int:
        """Returns the tokens of a step, of all data-parallel ranks."""
        return self.batch * self.length * self.microbatches * self.sizes.dp


@dataclass(frozen=True)
class Step:
    """An optimizer step.

    Attributes:
        case: what was simulated.
        window: seconds of forward and backward of all micro-batches.
        sums: seconds after it in which only gradients are summed.
        optimizer: seconds of the optimizer.
        loads: seconds of each kind of work in a window, on the rank that has most.
        exposed: seconds of each kind of communication in a window that run beside no computation, likewise.
        bubble: part of a window in which the pipeline's ranks wait for each other.
        memory: of the rank that needs most.
        model_flops: of a device in a step, attention counted as causal, and as if every token saw every other.
        timeline: of the window, if it was simulated whole.
    """

    case: Case
    window: float
    sums: float
    optimizer: float
    loads: Mapping[Kind, float]
    exposed: Mapping[Kind, float]
    bubble: float
    memory: Memory
    model_flops: tuple[float, float]
    timeline: Timeline | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """Returns the seconds of the whole step."""
        return self.window + self.sums + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        """Returns the tokens that all devices train on in a second."""
        return self.case.tokens / self.seconds

    @property
    def tflops(self) -> tuple[float, float]:
        """Returns TFLOP/s of a device, in both conventions, see `model_flops`."""
        causal, full = (flops / self.seconds / 1e12 for flops in self.model_flops)
        return causal, full


def layout_of(amounts: Amounts, case: Case) -> Layout:
    """Returns the units of all ranks of a pipeline.

    Raises:
        ValueError: the model has too few layers for it, or its tied weights would be on two ranks.
    """
    pp = case.sizes.pp
    placement = Scheduler(case.schedule, pp).placement
    ranks = stage_ranks(placement, pp)
    model = amounts.model
    if model.tied and ranks[0] != ranks[-1]:
        raise ValueError(
            f"{model.name} shares the weights of embedding and head, and schedule={case.schedule!r} has them on "
            "different ranks; use schedule='auto'"
        )
    names, chunks = place_names(model.units, ranks, split_layers(model.layers, ranks, head_cost=model.head_cost))
    graphs = dict(amounts.layout.graphs)
    if pp > 1:
        graphs |= transfer_graphs(len(graphs[names[0]].forward.outputs))
    return Layout(names, chunks, graphs, (), ranks)


def simulate_step(amounts: Amounts, case: Case, cluster: Cluster, whole: bool = False) -> Step:
    """Returns what an optimizer step takes.

    Args:
        amounts: of a rank of this case's layout.
        case: what is trained how.
        cluster: what it runs on.
        whole: whether to simulate every operator of the window, where it has no more than `WHOLE` of them.

    Raises:
        ValueError: the layout cannot be built.
    """
    layout = layout_of(amounts, case)
    profile = estimate_profile(amounts, layout, case.sizes, cluster, case.dtype)
    plan = make_plan(case.plan, profile, model=amounts.model.name, mesh={"tp_size": case.sizes.tp})
    layers = _steady(plan, profile, amounts.model.units[1:-1])
    costs = _costs(profile, layers)
    scheduler = Scheduler(case.schedule, case.sizes.pp, costs)
    schedule = scheduler(case.microbatches)
    simulated = simulate_schedule(schedule, layout.ranks, costs)
    timeline = None
    window, bubble = simulated.seconds, simulated.bubble
    if whole and _num_operators(layout) * case.microbatches <= WHOLE:
        _, timeline = predict_plan(plan, profile, schedule)
        window = timeline.seconds
    busiest = max(range(layout.num_ranks), key=lambda rank: simulated.busy[rank])
    loads = _loads(profile, layout, busiest, case.microbatches)
    window = max(window, _host_seconds(layout, busiest, case.microbatches, cluster))
    exposed = {
        kind: seconds * layers.exposed.get(kind, 1.0)
        for kind, seconds in loads.items()
        if kind.communicates and seconds
    }
    memory = max(
        (
            memory_of(amounts, layout, rank, slots, case.sizes.dp * case.sizes.cp, case.shard_optimizer)
            for rank, slots in enumerate(schedule)
        ),
        key=lambda memory: memory.total,
    )
    sums = _sums(amounts, layout, case, cluster, profile)
    model, tokens = amounts.model, case.tokens / case.sizes.devices
    flops = [model.flops_per_token + model.attention_flops * case.length * share for share in (0.5, 1.0)]
    return Step(
        case,
        window,
        sums,
        _optimizer(amounts, layout, case, cluster),
        loads,
        exposed,
        bubble,
        memory,
        (flops[0] * tokens, flops[1] * tokens),
        timeline,
    )


@dataclass(frozen=True)
class _Layers:
    """What a plan makes of layers in the steady state.

    Attributes:
        forward: seconds of a layer's forward with nothing beside it, by the layer's name.
        backward: likewise, of its backward.
        fused: likewise, of the forward of one micro-batch beside the backward of another.
        exposed: of each kind of communication, the part that runs beside no computation.
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    fused: Mapping[str, float]
    exposed: Mapping[Kind, float]


def _steady(plan: Plan, profile: Profile, names: Sequence[str]) -> _Layers:
    """Returns what a plan makes of the layers of these names."""
    forward, backward = Action(0, "F", 1), Action(0, "B", 0)
    slots = {"forward": Slot(forward=forward), "backward": Slot(backward=backward), "fused": Slot(forward, backward)}
    if runs_one_strand(plan.rule):
        slots["fused"] = slots["forward"]  # nothing runs beside anything
    found: dict[str, dict[str, float]] = {part: {} for part in slots}
    totals: dict[Kind, tuple[float, float]] = {}
    for name in dict.fromkeys(names):
        for part, slot in slots.items():
            short, long = (_chain(plan, profile, name, slot, length) for length in CHAIN)
            found[part][name] = (long.seconds - short.seconds) / (CHAIN[1] - CHAIN[0])
            wanted = part in ("forward", "backward") if runs_one_strand(plan.rule) else part == "fused"
            for kind, (alone, exposed) in exposed_seconds(long).items() if wanted else ():
                before = totals.get(kind, (0.0, 0.0))
                totals[kind] = before[0] + alone, before[1] + exposed
    if runs_one_strand(plan.rule):
        found["fused"] = {name: found["forward"][name] + found["backward"][name] for name in found["forward"]}
    shares = {kind: exposed / alone for kind, (alone, exposed) in totals.items() if alone}
    return _Layers(found["forward"], found["backward"], found["fused"], shares)


def _chain(plan: Plan, profile: Profile, name: str, slot: Slot, length: int) -> Timeline:
    layout = Layout([name] * length, {0: range(length)}, profile.layout.graphs)
    return predict_plan(plan, replace(profile, layout=layout), [[slot]])[1]


def exposed_seconds(timeline: Timeline, rank: int = 0) -> dict[Kind, tuple[float, float]]:
    """Returns, for each kind of communication, its seconds, and those that run beside no computation of the rank."""
    work = timeline.work
    spans: dict[int, list[tuple[float, float]]] = {}
    for place, entry in enumerate(work.entries):
        if entry >= 0 and work.rank(place) == rank and timeline.ends[place] > timeline.starts[place]:
            spans.setdefault(work.streams[place], []).append((timeline.starts[place], timeline.ends[place]))
    computing = sorted(spans.pop(COMPUTE, []))
    found = {}
    for stream, mine in spans.items():
        alone = sum(end - start for start, end in mine)
        hidden = _common(sorted(mine), computing)
        found[STREAMS[stream]] = alone, alone - hidden
    return found


def _common(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Returns the seconds that two sorted lists of disjoint intervals have in common."""
    total, place = 0.0, 0
    for start, end in first:
        while place < len(second) and second[place][1] <= start:
            place += 1
        at = place
        while at < len(second) and second[at][0] < end:
            total += min(end, second[at][1]) - max(start, second[at][0])
            at += 1
    return total


def _costs(profile: Profile, layers: _Layers) -> Costs:
    """Returns what the virtual stages cost under a plan, which gives layers other times than their operators add up to."""
    plain = stage_costs(profile)
    layout = profile.layout
    names = [layout.units[unit] for chunk in layout.chunks.values() for unit in chunk]
    counted = [name for name in names if name in layers.forward]
    alone = sum(layers.forward[name] + layers.backward[name] for name in counted)
    fused = sum(layers.fused[name] for name in counted)
    forward, inputs, weights = list(plain.forward), list(plain.input), list(plain.weight)
    for stage, chunk in layout.chunks.items():
        for name in (layout.units[unit] for unit in chunk):
            if name not in layers.forward:
                continue
            parts = dict.fromkeys("FIW", 0.0)
            for letter, graph in (("F", layout.graphs[name].forward), ("B", layout.graphs[name].backward)):
                for op in graph.operators:
                    part = "F" if letter == "F" else "W" if op.part is Part.W else "I"
                    parts[part] += profile.times[name, f"{letter}.{op.name}"]
            ratio = layers.backward[name] / (parts["I"] + parts["W"])
            forward[stage] += layers.forward[name] - parts["F"]
            inputs[stage] += (ratio - 1) * parts["I"]
            weights[stage] += (ratio - 1) * parts["W"]
    return Costs(forward, inputs, weights, plain.transfer, max(1.0, alone / fused))


def _loads(profile: Profile, layout: Layout, rank: int, microbatches: int) -> dict[Kind, float]:
    found = dict.fromkeys(Kind, 0.0)
    for name in (layout.units[unit] for unit in layout.units_of(rank)):
        pair = layout.graphs[name]
        for letter, graph in (("F", pair.forward), ("B", pair.backward)):
            for op in graph.operators:
                if not op.receives:
                    found[op.kind] += microbatches * profile.times[name, f"{letter}.{op.name}"]
    return found


def _host_seconds(layout: Layout, rank: int, microbatches: int, cluster: Cluster) -> float:
    """Returns what a host needs to issue a window, where it issues while the device computes."""
    if not cluster.device.host_runs_ahead:
        return 0.0
    pairs = [layout.graphs[layout.units[unit]] for unit in layout.units_of(rank)]
    count = sum(len(pair.forward.operators) + len(pair.backward.operators) for pair in pairs)
    return count * microbatches * cluster.device.issue_seconds


def _num_operators(layout: Layout) -> int:
    pairs = [layout.graphs[name] for name in layout.units]
    return sum(len(pair.forward.operators) + len(pair.backward.operators) for pair in pairs)


def _sums(amounts: Amounts, layout: Layout, case: Case, cluster: Cluster, profile: Profile) -> float:
    """Returns the seconds after the last backward in which gradients are still summed.

    A unit's gradients are summed once its backward in the last micro-batch is over, one after the other.
    """
    axes = rings(cluster, case.sizes)
    worst = 0.0
    for rank in range(layout.num_ranks):
        computed = summed = 0.0
        for name in reversed([layout.units[unit] for unit in layout.units_of(rank)]):
            if name not in amounts.weights:
                continue
            computed += sum(profile.times[name, f"B.{op.name}"] for op in layout.graphs[name].backward.operators)
            held = amounts.weights[name]
            for axis, count in (("copies", held.trained), ("expert_copies", held.experts)):
                size = axes[axis].size
                sent = int(2 * (size - 1) / size * count * GRADIENT)
                seconds = transfer_seconds(Transfer(axis, "all_reduce", sent), axes[axis], cluster)
                summed = max(summed, computed) + seconds if seconds else summed
        worst = max(worst, summed - computed)
    return max(0.0, worst)


def _optimizer(amounts: Amounts, layout: Layout, case: Case, cluster: Cluster) -> float:
    held = [held_weights(amounts, layout, rank) for rank in range(layout.num_ranks)]
    trained = max(each.trained + each.experts for each in held)
    bandwidth = cluster.device.bandwidth * cluster.device.memory_efficiency.at(PARAMETER * trained)
    copies = case.sizes.dp
    if not case.shard_optimizer or copies == 1:
        return OPTIMIZER_BYTES * trained / bandwidth
    sent = int((copies - 1) / copies * trained * PARAMETER)
    gathered = transfer_seconds(Transfer("copies", "all_gather", sent), rings(cluster, case.sizes)["copies"], cluster)
    return OPTIMIZER_BYTES * trained / copies / bandwidth + gathered
