"""The schedule `auto`: the fastest on the fold for given costs.

In:   the number of ranks P and micro-batches M, the costs of the virtual stages, and a limit of activations.
Out:  the fastest schedule found: a named schedule, a periodic one, or a list schedule improved by local search.
Must hold: the layers are on the fold, so layers never move between ranks; without slices of the vocabulary, the
schedule is never slower than `folded_1f1b` and `dualpipe_v` if they fit the memory; equal inputs give equal
schedules on every machine.

    list scheduling   a free rank takes its policy's preferred action among the actions with all inputs
    local search      anneals the best schedules by small random changes, mostly on the critical path
    periodic          every micro-batch goes the same way, a period after the one before

In a periodic schedule an action begins after its inputs have arrived, and in a period the actions of a rank do not
overlap; so the schedule can run, and the number of micro-batches under way equals the periods of one micro-batch. No
period is shorter than the time of the heaviest rank for a micro-batch. Actions are placed in the order of a
micro-batch, at the first time at which their rank is free in every period, if possible without gaps that are too small
for others; weight gradients go into what is left (software pipelining: Lam, 1988; arXiv 2411.05288 repeats such a
block, with slices of the vocabulary).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from hf_helix.planning.annealing import anneal, threshold
from hf_helix.planning.choice.memory import MemoryLimit
from hf_helix.planning.choice.slot_clock import (
    ClockRun,
    Costs,
    Row,
    Simulated,
    SlotClock,
    TimedSlot,
    simulate_schedule,
)
from hf_helix.planning.schedule.actions import PARTS, Action, Schedule, Slot
from hf_helix.planning.schedule.named import FOLDED, build_schedule
from hf_helix.planning.schedule.placement import FOLD, stage_ranks, stages_of_rank
from hf_helix.planning.schedule.validate import validate

# -- periodic schedules ----------------------------------------------------------------------------------------------

STRETCHES, GAPS = (1.02, 1.05, 1.1, 1.2), (0.1, 0.2, 0.3, 0.5)
"""The periods to try, in parts of the shortest possible one, each with the smallest gaps, in parts of the period. In 12
windows on 2 to 8 ranks, only the period 1.05, or only the gap 0.3, was as good as all within 0.1 %. Every other single
value made windows up to 5 to 37 % longer, or some action found no place: so it was with gaps of any size."""

SURE = 24.0
"""A period in which every action finds a place, since it is longer than any number of gaps that are too small."""


SHORT = 3
"""Micro-batches for each rank of the short window that compares periods. From then on, every micro-batch takes as long
as the one before."""


def periodic_schedules(
    ranks: tuple[int, ...], costs: Costs, num_microbatches: int, count: int, only_fastest: bool = False
) -> list[Schedule]:
    """Returns at most `count` schedules, the fastest of a short window first.

    Args:
        ranks: the rank of each stage.
        only_fastest: returns the fastest of these in the whole window. A long window is extrapolated.
    """
    short = SHORT * (max(ranks) + 1)
    made = _blocks(ranks, costs, min(num_microbatches, short))[:count]
    if only_fastest and num_microbatches > 2 * short:
        twice = SlotClock(ranks, costs, 2 * short)
        more = (num_microbatches - short) / short
        made = [min(made, key=lambda each: each[0] + more * (_seconds(twice, each[1]) - each[0]))]
    whole = SlotClock(ranks, costs, num_microbatches)
    return [_repeated(whole, *block) for _, block in made]


Block = tuple[Mapping[Action, float], float]
"""When the actions of a micro-batch begin, and the period in which they repeat."""


@lru_cache(maxsize=16)
def _blocks(ranks: tuple[int, ...], costs: Costs, num_microbatches: int) -> list[tuple[float, Block]]:
    """Returns the blocks that were found, the fastest first, each after its seconds for a window."""
    clock = SlotClock(ranks, costs, num_microbatches)
    tried = [_placed(clock, *each) for each in product(STRETCHES, GAPS)]
    if not any(tried):
        tried = [_placed(clock, SURE, 0.0)]
    blocks = [each for each in tried if each is not None]
    return sorted(((_seconds(clock, block), block) for block in blocks), key=lambda each: each[0])


def _seconds(clock: SlotClock, block: Block) -> float:
    return simulate_schedule(_repeated(clock, *block), clock.ranks, clock.costs).seconds


def _placed(clock: SlotClock, stretch: float, least: float) -> Block | None:
    """Returns when the actions of the first micro-batch begin, and the period; None if an action finds no place."""
    costs, stages = clock.costs, range(len(clock.ranks))
    loads = [0.0] * (max(clock.ranks) + 1)
    for stage in stages:
        loads[clock.ranks[stage]] += costs.seconds(Action(stage, "F", 0)) + costs.seconds(Action(stage, "B", 0))
    period = stretch * max(loads)
    slack = 1e-9 * period  # of rounding
    taken: list[list[tuple[float, float]]] = [[] for _ in loads]
    starts: dict[Action, float] = {}

    def place(action: Action, ready: float) -> bool:
        seconds, mine = costs.seconds(action), taken[clock.ranks[action.stage]]
        ends = [(begin + length - ready) % period for begin, length in mine]
        begins = [(begin - seconds - ready) % period for begin, _ in mine]
        fitting: list[tuple[bool, float]] = []
        for start in (ready + wait for wait in sorted({0.0, *ends, *begins})):
            since = [(start - begin + slack) % period - slack - length for begin, length in mine]
            until = [(begin - start + slack) % period - slack - seconds for begin, _ in mine]
            rests = min(since, default=period), min(until, default=period)
            if min(rests) >= -2 * slack:
                fitting.append((any(2 * slack < rest < least * period for rest in rests), start))
        if fitting:
            starts[action] = min(fitting)[1]
            mine += [(starts[action], seconds)] if seconds else []
        return bool(fitting)

    ready = 0.0
    route = [(stage, "F") for stage in stages] + [(stage, "I") for stage in stages[::-1]]
    for (stage, part), (following, _) in zip(route, [*route[1:], route[-1]], strict=True):
        action = Action(stage, part, 0)
        if not place(action, ready):
            return None
        ready = starts[action] + costs.seconds(action) + clock.hop(stage, following)
    for stage in stages[::-1]:
        action = Action(stage, "I", 0)
        if not place(Action(stage, "W", 0), starts[action] + costs.seconds(action)):
            return None
    return starts, period


def _repeated(clock: SlotClock, starts: Mapping[Action, float], period: float) -> Schedule:
    """Returns the actions of all micro-batches in the order of their times; a W directly after its I joins it."""
    rows: Schedule = [[] for _ in range(max(clock.ranks) + 1)]
    # Actions without a time of their own begin at the same time as others: they keep the order of a micro-batch.
    times = [
        (start + number * period, place, number, action)
        for place, (action, start) in enumerate(starts.items())
        for number in range(clock.num_microbatches)
    ]
    for _, _, number, action in sorted(times):
        row, action = rows[clock.ranks[action.stage]], action.later(number)
        joined = action._replace(computation_type="I")
        if action.computation_type == "W" and row and row[-1].backward == joined:
            row[-1] = Slot(backward=action._replace(computation_type="B"))
        else:
            row.append(Slot.alone(action))
    return rows


# -- list schedules and their search ---------------------------------------------------------------------------------

SEARCHED = "searched"
"""The label of a schedule that is none of the named ones."""
FINALISTS, STARTS = 4, 2


def choose_schedule(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    search: bool = True,
    limit: MemoryLimit | None = None,
    placement: str = FOLD,
) -> tuple[str, Schedule]:
    """Returns the fastest schedule found that fits, and its label: a name, or `SEARCHED`. If none fits, the
    schedule with the least excess. No schedule has more activations alive at once on a rank than the larger maximum of
    `folded_1f1b` and `dualpipe_v`, or of the periodic schedules.

    Args:
        search: whether to try many policies and to improve the best schedules, which takes seconds in long windows;
            else the choice is among the named schedules and two list schedules.
        limit: of the memory; None without a limit. If the memory of operators is unknown, the choice is among the named
            schedules.
        placement: `fold`, or `spread`: then the choice is among periodic schedules.
    """
    ranks = stage_ranks(placement, num_ranks)
    clock = SlotClock(ranks, costs, num_microbatches)

    def run(label: str, schedule: Schedule) -> tuple[str, Simulated]:
        return label, simulate_schedule(schedule, ranks, costs)

    def merit(candidate: tuple[str, Simulated]) -> tuple[float, float, int]:
        excess = 0.0 if limit is None else max(0.0, limit.excess(candidate[1].schedule))
        return excess, candidate[1].seconds, max(candidate[1].live)

    if placement == FOLD:
        candidates = [run(name, build_schedule(name, num_ranks, num_microbatches)) for name in FOLDED]
    else:
        found = periodic_schedules(ranks, costs, num_microbatches, FINALISTS, only_fastest=not search and limit is None)
        if len(found) == 1 and not search:
            validate(found[0], num_microbatches, ranks)
            return SEARCHED, found[0]
        candidates = [run(SEARCHED, each) for each in found]
    max_live = max(max(simulated.live) for _, simulated in candidates)
    if limit is None or limit.passes is not None:
        if placement == FOLD:
            policies = (_policies if search else _usual_policies)(num_ranks, num_microbatches, costs, max_live)
            candidates.append(run(SEARCHED, _listed(clock, policies)))
        for _, start in sorted(candidates, key=merit)[: STARTS if search else 0]:
            candidates.append(run(SEARCHED, improve_schedule(start.schedule, clock, max_live, limit)))
    label, best = min(candidates, key=merit)
    validate(best.schedule, num_microbatches, ranks)
    return label, best.schedule


def _listed(clock: SlotClock, policies: Iterable[Policy]) -> Schedule:
    """Returns the best list schedule: the best policies of a short window compete on the full window."""
    rounds, short = [(clock, 1)], 2 * (max(clock.ranks) + 1)
    if short < clock.num_microbatches:
        rounds.insert(0, (SlotClock(clock.ranks, clock.costs, short), FINALISTS))
    for each, keep in rounds:
        made = [(list_schedule(each, policy), policy) for policy in policies]
        made.sort(key=lambda one: one[0][1])
        policies = [policy for _, policy in made[:keep]]
    return made[0][0][0]


def _policies(num_ranks: int, num_microbatches: int, costs: Costs, max_live: int) -> Iterator[Policy]:
    """Yields the policies of a search.

    Annealing from the named schedules finds as fast a schedule in windows of two micro-batches or more for each rank.
    In shorter windows policies are needed: on 8 ranks, 5 micro-batches took up to 13 % longer without, and 9 up to 3 %.
    """
    pairs = (True, False) if costs.gain > 1 else (False,)
    most = 2 * num_microbatches  # backwards that a rank has
    aparts = dict.fromkeys(min(apart, most) for apart in (num_ranks, 2 * num_ranks, most))
    for pair, early, apart, forward, backward, delay in product(
        pairs, (False, True), aparts, (1, 2), (0, 1, 2), (0.5, 1.0)
    ):
        yield Policy(max_live, pair, early, apart, forward, backward, delay)


def _usual_policies(num_ranks: int, num_microbatches: int, costs: Costs, max_live: int) -> Iterator[Policy]:
    """Yields two policies; for equal stages and short windows the better of the two is as good as the best. Then the
    named schedules are far off: 9 micro-batches on 8 ranks take 23 % less under a list schedule."""
    for early in (True, False):
        yield Policy(max_live, costs.gain > 1, early, 2 * num_microbatches, backward=int(early), delay=0.5)


@dataclass(frozen=True)
class Policy:
    """The preferences of a rank in list scheduling."""

    max_live: int  # activations, each of one stage and micro-batch, alive at once on a rank; at least 2
    pair: bool = True  # whether an F and a B that can start run as one slot
    # whether the first backwards of the second chunk, P-1-r on rank r, run only as I to send gradients sooner
    early: bool = False
    apart: int = 0  # the number of a rank's last backwards that run as I, with W when nothing else can start
    forward: int = 1  # the chunk whose F goes first: 0 or 1, or 2 for the chunk that did not run last
    backward: int = 1  # the chunk whose B goes first, with the same values
    delay: float = 1.0  # the part of a W that may delay another action; 1 fills every gap


def list_schedule(clock: SlotClock, policy: Policy) -> tuple[Schedule, float]:
    """Returns the list schedule of a policy, and its seconds.

    Never deadlocks: the second chunk always has memory, because F of the first chunk takes the last place only while
    an activation of the second is alive; so a full rank can always free a place, and the oldest micro-batch can go on.
    """
    num_ranks = max(clock.ranks) + 1
    state = _State(clock, policy)
    schedule: Schedule = [[] for _ in range(num_ranks)]
    free = [0.0] * num_ranks
    wakes = [(0.0, rank) for rank in range(num_ranks)]
    while wakes:
        now, rank = heapq.heappop(wakes)
        if now < free[rank]:
            continue
        slot = state.choose(rank, now)
        if slot is not None:
            schedule[rank].append(slot)
            free[rank] = now + clock.timed(slot).seconds
            for wake in state.run(slot, rank, free[rank]):
                heapq.heappush(wakes, wake)
    return schedule, max(free)


class _State:
    """The state of list scheduling; stages take micro-batches in order, so counts are enough."""

    def __init__(self, clock: SlotClock, policy: Policy) -> None:
        self.clock = clock
        self.policy = policy
        self.num_microbatches = clock.num_microbatches
        self.chunks = [stages_of_rank(rank, clock.ranks) for rank in range(max(clock.ranks) + 1)]
        self.results = clock.no_results()
        self.done = {part: [0] * len(clock.ranks) for part in "FIW"}  # of each stage, how many have run
        self.last_chunk = {"F": [1] * len(self.chunks), "B": [0] * len(self.chunks)}

    # -- actions that can start ---------------------------------------------------------------------------------------

    def _time(self, part: str, stage: int) -> float:
        """When the next F or I of a stage can start; infinity if none is left, an F has no room, or an input is on its
        way."""
        following = self.done[part][stage]
        if following == self.num_microbatches or (part == "F" and not self._has_room(stage)):
            return math.inf
        return self.clock.arrival(self.clock.number(part, stage, following), self.results)

    def _has_room(self, stage: int) -> bool:
        down, up = self.chunks[self.clock.ranks[stage]]
        ran, freed = self.done["F"], self.done["W"]
        live_up = ran[up] - freed[up]
        live = ran[down] - freed[down] + live_up
        return live < self.policy.max_live - (stage == down and live_up == 0)

    def _preferred(self, rank: int, part: str) -> Sequence[int]:
        """The stages of a rank, the preferred one first."""
        preferred = self.policy.forward if part == "F" else self.policy.backward
        if preferred == 2:
            preferred = 1 - self.last_chunk[part][rank]
        return self.chunks[rank][::-1] if preferred else self.chunks[rank]

    # -- the choice of a slot -----------------------------------------------------------------------------------------

    def choose(self, rank: int, now: float) -> Slot | None:
        """Returns the slot that a free rank starts now; None to wait for a result on its way."""
        backward = next((stage for stage in self._preferred(rank, "B") if self._time("I", stage) <= now), None)
        forward = None
        if backward is None or self.policy.pair:
            forward = next((stage for stage in self._preferred(rank, "F") if self._time("F", stage) <= now), None)
        if backward is not None:
            return self._backward_slot(rank, forward, backward)
        if forward is not None:
            return Slot(self._next(forward, "F"))
        return self._fill(rank, now)

    def _backward_slot(self, rank: int, forward: int | None, backward: int) -> Slot:
        done, (_, up) = self.done["I"][backward], self.chunks[rank]
        early = self.policy.early and backward == up and done < len(self.chunks) - 1 - rank
        left = sum(self.num_microbatches - self.done["I"][stage] for stage in self.chunks[rank])
        if early or (forward is None and left <= self.policy.apart):
            return Slot(backward=self._next(backward, "I"))
        kind = "W" if self.done["W"][backward] < done else "B"  # weight gradients add up in order
        return Slot(None if forward is None else self._next(forward, "F"), self._next(backward, kind))

    def _fill(self, rank: int, now: float) -> Slot | None:
        """Returns the W that has waited longest, if it fits before another action can start."""
        waiting = [stage for stage in self.chunks[rank] if self.done["W"][stage] < self.done["I"][stage]]
        if not waiting:
            return None
        stage = min(waiting, key=lambda stage: self.results[self.clock.number("I", stage, self.done["W"][stage])])
        until = min(self._time(part, each) for part in "FI" for each in self.chunks[rank])
        fits = now + self.clock.costs.weight[stage] * (1 - self.policy.delay) <= until
        return Slot(backward=self._next(stage, "W")) if fits else None

    def _next(self, stage: int, computation_type: str) -> Action:
        part = "I" if computation_type == "B" else computation_type
        return Action(stage, computation_type, self.done[part][stage])

    # -- completed slots ----------------------------------------------------------------------------------------------

    def run(self, slot: Slot, rank: int, end: float) -> list[tuple[float, int]]:
        """Counts a slot of a rank with the given end; returns the times at which ranks may go on."""
        wakes = [(end, rank)]
        for action in slot.actions:
            stage = action.stage
            for part in PARTS[action.computation_type]:
                self.done[part][stage] += 1
                if part != "W":
                    self.results[self.clock.number(part, stage, action.microbatch)] = end
                    self.last_chunk["F" if part == "F" else "B"][rank] = self.chunks[rank].index(stage)
                    other = stage + 1 if part == "F" else stage - 1
                    if 0 <= other < len(self.clock.ranks):
                        wakes.append((end + self.clock.hop(stage, other), self.clock.ranks[other]))
        return wakes


TRIALS = 10_000
EFFORT = 3_000_000  # slots that are run in all; about a second

HEAT = 0.2
"""In times of an average F: how much slower the walk may become at first. In 24 cases with 2 to 8 ranks 0 and 0.05 are
as good on average, 1 % better in one case and worse in another; with 1, schedules are half a percent slower."""

MEAN = 0.01  # weight of the ranks' mean end against the last end, so that small steps add up
ON_PATH = 0.8  # the part of the changes on the critical path
STEPS = (-4, -3, -2, -1, 1, 2, 3, 4)
LATER = 8  # places by which a W may move away from its I


@dataclass
class _Candidate:
    """A schedule that can run."""

    rows: list[Row]
    run: ClockRun

    @cached_property
    def value(self) -> float:
        """The time, and a little of the mean time of the ranks."""
        return max(self.run.ends) + MEAN * sum(self.run.ends) / len(self.run.ends)

    @cached_property
    def path(self) -> list[tuple[int, int]]:
        """The critical path."""
        return self.run.critical_path()


def improve_schedule(schedule: Schedule, clock: SlotClock, max_live: int, limit: MemoryLimit | None = None) -> Schedule:
    """Returns the fastest schedule of a random walk of small changes.

    A list schedule never revises a choice, although the best choice for a slot can be bad for later slots; this walk
    does. Without clock, hash or transcendental function, the walk is equal on every machine. At most
    `max_live` activations, each of one stage and micro-batch, are alive at once on a rank; for `limit` see
    `choose_schedule`.
    """
    rows = [[clock.timed(slot) for slot in slots] for slots in schedule]
    run = clock.run(rows)
    assert run is not None, "only schedules that can run are improved"

    def propose(current: _Candidate, rng: random.Random) -> _Candidate | None:
        rank, place = rng.choice(current.path) if rng.random() < ON_PATH else _anywhere(current.rows, rng)
        row = list(current.rows[rank])
        rng.choice(CHANGES)(row, place, rng, clock.timed)
        if row == current.rows[rank] or not _is_valid(row, len(clock.ranks), max_live):
            return None
        if limit is not None and limit.excess_of(rank, (timed.slot for timed in row)) > 0:
            return None
        changed = [*current.rows[:rank], row, *current.rows[rank + 1 :]]
        run = clock.run(changed)
        return None if run is None else _Candidate(changed, run)

    heat = HEAT * sum(clock.costs.forward) / len(clock.costs.forward)
    best = anneal(
        _Candidate(rows, run),
        propose,
        steps=min(TRIALS, EFFORT // sum(map(len, rows))),
        rng=random.Random(0),
        temperature=lambda _: heat,
        accept=threshold,
        merit=lambda candidate: (max(candidate.run.ends), candidate.value),
    )
    return [[timed.slot for timed in row] for row in best.rows]


def _anywhere(rows: Sequence[Row], rng: random.Random) -> tuple[int, int]:
    rank = rng.randrange(len(rows))
    return rank, rng.randrange(len(rows[rank]))


def _is_valid(row: Row, num_stages: int, max_live: int) -> bool:
    """Whether a rank takes the micro-batches in order and holds at most `max_live`; W before I deadlocks on the
    clock."""
    following = [0] * (3 * num_stages)  # by part: the next micro-batch
    live = 0
    for slot, _, _, _, parts in row:
        for part, microbatch in parts:
            if following[part] != microbatch:
                return False
            following[part] = microbatch + 1
        live += slot.forward is not None
        if live > max_live:
            return False
        live -= slot.backward is not None and slot.backward.computation_type != "I"
    return True


# -- changes ---------------------------------------------------------------------------------------------------------
#
# Each function changes a row in place, at a place, or leaves the row unchanged.

Make = Callable[[Slot], TimedSlot]


def _shift(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Moves a slot by a few places."""
    item = row.pop(place)
    row.insert(max(0, place + rng.choice(STEPS)), item)


