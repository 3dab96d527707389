"""Repetition: a long window is ordered and predicted as a short one whose middle repeats.

In:   a plan, and the schedule of a window.
Out:  a `RepeatedWindow`: a shorter window in the order of issue, and the stretch of it that the whole window repeats.
Must hold: between the two ends of a stretch every rank issues the same for later micro-batches, and everything that the
stretch needs of other ranks is issued before. So a stretch can follow itself any number of times: values are there when
they are read, memory does not grow, and no rank waits for ever.

    schedule   0 1 2 | 3 4 | 3 4 | 3 4 | 5 6        period: slots that recur `shift` micro-batches later on every rank
    short      0 1 2 | 3 4 | 3 4 | 5 6              a few periods kept, ordered by the plan
    order      a b c d e [f g h] [f g h] x y z      stretch: recurs in the order; repeated for the periods left out

Orders without times, and orders by times of one or two ranks, become periodic within a few micro-batches: `AGREEING`
stretches in a row are equal and, by the clock of the plan, end equally later on all ranks. Then the repeated order is
that of the whole window. On more ranks the order takes many micro-batches to become periodic. Sync points then make a
stretch: at both of its ends every rank issues everything that precedes them in the schedule. They would do on one or
two ranks as well, but planning 64 micro-batches then takes two to five times as long.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.schedule.actions import PARTS, Schedule, Slot, SyncPoints
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.passes import OrderedWindow
from hf_helix.planning.window.window import Window

# The figures are of windows of 40 micro-batches or more under `greedy`, with random times.

AGREEING = 3
"""Stretches in a row that must be equal. After 1, 2 of 60 windows went on in another order, and were 1.4 % off."""

LEAST_SAVED = 8
"""Micro-batches; a window is not shortened by fewer. On two ranks the attempt mostly fails with 10 to 14 micro-batches,
and costs a quarter of the time of planning."""

KEPT = (4, 8)
"""Periods of the schedule in the short window. With 4, an order is periodic in 17 of 20 windows on one rank, in 6 of 40
on two ranks; with 8, in all."""

MULTIPLES = (1, 2)
"""Periods of the schedule in a stretch that is found. One order of 20 alternates between two periods."""

MADE = 8
"""Periods of the schedule in a stretch between sync points, where ranks wait a little for each other. On 4 and 8 ranks,
windows are at most 1.5 % too long with 1, 0.7 % with 2, 0.4 % with 4, 0.2 % with 8; ordering takes longer with more."""

SETTLING = (8, 16, 32)
"""Periods before the first sync point; a schedule without sync points that early gets the next. Named schedules have
them on up to 32 ranks, and windows are equally long with 2 to 16."""

AFTER = 2  # periods after the last sync point, so that cool-down is not in the stretch; 0 to 8 give equal windows
NEAR = 1e-9  # times that differ by a smaller part of a stretch are equal
REMEMBERED = 4  # windows, so that comparing a few plans orders each once


@dataclass(frozen=True)
class RepeatedWindow:
    """A window in the order of issue, with a stretch to repeat."""

    ordered: OrderedWindow  # the short window, or the window itself
    schedule: Schedule  # of `ordered`
    periodic: Periodic | None = None  # the whole schedule; None if nothing repeats
    kept: int = 0  # periods that `schedule` has kept
    stretches: Sequence[tuple[int, int]] = ()  # begin and end of the stretch in the order of each rank
    periods: int = 0  # of the schedule in a stretch
    repeats: int = 0  # how many more times the whole window has the stretch

    @property
    def shift(self) -> int:
        """Micro-batches of a stretch."""
        return self.periods * self.periodic.shift if self.periodic else 0

    def lengthened(self, copies: int, rank: int | None = None) -> RepeatedWindow:
        """The window with some of the repetitions written out; its stretch is the middle one."""
        if not copies or self.periodic is None:
            return self
        kept = self.kept + copies * self.periods
        schedule = self.periodic.keep(kept)
        asked = [slots if rank in (None, number) else [] for number, slots in enumerate(schedule)]
        window = Window(asked, self.ordered.window.layout)
        orders, stretches = [], []
        for slots, order, (begin, end) in zip(asked, self.ordered.orders, self.stretches, strict=True):
            parts = [order[:end], *[order[begin:end]] * copies, order[end:]] if slots else []
            later = (0, *range(1, copies + 1), copies)
            orders.append([each for part in zip(parts, later, strict=False) for each in self._moved(*part, window)])
            middle = copies // 2 * (end - begin)
            stretches.append((begin + middle, end + middle))
        ordered, repeats = OrderedWindow(window, orders), self.repeats - copies
        return RepeatedWindow(ordered, schedule, self.periodic, kept, stretches, self.periods, repeats)

    def _moved(self, order: Iterable[int], number: int, window: Window) -> Iterator[int]:
        """Yields a part of the order as places of a longer window, `number` stretches later."""
        mine, later = self.ordered.window, number * self.shift
        for place in order:
            yield place if place < 0 else window.at[mine.microbatches[place] + later][mine.indices[place]]


def order_window(
    plan: Plan, schedule: Schedule, layout: Layout, slots_ahead: int = 1, rank: int | None = None
) -> RepeatedWindow:
    """Returns a window in the order of issue, a long one shortened.

    Plans by times order all ranks together, so the last few windows are remembered: prediction and program share one.

    Args:
        slots_ahead: see `Plan.issue`.
        rank: the only rank to order; None for all.
    """
    if not plan.BY_TIMES:
        return _order_window(plan, schedule, layout, slots_ahead, rank)
    for known, window, held, ordered in tuple(_remembered):
        if known is plan and window == schedule and held == layout:
            return ordered
    ordered = _order_window(plan, schedule, layout, slots_ahead, None)
    _remembered.append((plan, schedule, layout, ordered))
    return ordered


_remembered: deque[tuple[Plan, Schedule, Layout, RepeatedWindow]] = deque(maxlen=REMEMBERED)


def _order_window(plan: Plan, schedule: Schedule, layout: Layout, slots_ahead: int, rank: int | None) -> RepeatedWindow:
    """Orders a short window, and finds its stretch; the whole window without a stretch, or if little would be saved.

        one or two ranks, or a plan without times:
            order a window of a few periods; do its last stretches of a period, or of two, agree?
            if not, try the same with more periods
        more ranks by times, or no stretch found:
            order a window with two sync points after some periods; the stretch is between them
            if the schedule has no such points, try later ones

    Example: one rank, 40 micro-batches. A period is an F beside a B.

        schedule   F0 | F1B0 F2B1 ... F39B38 | B39             39 periods
        short      F0 | F1B0 F2B1 F3B2 F4B3 F5B4 | B5          5 periods are kept
        order      a b [c] d e f                               c, d and e agree: they begin with F2, F3 and F4
        whole      a b [c] 35 times, d e f                     c stands for the 34 other periods as well
    """
    periodic = Periodic(schedule)
    for least in KEPT if layout.num_ranks <= 2 or not plan.BY_TIMES else ():
        kept = least + (periodic.periods - least) % MULTIPLES[-1]
        if (periodic.periods - kept) * periodic.shift < LEAST_SAVED:
            break
        short = periodic.keep(kept)
        ordered = plan.issue(short, layout, slots_ahead, rank)
        for periods in MULTIPLES:
            stretches = _agreeing(ordered, periods * periodic.shift)
            if stretches:
                repeats = (periodic.periods - kept) // periods
                return RepeatedWindow(ordered, short, periodic, kept, stretches, periods, repeats)
    for settling in SETTLING if plan.BY_TIMES else ():
        repeats = (periodic.periods - settling - MADE - AFTER) // MADE
        if repeats * MADE * periodic.shift < LEAST_SAVED:
            break
        kept = periodic.periods - repeats * MADE
        short = periodic.keep(kept)
        sync_points = periodic.sync_points(short, settling, MADE)
        if sync_points:
            ordered = plan.issue(short, layout, slots_ahead, rank, sync_points)
            slots = ordered.window.slots
            stretches = [
                (starts[begin] - starts[0], starts[end] - starts[0])
                for starts, (begin, end) in zip(slots, sync_points, strict=True)
            ]
            return RepeatedWindow(ordered, short, periodic, kept, stretches, MADE, repeats)
    return RepeatedWindow(plan.issue(schedule, layout, slots_ahead, rank), schedule)


# -- stretches of an order ---------------------------------------------------------------------------------------------


def _agreeing(ordered: OrderedWindow, shift: int) -> list[tuple[int, int]]:
    """Returns the first of the last stretches of `shift` micro-batches on each rank; nothing unless all ranks agree."""
    stretches: list[tuple[int, int]] = []
    seconds: float | None = None
    indices, microbatches = ordered.window.indices, ordered.window.microbatches
    for order in ordered.orders:
        keys = [(indices[place], microbatches[place]) if place >= 0 else (place, 0) for place in order]
        bounds = _bounds(keys, shift) if order else [0] * (AGREEING + 1)
        if bounds is None or not _agree(keys, bounds, shift):
            return []
        if ordered.ends is not None:
            if seconds is None:
                seconds = ordered.ends[order[bounds[-1]]] - ordered.ends[order[bounds[-2]]]
            if not _equally_later(order, ordered.ends, bounds, seconds):
                return []
        stretches.append((bounds[0], bounds[1]))
    return stretches


def _bounds(keys: Sequence[tuple[int, int]], shift: int) -> list[int] | None:
    """The begins of the last stretches: the rank's first instruction again, for later micro-batches."""
    places = [place for place, (index, _) in enumerate(keys) if index == keys[0][0]]
    if len(places) <= AGREEING * shift:
        return None
    bounds = places[-1 - AGREEING * shift :: shift]
    numbers = [keys[place][1] for place in bounds]
    return bounds if numbers == list(range(numbers[0], numbers[0] + AGREEING * shift + 1, shift)) else None


