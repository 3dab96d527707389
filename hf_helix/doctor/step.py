"""An optimizer step of a whole cluster: its time, its throughput, its memory.

In:   the amounts of a rank, a case (layout, micro-batches, plan), and a cluster.
Out:  a `Step`.
Must hold: data-parallel replicas are equal, so one pipeline is simulated for all replicas; the clock of plans predicts
the window, with all layers or with few (`hf_helix.doctor.window`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hf_helix.config import AUTO, EVERY_MICROBATCH, OFFLOAD, HelixConfig
from hf_helix.doctor.amounts.records import GRADIENT, PARAMETER, Amounts
from hf_helix.doctor.case import ELEMENT, Case, Software
from hf_helix.doctor.edges import PassTimes, waits_at_edges
from hf_helix.doctor.estimate import estimate_profile, rings
from hf_helix.doctor.memory import (
    COLLECTIVE,
    Drawing,
    Memory,
    full_gradients,
    held_weights,
    memory_of,
    peaks_of_programs,
    peaks_of_schedules,
    peaks_of_window,
)
from hf_helix.doctor.traffic import cast_seconds, timed_traffic
from hf_helix.doctor.window import Fidelity, WindowClock, WindowTime, schedule_of, usual_schedules
from hf_helix.planning.choice.memory import MemoryLimit, Passes, Peak
from hf_helix.planning.graph.backward import slice_names
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.plan.program import free_values
from hf_helix.planning.rules.registry import runs_one_strand
from hf_helix.planning.schedule.actions import Slot
from hf_helix.planning.schedule.placement import FRONT, REAR, count_layers, half_name, ranges_of
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.timing.sizes import COPIES, FULL_GRADIENTS, Sizes
from hf_helix.planning.window.layout import Layout, Name, named_operators, staged_layout

OPTIMIZER_BYTES = 32
"""Bytes moved by the optimizer per element: gradient, weight and two states read, weight and states written, the
gradient read once more for its norm."""


@dataclass(frozen=True)
class Step:
    """An optimizer step."""

    case: Case
    window: float  # seconds of forward and backward of all micro-batches, including `waits` and `casts`
    sums: float  # seconds of gradient reduction after the window, and of copies to the host that no update hides
    optimizer: float
    loads: Mapping[Kind, float]  # seconds by kind of operator in a window, on the busiest rank
    # seconds of communication without concurrent computation, by kind, on the busiest rank; of transfers between
    # stages, the seconds by which these lengthen the window; empty below `Fidelity.WHOLE`
    exposed: Mapping[Kind, float]
    # fraction of the window in which the busiest rank waits for computation of other ranks; 0 below `Fidelity.WHOLE`
    bubble: float
    memory: Memory  # memory of the rank with the largest total
    # floating-point operations of a device in a step, with causal and with full attention
    model_flops: tuple[float, float]
    gathers: float = 0.0  # seconds of weight gathers in `loads`, and of copies from the host
    waits: float = 0.0  # seconds added to the window by the gathers of `shard_optimizer`; 0 below `Fidelity.WHOLE`
    # seconds of the casts of weights to the type of matrix products, once in a window; 0 for weights gathered in this
    # type
    casts: float = 0.0
    issuing: float = 0.0  # seconds of the host for the window; 0 if the host computes
    replayed: bool = False  # whether the host issues the window as a CUDA graph
    fidelity: Fidelity = Fidelity.QUICK
    # the programs and the timeline of the window, for a picture; None if not drawn
    drawn: Drawing | None = field(default=None, repr=False)
    # bytes of a node's host: weights, states and gradients, and inputs of layers; 0 if these are on devices
    host: float = 0.0
    # the plan of the window, and its seconds, for more of it; None if not of all ranks
    planned: tuple[Plan, WindowTime] | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.window + self.sums + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return self.case.tokens / self.seconds

    @property
    def tflops(self) -> tuple[float, float]:
        """TFLOP/s of a device, with causal and with full attention."""
        causal, full = (flops / self.seconds / 1e12 for flops in self.model_flops)
        return causal, full


OF_STEPS = (Step, Case, HelixConfig, Software, Sizes, Memory, Fidelity, Kind)
"""The classes of the values of a step that is not drawn."""


def layout_of(amounts: Amounts, case: Case) -> Layout:
    """Returns the units of all ranks. Raises ValueError for too few layers, or for tied weights on two ranks."""
    model, ranks = amounts.model, case.stage_ranks
    if model.tied and ranks[0] != ranks[-1] and not case.config.spread_vocabulary:
        raise ValueError(
            f"{model.name} shares the weights of embedding and head, and schedule={case.config.schedule!r} has them on "
            "different ranks; use schedule='auto'"
        )
    cut, ranges = ranges_of(case.config.layers_per_stage or usual_counts(amounts, case))
    halves = {1 + place: [half_name(half, model.units[1 + place]) for half in (FRONT, REAR)] for place in cut}
    units = [name for place, unit in enumerate(model.units) for name in halves.get(place, [unit])]
    if case.config.spread_vocabulary:
        embedding, *layers, head = units
        units = [*slice_names(embedding, case.sizes.pp), *layers, *slice_names(head, case.sizes.pp)]
    return staged_layout(units, amounts.layout.graphs, ranks, ranges)


def usual_counts(amounts: Amounts, case: Case) -> tuple[float, ...]:
    """Returns the layers of each stage in a run without `layers_per_stage`."""
    head_cost = 0.0 if case.config.spread_vocabulary else amounts.model.head_cost
    tower_cost = case.config.image_share * amounts.model.tower_cost
    return tuple(
        count_layers(
            amounts.model.layers,
            case.layer_ranks,
            embedding_cost=tower_cost,
            head_cost=head_cost,
            first_least=amounts.model.first_least,
        )
    )


def even_counts(amounts: Amounts, case: Case, cluster: Cluster) -> tuple[float, ...]:
    """Returns the layers of each stage that make the slowest rank of a pipeline as fast as can be, by the times of the
    units, and in halves if the amounts have halves of layers."""
    names, model = amounts.layout.units, amounts.model
    seconds = dict.fromkeys(names, 0.0)
    profile = estimate_profile(amounts, amounts.layout, case, cluster)
    for name, op in named_operators(amounts.layout):
        seconds[name[0]] += profile.times[name] if op.kind is Kind.COMPUTE else 0.0
    layer = sum(seconds[name] for name in model.units[1:-1]) / model.layers
    front, rear = (sum(seconds[name] for name in names if name.startswith(half)) for half in (FRONT, REAR))
    counts = count_layers(
        model.layers,
        case.layer_ranks,
        embedding_cost=seconds[model.units[0]] / layer
        if case.config.image_share or not case.config.spread_vocabulary
        else 0.0,
        head_cost=0.0 if case.config.spread_vocabulary else seconds[names[-1]] / layer,
        first_half=front / (front + rear) if front else None,
        first_least=model.first_least,
    )
    return tuple(counts)


def profile_of(amounts: Amounts, case: Case, cluster: Cluster, whole: bool = False) -> Profile:
    """Returns the times of the operators of a case; if `whole`, with gradient reductions and weight gathers."""
    profile = estimate_profile(amounts, layout_of(amounts, case), case, cluster)
    return timed_traffic(profile, amounts, case, cluster) if whole else profile


def memory_of_case(
    amounts: Amounts, case: Case, layout: Layout | None = None, peaks: Sequence[Peak] | None = None
) -> Memory:
    """Returns the memory of the rank with the largest total.

    Args:
        amounts: the amounts of a rank of this case.
        case: the case.
        layout: the layout of the case, if known.
        peaks: the peaks of all ranks, if known.

    Raises:
        ValueError: the layout cannot be built.
    """
    layout = layout or layout_of(amounts, case)
    peaks = peaks or peaks_of_case(amounts, case, layout)
    found = [memory_of(amounts, layout, rank, peak, case) for rank, peak in enumerate(peaks)]
    return max(found, key=lambda memory: memory.total)


def held_bytes(amounts: Amounts, case: Case) -> float:
    """Returns the bytes of weights, gradients and states, of the mean rank: no schedule needs less.

    Args:
        amounts: the amounts of a rank of this case, whatever it recomputes and shards.
        case: the case.
    """
    layout = layout_of(amounts, case)
    found = [memory_of(amounts, layout, rank, Peak(), case) for rank in range(layout.num_ranks)]
    return sum(each.weights + each.gradients + each.states for each in found) / len(found)


def with_usual_reduction(amounts: Amounts, case: Case, cluster: Cluster) -> Case:
    """Returns the case with the reductions of gradients that a run chooses under `reduce_gradients="auto"`."""
    layout = layout_of(amounts, case)
    full = max(full_gradients(amounts, layout, rank, False, False) for rank in range(layout.num_ranks))
    often = case.config.shard_parameters and full > FULL_GRADIENTS * cluster.device.memory
    return case.changed(reduce_gradients=EVERY_MICROBATCH if often else "window")


def memory_limit(amounts: Amounts, case: Case, layout: Layout, memory: float) -> MemoryLimit:
    """Returns the limit of the windows of a case on devices with this many bytes of memory."""
    passes = Passes(amounts.operators, layout, amounts.handed_on, not runs_one_strand(case.config.plan))
    is_single, room = case.microbatches == 1, []
    for rank in range(layout.num_ranks):
        held = Peak(gradients=full_gradients(amounts, layout, rank, is_single, case.reduces_often))
        room.append(memory - memory_of(amounts, layout, rank, held, case).total)
    return MemoryLimit(passes, room)


def peaks_of_case(amounts: Amounts, case: Case, layout: Layout) -> list[Peak]:
    """Returns the peak memory of each pipeline rank; `shard_optimizer` does not change the peaks."""
    two_strands = not runs_one_strand(case.config.plan)
    usual = usual_schedules(case.config.schedule, case.sizes.pp, case.microbatches, layout.is_spread)
    return peaks_of_schedules(amounts, layout, usual, two_strands, case.reduces_often)


def _peaks_of_search(amounts: Amounts, case: Case, layout: Layout, room: float) -> list[Peak]:
    """Returns the peak memory of each pipeline rank under a schedule that a run may search.

    A search keeps no more activations than the usual schedules, but runs single forward passes that these overlap with
    a backward pass, which then frees no memory at the same time; and no more memory than there is `room` for in a
    device.
    """
    usual = peaks_of_case(amounts, case, layout)
    if case.config.schedule != AUTO or case.sizes.pp == 1:
        return usual
    apart = [
        [[Slot.alone(action) for slot in slots for action in slot.actions] for slots in schedule]
        for schedule in usual_schedules(AUTO, case.sizes.pp, case.microbatches, layout.is_spread)
    ]
    peaks = peaks_of_schedules(amounts, layout, apart, not runs_one_strand(case.config.plan), case.reduces_often)
    return peaks if memory_of_case(amounts, case, layout, peaks).total <= room else usual


def peaks_of_plan(amounts: Amounts, case: Case, cluster: Cluster, clock: WindowClock | None = None) -> list[Peak]:
    """Returns the peak memory of each rank by the programs of a case's plan, or of a clock's, in a window long enough
    for the peak. On a CPU memory depends on when instructions run."""
    if clock is None or clock.amounts is not amounts:
        # deferred weight gradients keep no more memory, so a plan without reductions serves
        clock = WindowClock(profile_of(amounts, case, cluster), amounts, case, cluster, Fidelity.QUICK)
    planned, count = clock.planned, min(case.microbatches, 2 * case.sizes.pp + 2)
    schedule = schedule_of(clock.named, case.sizes.pp, count, case.config.spread_vocabulary)
    if cluster.device.host_runs_ahead:
        ordered = planned.plan.issue(schedule, planned.profile.layout)
        programs = [free_values(ordered.program(rank)) for rank in range(case.sizes.pp)]
        return peaks_of_programs(amounts, planned.profile.layout, programs)
    predicted = predict(planned.plan, planned.profile, schedule, timeline=True)
    return peaks_of_window(amounts, planned.profile.layout, (predicted.instructions, predicted.timeline), False)


def simulate_step(
    amounts: Amounts,
    case: Case,
    cluster: Cluster,
    fidelity: Fidelity = Fidelity.DRAWN,
    of_window: Amounts | None = None,
    known: tuple[Plan, WindowTime] | None = None,
    peaks: Sequence[Peak] | None = None,
) -> Step:
    """Returns the optimizer step of a case.

    Args:
        amounts: the amounts of a rank of this case.
        case: the case.
        cluster: the cluster.
        fidelity: how much of the window is predicted.
        of_window: coarse amounts for the time of the whole window; None for `amounts`.
        known: the plan and the window of all layers, if a search has found it.
        peaks: the peaks of all ranks, if known.

    Raises:
        ValueError: the layout cannot be built.
    """
    of_window = amounts if of_window is None else of_window
    profile = profile_of(of_window, case, cluster)
    limit = memory_limit(of_window, case, profile.layout, cluster.device.memory)
    is_coarse = of_window is not amounts
    clock = WindowClock(profile, of_window, case, cluster, fidelity, limit, is_coarse=is_coarse, known=known)
    return _step(amounts, case, cluster, profile, clock, peaks)


def bound_step(amounts: Amounts, case: Case, cluster: Cluster, split: bool = False) -> Step:
    """Returns a step of `Fidelity.BOUND`: no plan of the case is faster. The memory of the step is not counted. A
    window takes at least as long as

        a rank computes, slowed down by its collectives of one kind
        the collectives of one kind take, with the reductions that share their link in every micro-batch
        the longest chain of operators of a strand, or under one strand all passes, one after the other
        the host issues

    and longer by what a rank waits for at its begin and its end, see `waits_at_edges`.

    Example: computation takes 1.3 times as long while a collective runs, and the collective 1.2 times. Hidden, a
    collective of 1 ms takes 1.2 ms, in which 0.92 ms are computed, so it adds 0.28 ms.

    Args:
        amounts: the amounts of a rank of this case.
        case: the case.
        cluster: the cluster.
        split: whether layers are split over the stages as in the case, so that the busiest rank counts; otherwise the
            mean rank counts, and no split is faster.
    """
    profile = profile_of(amounts, case, cluster)
    layout = profile.layout
    passes = PassTimes.of(profile)
    edges = waits_at_edges(passes, amounts, layout, case, cluster)
    names = [[layout.units[unit] for unit in layout.units_of(rank)] for rank in range(layout.num_ranks)]

    def window(busy: Mapping[str, float], edges: Sequence[float] = (0.0,) * layout.num_ranks) -> float:
        of_ranks = [case.microbatches * sum(busy[name] for name in mine) for mine in names]
        of_ranks = [busy + edge for busy, edge in zip(of_ranks, edges, strict=True)]
        return max(of_ranks) if split else sum(of_ranks) / len(of_ranks)

    computing, calls = dict.fromkeys(layout.graphs, 0.0), dict.fromkeys(layout.graphs, 0)
    others = {kind: (dict.fromkeys(layout.graphs, 0.0), dict.fromkeys(layout.graphs, 0.0)) for kind in COLLECTIVE}
    any_computation: Name | None = None
    for name, op in named_operators(layout):
        calls[name[0]] += _calls(amounts, name)
        if op.kind is Kind.COMPUTE:
            computing[name[0]] += profile.times[name]
            any_computation = name
    for name, op in named_operators(layout):
        if op.kind in others and any_computation is not None:
            alone, added = others[op.kind]
            slower, slowed = profile.slowdown(any_computation, name), profile.slowdown(name, any_computation)
            alone[name[0]] += profile.times[name]
            added[name[0]] += min(1.0, slowed * (1 - 1 / slower)) * profile.times[name]
    if runs_one_strand(case.config.plan):
        limits = [window(passes.in_turn, edges)]
    elif layout.num_ranks == 1:
        limits = [window(each, edges) for each in (passes.forward, passes.backward)]
    else:  # two micro-batches of one direction may be concurrent
        limits = [window({unit: (passes.forward[unit] + passes.backward[unit]) / 2 for unit in layout.graphs}, edges)]
    sums, link = _often_reduced(profile, amounts, case, cluster)
    for kind, (alone, added) in others.items():
        slowed_down = {unit: computing[unit] + added[unit] for unit in computing}
        limits += [window(alone) + (sums if kind is link else 0.0), window(slowed_down, edges)]
    around = _around(amounts, case, cluster, layout, window(calls), min(map(len, names)))
    nothing, by_kind = Memory(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), dict.fromkeys(Kind, 0.0)
    by_kind[Kind.COMPUTE] = window(computing)
    least = around.casts + max(*limits, around.issuing)
    return Step(case, least, 0.0, around.optimizer, by_kind, {}, 0.0, nothing, (0.0, 0.0), fidelity=Fidelity.BOUND)


def _often_reduced(profile: Profile, amounts: Amounts, case: Case, cluster: Cluster) -> tuple[float, Kind | None]:
    """Returns the seconds of reductions before the end of a window, and the kind of collectives that share their link;
    0 if gradients are reduced at the end only."""
    if not case.reduces_often or case.sizes.copies == 1:
        return 0.0, None
    timed = timed_traffic(profile, amounts, case, cluster)
    often = (each.named_operators[0][0] for each in timed.layout.reductions if each.every_microbatch)
    crosses = rings(cluster, case.sizes)[COPIES].crosses
    sums = (case.microbatches - 1) * sum(timed.times[name] for name in often)
    return sums, Kind.INTER_NODE if crosses else Kind.INTRA_NODE


def detailed_step(amounts: Amounts, step: Step, cluster: Cluster) -> Step:
    """Returns a step of `Fidelity.TIMED` with exposed communication, the bubble and waits."""
    assert step.planned is not None, "a step of all layers"
    plan, timed = step.planned
    profile = profile_of(amounts, step.case, cluster)
    clock = WindowClock(profile, amounts, step.case, cluster, Fidelity.WHOLE, plan=plan)
    window = clock.detailed(timed)
    exposed = {kind: seconds for kind, seconds in window.exposed.items() if step.loads[kind]}
    waits = step.waits if step.case.config.offload else window.waits
    bubble = window.bubble / window.seconds
    return replace(step, exposed=exposed, bubble=bubble, waits=waits, fidelity=Fidelity.WHOLE)


def simulate_plan(
    amounts: Amounts,
    case: Case,
    cluster: Cluster,
    profile: Profile,
    plan: Plan,
    fidelity: Fidelity = Fidelity.DRAWN,
) -> Step:
    """Returns the optimizer step of a case under a given plan, in place of its own."""
    reduces = bool(profile.layout.traffic)
    clock = WindowClock(profile, amounts, case, cluster, fidelity, plan=plan, reduces=reduces)
    return _step(amounts, case, cluster, profile, clock)


def _step(
    amounts: Amounts,
    case: Case,
    cluster: Cluster,
    profile: Profile,
    clock: WindowClock,
    peaks: Sequence[Peak] | None = None,
) -> Step:
    layout, window, count = profile.layout, clock.time(), case.microbatches
    if window.drawing is not None:
        drawn_layout = clock.planned.profile.layout
        peaks = peaks_of_window(amounts, drawn_layout, window.drawing, cluster.device.host_runs_ahead)
    elif clock.fidelity is Fidelity.QUICK:
        counted = layout if clock.amounts is amounts else layout_of(amounts, case)
        peaks = _peaks_of_search(amounts, case, counted, cluster.device.memory)
    elif peaks is None:
        peaks = peaks_of_plan(amounts, case, cluster, clock)
    names = [layout.units[unit] for unit in layout.units_of(clock.busiest)]
    ops = {(name, entry): op for name in set(names) for entry, op in layout.graphs[name].entries()}
    entries = [(name, entry) for name in names for entry, _ in layout.graphs[name].entries()]
    operators = [(ops[entry], profile.times[entry]) for entry in entries]
    calls = sum(_calls(clock.amounts, entry) for entry in entries)
    loads = dict.fromkeys(Kind, 0.0)
    for op, seconds in operators:
        loads[op.kind] += 0.0 if op.receives else count * seconds
    around, waits = _around(amounts, case, cluster, layout, count * calls, len(names)), window.waits
    hiding = around.hiding
    return Step(
        case,
        around.casts + max(window.seconds - min(waits, hiding), around.issuing),
        window.reductions - min(window.copies, hiding),
        around.optimizer,
        loads,
        {kind: seconds for kind, seconds in window.exposed.items() if loads[kind]},
        window.bubble / window.seconds,
        memory_of_case(amounts, case, layout, peaks),
        model_flops(amounts, case),
        count * sum(seconds for op, seconds in operators if op.ahead and not (op.reads and op.kind is Kind.UP)),
        max(0.0, waits - hiding),
        around.casts,
        around.issuing,
        around.replayed,
        clock.fidelity,
        window.drawing,
        ((PARAMETER + GRADIENT + case.state_bytes + _cast_bytes(case)) * around.of_node if case.config.offload else 0.0)
        + cluster.devices_per_node * _inputs_on_host(amounts, case, layout),
        clock.found(window),
    )


@dataclass(frozen=True)
class _Around:
    """What a step has around the operators of its window."""

    optimizer: float  # seconds of the update
    hiding: float  # seconds of the update on the host, in which copies of other shards run
    casts: float  # see `Step`
    issuing: float  # see `Step`
    replayed: bool  # see `Step`
    of_node: float  # elements that the devices of a node step


def _around(amounts: Amounts, case: Case, cluster: Cluster, layout: Layout, calls: float, num_units: int) -> _Around:
    """Returns what a step has around its window, in which a rank with `num_units` units makes `calls` calls."""
    device, replayed = cluster.device, is_replayed(case, layout, cluster)
    issuing = device.replay_seconds if replayed else calls * device.issue_seconds
    casts = cast_seconds(amounts, layout, case, cluster)
    held = (held_weights(amounts, layout, rank) for rank in range(layout.num_ranks))
    stepped = [case.stepped(each.trained, each.experts) for each in held]
    of_node = cluster.devices_per_node * sum(stepped) / len(stepped)
    optimizer, hiding = _optimizer_seconds(case, cluster, stepped, of_node), 0.0
    if case.config.offload:  # copies of a shard overlap with updates of others; each unit has one at least
        hiding = optimizer * (1 - 1 / num_units)
    if case.keeps_copies and case.spread_weights:  # before the window
        casts += max(0.0, max(stepped) * ELEMENT[case.dtype] / cluster.host.bandwidth - hiding)
    return _Around(optimizer, hiding, casts, issuing if device.host_runs_ahead else 0.0, replayed, of_node)


def _calls(amounts: Amounts, name: Name) -> int:
    """Returns the calls of the host for an operator."""
    return amounts.operators[name].calls if name in amounts.operators else 1


def is_replayed(case: Case, layout: Layout, cluster: Cluster) -> bool:
    """Returns whether windows run from CUDA graphs: on GPUs, unless the host reads sizes (experts without a
    capacity, or images) or takes gradients or activations."""
    on_host = case.config.offload or case.recompute == OFFLOAD
    operators = (op for pair in layout.graphs.values() for _, op in pair.entries())
    reads = case.config.image_share > 0 or any(op.host_read_sizes for op in operators)
    return case.config.cuda_graphs is not False and cluster.backend == "nccl" and not reads and not on_host


def _inputs_on_host(amounts: Amounts, case: Case, layout: Layout) -> int:
    """Returns the most bytes of inputs of layers that a rank has on its host, waiting for their backward passes."""
    if case.recompute != OFFLOAD:
        return 0
    copied = dict.fromkeys(layout.units, 0)
    for name, op in named_operators(layout):
        if op.kind is Kind.DOWN:
            copied[name[0]] += sum(each.bytes for each in amounts.operators[name].transfers)
    most = 0
    for schedule in usual_schedules(case.config.schedule, case.sizes.pp, case.microbatches, layout.is_spread):
        for slots in schedule:
            waiting = 0
            for action in (action for slot in slots for action in slot.actions if action.computation_type != "W"):
                inputs = sum(copied[layout.units[unit]] for unit in layout.chunks[action.stage])
                waiting += inputs if action.computation_type == "F" else -inputs
                most = max(most, waiting)
    return most


def _optimizer_seconds(case: Case, cluster: Cluster, stepped: Sequence[float], of_node: float) -> float:
    """Returns the seconds of an update: of the elements of the largest rank on its device, or of a node's on its host,
    with a gradient read, a weight and its states are read and written, and the weight is cast."""
    if not case.config.offload:
        return max(cluster.device.moving_seconds(OPTIMIZER_BYTES * mine, PARAMETER * mine) for mine in stepped)
    cast = _cast_bytes(case)
    moved = GRADIENT + 2 * (PARAMETER + case.state_bytes) + (PARAMETER + cast if cast else 0)
    return moved * of_node / cluster.host.memory


def _cast_bytes(case: Case) -> int:
    """Returns the bytes of a weight's cast on the host."""
    return ELEMENT[case.dtype] if case.dtype != "fp32" else 0


def model_flops(amounts: Amounts, case: Case) -> tuple[float, float]:
    """Returns the floating-point operations of a device in a step, see `Step.model_flops`."""
    model, tokens = amounts.model, case.tokens / case.sizes.devices
    causal, full = model.flops.causal(case.length), model.flops.full(case.length)
    of_images = (
        kernel.flops
        for (unit, _), counted in amounts.operators.items()
        if unit == model.units[0]
        for kernel in counted.kernels
    )
    shared = case.sizes.tp * case.sizes.cp * case.sizes.pp  # by ranks with the same images
    towers = sum(of_images) * case.microbatches / shared
    return causal * tokens + towers, full * tokens + towers
