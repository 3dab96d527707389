"""A row of the paper under one of its methods, on paper.

In:   a row, and the name of a method.
Out:  a `Run`: the step that is simulated, and its speed in the row's unit.
Must hold: every method runs the same operators at the same rates; methods differ in the plan and the schedule alone,
but that the paper's run the ring of Megatron-LM (`benchmarks.paper.ring`).
Rates come from the files of clusters.

What each method is here:

    Megatron      `sequential` under 1F1B. It overlaps what Megatron-LM does: steps of the ring beside blocks of
                  attention, and the weight gradient of a column-parallel linear beside a reduce-scatter
    Intra-batch   `sequential` under 1F1B, on graphs in tiles (`benchmarks.paper.tiles`), whose products are smaller and
                  so less efficient. Memory is that of whole operators
    Wavelet+      `round_robin` under the paper's W schedule
    DHelix        `dhelix` under the W schedule, with a launch interval after every barrier
    search        our own plan, under `schedule="auto"`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.paper.models import build_model
from benchmarks.paper.published import DHELIX, INTRA_BATCH, MEGATRON, TOP_K, WAVELET, Row
from benchmarks.paper.ring import with_megatron_ring
from benchmarks.paper.tiles import source_of, step_in_tiles, tile_profile
from hf_helix.doctor.amounts.records import Amounts, OperatorAmounts, Transfer
from hf_helix.doctor.case import ELEMENT, Case
from hf_helix.doctor.estimate import operator_seconds, rings, transfer_seconds
from hf_helix.doctor.memory import held_weights
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import Step, profile_of, simulate_plan
from hf_helix.doctor.window import Fidelity
from hf_helix.planning.plan.block_plan import BARRIER, BlockPlan
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.cluster import Cluster, load_cluster
from hf_helix.planning.timing.profile import Pair, Profile
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES
from hf_helix.planning.window.layout import Layout, Name, named_operators

SEARCH = "search"
RULES: Mapping[str, tuple[str, str]] = {
    MEGATRON: ("sequential", "1f1b"),
    INTRA_BATCH: ("sequential", "1f1b"),
    WAVELET: ("round_robin", "folded_1f1b"),
    DHELIX: ("dhelix", "folded_1f1b"),
    SEARCH: ("search", "auto"),
}
"""Plan and schedule of every method."""

SEARCHING = 0.2
"""The length of a search, in parts of the usual one."""

LAUNCH_SECONDS = 20e-6
"""What DHelix's `torch.cuda.synchronize` between two pairs of segments leaves the device idle. Assumed: the paper gives
it as a part of communication only (table 7)."""


@dataclass(frozen=True)
class Run:
    """A row under a method.

    Attributes:
        row: of the paper.
        method: a key of `RULES`.
        step: what is simulated.
        profile: the times of the operators.
        plan: their order.
        launches: seconds of the step in which a device waits for the host after barriers.
    """

    row: Row
    method: str
    step: Step
    profile: Profile
    plan: Plan
    launches: float

    @property
    def speed(self) -> float:
        """Returns the speed as the row counts it."""
        return speed_of(self.row, self.step)


class Runs:
    """Simulates rows, each under each method once.

    Args:
        clusters: by name, in the place of those that the package brings.
    """

    def __init__(self, clusters: Mapping[str, Cluster] | None = None) -> None:
        self.clusters = dict(clusters or {})
        self._models: dict[tuple[str, int | None, str], SimulatedModel] = {}
        self._amounts: dict[tuple[object, ...], Amounts] = {}
        self._runs: dict[tuple[Row, str], Run] = {}

    def cluster(self, row: Row) -> Cluster:
        """Returns the cluster of a row."""
        if row.cluster not in self.clusters:
            self.clusters[row.cluster] = load_cluster(row.cluster)
        return self.clusters[row.cluster]

    def with_clusters(self, clusters: Mapping[str, Cluster]) -> Runs:
        """Returns runs on other clusters of the same shape, for which nothing is counted anew."""
        other = Runs(clusters)
        other._amounts = self._amounts
        return other

    def run(self, row: Row, method: str) -> Run:
        """Returns a row under a method."""
        if (row, method) not in self._runs:
            profile = self.profile(row, method)
            plan = self._plan(row, method, profile)
            amounts, case, cluster = self.amounts(row, method), case_of(row, method), self.cluster(row)
            step = simulate_plan(amounts, case, cluster, profile, plan, Fidelity.WHOLE)
            if method == INTRA_BATCH:
                profile = tiled_profile(amounts, profile, row, cluster)
                plan = self._plan(row, method, profile)
                step = step_in_tiles(step, profile, amounts, cluster, row.sizes.tp, reduces=False)
            if method != SEARCH:  # the paper: gradients are synchronized "at the end of an iteration"
                step = _with_nothing_beside(step, amounts, profile.layout, cluster)
            launches = LAUNCH_SECONDS * barriers_of(plan, profile, row) if method == DHELIX else 0.0
            step = replace(step, window=step.window + launches)
            self._runs[row, method] = Run(row, method, step, profile, plan, launches)
        return self._runs[row, method]

    def gain(self, row: Row, method: str) -> float:
        """Returns how many times as fast as Megatron a method is."""
        return self.run(row, method).speed / self.run(row, MEGATRON).speed

    def profile(self, row: Row, method: str) -> Profile:
        """Returns the times of a row's operators, with the layout that a method's schedule has."""
        has_reductions = method == SEARCH  # else these follow the window, see `_with_nothing_beside`
        return profile_of(self.amounts(row, method), case_of(row, method), self.cluster(row), has_reductions)

    def amounts(self, row: Row, method: str = MEGATRON, recompute: str = "none") -> Amounts:
        """Returns what a rank of a row does.

        Args:
            row: of the paper.
            method: a key of `RULES`; those of the paper have the ring of Megatron-LM.
            recompute: as in `HelixConfig`.

        Raises:
            ValueError: the model cannot be cut like this.
        """
        is_ours = method == SEARCH
        key = row.model, row.layers, row.cluster, row.length, row.sizes, row.capacity, recompute, is_ours
        if key not in self._amounts:
            counted = self.model(row).amounts(case_of(row, MEGATRON).changed(recompute=recompute))
            padded = _padded(_reduced_by_the_backend(counted), max(1.0, row.capacity / TOP_K))
            self._amounts[key] = padded if is_ours else with_megatron_ring(padded)
        return self._amounts[key]

    def model(self, row: Row) -> SimulatedModel:
        """Returns the model of a row, on the row's cluster."""
        key = row.model, row.layers, row.cluster
        if key not in self._models:
            self._models[key] = SimulatedModel(build_model(row.model, row.layers), self.cluster(row))
        return self._models[key]

    def _plan(self, row: Row, method: str, profile: Profile) -> Plan:
        amounts, sizes = self.amounts(row, method), row.sizes
        mesh = {"tp_size": sizes.tp}
        return make_plan(RULES[method][0], profile, model=amounts.model.name, mesh=mesh, search_share=SEARCHING)


