"""The begin and the end of a window: what a rank of a pipeline waits for before and after its own work.

In:   a profile, the amounts of a rank, a case, and a cluster.
Out:  seconds, for each rank.
Must hold: no schedule waits less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from hf_helix.doctor.amounts.records import Amounts
from hf_helix.doctor.case import Case
from hf_helix.doctor.traffic import exchanged_seconds
from hf_helix.planning.graph.operator import Graph
from hf_helix.planning.plan.bounds import critical_path, pass_seconds
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.layout import Layout


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the passes of each unit, by its name."""

    forward: Mapping[str, float]  # the longest chain of operators of a layer; 0 of other units
    backward: Mapping[str, float]  # the same, without weight gradients
    forward_in_turn: Mapping[str, float]  # operators in their order, see `pass_seconds`
    backward_in_turn: Mapping[str, float]

    @classmethod
    def of(cls, profile: Profile) -> PassTimes:
        """Returns the passes by the times of a profile."""
        times: dict[tuple[str, str], dict[str, float]] = {}
        for (unit, entry), each in profile.times.items():
            times.setdefault((unit, entry[0]), {})[entry[2:]] = each
        graphs, made = profile.layout.graphs.items(), list[dict[str, float]]()
        for seconds in (_chain, pass_seconds):
            made.append({unit: seconds(pair.forward, times[unit, "F"]) for unit, pair in graphs})
            made.append({unit: seconds(pair.backward, times[unit, "B"]) for unit, pair in graphs})
        return cls(*made)

    @property
    def in_turn(self) -> Mapping[str, float]:
        """Both passes of a unit, one after the other."""
        return {unit: seconds + self.backward_in_turn[unit] for unit, seconds in self.forward_in_turn.items()}


def _chain(graph: Graph, seconds: Mapping[str, float]) -> float:
    return critical_path(graph, seconds) if graph.repeats else 0.0


def waits_at_edges(passes: PassTimes, amounts: Amounts, layout: Layout, case: Case, cluster: Cluster) -> list[float]:
    """Returns the least seconds that each rank of a pipeline waits before and after its work.

    A rank begins after the first forward pass has gone through the stages before its first, and after the gathers of
    the first stage's weights, less this stage's forward pass. It ends before the last backward pass goes through the
    stages before, and before the gradients of the first stage are reduced, less this stage's backward pass. Stages of a
    rank that follow each other count as one.

    Args:
        passes: the passes of each unit.
        amounts: the amounts of a rank of the case.
        layout: the units of all ranks.
        case: the case.
        cluster: the rates of links and devices.
    """
    waits, begin, end = dict[int, float](), 0.0, 0.0
    for rank, stages in groupby(sorted(layout.chunks), key=lambda stage: layout.ranks[stage] if layout.ranks else 0):
        names = [layout.units[unit] for stage in stages for unit in layout.chunks[stage]]
        if rank not in waits:
            held = [amounts.weights[name] for name in names if name in amounts.weights]
            trained, experts = sum(each.trained for each in held), sum(each.experts for each in held)
            gathered, reduced = exchanged_seconds(trained, experts, case, cluster)
            gathered -= sum(passes.forward_in_turn[name] for name in names)
            reduced -= sum(passes.backward_in_turn[name] for name in names)
            waits[rank] = max(begin, gathered) + max(end, reduced)
        begin += sum(passes.forward[name] for name in names)
        end += sum(passes.backward[name] for name in names)
    return [waits.get(rank, 0.0) for rank in range(layout.num_ranks)]
