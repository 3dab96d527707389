"""List scheduling of a whole window, over all pipeline ranks at once; `PriorityPlan` is a plan that orders so.

In:   a schedule, seconds and priority of every operator, and how many layers' activations may be alive.
Out:  the order of issue.
Must hold: a pure function of its inputs, the same on every rank. Values are written before they are read. Micro-batches
go through every unit in the schedule's order, and gradients of every parameter accumulate in that order.

    ready = all instructions without predecessors (data dependencies, and the order of `Precedence`)
    until every instruction is issued:
        rank  = the rank whose next instruction can begin first; of a rank, the next instruction is
                    a ready communication, if there is one: communication is issued as soon as its input exists
                    else the ready computation with the smallest max(now, arrival of its inputs) + priority, but
                        not a forward one while the memory limit of the rank is reached, and
                        not a recomputation while two layers of the rank hold recomputed activations
        issue it; its end is the arrival of its readers; readers without other predecessors become ready
    if no rank can begin: the oldest recomputation goes on, over the limit, or else the oldest instruction

So nothing is aligned to layers or slots: the next layer fills the gaps of a layer, and warm-up and cool-down are
ordered like the steady state. A rank has two micro-batches under way: one forward and one backward, or two of one
direction where the schedule runs one strand alone.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any, ClassVar

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.plan.block_plan import entries
from hf_helix.planning.plan.plan import Plan, check_known
from hf_helix.planning.plan.precedence import ActivationMemory, Precedence, activation_memory, peak_layers, shares_of
from hf_helix.planning.schedule.actions import Schedule, SyncPoints
from hf_helix.planning.text import round_ms
from hf_helix.planning.window.layout import Layout, Name
from hf_helix.planning.window.passes import OrderedWindow
from hf_helix.planning.window.window import COMPUTE, Times, Window, WindowArrays

Priority = Mapping[Name, float]
"""Seconds by operator, 0 by default; the smaller goes first. A computation with a priority of 2 ms goes before one with
5 ms that could start less than 3 ms earlier."""

EXTRA_LIVE_LAYERS = 1
RECOMPUTED_LAYERS = 2 + 1e-6  # with recomputed activations alive: a layer of each backward strand
SLACK = 1e-6

SMALL = 1e-3
"""Priorities of the last backward, in parts of the times of operators: they decide between instructions that can start
at the same time, and never delay what can start."""


@dataclass(frozen=True)
class Priorities:
    """The input of list scheduling besides the window itself."""

    times: Times  # seconds of every operator alone
    priority: Priority  # see `Priority`
    extra_live_layers: int = EXTRA_LIVE_LAYERS  # layers whose activations may be alive beyond one strand's
    # in the last backward, the first n units of each rank compute their weight gradients after all else, see
    # `planning.plan.search`; None to order the last backward like all others
    num_units_with_deferred_wgrad: int | None = None


REMEMBERED = 8
"""Windows whose precedences are remembered: a search of layouts orders equal windows for many times in a row, each with
few and with more layers, for few and for more micro-batches, without and with slices of the vocabulary."""


class _Precedences:
    """The part of list scheduling that does not depend on times.

    Attributes:
        window: the instructions of all ranks.
        arrays: the window, with seconds of no meaning.
        kept, recomputed: the activations of each place.
        after: the precedence of all instructions.
        readers: of each place, its successors.
        queues: of each place, see `WindowArrays.queues`.
        peaks: of each rank, how many layers' activations are alive without further ones.
        layer: the activations of the largest layer.
    """

    def __init__(self, schedule: Schedule, layout: Layout) -> None:
        self.schedule, self.layout = schedule, layout
        self.window = window = Window(schedule, layout)
        self.arrays = window.arrays(dict.fromkeys(window.pattern.names, 0.0))
        shares = {name: shares_of(pair) for name, pair in layout.graphs.items() if pair.forward.repeats}
        memory = activation_memory(window.pattern, layout, shares)
        self.kept, self.recomputed = (
            ActivationMemory(window.per_place(each.alloc), window.per_place(each.free)) for each in memory
        )
        kept = {name: sum(share for share, source in parts.values() if not source) for name, parts in shares.items()}
        self.peaks = [peak_layers(slots, layout, kept) for slots in schedule]
        self.layer = max(kept.values(), default=0.0)
        self.queues = self.arrays.queues()
        self.after = Precedence(window, self.arrays, schedule, layout, *memory)
        self.readers: list[list[int]] = [[] for _ in self.after.needs]
        for place, needs in enumerate(self.after.needs):
            for need in needs:
                self.readers[need].append(place)


_remembered: deque[_Precedences] = deque(maxlen=REMEMBERED)


def _precedences(schedule: Schedule, layout: Layout) -> _Precedences:
    """Returns the precedences of a window, remembered for equal ones."""
    for known in tuple(_remembered):
        if known.schedule == schedule and known.layout == layout:
            return known
    made = _Precedences(schedule, layout)
    _remembered.append(made)
    return made


class ListScheduler:
    """A window, ready to be ordered many times.

    Args:
        times: seconds of every operator alone.
        extra_live_layers: see `Priorities`.

    Attributes:
        window: the instructions of all ranks.
        arrays: the window for these times.
        needs: of each place, its predecessors.
        readers: of each place, its successors.
        limits: of each rank, how many layers' activations may be alive.
    """

    def __init__(self, schedule: Schedule, layout: Layout, times: Times, extra_live_layers: int) -> None:
        known = _precedences(schedule, layout)
        self.window, self.kept, self.recomputed = known.window, known.kept, known.recomputed
        self.arrays = replace(known.arrays, seconds=known.window.seconds(times))
        self.limits = [peak + extra_live_layers * known.layer + SLACK for peak in known.peaks]
        self.needs, self.readers = known.after.needs, known.readers
        self._queues, self._after = known.queues, known.after

    def issue(self, priority: Priority, sync_points: SyncPoints = (), deferred: int | None = None) -> OrderedWindow:
        """The window in the order of issue, rank by rank."""
        ends = [0.0] * len(self.arrays)
        orders: list[list[int]] = [[] for _ in self.limits]
        for place in self.order(priority, ends, sync_points, deferred):
            orders[self.arrays.ranks[place]].append(place)
        return OrderedWindow(self.window, orders, ends)

    def order(
        self,
        priority: Priority,
        ends: list[float] | None = None,
        sync_points: SyncPoints = (),
        deferred: int | None = None,
    ) -> list[int]:
        """The order of issue, as places; only the order among the instructions of one rank counts.

            begins = a heap of (begin of the chosen instruction, rank)
            for every instruction of the window:
                for every rank that has changed: choose its next instruction, push its begin
                rank = the top of the heap; entries with an outdated begin are dropped
                issue its instruction; if every rank is at a memory limit, an older one, see the module
                its end:  a computation begins when its rank and its inputs are free, and occupies the rank
                          communication begins when its queue and its inputs are free, and occupies the queue
                count the activations that it allocates and frees
                for every reader: it arrives at the latest end of its predecessors; after the last of them it is ready
                the rank and the ranks of new ready instructions have changed

        Args:
            priority: seconds, see `Priority`.
            ends: filled with the end of the instruction at each place, if given.
            sync_points: see `SyncPoints`.
            deferred: see `Priorities.num_units_with_deferred_wgrad`.
        """
        weight, ranks = self._weights(priority, deferred), self._ranks(sync_points)
        waits = [len(needs) for needs in self.needs]
        arrives = [0.0] * len(self.arrays)
        free = [0.0] * (max(self._queues, default=0) + 1)
        # The layers that every forward action has still to allocate; the last entry stands for no action.
        left = [*self._after.layers, 0.0]
        of, streams, seconds = self.arrays.ranks, self.arrays.streams, self.arrays.seconds
        kept, recomputed, readers, queues = self.kept, self.recomputed, self.readers, self._queues
        for place, count in enumerate(waits):
            if not count:
                ranks[of[place]].add(place, streams[place] == COMPUTE)
        order: list[int] = []
        begins: list[tuple[float, int]] = []  # next begin of each rank; outdated entries stay until they are popped
        changed = list(range(len(ranks)))
        # One long loop without calls: annealing runs it for every order that it tries.
        for _ in range(len(self.arrays)):
            for number in changed:
                self._choose(ranks[number], arrives, weight, left)
                heappush(begins, (ranks[number].start, number))
            while begins[0][0] != ranks[begins[0][1]].start:
                heappop(begins)
            rank = ranks[begins[0][1]]
            chosen = rank.chosen
            if chosen < 0:  # every rank is at a limit
                chosen = min(map(self._oldest_recomputation, ranks))
                if chosen == len(self.window):  # periodic schedules do not count activations
                    chosen = min(min(each.computing, default=chosen) for each in ranks)
                assert chosen < len(self.window), "some instruction of a valid schedule is always ready"
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
            rank = self.arrays.ranks[place]
            alive[rank] += self.kept.alloc[place] - self.kept.free[place]
            most[rank] = max(most[rank], alive[rank])
        return most

    def _weights(self, priority: Priority, deferred: int | None) -> list[float]:
        """The priority of every instruction."""
        known = [priority.get(name, 0.0) for name in self.arrays.names]
        weight = [known[entry] for entry in self.arrays.entries]
        if deferred is not None:
            for place, each in _last_backward(self.window, self.arrays, deferred):
                weight[place] = each
        return weight

    def _ranks(self, sync_points: SyncPoints) -> list[_Rank]:
        """The ranks before their first instruction."""
        ranks = [_Rank(limit) for limit in self.limits]
        for rank, slots, points in zip(ranks, self.window.slots, sync_points or [()] * len(ranks), strict=True):
            rank.sync_points = [(slots[slot], slots[slot] - slots[0]) for slot in points][::-1]
            rank.open()
        return ranks

    def _choose(self, rank: _Rank, arrives: list[float], weight: list[float], left: list[float]) -> None:
        """Notes the next instruction of a rank and its begin; none if every ready one would exceed a limit."""
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
        """The first ready recomputation of a rank, whatever it allocates; the window's length if there is none."""
        return min((place for place in rank.computing if self.recomputed.alloc[place]), default=len(self.window))