def speed_of(row: Row, step: Step) -> float:
    """Returns TFLOP/s of a GPU with full attention, or tokens a second, as a row counts."""
    return step.tokens_per_second if row.counts_tokens else step.tflops[1]


def case_of(row: Row, method: str) -> Case:
    """Returns the case of a row under a method: micro-batches of one sequence, and the optimizer in shards. The paper
    does not say so, but with all states on every rank most of its models do not fit."""
    rule, schedule = RULES[method]
    options = {"plan": rule, "schedule": schedule, "shard_optimizer": True}
    return Case.of(row.sizes, 1, row.length, row.microbatches, **options)


def _with_nothing_beside(step: Step, amounts: Amounts, layout: Layout, cluster: Cluster) -> Step:
    """Returns a step that sums gradients once its window is over, and gathers weights once the optimizer is done, all
    of them in the type of matrix products, as Megatron-LM's distributed optimizer does."""
    case, axes = step.case, rings(cluster, step.case.sizes)
    gathers = 0.0
    ranks = range(layout.num_ranks)
    for held in (held_weights(amounts, layout, rank) for rank in ranks):
        parts = ((COPIES, held.trained), (EXPERT_COPIES, held.experts))
        sent = [Transfer(axis, "all_gather", axes[axis].sent(count * ELEMENT[case.dtype])) for axis, count in parts]
        gathers = max(gathers, sum(transfer_seconds(each, axes[each.axis], cluster) for each in sent))
    profile = profile_of(amounts, case, cluster, whole=True)
    traffic = (profile.layout.traffic_of(rank) for rank in ranks)
    sums = max(sum(profile.times[each.named_operators[0][0]] for each in own if each.adders) for own in traffic)
    return replace(step, sums=sums, optimizer=step.optimizer + gathers)


