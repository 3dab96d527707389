"""Oracles for schedules, apart from the validator and the simulator."""

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


def start_times(schedule: Schedule, num_stages: int, num_microbatches: int) -> dict[str, int]:
    """When each part starts if every slot takes one unit and starts as soon as it can.

    A slot waits for the one before it on its rank and for the action before each of its own; a circle is a deadlock.
    """
    place = slots_by_part(schedule)
    needs: dict[tuple[int, int], set[tuple[int, int]]] = {node: set() for node in place.values()}
    for rank, number in needs:
        if number:
            needs[rank, number].add((rank, number - 1))
    for microbatch in range(num_microbatches):
        way = way_of_a_microbatch(num_stages, microbatch)
        for before, after in pairwise(way):
            needs[place[after]].add(place[before])
        for stage in range(num_stages):
            before, after = place[f"{stage}I{microbatch}"], place[f"{stage}W{microbatch}"]
            if before != after:
                needs[after].add(before)
    start: dict[tuple[int, int], int] = {}
    for node in TopologicalSorter(needs).static_order():
        start[node] = max((start[need] + 1 for need in needs[node]), default=0)
    return {part: start[node] for part, node in place.items()}


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
        start_times(schedule, num_stages, num_microbatches)
    except ValueError:  # a circle
        return False
    return True
