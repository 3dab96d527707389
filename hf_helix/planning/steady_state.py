"""Steady states: what a long window repeats, so that it is ordered and predicted once.

In:   a schedule, or a window in the order of issue.
Out:  shorter schedules with the same beginning and end; the stretch of an order that repeats, with its seconds.
Must hold: a schedule is shortened by whole periods, in which every stage of a rank runs each of its parts for the same
number of micro-batches, on all ranks alike. An order repeats where `AGREEING` stretches in a row are the same but for
the numbers of their micro-batches and, by the clock that ordered them, all ranks start everything equally later: then
whatever the next order depends on is the same again, and it goes on so until micro-batches run out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hf_helix.planning.issued import Issued
from hf_helix.planning.pipeline.actions import PARTS, Action, Schedule, Slot

AGREEING = 3
SHORTEST = 8  # micro-batches that must be left out, or nothing is gained
PERIODS = (4, 8, 16, 32)  # of the schedule that shorter ones keep; the longer ones where the shorter do not settle
MULTIPLES = (1, 2, 3, 4)  # periods of the schedule in a period of the order
NEAR = 1e-9  # two times that differ by a smaller part of a period are equal


@dataclass(frozen=True)
class Shortened:
    """A schedule that others lengthen by repeating its steady state.

    Attributes:
        schedule: the shorter one.
        removed: how many micro-batches it lacks.
        shift: how many of them are a period.
    """

    schedule: Schedule
    removed: int = 0
    shift: int = 1


@dataclass(frozen=True)
class Steady:
    """The steady state of an order.

    Attributes:
        stretches: of each rank, where in its order a period begins and ends; what comes after it repeats it.
        shift: micro-batches of a period.
        seconds: of a period.
    """

    stretches: list[tuple[int, int]]
    shift: int
    seconds: float


# -- schedules --------------------------------------------------------------------------------------------------------


def shortenings(schedule: Schedule) -> Iterator[Shortened]:
    """Yields shorter schedules, each longer than the one before; the last one is the schedule itself."""
    shift = next((shift for shift in MULTIPLES if _regions(schedule, shift)), 0)
    regions = _regions(schedule, shift) if shift else []
    for kept, rounded in zip(PERIODS, (1, 2, 12, 12), strict=True):
        least = min(((end - begin) // length for begin, end, length in regions), default=0)
        removed = (least - kept) // rounded * rounded
        if removed * shift >= SHORTEST:
            yield Shortened(
                [
                    _without(slots, begin + length, removed * length, removed * shift)
                    for slots, (begin, _, length) in zip(schedule, regions, strict=True)
                ],
                removed * shift,
                shift,
            )
    yield Shortened(schedule)


def _regions(schedule: Schedule, shift: int) -> list[tuple[int, int, int]]:
    """Of each rank, where its slots repeat for micro-batches `shift` later: begin, end, and slots of a period; nothing
    where a rank's do not."""
    found = [_region(slots, shift) for slots in schedule]
    return [each for each in found if each] if all(found) else []


def _region(slots: Sequence[Slot], shift: int) -> tuple[int, int, int] | None:
    if not slots:
        return None
    keys = [_numbers(slot) for slot in slots]
    middle = len(slots) // 2
    later = {key: place for place, key in enumerate(keys)}.get(_later(keys[middle], shift))
    if later is None:
        return None
    length = later - middle
    begin, end = middle, middle
    while begin > 0 and keys[begin - 1 + length] == _later(keys[begin - 1], shift):
        begin -= 1
    while end + length < len(keys) and keys[end + length] == _later(keys[end], shift):
        end += 1
    whole = _parts(slots)
    return (begin, end + length, length) if _parts(slots[middle:later]) == dict.fromkeys(whole, shift) else None


Numbers = tuple[tuple[int, str, int] | None, tuple[int, str, int] | None]


def _numbers(slot: Slot) -> Numbers:
    forward, backward = (
        None if action is None else (action.stage, action.computation_type, action.microbatch)
        for action in (slot.forward, slot.backward)
    )
    return forward, backward


def _later(key: Numbers, shift: int) -> Numbers:
    """The same for micro-batches `shift` later."""
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


# -- orders -----------------------------------------------------------------------------------------------------------


def find_steady(issued: Issued, ends: Sequence[float] | None, shortened: Shortened) -> Steady | None:
    """Returns the steady state of an order; None where it has none that fills what was left out.

    Args:
        issued: the order of a shortened window.
        ends: of each of its instructions, when it ends; None where times do not matter.
        shortened: the window.
    """
    for multiple in MULTIPLES:
        shift = multiple * shortened.shift
        if shortened.removed % shift == 0:
            found = _steady(issued, ends, shift)
            if found is not None:
                return found
    return None


def _steady(issued: Issued, ends: Sequence[float] | None, shift: int) -> Steady | None:
    """The steady state whose periods are `shift` micro-batches."""
    stretches: list[tuple[int, int]] = []
    seconds: float | None = None
    for order in issued.orders:
        if not order:
            stretches.append((0, 0))
            continue
        bounds = _bounds(issued, order, shift)
        if bounds is None or not _agree(issued, order, bounds, shift):
            return None
        if ends is not None:
            if seconds is None:
                seconds = ends[order[bounds[-1]]] - ends[order[bounds[-2]]]
            if not _equally_later(order, ends, bounds, seconds):
                return None
        stretches.append((bounds[0], bounds[1]))
    return Steady(stretches, shift, seconds or 0.0)


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