def barriers_of(plan: Plan, profile: Profile, row: Row) -> int:
    """Returns how many barriers a rank meets in a step, in layers that run beside each other.

    Args:
        plan: a block plan.
        profile: the times of the operators.
        row: of the paper.
    """
    assert isinstance(plan, BlockPlan)
    layout = profile.layout
    names = [layout.units[unit] for unit in layout.units_of(0) if "." not in layout.units[unit]]
    layers = [name for name in names if layout.graphs[name].forward.repeats]
    return row.microbatches * sum(plan.order(name, name).count(BARRIER) for name in layers)


def _reduced_by_the_backend(amounts: Amounts) -> Amounts:
    """Returns the amounts with sums inside the collective, as Megatron-LM leaves them to NCCL.

    Our runtime exchanges the parts and adds them up in fp32, which takes the same way inside a node and more of the
    links between nodes.
    """

    def summed(counted: OperatorAmounts) -> OperatorAmounts:
        sent = [
            replace(each, method="reduce_scatter") if (each.axis, each.method) == ("tp", "exchange") else each
            for each in counted.transfers
        ]
        return replace(counted, transfers=tuple(sent))

    return replace(amounts, operators={name: summed(counted) for name, counted in amounts.operators.items()})


def _padded(amounts: Amounts, factor: float) -> Amounts:
    """Returns the amounts with so many times as many rows for every expert.

    The paper's experts have a capacity of 6 or 8. Were that, as in today's Megatron-LM, the multiple of a balanced
    load that is computed, the A40 would run at 91 % of its peak; so it is taken as a multiple of the tokens of a rank
    divided by its experts, of which each token asks for two.
    """

    def more(name: Name, counted: OperatorAmounts) -> OperatorAmounts:
        if ".experts." not in name[1]:
            return counted
        kernels = [replace(k, flops=k.flops * factor, bytes=int(k.bytes * factor)) for k in counted.kernels]
        sent = [replace(each, bytes=int(each.bytes * factor)) for each in counted.transfers]
        return replace(counted, kernels=tuple(kernels), transfers=tuple(sent))

    return replace(amounts, operators={name: more(name, counted) for name, counted in amounts.operators.items()})


# --- Tiles ---


def tiled_profile(amounts: Amounts, profile: Profile, row: Row, cluster: Cluster) -> Profile:
    """Returns the times of the tiled graphs. Tiles take as long as the cluster needs for such small products and
    messages.

    Args:
        amounts: of whole operators.
        profile: of whole operators.
        row: whose layout it is.
        cluster: what it runs on.
    """
    tiles, axes = row.sizes.tp, rings(cluster, row.sizes)
    whole = tile_profile(profile, tiles)
    times = dict(whole.times)
    for name, op in named_operators(whole.layout):
        source, parts = source_of(name, op, profile, tiles)
        if parts > 1:
            part = _part(amounts.operators[source], parts)
            times[name] = operator_seconds(part, op.kind, axes, cluster, "bf16")
    pairs = {(a, b): Pair.of(times[a], times[b], whole.slowdown(a, b), whole.slowdown(b, a)) for a, b in whole.pairs}
    return replace(whole, times=times, pairs=pairs)


def _part(whole: OperatorAmounts, parts: int) -> OperatorAmounts:
    kernels = [replace(each, flops=each.flops / parts, bytes=each.bytes // parts) for each in whole.kernels]
    transfers = [replace(each, bytes=each.bytes // parts) for each in whole.transfers]
    return OperatorAmounts(kernels=kernels, transfers=transfers)
