"""Periodic schedules: shorter ones with the same beginning and end, and where ranks can be cut together.

In:   a schedule.
Out:  a `Periodic`.
Must hold: in a period every rank runs each part of each of its stages for the same number of micro-batches, so that
with periods taken out, what is left is the schedule of fewer micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hf_helix.planning.pipeline.actions import PARTS, Action, Schedule, Slot

Gates = Sequence[Sequence[int]]
"""The slots of each rank at which its order of issue is cut; empty where nothing is cut."""


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

    def gates(self, short: Schedule, settling: int, periods: int) -> Gates:
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