@dataclass(slots=True)
class _Rank:
    """The state of a rank during list scheduling."""

    limit: float  # how many layers' activations may be alive
    computing: list[int] = field(default_factory=list)  # the ready computations
    moving: list[int] = field(default_factory=list)  # the ready communication
    now: float = 0.0  # when the compute stream is free
    alive: float = 0.0  # layers whose activations, kept by forward, are alive
    recomputed: float = 0.0  # layers whose recomputed activations are alive
    chosen: int = -1  # the next instruction; -1 for none
    start: float = math.inf  # its begin
    issued: int = 0  # the number of issued instructions
    # later ones, the last first: the place from which on instructions wait, and the number of instructions before the
    # point
    sync_points: list[tuple[int, int]] = field(default_factory=list)
    closed_from: int = sys.maxsize  # the place from which on instructions wait for the next sync point
    opens: int = -1  # the number of issued instructions at the next sync point
    # ready instructions from `closed_from` on, each with whether it computes
    waiting: list[tuple[int, bool]] = field(default_factory=list)

    def add(self, place: int, computes: bool) -> None:
        """Makes an instruction ready, or holds it until the next sync point."""
        if place >= self.closed_from:
            self.waiting.append((place, computes))
        else:
            (self.computing if computes else self.moving).append(place)

    def open(self) -> None:
        """Passes a sync point: instructions up to the following one may be issued."""
        self.closed_from, self.opens = self.sync_points.pop() if self.sync_points else (sys.maxsize, -1)
        waiting, self.waiting = self.waiting, []
        for place, computes in waiting:
            self.add(place, computes)


