"""List scheduling of a whole window, over all ranks of the pipeline at once.

In:   a schedule, seconds and priority of every operator, and how many layers' activations may be alive.
Out:  the order of issue.
Must hold: a pure function of its inputs, the same on every rank. Values are written before they are read. Micro-batches
go through every unit in the schedule's order, forward and backward, and every parameter's gradients accumulate in that
order. Forward is delayed while the memory limit is reached: activations, and the gradients that weight gradients read.
At most two layers hold recomputed activations at a time; a third is recomputed only if the rank would otherwise
deadlock. A strand leaves a layer only once all of it that weight gradients read has been recomputed.

Nothing is aligned to layers or slots: gaps that one layer leaves are filled by the next, and warm-up and cool-down are
scheduled like the steady state. Two micro-batches of a rank are under way at a time: a forward and a backward one, and
where the schedule runs one strand alone (warm-up and cool-down), two forward or two backward ones. Communication is
issued as soon as its input is; the next computation is the one with the smallest sum of start and priority.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, ClassVar

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.plan.block_plan import entries
from hf_helix.planning.plan.plan import Plan, check_known
from hf_helix.planning.plan.precedence import ActivationMemory, Precedence, activation_memory, peak_layers, shares_of
from hf_helix.planning.schedule.actions import Schedule, SyncPoints
from hf_helix.planning.text import round_ms
from hf_helix.planning.timing.profile import Name
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.passes import Issued
from hf_helix.planning.window.window import COMPUTE, NumberedPass, Times, Window, Work

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

Priority = Mapping[Name, float]
"""Seconds by operator, 0 where it has none; the smaller goes first. A computation with a priority of 2 ms goes before
one with 5 ms that could start less than 3 ms earlier."""

EXTRA_LIVE_LAYERS = 1
RECOMPUTED_LAYERS = 2 + 1e-6  # whose recomputed activations may be alive: a layer of each backward strand
SLACK = 1e-6


@dataclass(frozen=True)
class Priorities:
    """What list scheduling needs besides the window itself.

    Attributes:
        times: seconds of every operator alone.
        priority: see `Priority`.
        extra_live_layers: how many layers' activations may be alive beyond those of one strand.
        held_units: of how many units at the front of each rank the weight gradients are held back in the last backward,
            see `hf_helix.planning.plan.search`; None where the last backward is ordered like all others.
    """

    times: Times
    priority: Priority
    extra_live_layers: int = EXTRA_LIVE_LAYERS
    held_units: int | None = None


class ListScheduler:
    """The instructions of a window as numbers, ready to be ordered many times.

    Args:
        schedule: of the window.
        layout: what the ranks hold.
        times: seconds of every operator alone.
        extra_live_layers: see `Priorities`.

    Attributes:
        window: what all ranks run, rank by rank, before it is ordered.
        work: the same with its times.
        needs: of each instruction, those that it is issued after.
        readers: of each instruction, those that are issued after it.
    """

    def __init__(self, schedule: Schedule, layout: Layout, times: Times, extra_live_layers: int) -> None:
        self.window = window = Window(schedule, layout)
        self.work = window.work(times)
        shares = {name: shares_of(pair) for name, pair in layout.graphs.items() if pair.forward.repeats}
        memory = [activation_memory(window.pattern.calls, layout, shares, recomputed) for recomputed in (False, True)]
        self.kept, self.recomputed = (
            ActivationMemory(window.of_calls(each.alloc), window.of_calls(each.free)) for each in memory
        )
        kept = {name: sum(share for share, source in parts.values() if not source) for name, parts in shares.items()}
        extra = extra_live_layers * max(kept.values(), default=0.0) + SLACK
        self.limits = [peak_layers(slots, layout, kept) + extra for slots in schedule]
        self._queues = self.work.queues()
        self._after = Precedence(window, self.work, schedule, layout, *memory)
        self.needs = self._after.needs
        self.readers: list[list[int]] = [[] for _ in self.needs]
        for place, needs in enumerate(self.needs):
            for need in needs:
                self.readers[need].append(place)

    def issue(self, priority: Priority, sync_points: SyncPoints = (), held_units: int | None = None) -> Issued:
        """The window in the order of issue, rank by rank.

        Args:
            priority: see `Priority`.
            sync_points: of each rank, slots that it begins only once it has issued all that comes before them.
            held_units: as of `Priorities`.
        """
        ends = [0.0] * len(self.work)
        orders: list[list[int]] = [[] for _ in self.limits]
        for place in self.order(priority, ends, sync_points, held_units):
            orders[self.work.ranks[place]].append(place)
        return Issued(self.window, orders, ends)

    def order(
        self,
        priority: Priority,
        ends: list[float] | None = None,
        sync_points: SyncPoints = (),
        held_units: int | None = None,
    ) -> list[int]:
        """The order of issue, as indices of the program; what counts is the order among the instructions of a rank.

        Args:
            priority: see `Priority`.
            ends: takes up when each instruction ends.
            sync_points: of each rank, slots that it begins only once it has issued all that comes before them.
            held_units: as of `Priorities`.
        """
        weight, ranks = self._weights(priority, held_units), self._ranks(sync_points)
        waits = [len(needs) for needs in self.needs]
        arrives = [0.0] * len(self.work)
        free = [0.0] * (max(self._queues, default=0) + 1)
        # What every forward action has still to allocate; the last stands for no action.
        left = [*self._after.layers, 0.0]
        of, streams, seconds = self.work.ranks, self.work.streams, self.work.seconds
        kept, recomputed, readers, queues = self.kept, self.recomputed, self.readers, self._queues
        for place, count in enumerate(waits):
            if not count:
                ranks[of[place]].add(place, streams[place] == COMPUTE)
        order: list[int] = []
        begins: list[tuple[float, int]] = []  # of what the ranks issue next; those that have changed stay until found
        changed = list(range(len(ranks)))
        # One long loop: annealing runs it for every order that it tries, and calls inside of it would cost time.
        for _ in range(len(self.work)):
            for number in changed:
                self._choose(ranks[number], arrives, weight, left)
                heappush(begins, (ranks[number].start, number))
            while begins[0][0] != ranks[begins[0][1]].start:
                heappop(begins)
            rank = ranks[begins[0][1]]
            chosen = rank.chosen
            if chosen < 0:  # every rank is at its limit for recomputed activations
                chosen = min(map(self._oldest_recomputation, ranks))
                assert chosen < len(self.window), "the oldest action of a valid schedule can always go on"
                rank = ranks[of[chosen]]
            end = arrives[chosen] if arrives[chosen] > rank.now else rank.now
            if streams[chosen] == COMPUTE:
                rank.computing.remove(chosen)
                end = rank.now = end + seconds[chosen]
            else:
                rank.moving.remove(chosen)
                queue = queues[chosen]
                end = free[queue] = max(end, free[queue]) + seconds[chosen]
            if kept.alloc[chosen]:
                left[self._after.action[chosen]] -= kept.alloc[chosen]
            rank.alive += kept.alloc[chosen] - kept.free[chosen]
            rank.recomputed += recomputed.alloc[chosen] - recomputed.free[chosen]
            if ends is not None:
                ends[chosen] = end
            rank.issued += 1
            if rank.issued == rank.opens:
                rank.open()
            changed = [of[chosen]]
            order.append(chosen)
            for reader in readers[chosen]:
                if arrives[reader] < end:
                    arrives[reader] = end
                waits[reader] -= 1
                if not waits[reader]:
                    other = of[reader]
                    ranks[other].add(reader, streams[reader] == COMPUTE)
                    if other not in changed:
                        changed.append(other)
        return order

    def peaks(self, order: Sequence[int]) -> list[float]:
        """The most layers whose activations are alive on each rank under an order."""
        alive, most = [0.0] * len(self.limits), [0.0] * len(self.limits)
        for place in order:
            rank = self.work.ranks[place]
            alive[rank] += self.kept.alloc[place] - self.kept.free[place]
            most[rank] = max(most[rank], alive[rank])
        return most

    def _weights(self, priority: Priority, held_units: int | None) -> list[float]:
        """The priority of every instruction; under `held_units`, another one for those of the last backward passes."""
        known = [priority.get(name, 0.0) for name in self.work.names]
        weight = [known[entry] for entry in self.work.entries]
        if held_units is not None:
            for place, each in last_backward_weights(self.window, self.work, held_units):
                weight[place] = each
        return weight

    def _ranks(self, sync_points: SyncPoints) -> list[_Rank]:
        """The ranks before their first instruction, with their sync_points closed."""
        ranks = [_Rank(limit) for limit in self.limits]
        for rank, slots, closed in zip(ranks, self.window.slots, sync_points or [()] * len(ranks), strict=True):
            rank.close([(slots[slot], slots[slot] - slots[0]) for slot in closed])
        return ranks

    def _choose(self, rank: _Rank, arrives: list[float], weight: list[float], left: list[float]) -> None:
        """Notes what a rank issues next and when it can begin: nothing where all that it could issue must allocate."""
        if rank.moving:
            few = rank.moving
            rank.chosen = min(few, key=lambda i: (arrives[i] + weight[i], i)) if len(few) > 1 else few[0]
            rank.start = rank.now
            return
        chosen, best, now = -1, 0.0, rank.now
        kept, recomputed = self.kept.alloc, self.recomputed.alloc
        for place in rank.computing:
            if kept[place] and rank.alive + kept[place] + left[self._after.ahead[place]] > rank.limit:
                continue  # the action before must always be able to allocate
            if recomputed[place] and rank.recomputed + recomputed[place] > RECOMPUTED_LAYERS:
                continue  # weight gradients will free some
            arrival = arrives[place]
            score = (arrival if arrival > now else now) + weight[place]
            if chosen < 0 or score < best or (score == best and place < chosen):
                chosen, best = place, score
        rank.chosen = chosen
        rank.start = math.inf if chosen < 0 else max(now, arrives[chosen])

    def _oldest_recomputation(self, rank: _Rank) -> int:
        """The first recomputation that a rank could issue, whatever it allocates; the program's length where there is
        none."""
        return min((place for place in rank.computing if self.recomputed.alloc[place]), default=len(self.window))


@dataclass(slots=True)
class _Rank:
    """A rank while a window is ordered.

    Attributes:
        limit: how many layers' activations may be alive.
        computing: the computations that it could issue.
        moving: the communication that it could issue.
        now: when its compute stream is free.
        alive: layers whose activations, kept by forward, are alive.
        recomputed: layers whose recomputed activations are alive.
        chosen: what it issues next; -1 for nothing.
        start: when that begins.
        issued: how many instructions it has issued.
        sync_points: what it has not come to, the last one first; see `close`.
        gate: the place from which on it issues nothing yet.
        opens: with how many instructions issued it may go on.
        behind: what it could issue were it not for the gate.
    """

    limit: float
    computing: list[int] = field(default_factory=list)
    moving: list[int] = field(default_factory=list)
    now: float = 0.0
    alive: float = 0.0
    recomputed: float = 0.0
    chosen: int = -1
    start: float = math.inf
    issued: int = 0
    sync_points: list[tuple[int, int]] = field(default_factory=list)
    gate: int = sys.maxsize
    opens: int = -1
    behind: list[tuple[int, bool]] = field(default_factory=list)

    def add(self, place: int, computes: bool) -> None:
        """Notes an instruction that it could issue from now on."""
        if place >= self.gate:
            self.behind.append((place, computes))
        else:
            (self.computing if computes else self.moving).append(place)

    def close(self, sync_points: list[tuple[int, int]]) -> None:
        """Keeps back what comes behind sync_points.

        Args:
            sync_points: of each, the place behind it, and how many instructions come before it.
        """
        self.sync_points = sync_points[::-1]
        self.open()

    def open(self) -> None:
        """Lets pass what comes before the next gate."""
        self.gate, self.opens = self.sync_points.pop() if self.sync_points else (sys.maxsize, -1)
        behind, self.behind = self.behind, []
        for place, computes in behind:
            self.add(place, computes)


SMALL = 1e-3
"""Priorities in parts of the times of operators: they decide between what can start at the same time."""


def last_backward_weights(window: Window, work: Work, held_units: int) -> Iterator[tuple[int, float]]:
    """Yields the places of the last backward of every unit, each with its priority in seconds.

    Args:
        window: of all ranks.
        work: its numbers.
        held_units: see `hf_helix.planning.plan.list_scheduler.Priorities`.
    """
    layout, calls = window.layout, window.pattern.calls
    longest = max(work.seconds, default=0.0)
    step = 3 * SMALL * longest  # more than anything within a unit
    for rank in range(layout.num_ranks):
        units = [unit for unit in layout.units_of(rank) if not layout.transfers(unit)]
        behind = {unit: len(units) - 1 - place for place, unit in enumerate(units)}
        held = set(units[:held_units])
        for made in _last_passes(window):
            if made.unit not in behind:
                continue
            for place, call in enumerate(made.calls, made.start):
                op = calls[call].operator
                is_weight = op is not None and op.part is Part.W
                units_before = behind[made.unit] + (len(units) if is_weight and made.unit in held else 0)
                own = work.seconds[place] + (longest if is_weight else 0.0)
                yield place, SMALL * own + step * units_before


def _last_passes(window: Window) -> list[NumberedPass]:
    """The passes backward through every unit for its last micro-batch; of backwards in two halves, both."""
    last: dict[tuple[int, str], NumberedPass] = {}
    for made in window.passes:
        if made.computation_type != "F":
            last[made.unit, made.computation_type] = made
    return list(last.values())


@dataclass(frozen=True)
class PriorityPlan(Plan):
    """A plan that orders whole windows by list scheduling, see `ListScheduler`.

    Attributes:
        priorities: what the list scheduler needs besides the window itself.
    """

    KEY: ClassVar[str] = "priorities"
    BY_TIMES: ClassVar[bool] = True

    priorities: Priorities

    def issue(
        self,
        schedule: Schedule,
        layout: Layout,
        slots_ahead: int = 1,
        rank: int | None = None,
        sync_points: SyncPoints = (),
    ) -> Issued:
        """The window as the list scheduler orders it, all ranks together. A receive is issued when, by the times of the
        plan, the other rank has sent, so `slots_ahead` means nothing here."""
        values = self.priorities
        scheduler = ListScheduler(schedule, layout, values.times, values.extra_live_layers)
        return scheduler.issue(values.priority, sync_points, values.held_units if layout.sums else None)

    def data(self) -> Any:
        """Milliseconds of every operator, the layers that may be alive, and the units that hold weight gradients back
        in the last backward, where there are any."""
        operators: dict[str, dict[str, Any]] = {}
        for (unit, entry), seconds in self.priorities.times.items():
            priority = self.priorities.priority.get((unit, entry), 0.0)
            figures = {"ms": round_ms(seconds, 9), "priority_ms": round_ms(priority, 9)}
            operators.setdefault(unit, {})[entry] = figures
        held = {} if self.priorities.held_units is None else {"held_units": self.priorities.held_units}
        return {"extra_live_layers": self.priorities.extra_live_layers, **held, "operators": operators}

    @classmethod
    def from_data(
        cls, data: Any, pairs: Mapping[str, GraphPair], *, rule: str, model: str, mesh: Mapping[str, int], graphs: str
    ) -> Self:
        """The plan of what a file says of its operators."""
        return cls(rule, model, dict(mesh), graphs, _priorities_from(data, pairs))


def _priorities_from(data: Any, pairs: Mapping[str, GraphPair]) -> Priorities:
    times, priority = {}, {}
    check_known(data["operators"], pairs, "unit")
    for unit, pair in pairs.items():
        figures = data["operators"].get(unit, {})
        known = entries(pair.forward, pair.backward)
        _check_entries(unit, figures, known)
        for entry in known:
            times[unit, entry], priority[unit, entry] = _seconds(f"{unit} {entry}", figures[entry])
    extra, held = data["extra_live_layers"], data.get("held_units")
    for name, value in {"extra_live_layers": extra, "held_units": 0 if held is None else held}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
    return Priorities(times, priority, extra, held)


def _check_entries(unit: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises ValueError where a unit's operators are not those of its graphs."""
    strange = sorted(given.keys() - known.keys())
    missing = [entry for entry in known if entry not in given]
    if strange:
        raise ValueError(f"unit {unit!r} has no operator {strange[0]!r}")
    if missing:
        raise ValueError(f"unit {unit!r} lacks the operator {missing[0]!r}")


def _seconds(name: str, figures: Mapping[str, Any]) -> tuple[float, float]:
    """Time and priority of an operator."""
    for key in ("ms", "priority_ms"):
        if key not in figures:
            raise ValueError(f"{name} lacks {key!r}")
    seconds, priority = (float(figures[key]) / 1e3 for key in ("ms", "priority_ms"))
    if not (math.isfinite(seconds) and seconds > 0 and math.isfinite(priority)):
        raise ValueError(f"impossible figures of {name}: {dict(figures)}")
    return seconds, priority
