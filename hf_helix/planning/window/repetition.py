"""Steady states: what a long window repeats, so that it is ordered and predicted once.

In:   a plan, and the schedule of a window.
Out:  an `Ordered`: a shorter window in the order of issue, and the stretch of it that the whole window repeats.
Must hold: a schedule is shortened by whole periods, in which every rank runs each part of each of its stages for the
same number of micro-batches. At both ends of a stretch every rank has issued the same but for the numbers of its
micro-batches, and whatever that needs of others has been issued, too. So a stretch can follow itself any number of
times: values are there when they are read, no more memory is taken than in the shorter window, and no rank waits for
ever.

Orders that do not depend on other ranks, and those of one or two ranks, fall into a rhythm within a few micro-batches:
`AGREEING` stretches in a row are the same and, by the clock of the plan, all ranks end everything equally later. Then
the order is that of the whole window. With more ranks the rhythm, if there is one, takes many micro-batches. There the
stretch is made: at both of its ends every rank issues all that the schedule has before it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.schedule.actions import PARTS, Action, Schedule, Slot, SyncPoints
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.passes import Issued
from hf_helix.planning.window.window import Window

AGREEING = 3
SHORTEST = 8  # micro-batches that must be left out, or nothing is gained
KEPT = (4, 8)  # periods of the schedule that are ordered to find a rhythm
MULTIPLES = (1, 2)  # periods of the schedule in a rhythm
MADE = 8  # periods of the schedule in a stretch that is made
SETTLING = (8, 16, 32)  # periods before it; the longer ones where ranks are further apart than the shorter
BEHIND = 2  # periods behind it
NEAR = 1e-9  # two times that differ by a smaller part of a stretch are equal
REMEMBERED = 4  # windows: those of a few plans that are compared


@dataclass(frozen=True)
class Ordered:
    """A window in the order of issue, of which a stretch may be repeated.

    Attributes:
        issued: the window, or a shorter one.
        schedule: of `issued`.
        periodic: what `schedule` was shortened from; None for the window itself.
        kept: periods that `schedule` has kept.
        stretches: of each rank, where in its order the stretch begins and ends.
        periods: of the schedule in a stretch.
        repeats: how many more times the whole window has it.
    """

    issued: Issued
    schedule: Schedule
    periodic: Periodic | None = None
    kept: int = 0
    stretches: Sequence[tuple[int, int]] = ()
    periods: int = 0
    repeats: int = 0

    @property
    def shift(self) -> int:
        """Micro-batches of a stretch."""
        return self.periods * self.periodic.shift if self.periodic else 0

    def lengthened(self, copies: int, rank: int | None = None) -> Ordered:
        """The window with so many of the repetitions made; its stretch is the one in the middle of them.

        Args:
            copies: how many, at most `repeats`.
            rank: the only one whose order is asked for; None for all.
        """
        if not copies or self.periodic is None:
            return self
        kept = self.kept + copies * self.periods
        schedule = self.periodic.keep(kept)
        asked = [slots if rank in (None, number) else [] for number, slots in enumerate(schedule)]
        window = Window(asked, self.issued.window.layout)
        orders, stretches = [], []
        for slots, order, (begin, end) in zip(asked, self.issued.orders, self.stretches, strict=True):
            parts = [order[:end], *[order[begin:end]] * copies, order[end:]] if slots else []
            later = (0, *range(1, copies + 1), copies)
            orders.append([each for part in zip(parts, later, strict=False) for each in self._moved(*part, window)])
            middle = copies // 2 * (end - begin)
            stretches.append((begin + middle, end + middle))
        return Ordered(
            Issued(window, orders), schedule, self.periodic, kept, stretches, self.periods, self.repeats - copies
        )

    def _moved(self, order: Iterable[int], number: int, window: Window) -> Iterator[int]:
        """Yields a part of an order as places in a longer window, for micro-batches so many stretches later."""
        mine, later = self.issued.window, number * self.shift
        for place in order:
            yield place if place < 0 else window.at[mine.microbatches[place] + later][mine.calls[place]]


def order_window(
    plan: Plan, schedule: Schedule, layout: Layout, slots_ahead: int = 1, rank: int | None = None
) -> Ordered:
    """Orders a window, a long one by its steady state.

    Orders by times are those of all ranks at once. So the window that was ordered to predict it need not be ordered
    again for the program.

    Args:
        plan: the order in which operators are issued.
        schedule: the slots of every rank.
        layout: what the ranks hold.
        slots_ahead: see `Plan.issue`.
        rank: the only one that is asked for; None for all of them.
    """
    if not plan.BY_TIMES:
        return _order_window(plan, schedule, layout, slots_ahead, rank)
    for known, window, held, ordered in tuple(_ordered):
        if known is plan and window == schedule and held == layout:
            return ordered
    ordered = _order_window(plan, schedule, layout, slots_ahead, None)
    _ordered.append((plan, schedule, layout, ordered))
    return ordered


_ordered: deque[tuple[Plan, Schedule, Layout, Ordered]] = deque(maxlen=REMEMBERED)


def _order_window(plan: Plan, schedule: Schedule, layout: Layout, slots_ahead: int, rank: int | None) -> Ordered:
    periodic = Periodic(schedule)
    for least in KEPT if layout.num_ranks <= 2 or not plan.BY_TIMES else ():
        kept = least + (periodic.periods - least) % MULTIPLES[-1]
        if (periodic.periods - kept) * periodic.shift < SHORTEST:
            break
        short = periodic.keep(kept)
        issued = plan.issue(short, layout, slots_ahead, rank)
        for periods in MULTIPLES:
            stretches = _agreeing(issued, periods * periodic.shift)
            if stretches:
                repeats = (periodic.periods - kept) // periods
                return Ordered(issued, short, periodic, kept, stretches, periods, repeats)
    for settling in SETTLING if plan.BY_TIMES else ():
        repeats = (periodic.periods - settling - MADE - BEHIND) // MADE
        if repeats * MADE * periodic.shift < SHORTEST:
            break
        kept = periodic.periods - repeats * MADE
        short = periodic.keep(kept)
        sync_points = periodic.sync_points(short, settling, MADE)
        if sync_points:
            issued = plan.issue(short, layout, slots_ahead, rank, sync_points)
            slots = issued.window.slots
            stretches = [
                (starts[begin] - starts[0], starts[end] - starts[0])
                for starts, (begin, end) in zip(slots, sync_points, strict=True)
            ]
            return Ordered(issued, short, periodic, kept, stretches, MADE, repeats)
    return Ordered(plan.issue(schedule, layout, slots_ahead, rank), schedule)


# -- orders -----------------------------------------------------------------------------------------------------------


def _agreeing(issued: Issued, shift: int) -> list[tuple[int, int]]:
    """Returns for each rank where the first of the last stretches of `shift` micro-batches begins and ends; nothing
    where these stretches do not agree on all ranks."""
    stretches: list[tuple[int, int]] = []
    seconds: float | None = None
    for order in issued.orders:
        bounds = _bounds(issued, order, shift) if order else [0] * (AGREEING + 1)
        if bounds is None or not _agree(issued, order, bounds, shift):
            return []
        if issued.ends is not None:
            if seconds is None:
                seconds = issued.ends[order[bounds[-1]]] - issued.ends[order[bounds[-2]]]
            if not _equally_later(order, issued.ends, bounds, seconds):
                return []
        stretches.append((bounds[0], bounds[1]))
    return stretches


def _bounds(issued: Issued, order: Sequence[int], shift: int) -> list[int] | None:
    """Where the last stretches of an order begin: each with what the rank issues first, for a later micro-batch."""
    calls, microbatches = issued.window.calls, issued.window.microbatches
    first = calls[order[0]]
    places = [place for place, each in enumerate(order) if each >= 0 and calls[each] == first]
    if len(places) <= AGREEING * shift:
        return None
    bounds = places[-1 - AGREEING * shift :: shift]
    numbers = [microbatches[order[place]] for place in bounds]
    return bounds if numbers == list(range(numbers[0], numbers[0] + AGREEING * shift + 1, shift)) else None


def _agree(issued: Issued, order: Sequence[int], bounds: Sequence[int], shift: int) -> bool:
    """Whether the stretches issue the same, each for micro-batches `shift` later than the one before."""
    calls, at, microbatches = issued.window.calls, issued.window.at, issued.window.microbatches
    first = order[bounds[0] : bounds[1]]
    if not first:
        return True
    counts = Counter(calls[place] for place in first if place >= 0)
    if set(counts.values()) != {shift} or len(counts) != len({calls[place] for place in order if place >= 0}):
        return False  # something is put off until micro-batches run out
    for number, (begin, end) in enumerate(pairwise(bounds[1:]), 1):
        later = number * shift
        if end - begin != len(first):
            return False
        for one, other in zip(first, order[begin:end], strict=True):
            if one < 0:
                if other != one:
                    return False
            elif microbatches[one] + later >= len(at) or at[microbatches[one] + later][calls[one]] != other:
                return False
    return True


def _equally_later(order: Sequence[int], ends: Sequence[float], bounds: Sequence[int], seconds: float) -> bool:
    """Whether everything of a stretch ends `seconds` after the same of the one before."""
    length, least = bounds[1] - bounds[0], -NEAR * seconds
    return all(
        one < 0 or least <= ends[other] - ends[one] - seconds <= -least
        for one, other in zip(order[bounds[0] : bounds[-1] - length], order[bounds[1] : bounds[-1]], strict=True)
    )


class Periodic:
    """A schedule whose ranks repeat the same slots for later and later micro-batches.

    Attributes:
        schedule: the schedule.
        shift: micro-batches of a period.
        regions: of each rank, where its slots repeat: begin, end, and slots of a period.
        periods: how many all ranks have; 0 where the schedule does not repeat.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.shift, self.regions = 0, list[tuple[int, int, int]]()
        for shift in range(1, 5):
            regions = [_region(slots, shift) for slots in schedule]
            if all(regions):
                self.shift, self.regions = shift, [each for each in regions if each]
                break
        self.periods = min(((end - begin) // length for begin, end, length in self.regions), default=0)

    def keep(self, periods: int) -> Schedule:
        """The schedule with so many periods."""
        removed = self.periods - periods
        return [
            _without(slots, begin, removed * length, removed * self.shift)
            for slots, (begin, _, length) in zip(self.schedule, self.regions, strict=True)
        ]

    def sync_points(self, short: Schedule, settling: int, periods: int) -> SyncPoints:
        """For each rank two slots, so many periods apart, before which all ranks together have run whatever they need
        of each other; nothing where there are none.

        Args:
            short: a schedule that `keep` gave.
            settling: periods before the first slot.
            periods: between them.
        """
        removed = [len(slots) - len(few) for slots, few in zip(self.schedule, short, strict=True)]
        first = _closed(short, [begin + settling * length for begin, _, length in self.regions])
        second = [place + periods * length for place, (_, _, length) in zip(first, self.regions, strict=True)]
        fits = all(
            place + length <= end - less
            for place, less, (_, end, length) in zip(second, removed, self.regions, strict=True)
        )
        return list(zip(first, second, strict=True)) if fits and _closed(short, second) == second else []


def _region(slots: Sequence[Slot], shift: int) -> tuple[int, int, int] | None:
    """Where the slots of a rank repeat for micro-batches `shift` later: begin, end, and slots of a period."""
    if not slots:
        return None
    keys = [_numbers(slot) for slot in slots]
    middle = len(slots) // 2
    again = {key: place for place, key in enumerate(keys)}.get(_later(keys[middle], shift))
    if again is None or _parts(slots[middle:again]) != dict.fromkeys(_parts(slots), shift):
        return None
    length = again - middle
    begin = end = middle
    while begin > 0 and keys[begin - 1 + length] == _later(keys[begin - 1], shift):
        begin -= 1
    while end + length < len(keys) and keys[end + length] == _later(keys[end], shift):
        end += 1
    return begin, end + length, length


Numbers = tuple[tuple[int, str, int] | None, tuple[int, str, int] | None]


def _numbers(slot: Slot) -> Numbers:
    forward, backward = (
        None if action is None else (action.stage, action.computation_type, action.microbatch)
        for action in (slot.forward, slot.backward)
    )
    return forward, backward


def _later(key: Numbers, shift: int) -> Numbers:
    """Returns the numbers of a slot with micro-batches that come `shift` later."""
    forward, backward = (None if one is None else (one[0], one[1], one[2] + shift) for one in key)
    return forward, backward


def _parts(slots: Sequence[Slot]) -> dict[tuple[int, str], int]:
    """How often slots run each part of each stage."""
    return Counter(
        (action.stage, part) for slot in slots for action in slot.actions for part in PARTS[action.computation_type]
    )


def _without(slots: Sequence[Slot], place: int, count: int, microbatches: int) -> list[Slot]:
    """The slots without `count` from a place on; those after them run earlier micro-batches instead."""

    def earlier(action: Action | None) -> Action | None:
        if action is None:
            return None
        return Action(action.stage, action.computation_type, action.microbatch - microbatches)

    rest = [Slot(earlier(slot.forward), earlier(slot.backward)) for slot in slots[place + count :]]
    return [*slots[:place], *rest]


def _closed(schedule: Schedule, ends: Sequence[int]) -> list[int]:
    """Returns how many slots of each rank are taken: `ends`, or as many more as the slots of all of them need."""
    made = {
        (action.stage, part, action.microbatch): (rank, place)
        for rank, slots in enumerate(schedule)
        for place, slot in enumerate(slots)
        for action in slot.actions
        for part in PARTS[action.computation_type]
    }
    ends, done = list(ends), [0] * len(schedule)
    while any(count < end for count, end in zip(done, ends, strict=True)):
        for rank, slots in enumerate(schedule):
            for slot in slots[done[rank] : ends[rank]]:
                for action in slot.actions:
                    forward = action.computation_type == "F"
                    need = action.stage + (-1 if forward else 1), "F" if forward else "I", action.microbatch
                    if action.computation_type != "W" and need in made:
                        other, place = made[need]
                        ends[other] = max(ends[other], place + 1)
            done[rank] = ends[rank]
    return ends