def _agree(keys: Sequence[tuple[int, int]], bounds: Sequence[int], shift: int) -> bool:
    """Whether each stretch issues the same as the one before, for micro-batches `shift` later."""
    first = keys[bounds[0] : bounds[1]]
    if Counter(index for index, _ in first if index >= 0) != dict.fromkeys({i for i, _ in keys if i >= 0}, shift):
        return False  # an operator is deferred until micro-batches run out
    return all(
        keys[begin:end] == [(index, microbatch + number * shift * (index >= 0)) for index, microbatch in first]
        for number, (begin, end) in enumerate(pairwise(bounds))
    )


def _equally_later(order: Sequence[int], ends: Sequence[float], bounds: Sequence[int], seconds: float) -> bool:
    """Whether each instruction of a stretch ends `seconds` after its counterpart in the stretch before."""
    length, least = bounds[1] - bounds[0], -NEAR * seconds
    return all(
        one < 0 or least <= ends[other] - ends[one] - seconds <= -least
        for one, other in zip(order[bounds[0] : bounds[-1] - length], order[bounds[1] : bounds[-1]], strict=True)
    )


# -- periods of a schedule ---------------------------------------------------------------------------------------------


class Periodic:
    """A schedule whose ranks repeat the same slots for later and later micro-batches.

    In a period every rank runs each part of each of its stages for the same number of micro-batches. So a schedule
    without some of its periods is the schedule of fewer micro-batches.

    Attributes:
        shift: micro-batches of a period.
        regions: of each rank, the slots that repeat: begin, end, and slots of a period.
        periods: the number of periods on all ranks; 0 for a schedule that does not repeat.
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
        """The schedule with a number of periods."""
        removed = self.periods - periods
        return [
            [*slots[:begin], *(slot.later(-removed * self.shift) for slot in slots[begin + removed * length :])]
            for slots, (begin, _, length) in zip(self.schedule, self.regions, strict=True)
        ]

    def sync_points(self, short: Schedule, settling: int, periods: int) -> SyncPoints:
        """Two consistent cuts of a shortened schedule, as a slot of each rank; empty if there are none.

        Before a cut all ranks have run every slot that another rank's slot before the cut needs.
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
    """The slots that repeat for micro-batches `shift` later: begin, end, and slots of a period."""
    if not slots:
        return None
    middle = len(slots) // 2
    again = {slot: place for place, slot in enumerate(slots)}.get(slots[middle].later(shift))
    if again is None or _parts(slots[middle:again]) != dict.fromkeys(_parts(slots), shift):
        return None
    length = again - middle
    begin = end = middle
    while begin > 0 and slots[begin - 1 + length] == slots[begin - 1].later(shift):
        begin -= 1
    while end + length < len(slots) and slots[end + length] == slots[end].later(shift):
        end += 1
    return begin, end + length, length


def _parts(slots: Sequence[Slot]) -> dict[tuple[int, str], int]:
    """How often slots run each part of each stage."""
    return Counter(
        (action.stage, part) for slot in slots for action in slot.actions for part in PARTS[action.computation_type]
    )


def _closed(schedule: Schedule, ends: Sequence[int]) -> list[int]:
    """The smallest consistent cut of the schedule that includes the first `ends` slots of each rank."""
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