def _last_backward(window: Window, arrays: WindowArrays, deferred: int) -> Iterator[tuple[int, float]]:
    """Yields a priority in seconds for every place of the last backward of every unit.

    Within a unit, input gradients and communication go first, and weight gradients fill the gaps, as under `greedy`.
    But the weight gradients of a unit go before all of the next unit, so that the reduction of its gradients can begin.
    The deferred weight gradients go after all else, unit by unit in the order of backward.
    """
    layout, operators = window.layout, window.pattern.operators
    longest = max(arrays.seconds, default=0.0)
    step = 3 * SMALL * longest  # more than the differences within a unit
    # of both halves of a split backward, the pass of the last micro-batch
    passes = {(made.unit, made.computation_type): made for made in window.passes if made.computation_type != "F"}
    held = [[u for u in layout.units_of(rank) if not layout.transfers(u)] for rank in range(layout.num_ranks)]
    for made in passes.values():
        if layout.transfers(made.unit):
            continue
        units = held[layout.rank_of(made.unit)]
        turn = units.index(made.unit)
        for place, index in enumerate(made.indices, made.start):
            is_weight = operators[index].part is Part.W
            units_before = len(units) - 1 - turn + (len(units) if is_weight and turn < deferred else 0)
            own = arrays.seconds[place] + (longest if is_weight else 0.0)
            yield place, SMALL * own + step * units_before


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PriorityPlan(Plan):
    """A plan that orders whole windows by list scheduling."""

    KEY: ClassVar[str] = "priorities"
    BY_TIMES: ClassVar[bool] = True

    priorities: Priorities  # the input of the list scheduler

    def issue(
        self,
        schedule: Schedule,
        layout: Layout,
        slots_ahead: int = 1,
        rank: int | None = None,
        sync_points: SyncPoints = (),
    ) -> OrderedWindow:
        """The window as the list scheduler orders it, all ranks together. A receive is issued when, by the times of the
        plan, the other rank has sent, so `slots_ahead` has no effect here."""
        values = self.priorities
        scheduler = ListScheduler(schedule, layout, values.times, values.extra_live_layers)
        deferred = values.num_units_with_deferred_wgrad if layout.reductions else None
        return scheduler.issue(values.priority, sync_points, deferred)

    def data(self) -> Any:
        """Milliseconds of every operator, and the other priorities."""
        operators: dict[str, dict[str, Any]] = {}
        for (unit, entry), seconds in self.priorities.times.items():
            priority = self.priorities.priority.get((unit, entry), 0.0)
            figures = {"ms": round_ms(seconds, 9), "priority_ms": round_ms(priority, 9)}
            operators.setdefault(unit, {})[entry] = figures
        deferred = self.priorities.num_units_with_deferred_wgrad
        held = {} if deferred is None else {"held_units": deferred}
        return {"extra_live_layers": self.priorities.extra_live_layers, **held, "operators": operators}

    @classmethod
    def fields_from(cls, data: Any, pairs: Mapping[str, GraphPair]) -> dict[str, Any]:
        """The priorities of a file."""
        times, priority = {}, {}
        check_known(data["operators"], pairs, "unit")
        for unit, pair in pairs.items():
            figures, known = data["operators"].get(unit, {}), entries(pair.forward, pair.backward)
            if strange := sorted(figures.keys() - known.keys()):
                raise ValueError(f"unit {unit!r} has no operator {strange[0]!r}")
            for entry in known:
                if entry not in figures:
                    raise ValueError(f"unit {unit!r} lacks the operator {entry!r}")
                times[unit, entry], priority[unit, entry] = _seconds(f"{unit} {entry}", figures[entry])
        extra, deferred = data["extra_live_layers"], data.get("held_units")
        for name, value in {"extra_live_layers": extra, "held_units": 0 if deferred is None else deferred}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
        return {"priorities": Priorities(times, priority, extra, deferred)}


def _seconds(name: str, figures: Mapping[str, Any]) -> tuple[float, float]:
    """Time and priority of an operator."""
    for key in ("ms", "priority_ms"):
        if key not in figures:
            raise ValueError(f"{name} lacks {key!r}")
    seconds, priority = (float(figures[key]) / 1e3 for key in ("ms", "priority_ms"))
    if not (math.isfinite(seconds) and seconds > 0 and math.isfinite(priority)):
        raise ValueError(f"impossible figures of {name}: {dict(figures)}")
    return seconds, priority
