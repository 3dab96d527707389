"""Oracles for schedules, apart from the validator and the simulator."""

from collections.abc import Callable
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest

from hf_helix.planning.schedule.actions import Schedule, Slot
from hf_helix.planning.schedule.named import PLACEMENT_OF

SIZES = [(ranks, batches) for ranks in range(1, 5) for batches in range(1, 10)]
every_size = pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
every_name = pytest.mark.parametrize("name", PLACEMENT_OF)


def text(schedule: Schedule) -> list[list[str]]:
    return [[str(slot) for slot in slots] for slots in schedule]


def parsed(*ranks: str) -> Schedule:
    return [[Slot.parse(word) for word in rank.split()] for rank in ranks]


def way_of_a_microbatch(num_stages: int, microbatch: int) -> list[str]:
    """What happens to one micro-batch, in order: forward through every stage, then backward through every stage."""
    stages = range(num_stages)
    return [f"{stage}F{microbatch}" for stage in stages] + [f"{stage}I{microbatch}" for stage in reversed(stages)]


def slots_by_part(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """(rank, number) of the slot that runs each part; B as I and W."""
    result: dict[str, tuple[int, int]] = {}
    for rank, slots in enumerate(schedule):
        for number, slot in enumerate(slots):
            for action in slot.actions:
                for part in action.computation_type.replace("B", "IW"):
                    name = f"{action.stage}{part}{action.microbatch}"
                    assert name not in result, name
                    result[name] = rank, number
    return result


def slot_ends(
    schedule: Schedule,
    num_stages: int,
    num_microbatches: int,
    seconds: Callable[[Slot], float] = lambda _: 1.0,
    transfer: float = 0.0,
) -> dict[tuple[int, int], float]:
    """When each slot (rank, number) ends if it starts as soon as it can: a longest path.

    A slot waits for the one before it on its rank and for the action before each of its own; a circle is a deadlock.

    Args:
        seconds: what a slot takes.
        transfer: what it takes until another rank knows its result.
    """
    place = slots_by_part(schedule)
    needs = {(rank, number): {(rank, number - 1)} if number else set() for rank, number in place.values()}
    for microbatch in range(num_microbatches):
        for before, after in pairwise(way_of_a_microbatch(num_stages, microbatch)):
            needs[place[after]].add(place[before])
        for stage in range(num_stages):
            before, after = place[f"{stage}I{microbatch}"], place[f"{stage}W{microbatch}"]
            needs[after] |= {before} - {after}
    ends: dict[tuple[int, int], float] = {}
    for rank, number in TopologicalSorter(needs).static_order():
        start = max((ends[need] + transfer * (need[0] != rank) for need in needs[rank, number]), default=0.0)
        ends[rank, number] = start + seconds(schedule[rank][number])
    return ends


def start_times(schedule: Schedule, num_stages: int, num_microbatches: int) -> dict[str, int]:
    """When each part starts if every slot takes one unit."""
    ends = slot_ends(schedule, num_stages, num_microbatches)
    return {part: int(ends[node]) - 1 for part, node in slots_by_part(schedule).items()}


def live_activations(slots: list[Slot]) -> int:
    """How many (stage, micro-batch) a rank holds at most."""
    live = most = 0
    for slot in slots:
        live += slot.forward is not None
        most = max(most, live)
        live -= slot.backward is not None and slot.backward.computation_type in "BW"
    return most


def oracle_can_run(schedule: Schedule, num_stages: int, num_microbatches: int) -> bool:
    for slots in schedule:
        seen: dict[tuple[int, str], int] = {}
        for action in (action for slot in slots for action in slot.actions):
            for part in action.computation_type.replace("B", "IW"):
                if action.microbatch != seen.get((action.stage, part), -1) + 1:
                    return False
                seen[action.stage, part] = action.microbatch
    try:
        slot_ends(schedule, num_stages, num_microbatches)
    except ValueError:  # a circle
        return False
    return True
