"""A whole optimizer step of a whole cluster: how long it takes, and what for.

In:   the amounts of a rank, a case (layout, micro-batches, plan), and a cluster.
Out:  a `Step`.
Must hold: data-parallel replicas are equal, so one pipeline is simulated for all; the window's time is that of the cost
function, whose rules are those of the executor.

Long windows repeat themselves. So windows are simulated with few layers on a stage and few micro-batches, and what one
more of each takes is added as often as there are more; a layout that is looked at in depth is simulated whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hf_helix.planning.graph.backward import transfer_graphs
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.registry import make_plan, runs_one_strand
from hf_helix.planning.schedule.placement import split_layers, stage_ranks
from hf_helix.planning.schedule.scheduler import Scheduler
from hf_helix.planning.timing.clock import Timeline
from hf_helix.planning.timing.predict import predict
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Layout, place_names
from hf_helix.planning.window.program import build_programs
from hf_helix.simulation.amounts.amounts import Amounts
from hf_helix.simulation.cluster import Cluster
from hf_helix.simulation.estimate import estimate_profile, rings
from hf_helix.simulation.memory import PARAMETER, Memory, Peak, Sharing, held_weights, memory_of
from hf_helix.simulation.peaks import peaks_of_schedules, peaks_of_window
from hf_helix.simulation.sizes import Sizes
from hf_helix.simulation.step.gathers import cast_seconds, exposed_gathers, profile_with_gathers, weight_gathers
from hf_helix.simulation.step.steady import Layers, costs_under, exposed_seconds, steady_layers
from hf_helix.simulation.step.sums import exposed_sums, profile_with_sums
from hf_helix.simulation.step.whole import predict_whole
from hf_helix.simulation.step.window import usual_schedules, window_of

OPTIMIZER_BYTES = 32
"""Bytes that an optimizer's step moves for an element: gradient, weight and two states read, the latter written, the
gradient read once more for its norm."""

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
        shard_optimizer: as in `HelixConfig`: ranks with copies each step a part of the weights, from gradients that are
            reduced to these parts, and gather the weights once in a window, beside its first forward pass.
        shard_parameters: as in `HelixConfig`.
        dtype: the type of matrix products.
        imbalance: rows that the experts of the busiest rank get, in parts of the mean. What routers choose depends on
            the data, so it is given, not predicted; time and memory are those of a rank that gets so many in every
            layer: an upper estimate where layers differ. With the factor of the most uneven layer, 1.27 to 1.50 times
            the memory that two ranks of a small mixture counted.
        expert_capacity_factor: as in `HelixConfig`: with it experts get equal rows, whatever routers choose.
    """

    sizes: Sizes
    batch: int
    length: int
    microbatches: int
    plan: str = "greedy"
    schedule: str = "auto"
    recompute: str = "none"
    shard_optimizer: bool = False
    shard_parameters: bool = False
    dtype: str = "bf16"
    imbalance: float = 1.0
    expert_capacity_factor: float | None = None

    @property
    def tokens(self) -> int:
        """Returns the tokens of a step, of all data-parallel ranks."""
        return self.batch * self.length * self.microbatches * self.sizes.dp

    @property
    def spread_weights(self) -> dict[str, int]:
        """Returns the axes that weights are spread over, with their ranks."""
        return self.sizes.spread() if self.shard_parameters else {}

    @property
    def spread_gradients(self) -> dict[str, int]:
        """Returns the axes over which gradients are reduced to parts, with their ranks; over others they are summed."""
        return self.sizes.spread() if self.shard_parameters or self.shard_optimizer else {}

    @property
    def sharing(self) -> Sharing:
        """Returns what ranks with copies keep."""
        sizes, several = self.sizes, bool(self.sizes.spread())
        states, parameters = self.shard_optimizer and several, self.shard_parameters and several
        return Sharing(sizes.copies, sizes.expert_copies, states, parameters)


