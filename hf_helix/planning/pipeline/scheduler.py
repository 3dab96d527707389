"""Schedulers: from the number of micro-batches of a window to its schedule.

In:   what the user calls the schedule, the number of pipeline ranks and, for `auto`, what the stages cost.
Out:  a schedule for a window of any length.
Must hold: a pure function of its inputs, the same on every rank; the placement does not depend on the window.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.graph.pair import SEND
from hf_helix.planning.pipeline.placement import FOLD
from hf_helix.planning.pipeline.schedule_file import PLACEMENT_OF, Schedule, num_microbatches_of, placement_of
from hf_helix.planning.pipeline.select import AUTO, Costs, find_schedule
from hf_helix.planning.profile import Profile

USUAL_GAIN = 1.2  # of forward beside backward, where nothing is measured
FOLDED = tuple(name for name, placement in PLACEMENT_OF.items() if placement == FOLD)


class Scheduler:
    """Makes the schedule of a window.

    Args:
        name: of a schedule, `auto`, or the path of an action file.
        num_ranks: of the pipeline.
        costs: of every virtual stage; without them all cost the same.

    Raises:
        ValueError: no such schedule, or an action file that is damaged or for another number of ranks.
        OSError: it cannot be read.
    """

    def __init__(self, name: str, num_ranks: int, costs: Costs | None = None) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self._costs = costs
        self._made: dict[int, Schedule] = {}
        self.most: int | None = None  # micro-batches; an action file has only so many
        if name in PLACEMENT_OF:
            self.placement = PLACEMENT_OF[name]
        elif name == AUTO:
            self.placement = FOLD
        else:
            _, schedule = find_schedule(name, num_ranks, None, self._stage_costs)
            self.placement, self.most = placement_of(schedule), num_microbatches_of(schedule)

    def __call__(self, num_microbatches: int) -> Schedule:
        """The schedule of a window of so many micro-batches."""
        if num_microbatches not in self._made:
            _, schedule = find_schedule(self.name, self.num_ranks, num_microbatches, self._stage_costs)
            self._made[num_microbatches] = schedule
        return self._made[num_microbatches]

    def _stage_costs(self, ranks: Sequence[int]) -> Costs:
        even = [1.0] * len(ranks)
        return self._costs or Costs(even, even, even, gain=USUAL_GAIN)


def schedule_names(name: str, num_ranks: int) -> tuple[str, ...]:
    """The schedules that a run under `name` may choose from."""
    return (*FOLDED, AUTO) if name == AUTO and num_ranks > 1 else (name,)


def candidates(name: str, profile: Profile) -> list[Scheduler]:
    """The schedulers that a run under `name` may choose from, once its operators are measured."""
    num_ranks = profile.layout.num_ranks
    names = schedule_names(name, num_ranks)
    return [
        Scheduler(each, num_ranks, stage_costs(profile) if len(names) > 1 and each == AUTO else None) for each in names
    ]


def stage_costs(profile: Profile) -> Costs:
    """What the parts of every virtual stage take, operator after operator, and how much faster two strands are."""
    layout = profile.layout
    totals: dict[tuple[int, str], float] = {}
    loads = dict.fromkeys(Kind, 0.0)
    for stage, chunk in layout.chunks.items():
        for unit in chunk:
            if layout.transfers(unit):
                continue
            name = layout.units[unit]
            pair = layout.graphs[name]
            for letter, graph in (("F", pair.forward), ("B", pair.backward)):
                for op in graph.operators:
                    part = "F" if op.part is Part.F else "W" if op.part is Part.W else "I"
                    seconds = profile.times[name, f"{letter}.{op.name}"]
                    totals[stage, part] = totals.get((stage, part), 0.0) + seconds
                    loads[op.kind] += seconds
    forward, inputs, weights = ([totals.get((stage, part), 0.0) for stage in layout.chunks] for part in "FIW")
    transfer = profile.times.get((SEND, "F.transfer"), 0.0)
    return Costs(forward, inputs, weights, transfer, sum(loads.values()) / max(loads.values()))
