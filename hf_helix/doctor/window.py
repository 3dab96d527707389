"""The window of a step: its seconds by the clock of plans, whole, or with few layers for a search.

In:   a case with its profile, amounts and cluster.
Out:  a `WindowTime`.
Must hold: every figure is a prediction of `hf_helix.planning`; a search changes only the numbers of layers and of
micro-batches that are predicted.

Deep models and long windows repeat themselves. In a search two windows are predicted, with few layers on the stages of
the busiest rank by itself and with one period of layers more, and the difference is extrapolated to all layers. The
slot clock adds the waits of this rank for others.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from hf_helix.config import AUTO
from hf_helix.doctor.amounts.records import Amounts
from hf_helix.doctor.case import Case
from hf_helix.doctor.estimate import LEAST
from hf_helix.doctor.memory import Drawing
from hf_helix.doctor.traffic import timed_traffic
from hf_helix.planning.choice.memory import MemoryLimit
from hf_helix.planning.choice.scheduler import ON_ONE_RANK, Scheduler
from hf_helix.planning.choice.slot_clock import Costs, simulate_schedule, stage_costs
from hf_helix.planning.graph.backward import FIRST, NEXT
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.predict import Prediction, predict, timeline_of
from hf_helix.planning.rules.registry import make_plan, runs_one_strand
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.schedule.named import FOLDED, NAMED_SCHEDULES
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.operator_clock import Timeline
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.layout import Layout, named_operators, sub_layout
from hf_helix.planning.window.window import COMPUTE, STREAMS
from hf_helix.runtime.streams.trace import Interval, common, merge

PERIODS = 12  # longest period, in layers, looked for in a model: hybrid models repeat 2 to 8 layers
WAITING = 4  # micro-batches of the window for waits at weight gathers; later micro-batches do not wait

COMPARED = (6, 8)
"""Micro-batches of the two windows whose difference gives the exposed communication per micro-batch. Between 4 and 6 a
rank by itself still settles: extrapolated to 125 micro-batches, that was 6 % of a step instead of 0.5 %."""

SHORT = 3, 4
"""Micro-batches, for each pipeline rank, of two windows by the slot clock, whose waits are extrapolated to more."""

CHOSEN = 3
"""Micro-batches, for each pipeline rank, of the window that compares the schedules of "auto". With 1, the slower
schedule was chosen for 11 of 36 random costs; with 2 or more for none."""

REMEMBERED = 4
"""Micro-batches, for each pipeline rank, of a window long enough for the peak memory: named schedules reach it with 2,
on 2 to 8 ranks."""

WRITTEN, SETTLED = 64, 8
"""Micro-batches of the longest window whose schedule is written, at least and, in pairs, for each pipeline rank: more
than `predict` simulates."""

NEGLIGIBLE = 0.005
"""The part of a window, in which a rank waits for others, up to which all of it counts as bubble: a second window, with
transfers that take no time, tells bubble and exposed transfers apart. The slot clock does not: it had 0.4 % of bubble
and 3.4 % of exposed transfers where the second window has 2.1 % and 1.8 %."""

NEGLIGIBLE_SUMS = 0.002
"""The part of a window with gradient reductions only, up to which a search does not look for weight gradients to defer:
it would gain less."""

MANY = 100
"""Micro-batches of a window so long that the order of its last backward does not matter: on two ranks with tensor
parallelism and 244 micro-batches the search gained 0.13 %."""

OPERATORS = 60_000  # most operators of a window simulated one by one, in about a second, and drawn


class Fidelity(Enum):
    """How much of a window is predicted.

    Attributes:
        BOUND: a lower bound of the time of all plans of the case, by only its computation.
        QUICK: few layers of the busiest rank, a plan made without gradient reductions, memory by the schedule; for a
            search.
        TIMED: all ranks, and all layers of a pipeline, with memory by the programs; long windows by their steady state.
        WHOLE: as `TIMED`, with exposed communication, the bubble and waits.
        DRAWN: as `WHOLE`, but short windows operator by operator, under the schedule searched in a run.
    """

    BOUND = "bound"
    QUICK = "quick"
    TIMED = "timed"
    WHOLE = "whole"
    DRAWN = "drawn"


LAYERS = 2, 3
"""Periods of layers on a stage in the two windows of a search."""


@dataclass(frozen=True)
class WindowTime:
    """The seconds of a window."""

    seconds: float  # seconds without the gradient reductions at the end
    reductions: float  # seconds at the end in which gradients are only reduced and copied to the host
    copies: float = 0.0  # the part of these in which they are only copied
    waits: float = 0.0  # seconds added by gathers of weights
    bubble: float = 0.0  # seconds in which the busiest rank waits for computation of other ranks
    # seconds of communication without concurrent computation, by kind, on the busiest rank
    exposed: Mapping[Kind, float] = field(default_factory=dict)
    drawing: Drawing | None = None  # the programs and the timeline, if every operator was simulated


@dataclass(frozen=True)
class Planned:
    """A plan for a profile with gradient reductions and gathers of weights."""

    profile: Profile
    plan: Plan


class WindowClock:
    """Predicts the window of a case.

    Args:
        profile: of all layers and ranks, without gradient reductions and gathers of weights.
        amounts: the amounts of a rank of the case.
        case: the case.
        cluster: the cluster.
        fidelity: how much of the window is predicted.
        limit: of the memory of the window under "auto"; None without a limit.
        plan: the plan; None for a plan by the rule of the case.
        reduces: whether gradients are reduced and weights gathered in the window.
        is_coarse: whether the amounts are coarse: then a search predicts all layers of one rank, which takes no longer.
        known: the plan and the window of all ranks that a search has found; None for none.
    """

    def __init__(
        self,
        profile: Profile,
        amounts: Amounts,
        case: Case,
        cluster: Cluster,
        fidelity: Fidelity,
        limit: MemoryLimit | None = None,
        plan: Plan | None = None,
        reduces: bool = True,
        is_coarse: bool = False,
        known: tuple[Plan, WindowTime] | None = None,
    ) -> None:
        self.layout = profile.layout
        self.fidelity = fidelity
        self.busiest = busiest_rank(profile)
        self.amounts = amounts
        self._profile, self._case, self._cluster = profile, case, cluster
        self._ranks, self._microbatches = self.layout.num_ranks, case.microbatches
        self._limit, self._plan, self._reduces = limit, plan, reduces
        is_long = self._ranks > 1 or not is_coarse
        self._has_few_layers, self._is_coarse = fidelity is Fidelity.QUICK and is_long, is_coarse
        self._made: dict[tuple[int, int, int], tuple[Planned, Prediction]] = {}
        self._known: WindowTime | None = None
        self._may_defer = known is not None and not _ends_soon(known[1])  # otherwise a window without deferring tells
        if known is not None and not self._may_defer:
            self._plan, self._known = known

    @functools.cached_property
    def _costs(self) -> Costs:
        """Costs of the stages, for the choice of a schedule."""
        costs = stage_costs(self._profile)
        rule = self._case.config.plan if self._plan is None else self._plan.rule
        return replace(costs, gain=1.0) if runs_one_strand(rule) else costs

    @functools.cached_property
    def named(self) -> str:
        """The fastest of the named schedules that the run may choose."""
        return named_schedule(self._case.config.schedule, self.layout, self._microbatches, self._costs)

    @functools.cached_property
    def planned(self) -> Planned:
        """Profile and plan of all layers."""
        if self.fidelity is not Fidelity.TIMED or self._plan is not None or not self._defers:
            return self._planned(self.layout, self.fidelity is not Fidelity.QUICK)
        if self._may_defer or (self._ranks > 1 and not self._is_coarse and self._microbatches < MANY):
            return self._planned(self.layout)
        first = self._planned(self.layout, defers=False)
        return first if _ends_soon(self._parts(first, self._microbatches)) else self._planned(self.layout)

    @property
    def _defers(self) -> bool:
        """Whether the rule of the plan searches the number of units whose weight gradients are deferred. The search
        shortens a window by little more than its sums, but on ranks that wait for each other in every layer."""
        return bool(self._whole.layout.reductions) and not runs_one_strand(self._case.config.plan)

    def _planned(self, layout: Layout, defers: bool = True) -> Planned:
        """Returns the plan of a layout; if it `defers`, made with gradient reductions: rules then search the number of
        deferred weight gradients, which is slow."""
        profile = self._whole if layout is self.layout else self._completed(layout)
        mesh = {"tp_size": self._case.sizes.tp}
        if self._plan is not None:
            return Planned(profile, self._plan)
        known = profile if defers else replace(self._profile, layout=layout)
        return Planned(profile, make_plan(self._case.config.plan, known, model=self.amounts.model.name, mesh=mesh))

    @functools.cached_property
    def _whole(self) -> Profile:
        """The profile of all layers, with the traffic of parameters."""
        return self._completed(self.layout)

    def _completed(self, layout: Layout) -> Profile:
        profile = replace(self._profile, layout=layout)
        return timed_traffic(profile, self.amounts, self._case, self._cluster) if self._reduces else profile

    def time(self) -> WindowTime:
        """Returns the seconds of the window."""
        if self._has_few_layers:
            return self._quick()
        drawn = self._drawn() if self.fidelity is Fidelity.DRAWN else None
        timed = self._known
        if timed is None:
            parts = drawn or self._parts(self.planned, self._microbatches)
            seconds, reductions = parts.seconds - parts.reduction_seconds, parts.reduction_seconds
            timed = WindowTime(seconds, reductions, parts.copy_seconds)
        if self._case.config.offload and self.fidelity is not Fidelity.QUICK:  # an update on a host hides some waits
            timed = replace(timed, waits=self._waits())
        if self._known is not None or self.fidelity in (Fidelity.QUICK, Fidelity.TIMED):
            return timed
        drawing = (drawn.instructions, drawn.timeline) if drawn else None
        return replace(self.detailed(timed, drawn), drawing=drawing)

    def found(self, window: WindowTime) -> tuple[Plan, WindowTime] | None:
        """Returns the plan and its window, if it is of all ranks, and not yet with all details."""
        is_found = self.fidelity is Fidelity.TIMED or (self.fidelity is Fidelity.QUICK and self._ranks == 1)
        return (self.planned.plan, window) if is_found else None

    def detailed(self, timed: WindowTime, drawn: Prediction | None = None) -> WindowTime:
        """Returns the seconds of the window with exposed communication, the bubble and waits; `drawn` is the window, if
        every operator was simulated."""
        exposed, bubble = self._exposed_by_kind(drawn), 0.0
        if self._ranks > 1:  # a rank waits for transfers, or for computation of others
            bubble = idle = max(0.0, timed.seconds - self._alone())
            if idle > NEGLIGIBLE * timed.seconds:
                bubble = max(0.0, idle - max(0.0, timed.seconds - self._without_transfers()))
            exposed[Kind.PIPELINE] = idle - bubble
        waits = timed.waits if self._case.config.offload else self._waits()
        return replace(timed, waits=waits, bubble=bubble, exposed=exposed)

    def _alone(self) -> float:
        """Returns the seconds of the window of the busiest rank by itself."""
        found = self._own_parts(self.planned.plan, self._own)
        return found.seconds - found.reduction_seconds

    def _without_transfers(self) -> float:
        """Returns the seconds of the window if transfers between stages took no time."""
        profile = self.planned.profile
        times = {name: LEAST for name, op in named_operators(profile.layout) if op.kind is Kind.PIPELINE}
        free = replace(self.planned, profile=replace(profile, times={**profile.times, **times}))
        found = self._parts(free, self._microbatches)
        return found.seconds - found.reduction_seconds

    def _exposed_by_kind(self, drawn: Prediction | None) -> dict[Kind, float]:
        """Returns the exposed seconds of each kind of communication: of the drawn window, else extrapolated."""
        if drawn:
            by_kind = {kind: found for kind, (_, found) in exposed_seconds(drawn.timeline, self.busiest).items()}
            by_kind.pop(Kind.GRADIENTS, None)  # in `reductions` and in `waits`
            return by_kind
        used = {op.kind for pair in self.layout.graphs.values() for _, op in pair.entries()}
        kinds = [kind for kind in Kind if kind in used and kind.communicates and kind is not Kind.PIPELINE]
        if not kinds:
            return {}
        counts = [min(self._microbatches, count) for count in COMPARED]
        plan, own = self.planned.plan, self._own
        orders = {each: plan.issue(self._on_one_rank(each), own.layout) for each in dict.fromkeys(counts)}
        few, more = (exposed_seconds(timeline_of(orders[each], own)) for each in counts)
        further = (self._microbatches - counts[1]) / max(1, counts[1] - counts[0])
        exposed: dict[Kind, float] = {}
        for kind in kinds:
            first, last = (each.get(kind, (0.0, 0.0))[1] for each in (few, more))
            exposed[kind] = max(0.0, last + further * (last - first))
        return exposed

    def _drawn(self) -> Prediction | None:
        """Returns the window operator by operator; None for more than `OPERATORS`."""
        operators = sum(len(list(self.layout.graphs[name].entries())) for name in self.layout.units)
        if operators * self._microbatches > OPERATORS:
            return None
        made = Scheduler(self._case.config.schedule, self._ranks, self._costs, self._limit, self.layout.is_spread)
        schedule = made(self._microbatches)
        return predict(self.planned.plan, self.planned.profile, schedule, timeline=True)

    def _quick(self) -> WindowTime:
        """Returns the window of the busiest rank by itself, from windows with few and with more layers, and its waits
        for other ranks by the slot clock."""
        layout = self.layout if self._ranks == 1 else rank_layout(self.layout, self.busiest)
        layouts, factor = reduced_layers(layout, LAYERS)
        plan = self.planned.plan
        parts = [self._own_parts(plan, self._completed(each)) for each in layouts]
        near, far = parts[0], parts[-1]
        pairs = (
            (near.seconds - near.reduction_seconds, far.seconds - far.reduction_seconds),
            (near.reduction_seconds, far.reduction_seconds),
            (near.copy_seconds, far.copy_seconds),
        )
        seconds, reductions, copies = (max(0.0, more + factor * (more - few)) for few, more in pairs)
        waits = self._idle_part() * seconds if self._ranks > 1 else 0.0
        return WindowTime(seconds + waits, reductions, copies)

    def _idle_part(self) -> float:
        """Returns how long the busiest rank waits for others by the slot clock, in parts of the time of its slots; of a
        long window from two short ones."""

        def idle(count: int) -> tuple[float, float]:
            schedule = schedule_of(self.named, self._ranks, count, self.layout.is_spread)
            found = simulate_schedule(schedule, self.layout.ranks, self._costs)
            waits = found.seconds * found.bubbles[self.busiest]
            return waits, found.seconds - waits

        few, more = (min(self._microbatches, number * self._ranks) for number in SHORT)
        (first, _), (last, busy) = idle(few), idle(more)
        further = (self._microbatches - more) / max(1, more - few)
        return max(0.0, last + further * (last - first)) / (busy * self._microbatches / more)

    def _own_parts(self, plan: Plan, own: Profile) -> Prediction:
        """Returns the window of one rank."""
        return long_window(lambda count: predict(plan, own, self._on_one_rank(count)), self._microbatches, 1)

    def _waits(self) -> float:
        """Returns the seconds that gathers of weights add to the window."""
        profile = self.planned.profile
        if not profile.layout.gathers:
            return 0.0
        without = replace(self.planned, profile=replace(profile, layout=profile.layout.without_gathers))
        few = min(self._microbatches, WAITING)
        return max(0.0, self._parts(self.planned, few).seconds - self._parts(without, few).seconds)

    def _parts(self, planned: Planned, microbatches: int) -> Prediction:
        def predicted(count: int) -> Prediction:
            schedule = schedule_of(self.named, self._ranks, count, self.layout.is_spread)
            return predict(planned.plan, planned.profile, schedule)

        key = id(planned.plan), id(planned.profile), microbatches
        if key not in self._made:
            self._made[key] = planned, long_window(predicted, microbatches, self._ranks)
        return self._made[key][1]

    @functools.cached_property
    def _own(self) -> Profile:
        """The profile of only the busiest rank."""
        if self._ranks == 1:
            return self.planned.profile
        return self._completed(rank_layout(self.layout, self.busiest))

    def _on_one_rank(self, microbatches: int) -> Schedule:
        return schedule_of(self.named if self.named in NAMED_SCHEDULES else ON_ONE_RANK, 1, microbatches)


def _ends_soon(window: Prediction | WindowTime) -> bool:
    """Returns whether so little of a window is only for gradient reductions that no deferred weight gradients could
    shorten a step by more than `NEGLIGIBLE_SUMS`. Copies to the host do not count: its updates hide them."""
    if isinstance(window, Prediction):
        return window.reduction_seconds - window.copy_seconds <= NEGLIGIBLE_SUMS * window.seconds
    return window.reductions - window.copies <= NEGLIGIBLE_SUMS * window.seconds


def long_window(predicted: Callable[[int], Prediction], microbatches: int, num_ranks: int) -> Prediction:
    """Returns the prediction of a window. The schedule of a long window is written for fewer micro-batches, with a
    remainder that schedules may depend on; further ones take as long as each other.

    Args:
        predicted: predicts a window of a number of micro-batches.
        microbatches: the number.
        num_ranks: of the pipeline.
    """
    most = max(WRITTEN, 2 * SETTLED * num_ranks)
    few = most + (microbatches - most) % (2 * num_ranks)
    found = predicted(min(few, microbatches))
    if few >= microbatches:
        return found
    if not found.further_seconds:
        return predicted(microbatches)
    return replace(found, seconds=found.seconds + (microbatches - few) * found.further_seconds)


# -- fewer layers, fewer ranks -----------------------------------------------------------------------------------------


def reduced_layers(layout: Layout, numbers: tuple[int, int]) -> tuple[Sequence[Layout], float]:
    """Returns layouts with few and with more layers on every stage, and the factor of extrapolation to all layers.

        value(all layers) = value(more) + factor * (value(more) - value(few))

    `numbers` are the periods of layers on a stage in the two layouts. A layout with too few layers is returned by
    itself, with factor 0.
    """
    layers = {name for name, pair in layout.graphs.items() if pair.forward.repeats}
    stages = [[layout.units[unit] for unit in chunk] for chunk in layout.chunks.values()]
    with_layers = [names for names in stages if layers.intersection(names)]
    for period in range(1, PERIODS + 1):
        runs = [_repeating(names, layers, period) for names in with_layers]
        kinds = {
            tuple(sorted(names[start : start + period])) for names, (start, _) in zip(with_layers, runs, strict=True)
        }
        few, more = (min(length for _, length in runs) // period - number for number in numbers)
        if more > 0 and len(kinds) == 1:
            left = iter(runs)
            starts = [next(left)[0] if names in with_layers else len(names) for names in stages]
            made = [_without(layout, starts, count * period) for count in (few, more)]
            return made, more / (few - more)
    return [layout], 0.0


def _repeating(names: Sequence[str], layers: Iterable[str], period: int) -> tuple[int, int]:
    """Returns the start and the length of the longest run of layers with this period among the units of a stage."""
    start, best = (0, 0), (0, 0)
    for place in range(len(names)):
        if names[place] not in layers:
            start = place + 1, 0
            continue
        begin, length = start
        repeats = length < period or names[place] == names[place - period]
        start = (begin, length + 1) if repeats else (place - period + 1, period)
        best = start if start[1] > best[1] else best
    return best


def _without(layout: Layout, starts: Sequence[int], count: int) -> Layout:
    """Returns a layout without `count` units of every stage, from a place on."""
    chunks = zip(layout.chunks.values(), starts, strict=True)
    return sub_layout(layout, [[*chunk[:start], *chunk[start + count :]] for chunk, start in chunks], layout.ranks)


def rank_layout(layout: Layout, rank: int) -> Layout:
    """Returns the layout of only one pipeline rank, without transfers between ranks. Its slices of the vocabulary
    accompany its layers, as the first ones, which read nothing of others."""
    kept = [
        [unit for unit in chunk if not layout.transfers(unit)]
        for stage, chunk in layout.chunks.items()
        if layout.ranks[stage] == rank
    ]
    if not layout.is_spread:
        return sub_layout(layout, kept, (0,) * len(kept))
    half = len(kept) // 2
    parts = [[unit for chunk in chunks for unit in chunk] for chunks in (kept[:half], kept[half:])]
    made = sub_layout(layout, parts, (0, 0))
    ends = layout.units[0].removesuffix(FIRST), layout.units[-1]
    alike = {f"{end}{suffix}": end + FIRST for end in ends for suffix in ("", NEXT)}
    return replace(made, units=[alike.get(name, name) for name in made.units])


# -- schedules ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def schedule_of(name: str, num_ranks: int, microbatches: int, is_spread: bool = False) -> Schedule:
    """Returns the schedule of a window, made once for all layouts with these arguments."""
    return Scheduler(name, num_ranks, spread=is_spread)(microbatches)


def possible_names(name: str, num_ranks: int, is_spread: bool = False) -> Sequence[str]:
    """Returns the named schedules of a name: "auto" stands for the folded schedules, without a search; with
    slices of the vocabulary, for which no schedule has a name, for itself."""
    if name != AUTO or is_spread:
        return [name]
    return FOLDED if num_ranks > 1 else [ON_ONE_RANK]


def usual_schedules(name: str, num_ranks: int, microbatches: int, is_spread: bool = False) -> list[Schedule]:
    """Returns the schedules for the prediction of memory, in a window long enough for the peak. Schedules that "auto"
    finds by a search keep to the memory of the run."""
    count = min(microbatches, REMEMBERED * num_ranks)
    names = possible_names(name, num_ranks, is_spread)
    return [schedule_of(each, num_ranks, count, is_spread) for each in names]


def named_schedule(name: str, layout: Layout, microbatches: int, costs: Costs) -> str:
    """Returns the fastest of the named schedules of a name."""
    names = possible_names(name, layout.num_ranks, layout.is_spread)
    if len(names) == 1:
        return names[0]
    count = min(microbatches, CHOSEN * layout.num_ranks)

    def seconds(each: str) -> float:
        return simulate_schedule(schedule_of(each, layout.num_ranks, count), layout.ranks, costs).seconds

    return min(names, key=seconds)


def busiest_rank(profile: Profile) -> int:
    """Returns the rank of a pipeline with the most work for a micro-batch."""
    layout = profile.layout
    seconds: dict[str, float] = {}
    for name, pair in layout.graphs.items():
        seconds[name] = sum(profile.times[name, entry] for entry, op in pair.entries() if not op.receives)
    loads = [sum(seconds[layout.units[unit]] for unit in layout.units_of(rank)) for rank in range(layout.num_ranks)]
    return loads.index(max(loads))


def exposed_seconds(timeline: Timeline, rank: int = 0) -> dict[Kind, tuple[float, float]]:
    """Returns the seconds of each kind of communication, in all and without concurrent computation of the rank."""
    work = timeline.arrays
    spans: dict[int, list[Interval]] = {}  # of each queue, which runs one instruction after the other
    streams: dict[int, int] = {}
    for place, queue in enumerate(work.queues()):
        if work.entries[place] >= 0 and work.ranks[place] == rank and timeline.ends[place] > timeline.starts[place]:
            spans.setdefault(queue, []).append((timeline.starts[place], timeline.ends[place]))
            streams[queue] = work.streams[place]
    computing = merge(span for queue, mine in spans.items() if streams[queue] == COMPUTE for span in mine)
    found: dict[Kind, tuple[float, float]] = {}
    for queue, mine in spans.items():
        if streams[queue] != COMPUTE:
            alone = sum(end - start for start, end in sorted(mine))  # the same floats, however a timeline is numbered
            hidden = sum(end - start for start, end in common(merge(mine), computing))
            before = found.get(STREAMS[streams[queue]], (0.0, 0.0))
            found[STREAMS[streams[queue]]] = before[0] + alone, before[1] + alone - hidden
    return found