@dataclass(frozen=True)
class Step:
    """An optimizer step.

    Attributes:
        case: what was simulated.
        window: seconds of forward and backward of all micro-batches, `waits` and `casts` included.
        sums: seconds after it in which only gradients are summed, or, predicted quickly, which their sums add to it.
        optimizer: seconds of the optimizer.
        loads: seconds of each kind of work in a window, on the rank that has most.
        exposed: seconds of each kind of communication in a window that run beside no computation, likewise; without
            those between stages unless the window was drawn, in which case they are known.
        bubble: part of a window in which the pipeline's ranks wait for each other.
        memory: of the rank that needs most.
        model_flops: of a device in a step, attention counted as causal, and as if every token saw every other.
        gathers: seconds of those `loads` in which weights are gathered.
        waits: seconds that gathers add to the window which happen once in it (`shard_optimizer`).
        casts: seconds of the window in which weights are cast to the type of matrix products, once in it; none where
            they are gathered in that type.
        is_whole: whether the window was predicted operator by operator.
        drawn: the programs and the timeline of the window, if it was kept for a picture.
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
    gathers: float = 0.0
    waits: float = 0.0
    casts: float = 0.0
    is_whole: bool = False
    drawn: tuple[Sequence[Instruction], Timeline] | None = field(default=None, repr=False)

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


def profile_of(amounts: Amounts, case: Case, cluster: Cluster, whole: bool = False) -> Profile:
    """Returns the times of the operators of a case, with its layout.

    Args:
        amounts: of a rank of this case's layout.
        case: what is trained how.
        cluster: what it runs on.
        whole: whether the sums of gradients and the gathers of weights that happen once in a window are among them.

    Raises:
        ValueError: the layout cannot be built.
    """
    profile = estimate_profile(amounts, layout_of(amounts, case), case.sizes, cluster, case.dtype)
    if whole:
        axes = rings(cluster, case.sizes)
        profile = profile_with_sums(profile, amounts, axes, cluster, case.spread_gradients)
        if case.shard_optimizer:
            profile = profile_with_gathers(profile, amounts, axes, cluster)
    return profile


def memory_of_case(
    amounts: Amounts, case: Case, layout: Layout | None = None, peaks: Sequence[Peak] | None = None
) -> Memory:
    """Returns the memory of the rank that needs most.

    Args:
        amounts: of a rank of this case's layout.
        case: what is trained how.
        layout: of the case, where it is known.
        peaks: of each rank, where they are known.

    Raises:
        ValueError: the layout cannot be built.
    """
    layout = layout or layout_of(amounts, case)
    return _heaviest(amounts, layout, case, peaks or peaks_of_case(amounts, case, layout))


def peaks_of_case(amounts: Amounts, case: Case, layout: Layout) -> list[Peak]:
    """Returns what is alive on each rank of a pipeline when most is.

    Args:
        amounts: of a rank of this case's layout.
        case: what is trained how; whether states are sharded does not matter.
        layout: of the case.
    """
    two_strands = not runs_one_strand(case.plan)
    usual = usual_schedules(case.schedule, case.sizes.pp, case.microbatches, two_strands)
    return peaks_of_schedules(amounts, layout, usual, two_strands)


def _few_microbatches(
    plan: Plan, profile: Profile, scheduler: Scheduler, case: Case, cluster: Cluster
) -> tuple[Sequence[Instruction], Timeline | None]:
    """Returns the instructions of all ranks, one rank after the other, in a window as long as memory depends on, and on
    CPUs, whose memory depends on it, when they run."""
    schedule = scheduler(min(case.microbatches, 2 * case.sizes.pp + 2))
    if not cluster.device.host_runs_ahead:
        predicted = predict(plan, profile, schedule, timeline=True)
        return predicted.instructions, predicted.timeline
    return [made for of_rank in build_programs(schedule, profile.layout, plan) for made in of_rank], None


def _heaviest(amounts: Amounts, layout: Layout, case: Case, peaks: Sequence[Peak]) -> Memory:
    """Returns the memory of the rank that needs most, given the peak of each."""
    found = [memory_of(amounts, layout, rank, peak, case.sharing) for rank, peak in enumerate(peaks)]
    return max(found, key=lambda memory: memory.total)


def simulate_step(
    amounts: Amounts,
    case: Case,
    cluster: Cluster,
    whole: bool = False,
    known: dict[object, Layers] | None = None,
    drawable: bool = True,
) -> Step:
    """Returns what an optimizer step takes.

    Args:
        amounts: of a rank of this case's layout.
        case: what is trained how.
        cluster: what it runs on.
        whole: whether to order and predict the window operator by operator.
        drawable: whether whole windows of up to `WHOLE` operators are kept for a picture, and search their schedule;
            else all are predicted by their steady state, and `Step.waits` by rule.
        known: what this rule made of layers on this cluster in cases that were simulated before; takes up that of this
            one. Layouts that differ in their pipeline have the same layers.

    Raises:
        ValueError: the layout cannot be built.
    """
    profile = profile_of(amounts, case, cluster, whole)
    plan = make_plan(case.plan, profile, model=amounts.model.name, mesh={"tp_size": case.sizes.tp})
    return simulate_plan(amounts, case, cluster, profile, plan, whole, known, drawable)


def simulate_plan(
    amounts: Amounts,
    case: Case,
    cluster: Cluster,
    profile: Profile,
    plan: Plan,
    whole: bool = False,
    known: dict[object, Layers] | None = None,
    drawable: bool = True,
) -> Step:
    """Returns what an optimizer step takes under a plan, whatever the case says of plans.

    Args:
        amounts: of a rank of this case's layout.
        case: what is trained how.
        cluster: what it runs on.
        profile: the times of the operators, see `profile_of`.
        plan: for this profile.
        whole, known, drawable: as of `simulate_step`.
    """
    layout = profile.layout
    names = dict.fromkeys(amounts.model.units[1:-1])
    key = (
        tuple((name, seconds) for name, seconds in profile.times.items() if name[0] in names),
        max(profile.times.values()),
    )
    layers = (known or {}).get(key) or steady_layers(plan, profile, list(names))
    if known is not None:
        known[key] = layers
    costs = costs_under(profile, layers)
    axes = rings(cluster, case.sizes)
    window = window_of(case.schedule, layout.ranks, case.microbatches, costs)
    waits = exposed_gathers(profile, amounts, axes, cluster) if case.shard_optimizer else 0.0
    drawn = None
    if whole:
        is_short = drawable and _num_operators(layout, range(len(layout.units))) * case.microbatches <= WHOLE
        scheduler = Scheduler(case.schedule if is_short else window.name, case.sizes.pp, costs)
        schedule = scheduler(case.microbatches)
        found = predict_whole(plan, profile, schedule, is_short, None if drawable else waits)
        seconds, sums, waits, drawn = found.seconds, found.sums, found.waits, found.drawn
    else:
        sums = exposed_sums(profile, amounts, axes, cluster, case.spread_gradients, plan.BY_TIMES)
        seconds = window.seconds + waits
    if whole and plan.profile_for(profile) is profile:
        programs, timeline = drawn or _few_microbatches(plan, profile, scheduler, case, cluster)
        peaks = peaks_of_window(amounts, layout, programs, None if cluster.device.host_runs_ahead else timeline)
        memory = _heaviest(amounts, layout, case, peaks)
    else:  # tiles have other operators than those whose memory is known
        memory = memory_of_case(amounts, case, layout)
    loads = _loads(profile, layout, window.busiest, case.microbatches)
    gathers_copies = case.shard_optimizer and bool(weight_gathers(amounts, layout, axes))
    casts = cast_seconds(amounts, layout, cluster, gathers_copies)
    seconds = casts + max(seconds, _host_seconds(layout, window.busiest, case.microbatches, cluster))
    exposed = {kind: loads[kind] * share for kind, share in layers.exposed.items() if loads[kind]}
    if drawn:
        exposed = {kind: found for kind, (_, found) in exposed_seconds(drawn[1], window.busiest).items()}
        exposed.pop(Kind.GRADIENTS, None)  # they are in `sums` and in `waits`
    return Step(
        case,
        seconds,
        sums,
        _optimizer(amounts, layout, case, cluster),
        loads,
        exposed,
        window.bubble,
        memory,
        model_flops(amounts, case),
        case.microbatches * _gather_seconds(profile, layout, window.busiest),
        waits,
        casts,
        whole,
        drawn,
    )


def model_flops(amounts: Amounts, case: Case) -> tuple[float, float]:
    """Returns the floating-point operations of a device in a step, see `Step.model_flops`."""
    model, tokens = amounts.model, case.tokens / case.sizes.devices
    causal, full = (model.flops_per_token + model.attention_flops * case.length * share for share in (0.5, 1.0))
    return causal * tokens, full * tokens


def _loads(profile: Profile, layout: Layout, rank: int, microbatches: int) -> dict[Kind, float]:
    found = dict.fromkeys(Kind, 0.0)
    for name in (layout.units[unit] for unit in layout.units_of(rank)):
        for entry, op in layout.graphs[name].entries():
            if not op.receives:
                found[op.kind] += microbatches * profile.times[name, entry]
    return found


def _gather_seconds(profile: Profile, layout: Layout, rank: int) -> float:
    """Returns the seconds in which a rank gathers weights for a micro-batch."""
    names = [layout.units[unit] for unit in layout.units_of(rank)]
    return sum(profile.times[name, entry] for name in names for entry, op in layout.graphs[name].entries() if op.ahead)


def _host_seconds(layout: Layout, rank: int, microbatches: int, cluster: Cluster) -> float:
    """Returns what a host needs to issue a window, where it issues while the device computes."""
    if not cluster.device.host_runs_ahead:
        return 0.0
    return _num_operators(layout, layout.units_of(rank)) * microbatches * cluster.device.issue_seconds


def _num_operators(layout: Layout, units: Iterable[int]) -> int:
    """Returns how many operators a micro-batch runs in some units, forward and backward."""
    return sum(len(list(layout.graphs[layout.units[unit]].entries())) for unit in units)


def _optimizer(amounts: Amounts, layout: Layout, case: Case, cluster: Cluster) -> float:
    """Returns the seconds of the optimizer on the rank that takes longest."""
    parts = [case.sharing.part_of(held_weights(amounts, layout, rank)) for rank in range(layout.num_ranks)]
    return max(cluster.device.moving_seconds(OPTIMIZER_BYTES * mine, PARAMETER * mine) for mine in parts)