def _fuse(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Runs a forward and a backward slot near it side by side."""
    other = place + rng.choice(STEPS)
    if 0 <= other < len(row):
        slots = row[place].slot, row[other].slot
        forward = [slot.forward for slot in slots if slot.forward]
        backward = [slot.backward for slot in slots if slot.backward]
        if len(forward) == len(backward) == 1 and not slots[0].fused and not slots[1].fused:
            row[place] = make(Slot(forward[0], backward[0]))
            del row[other]


def _unfuse(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Runs the two actions of a fused slot one after the other."""
    alone = [make(Slot.alone(action)) for action in row[place].slot.actions]
    row[place : place + 1] = alone if rng.random() < 0.5 else alone[::-1]


def _split(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Splits a B into I and W, and runs the W later."""
    forward, backward = row[place].slot.forward, row[place].slot.backward
    if backward and backward.computation_type == "B":
        stage, microbatch = backward.stage, backward.microbatch
        row[place] = make(Slot(forward, Action(stage, "I", microbatch)))
        row.insert(place + 1 + rng.randrange(LATER), make(Slot.alone(Action(stage, "W", microbatch))))


def _join(row: Row, place: int, rng: random.Random, make: Make) -> None:
    """Joins a W with its I to a B."""
    forward, backward = row[place].slot.forward, row[place].slot.backward
    if backward and backward.computation_type == "W":
        stage, microbatch = backward.stage, backward.microbatch
        apart = Action(stage, "I", microbatch)
        first = next(number for number, item in enumerate(row) if item.slot.backward == apart)
        row[first] = make(Slot(row[first].slot.forward, Action(stage, "B", microbatch)))
        row[place : place + 1] = [make(Slot(forward))] if forward else []


CHANGES = (_shift, _shift, _fuse, _unfuse, _split, _join)
